"""The gallery of a calibration: the run's items, one half of the held-out data, or both.

A gallery of both has as many items as the labelled part of the run's gallery, because error rates depend on this size.
"""

import warnings
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from lam.datasets import Dataset
from lam.datasets.base import stratified_split
from lam.encoders.base import Encoder
from lam.gallery.snapshot import Snapshot
from lam.pairs.relevance import LabelRelevance, Relevance, relevance_of
from lam.runs.config import RunConfig
from lam.runs.finished import Run
from lam.utils.notes import Note
from lam.vmf.embeddings import Embeddings

INDEX, HELD_OUT = "index", "held-out"


@dataclass(frozen=True)
class Searchable:
    """A gallery of G items, and the items that match each query.

    Attributes:
        items: (G,) embeddings of the items.
        relevance: which images are queries, and which items match them.
        labels: labels of the items; None if all items come from the held-out data.
        is_stored: whether all items come from the run's gallery.
        without_label: number of stored items that are left out, because they have no label.
    """

    items: Embeddings
    relevance: Relevance
    labels: tuple[str, ...] | None
    is_stored: bool
    without_label: int


def holds_none_of(run: Run, images: Dataset) -> bool:
    """Whether all gallery labels are in `images.classes`, but label no image; and two images share a class."""
    if images.targets.ndim > 1 or images.is_query is not None:
        return False
    stored = {item.label for item in run.gallery.items if item.label}
    numbers, counts = images.labels.unique(return_counts=True)
    names = {images.classes[number] for number in numbers.tolist()}
    return bool(stored) and stored <= set(images.classes) - names and int(counts.max()) > 1


def half_of(encoder: Encoder, images: Dataset, embeddings: Embeddings, config: RunConfig) -> Searchable:
    """Held-out data, split into queries and a gallery by `images.is_query`, or by default into random halves."""
    is_query = images.is_query
    if is_query is None:
        if len(images) < 2:
            raise ValueError(f"queries and a gallery need at least 2 images, got {len(images)}")
        is_query = _drawn(images, len(images) // 2, config.seed)
    within = config.places.relevant_within
    relevance = relevance_of(encoder.relation, images.targets, is_query=is_query, relevant_within=within)
    return Searchable(embeddings[relevance.candidates], relevance, None, is_stored=False, without_label=0)


def stored_items(gallery: Snapshot, images: Dataset) -> Searchable:
    """The run's items as the gallery; all images are queries."""
    stored, labels, without_label = _labelled(gallery)
    relevance = _relevance(images, labels, torch.ones(len(images), dtype=torch.bool))
    return Searchable(stored, relevance, labels, is_stored=True, without_label=without_label)


def stored_items_with_half(gallery: Snapshot, images: Dataset, embeddings: Embeddings, seed: int) -> Searchable:
    """The run's items, some replaced by one half of the held-out data, with a `Note` as a warning."""
    stored, labels, without_label = _labelled(gallery)
    n_replaced = min(len(images) - len(images) // 2, len(labels))
    is_query = _drawn(images, len(images) - n_replaced, seed)
    kept = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[n_replaced:].sort().values
    warnings.warn(
        f"the gallery holds no item of the {len(images.labels.unique())} validation classes: {n_replaced} of the "
        f"{len(images)} validation items replace as many of its {len(labels)}; for your own classes, index their items "
        "and calibrate on a --folder of other items",
        Note,
        stacklevel=3,
    )
    items = Embeddings.concatenate([_comparable(embeddings[~is_query]), _comparable(stored[kept])])
    names = tuple(images.classes[number] for number in images.labels[~is_query].tolist())
    labels = tuple(labels[row] for row in kept.tolist())
    relevance = _relevance(images, labels, is_query)
    return Searchable(items, relevance, names + labels, is_stored=False, without_label=without_label)


def _comparable(embeddings: Embeddings) -> Embeddings:
    """Embeddings with only directions and κ, like stored items."""
    ones = torch.ones_like(embeddings.kappa)
    return Embeddings(embeddings.mean, embeddings.kappa, ones, ones)


def _labelled(gallery: Snapshot) -> tuple[Embeddings, tuple[str, ...], int]:
    """Items with a label, their labels, and the number of items without one."""
    if not gallery.items:
        raise ValueError(f"the gallery in {gallery.folder} holds no items: `lam index` fills it")
    labels = [item.label for item in gallery.items]
    if not any(labels):
        raise ValueError(
            f"all {len(labels)} stored items lack a label: give them labels, or choose the gallery '{HELD_OUT}'"
        )
    known = torch.tensor([row for row, label in enumerate(labels) if label])
    return gallery.embeddings[known], tuple(filter(None, labels)), len(labels) - len(known)


def _relevance(images: Dataset, labels: tuple[str, ...], is_query: Bool[Tensor, " N"]) -> Relevance:
    if images.targets.ndim > 1:
        raise ValueError(f"stored items have labels, but no positions: calibrate places with the gallery '{HELD_OUT}'")
    numbers = {name: number for number, name in enumerate(images.classes)}
    stored = torch.tensor([numbers.setdefault(name, len(numbers)) for name in labels], dtype=torch.int64)
    is_query = torch.cat([is_query, torch.zeros(len(stored), dtype=torch.bool)])
    relevance = LabelRelevance(torch.cat([images.labels, stored]), is_query)
    if not relevance.count().any():
        raise ValueError(
            f"no label of the {len(stored)} stored items is a label of the calibration data, such as "
            f"{images.classes[0]!r}: give a --folder (a file for texts) with labels or answers that are stored, such "
            f"as {labels[0]!r}, or choose the gallery '{HELD_OUT}'"
        )
    return relevance


def _drawn(images: Dataset, size: int, seed: int) -> Bool[Tensor, " N"]:
    """True for `size` random items, with each class in proportion."""
    drawn = torch.zeros(len(images), dtype=torch.bool)
    drawn[stratified_split(images.labels, (size,), seed=seed)[0]] = True
    return drawn
