"""Makes gallery items from embedded images or texts: ids, uncertain images, and fusion of images with one id."""

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lam.datasets.base import Preview
from lam.gallery.item import ID_RULE, INDEXED, Item, check_id, metadata_json, normalize_label, number_of, pack
from lam.gallery.refusal import Refusal
from lam.inputs.decoding import thumbnail_of_file
from lam.retrieval.index.checks import unit_vectors
from lam.retrieval.index.fusion import fuse_identities
from lam.vmf.embeddings import Embeddings

_SEPARATE = "for separate items, give them ids in a list"


@dataclass(frozen=True)
class SourceImage:
    """An image or a text to index.

    Attributes:
        path: file of the image, or origin of the text.
        label: class; empty without a label.
        content: the `lam.gallery.item.content_id` of the image file or the text.
        listed_id: id in the list, if any.
        metadata: other columns of the list.

    Raises:
        ValueError: for an invalid id, label or metadata.
    """

    path: str
    label: str
    content: int
    listed_id: str | None = None
    metadata: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        try:
            if self.listed_id is not None:
                check_id(self.listed_id)
        except Refusal:
            raise ValueError(f"{self.path}: the id must have {ID_RULE}, got {self.listed_id!r}") from None
        try:
            object.__setattr__(self, "label", normalize_label(self.label))
            metadata_json(self.metadata or {})
        except Refusal as refusal:
            raise ValueError(f"{self.path}: {refusal}, allowed is {refusal.allowed}") from None

    @property
    def id(self) -> str:
        """`listed_id`, or by default `content` as text; fusion by label uses a hash of the label instead."""
        return str(self.content) if self.listed_id is None else self.listed_id


@dataclass(frozen=True)
class Enrolment:
    """Items for a gallery, in the order of their first images; `uncertain` has path and κ of each uncertain image."""

    items: tuple[Item, ...]
    embeddings: Embeddings
    uncertain: tuple[tuple[str, float], ...] = ()

    def __len__(self) -> int:
        return len(self.items)

    def with_thumbnails(self) -> "Enrolment":
        """A copy with a thumbnail for each item whose first image file is readable."""
        return replace(self, items=tuple(replace(item, thumbnail=thumbnail_of_file(item.path)) for item in self.items))


def enrol(
    images: Sequence[SourceImage],
    embeddings: Embeddings,
    *,
    flag_below: float | None = None,
    skip_uncertain: bool = False,
    fuse: bool = False,
) -> Enrolment:
    """One item for each id, in the order in which ids first occur.

    Without `fuse`, all images of an id are copies, and the first becomes the item; a warning counts items whose copies
    differ in label. With `fuse`, images of one identity have the same listed id or, without ids, the same
    label. The fused κ does not rise with the number of images (`lam.retrieval.fuse_identities` with an error
    correlation of 1). Repeated images count once. An item has the metadata of its first image; a warning counts images
    with others.

    Args:
        flag_below: an image with a lower κ is uncertain; with None, every image is certain.
        skip_uncertain: whether uncertain images are left out.
        fuse: whether the images of one identity become one item.

    Raises:
        ValueError: if no image is left; for embeddings that an index cannot hold; with `fuse`, for an image that has
            neither id nor label, or an id with several labels; without `fuse`, for different contents of one listed id.
    """
    kappa = embeddings.kappa.tolist()
    is_uncertain = [flag_below is not None and value < flag_below for value in kappa]
    uncertain = tuple((image.path, kappa[row]) for row, image in enumerate(images) if is_uncertain[row])
    kept = [row for row in range(len(images)) if not (skip_uncertain and is_uncertain[row])]
    if not kept:
        raise ValueError(f"no image is left: kappa is below the flag {flag_below:.4g} for all {len(images)}")
    rows_by_id: dict[str, list[int]] = {}
    for row in kept:
        rows_by_id.setdefault(_identity(images[row]) if fuse else images[row].id, []).append(row)
    pairs = [(images[first], images[row]) for first, *others in rows_by_id.values() for row in others]
    if not fuse:
        _check_copies(pairs)
    _warn_of_other_metadata(pairs, "give all images of an item the same metadata" if fuse else _SEPARATE)
    rows_by_id = {item_id: _distinct(images, rows) if fuse else rows[:1] for item_id, rows in rows_by_id.items()}
    joined = [row for rows in rows_by_id.values() for row in rows]
    used = embeddings if joined == list(range(len(images))) else embeddings[torch.tensor(joined)]
    fused, resultants, counts = used, [1.0] * len(rows_by_id), [len(rows) for rows in rows_by_id.values()]
    if max(counts) > 1:
        fused = fuse_identities(used, torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))).embeddings
        resultants = fused.resultant.tolist()
    vectors, fused_kappa = unit_vectors(fused, fused.dimension).numpy(), fused.kappa.double().tolist()
    items = tuple(
        _item(
            item_id, [images[row] for row in rows], vectors[at], fused_kappa[at], resultants[at],
            [kappa[row] for row in rows],
        )
        for at, (item_id, rows) in enumerate(rows_by_id.items())
    )  # fmt: skip
    return Enrolment(items, fused, uncertain)


def _check_copies(pairs: Sequence[tuple[SourceImage, SourceImage]]) -> None:
    """Reject images of one id with different contents; warn of copies with another label than the first."""
    for first, copy in pairs:
        if copy.content != first.content:
            raise ValueError(
                f"{copy.path}: id {copy.id!r} is already at {first.path}; ids must differ, unless items with one id "
                "are fused (--fuse)"
            )
    if several := [(first, copy) for first, copy in pairs if copy.label != first.label]:
        (first, copy), count = several[0], len({first.id for first, _ in several})
        warnings.warn(
            f"{'1 item has' if count == 1 else f'{count} items have'} several labels, such as {first.path} as "
            f"{first.label!r} and {copy.label!r}: the first is kept; {_SEPARATE}",
            stacklevel=3,
        )


def _warn_of_other_metadata(pairs: Sequence[tuple[SourceImage, SourceImage]], advice: str) -> None:
    facts = [[{**(each.metadata or {}), "text": ""} for each in pair] for pair in pairs]  # texts of an item may differ
    if lost := [pair[1].path for pair, (first, other) in zip(pairs, facts, strict=True) if other != first]:
        n_lost = "1 image has" if len(lost) == 1 else f"{len(lost)} images have"
        warnings.warn(
            f"{n_lost} other metadata than the first of the item, such as {lost[0]}: only the first are kept; {advice}",
            stacklevel=3,
        )


def item_of_embedding(item_id: str, vector: np.ndarray, kappa: float, label: str, preview: Preview) -> Item:
    """The gallery item for an item of a data set, with metadata, text and picture from the preview."""
    metadata = metadata_json({**preview.metadata, **({} if preview.text is None else {"text": preview.text})})
    paths = json.dumps([preview.path])
    return Item(item_id, vector.tobytes(), kappa, label, metadata, preview.picture, INDEXED, paths=paths)


def _item(
    item_id: str, sources: list[SourceImage], vector: np.ndarray, kappa: float, resultant: float, kappas: list[float]
) -> Item:
    """The item with one id; `sources` and `kappas` are its images and their κ."""
    contents, paths = pack([source.content for source in sources]), json.dumps([source.path for source in sources])
    metadata = metadata_json(sources[0].metadata or {})
    item = Item(
        item_id, vector.tobytes(), kappa, sources[0].label, metadata, None, INDEXED, contents=contents, paths=paths
    )
    if len(sources) == 1:
        return item
    mass, roots = sum(kappas), float(np.sqrt(kappas).sum())
    sums = np.concatenate([[mass, roots], resultant * mass * vector.astype(np.float64)]).tobytes()
    return replace(item, images=len(sources), resultant=resultant, least_image_kappa=min(kappas), sums=sums)


def _identity(image: SourceImage) -> str:
    if image.listed_id is not None:
        return image.listed_id
    if not image.label:
        raise ValueError(f"{image.path} has neither id nor label: fusing needs an id or a label for each image")
    return str(number_of(hashlib.sha256(f"label {image.label}".encode()).hexdigest()))


def _distinct(images: Sequence[SourceImage], rows: list[int]) -> list[int]:
    """The rows of one id, without repeated images; a `ValueError` if their labels differ."""
    first, by_content = images[rows[0]], dict[int, int]()
    for row in rows:
        if images[row].label != first.label:
            raise ValueError(
                f"images of one id must have one label: id {first.listed_id!r} has {first.label!r} for {first.path}, "
                f"{images[row].label!r} for {images[row].path}"
            )
        by_content.setdefault(images[row].content, row)
    return list(by_content.values())
