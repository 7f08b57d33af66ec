"""Fuses images of one identity into one item, one image after the other.

A fused item depends on the directions μ and concentrations κ of its images only through the float64 sums Σ κμ, Σ κ and
Σ √κ, so images may come in any order. `lam.retrieval.index.fusion` has the formula; its error correlation is 1 here.
"""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lam.gallery.item import Images, Item
from lam.gallery.refusal import Refusal
from lam.retrieval.index.fusion import Sums

MAX_IMAGES = 10_000
_BYTES = 8


def fuse(known: Item, image: Item) -> Item:
    """Fuse an image into an item; the result equals `fuse_identities` of all images at once.

    If the directions cancel, κ is 0 and the direction stays. The item keeps its label and metadata, and its thumbnail
    if it has one. An item that already holds the image is returned unchanged. An image with another label or other
    metadata is refused as `conflict`, and so is an image for an item that already has `MAX_IMAGES`.
    """
    _refuse_another(known, image)
    if _holds(known, image):
        return known
    if known.images.count >= MAX_IMAGES:
        raise Refusal("conflict", f"the item has {known.images.count} images", allowed=f"at most {MAX_IMAGES}")
    sums = _sums(known) + _sums(image)
    direction = sums.direction(_mean(known))[0].float().numpy()
    kappas = (known.kappa if known.images.least_kappa is None else known.images.least_kappa, image.kappa)
    images = Images(
        known.images.count + 1,
        float(sums.resultant),
        min(kappas),
        known.images.contents + image.images.contents,
        known.images.paths,
        torch.cat([sums.mass, sums.roots, sums.product[0]]).numpy().tobytes(),
    )
    return replace(
        known,
        vector=direction.tobytes(),
        kappa=float(sums.kappa()),
        thumbnail=known.thumbnail or image.thumbnail,
        origin=image.origin,
        images=images,
    )


def _refuse_another(known: Item, image: Item) -> None:
    if image.label not in ("", known.label):
        raise Refusal(
            "conflict",
            f"images of one item have one label: the item has {known.label!r}, this image {image.label!r}",
            allowed="the same label or none; without fuse the image replaces the item",
        )
    if _beside_text(image) not in ({}, _beside_text(known)):
        raise Refusal(
            "conflict",
            "images of one item have the same metadata: this image has other metadata",
            allowed="the same metadata or none; without fuse the image replaces the item",
        )


def _beside_text(item: Item) -> dict[str, Any]:
    """An item's metadata without the text, which differs between fused texts."""
    return {name: value for name, value in json.loads(item.metadata).items() if name != "text"}


def _holds(known: Item, image: Item) -> bool:
    """Whether the item already holds the image, by content numbers and, if some are unknown, by the item's id."""
    contents, content = known.images.contents, image.images.contents
    ids = {contents[start : start + _BYTES] for start in range(0, len(contents), _BYTES)}
    is_incomplete = len(ids) < known.images.count
    return content in ids or (is_incomplete and known.id == str(int.from_bytes(content, "big")))


def _sums(item: Item) -> Sums:
    if item.images.sums is not None:
        sums = torch.from_numpy(np.frombuffer(item.images.sums).copy())
        return Sums(sums[None, 2:], sums[:1], sums[1:2])
    kappa = torch.tensor([item.kappa], dtype=torch.float64)
    return Sums(kappa[:, None] * _mean(item), kappa, kappa.sqrt())


def _mean(item: Item) -> torch.Tensor:
    return torch.from_numpy(item.embedding.astype(np.float64))[None]
