"""The gallery of a calibration: the run's items, one half of the held-out data, or both.

A mixed gallery has as many items as the run's gallery has labelled items, because error rates depend on the size.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from lam.datasets import Dataset, PlaceImages
from lam.datasets.base import stratified_split
from lam.encoders.base import Encoder
from lam.gallery.replica import Snapshot
from lam.pairs.relevance import LabelRelevance, Relevance, relevance_of
from lam.runs.config import RunConfig
from lam.runs.finished import Run
from lam.utils.notes import Note
from lam.vmf.embeddings import Embeddings

INDEX, HELD_OUT = "index", "held-out"


@dataclass(frozen=True)
class Searchable:
    """A gallery of G items with labels, and the items that match each query.

    `labels` is None if all items come from the held-out data; `is_stored` says whether all come from the run's gallery.
    `without_label` is the number of stored items that are left out, because they have no label.
    """

    items: Embeddings
    relevance: Relevance
    labels: tuple[str, ...] | None
    is_stored: bool
    without_label: int


def holds_none_of(run: Run, images: Dataset) -> bool:
    """Whether all gallery labels are in `images.classes`, no image has one of them, and two images share a class."""
    if images.targets.ndim > 1 or images.is_query is not None:
        return False
    stored = {item.label for item in run.gallery.items if item.label}
    counts = images.labels.unique(return_counts=True)[1]
    return bool(stored) and stored <= set(images.classes) - images.present_classes and int(counts.max()) > 1


def stored_places(run: Run, test: Dataset) -> Float64[Tensor, "G _"] | None:
    """Targets of the gallery's items if all of them are database images of a test split of places; else None."""
    images = test.candidates
    if not isinstance(images, PlaceImages):
        return None
    names = {str(row): path.name for row, path in enumerate(images.paths)}
    stored = {item.id: Path(item.path).name for item in run.gallery.items}
    return images.targets[[int(item) for item in stored]] if stored.items() <= names.items() else None


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
    _check_has_classes(images)
    stored, labels, without_label = _labelled(gallery)
    relevance = _relevance(images, labels, torch.ones(len(images), dtype=torch.bool))
    return Searchable(stored, relevance, labels, is_stored=True, without_label=without_label)


def stored_items_with_half(
    gallery: Snapshot,
    images: Dataset,
    embeddings: Embeddings,
    encoder: Encoder,
    config: RunConfig,
    *,
    places: Float64[Tensor, "G _"] | None = None,
) -> Searchable:
    """The run's items, after the database or a half of `images` has replaced as many. A `Note` reports this.

    `places` are the targets of the items (`stored_places`); None for items with labels.
    """
    stored, labels, without_label = _labelled(gallery)
    is_query = images.is_query
    if is_query is None:
        is_query = _drawn(images, len(images) - min(len(images) - len(images) // 2, len(labels)), config.seed)
    n_replaced = min(int((~is_query).sum()), len(labels))
    kept = torch.randperm(len(labels), generator=torch.Generator().manual_seed(config.seed))[n_replaced:].sort().values
    if places is None:
        joined = tuple(images.classes[number] for number in images.labels[~is_query].tolist())
        rest = tuple(labels[row] for row in kept.tolist())
        relevance, names = _relevance(images, rest, is_query), joined + rest
        holds = f"no item of the {len(images.labels.unique())} validation classes"
        advice = "; for your own classes, index their items and calibrate on a --folder of other items"
    else:
        targets = torch.cat([images.targets, places[kept]])
        of_all = torch.cat([is_query, torch.zeros(len(kept), dtype=torch.bool)])
        within = config.places.relevant_within
        relevance, names = relevance_of(encoder.relation, targets, is_query=of_all, relevant_within=within), None
        holds, advice = "the places of the test split", ""
    warnings.warn(
        f"the gallery holds {holds}: {n_replaced} of the {len(images)} validation items replace as many of its "
        f"{len(labels)}{advice}",
        Note,
        stacklevel=3,
    )
    items = Embeddings.concatenate([_comparable(embeddings[~is_query]), _comparable(stored[kept])])
    return Searchable(items, relevance, names, is_stored=False, without_label=without_label)


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


def _check_has_classes(images: Dataset) -> None:
    if images.targets.ndim > 1:
        raise ValueError(f"stored items have no positions: calibrate places with the gallery '{HELD_OUT}'")


def _relevance(images: Dataset, labels: tuple[str, ...], is_query: Bool[Tensor, " N"]) -> Relevance:
    _check_has_classes(images)
    numbers = {name: number for number, name in enumerate(images.classes)}
    stored = torch.tensor([numbers.setdefault(name, len(numbers)) for name in labels], dtype=torch.int64)
    is_query = torch.cat([is_query, torch.zeros(len(stored), dtype=torch.bool)])
    relevance = LabelRelevance(torch.cat([images.labels, stored]), is_query)
    if not relevance.count().any():
        raise ValueError(
            f"no label of the {len(stored)} stored items is a label of the calibration data, such as "
            f"{images.classes[0]!r}: give a --folder (a file for texts) with labels that are stored, such as "
            f"{labels[0]!r} (without a column of labels, an answer is its own label), or choose the gallery "
            f"'{HELD_OUT}'"
        )
    return relevance


def _drawn(images: Dataset, size: int, seed: int) -> Bool[Tensor, " N"]:
    """True for `size` random items, with each class in proportion."""
    drawn = torch.zeros(len(images), dtype=torch.bool)
    drawn[stratified_split(images.labels, (size,), seed=seed)[0]] = True
    return drawn
