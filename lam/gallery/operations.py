"""Operations that change the items, and their effects. Images of one identity are fused one after the other.

A fused item depends on the directions μ and concentrations κ of its images only through the float64 sums Σ κμ, Σ κ and
Σ √κ, so images may come in any order. `lam.retrieval.index.fusion` has the formula; its error correlation is 1 here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lam.gallery.filters import Filter
from lam.gallery.item import SERVED, Item, metadata_json
from lam.gallery.refusal import Refusal
from lam.retrieval.index.fusion import Sums

MAX_IMAGES = 10_000


@dataclass(frozen=True)
class Change:
    """The effect of one operation: the removed keys, and the stored item with its key (None if no item is stored).

    Attributes:
        created: whether the id of the item is new.
        parts: for a `Batch`, the effect or refusal of each operation in it.
    """

    removed: tuple[int, ...] = ()
    key: int | None = None
    created: bool = False
    item: Item | None = None
    parts: "tuple[Change | Refusal, ...]" = ()


@dataclass(frozen=True)
class Fuse:
    """An item of one image. It is fused into the stored item with the same id, or added if the id is new."""

    item: Item

    def over(self, old: Item) -> Item:
        """The fused item; refusals as in `fuse`."""
        return fuse(old, self.item)


@dataclass(frozen=True)
class Replace:
    """An item that replaces the stored item with its id, but keeps the old label, the old metadata, or both.

    The old metadata of a text item lose their `text`, because it is the old content.
    """

    item: Item
    keeps: Sequence[str]

    def over(self, old: Item) -> Item:
        """The new item with the fields that it keeps from the old one; metadata that are too long are refused."""
        item = replace(self.item, label=old.label) if "label" in self.keeps else self.item
        if "metadata" not in self.keeps:
            return item
        return replace(item, metadata=metadata_json(_beside_text(old) | json.loads(item.metadata)))


@dataclass(frozen=True)
class Patch:
    """A change of an item's label and metadata; an unknown id has no effect.

    Attributes:
        label: the new label; None keeps the old one.
        metadata: new values by name; None as a value removes the name, other names stay.
    """

    id: str
    label: str | None
    metadata: Mapping[str, Any]

    def over(self, old: Item) -> Item:
        """The changed item, which `lam index` no longer replaces.

        A new `text` for a text item, or metadata that are too long, are refused.
        """
        metadata = json.loads(old.metadata)
        if "text" in self.metadata and old.text is not None:
            raise Refusal(409, "the text is the content of the item", allowed="PUT with another text")
        metadata |= self.metadata
        kept = {name: value for name, value in metadata.items() if value is not None or name not in self.metadata}
        new = replace(old, label=old.label if self.label is None else self.label, metadata=metadata_json(kept))
        return old if new == old else replace(new, origin=SERVED)


@dataclass(frozen=True)
class DeleteWhere:
    """The deletion of all items that pass a filter."""

    where: Filter


@dataclass(frozen=True)
class Batch:
    """Items to add, replace or fuse in one transaction; with `whole`, one refused item undoes all."""

    operations: Sequence[Item | Replace | Fuse]
    whole: bool


Operation = Item | Replace | Fuse | Patch | DeleteWhere | Batch | str
"""An item to add, replace or fuse; a patch; a deletion by filter; a batch; or the id of an item to delete."""


def fuse(known: Item, image: Item) -> Item:
    """Fuse an image into an item; the result equals `fuse_identities` of all images at once.

    If the directions cancel, κ is 0 and the direction stays. The item keeps its label and metadata, and its thumbnail
    if it has one. An item that already holds the image is returned unchanged. An image with another label or other
    metadata is refused with 409, and so is an image for an item that already has `MAX_IMAGES`.
    """
    _refuse_another(known, image)
    if _holds(known, image):
        return known
    if known.images >= MAX_IMAGES:
        raise Refusal(409, f"the item has {known.images} images", allowed=f"at most {MAX_IMAGES}")
    sums = _sums(known) + _sums(image)
    direction = sums.direction(_mean(known))[0].float().numpy()
    kappas = (known.kappa if known.least_image_kappa is None else known.least_image_kappa, image.kappa)
    return replace(
        known,
        vector=direction.tobytes(),
        kappa=float(sums.kappa()),
        thumbnail=known.thumbnail or image.thumbnail,
        origin=image.origin,
        images=known.images + 1,
        resultant=float(sums.resultant),
        least_image_kappa=min(kappas),
        contents=known.contents + image.contents,
        sums=torch.cat([sums.mass, sums.roots, sums.product[0]]).numpy().tobytes(),
    )


def _refuse_another(known: Item, image: Item) -> None:
    if image.label not in ("", known.label):
        what = f"images of one item have one label: the item has {known.label!r}, this image {image.label!r}"
        raise Refusal(409, what, allowed="the same label or none; without fuse the image replaces the item")
    if _beside_text(image) not in ({}, _beside_text(known)):
        what = "images of one item have the same metadata: this image has other metadata"
        raise Refusal(409, what, allowed="the same metadata or none; without fuse the image replaces the item")


def _beside_text(item: Item) -> dict[str, Any]:
    """An item's metadata without the content of a text item."""
    return {name: value for name, value in json.loads(item.metadata).items() if name != "text" or item.text is None}


def _holds(known: Item, image: Item) -> bool:
    """Whether the item already holds the image, by content numbers and, if some are unknown, by the item's id."""
    ids, content = known.content_ids, image.contents
    is_incomplete = len(ids) < known.images
    return content in ids or (is_incomplete and known.id == str(int.from_bytes(content, "big")))


def _sums(item: Item) -> Sums:
    if item.sums is not None:
        sums = torch.from_numpy(np.frombuffer(item.sums).copy())
        return Sums(sums[None, 2:], sums[:1], sums[1:2])
    kappa = torch.tensor([item.kappa], dtype=torch.float64)
    return Sums(kappa[:, None] * _mean(item), kappa, kappa.sqrt())


def _mean(item: Item) -> torch.Tensor:
    return torch.from_numpy(item.embedding.astype(np.float64))[None]
