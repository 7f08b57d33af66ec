"""From embedded images to items: their ids, the gate for uncertain images, and fusion of one identity's.

The id of an image is the one that its list gives it, or else its number by content. Reading images and lists, and
storing the items, is done elsewhere.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from lam.gallery.item import (
    ID_RULE,
    INDEXED,
    Images,
    Item,
    checked_id,
    checked_label,
    checked_metadata,
    number_of,
    packed,
)
from lam.gallery.refusal import Refusal
from lam.inputs.thumbnails import thumbnail_of_file
from lam.retrieval.index.entries import unit_vectors
from lam.retrieval.index.fusion import fuse_identities
from lam.vmf.embeddings import Embeddings


@dataclass(frozen=True)
class Entry:
    """An image that shall be indexed.

    Attributes:
        path: its file.
        label: what it shows; empty where that is not known.
        content: its number by content.
        name: its stable id, where its list gives one.
        metadata: whatever else the list says.

    Raises:
        ValueError: for an id that is none, or a label or metadata that are too long or no Unicode.
    """

    path: str
    label: str
    content: int
    name: str | None = None
    metadata: dict[str, str] | None = None

    def __post_init__(self) -> None:
        try:
            if self.name is not None:
                checked_id(self.name)
        except Refusal:
            raise ValueError(f"{self.path}: the id must have {ID_RULE}, got {self.name!r}") from None
        try:
            checked_label(self.label)
            checked_metadata(self.metadata or {})
        except Refusal as refusal:
            raise ValueError(f"{self.path}: {refusal}, allowed is {refusal.allowed}") from None

    @property
    def id(self) -> str:
        """The id of its item, where images are not fused by label."""
        return str(self.content) if self.name is None else self.name


@dataclass(frozen=True)
class Enrolled:
    """What goes into a gallery.

    Attributes:
        items: in the order of each one's first image.
        embeddings: of the items.
        uncertain: path and κ of every image below the flag.
        skipped: whether those were left out.
    """

    items: tuple[Item, ...]
    embeddings: Embeddings
    uncertain: tuple[tuple[str, float], ...] = ()
    skipped: bool = False

    def __len__(self) -> int:
        return len(self.items)

    def pictured(self) -> "Enrolled":
        """With a picture of each item whose first image is a file."""
        return replace(self, items=tuple(replace(item, thumbnail=thumbnail_of_file(item.path)) for item in self.items))


def enrol(
    entries: Sequence[Entry],
    embeddings: Embeddings,
    *,
    flag_below: float | None = None,
    skip_uncertain: bool = False,
    fuse: bool = False,
) -> Enrolled:
    """Gate, and drop or fuse what belongs to one id; the order is that of each id's first image.

    Images of one identity, the same stable id or, without one, the same label, are fused as by
    `lam.retrieval.fuse_identities` with errors that are wholly shared, so that κ does not rise by their number.
    The item has the first image's metadata; the same image twice counts once.

    Args:
        entries: N images.
        embeddings: of those.
        flag_below: the κ below which an image is uncertain; None for no gate.
        skip_uncertain: leave uncertain images out.
        fuse: make one item of each identity, instead of one of each image.

    Raises:
        ValueError: where no image is left; for embeddings that an index cannot hold; or, fusing, for an image without
            id or label, or labels that differ within one identity.
    """
    kappa = embeddings.kappa.tolist()
    is_uncertain = [flag_below is not None and value < flag_below for value in kappa]
    uncertain = tuple((entry.path, kappa[row]) for row, entry in enumerate(entries) if is_uncertain[row])
    kept = [row for row in range(len(entries)) if not (skip_uncertain and is_uncertain[row])]
    if not kept:
        raise ValueError(f"no image is left: kappa is below the flag {flag_below:.4g} for all {len(entries)}")
    groups: dict[str, list[int]] = {}
    for row in kept:
        groups.setdefault(_identity(entries[row]) if fuse else entries[row].id, []).append(row)
    alone = {identity: _different(entries, rows) if fuse else rows[:1] for identity, rows in groups.items()}
    rows = torch.tensor([row for of_one in alone.values() for row in of_one])
    made, resultants = _fused(embeddings[rows], [len(of_one) for of_one in alone.values()])
    vectors, fused_kappa = unit_vectors(made, made.dimension).numpy(), made.kappa.double().tolist()
    items = tuple(
        _item(
            identity, [entries[row] for row in of_one], vectors[at], fused_kappa[at], resultants[at],
            [kappa[row] for row in of_one],
        )
        for at, (identity, of_one) in enumerate(alone.items())
    )  # fmt: skip
    return Enrolled(items, made, uncertain, skip_uncertain)


def item_of_embedding(
    identity: str, vector: np.ndarray, kappa: float, label: str, path: str, picture: bytes | None
) -> Item:
    """An item of one image that is known by its path alone."""
    images = Images(paths=json.dumps([path]))
    return Item(identity, vector.tobytes(), kappa, label, thumbnail=picture, origin=INDEXED, images=images)


def _item(
    identity: str, entries: list[Entry], vector: np.ndarray, kappa: float, resultant: float, alone: list[float]
) -> Item:
    """The item of images of one identity, of which each one's κ is known."""
    contents, paths = packed(entry.content for entry in entries), json.dumps([entry.path for entry in entries])
    images = Images(contents=contents, paths=paths)
    if len(entries) > 1:
        mass, roots = sum(alone), float(np.sqrt(alone).sum())
        sums = np.concatenate([[mass, roots], resultant * mass * vector.astype(np.float64)])
        images = Images(len(entries), resultant, min(alone), contents, paths, sums.tobytes())
    metadata = checked_metadata(entries[0].metadata or {})
    return Item(identity, vector.tobytes(), kappa, entries[0].label, metadata, origin=INDEXED, images=images)


def _identity(entry: Entry) -> str:
    if entry.name is not None:
        return entry.name
    if not entry.label:
        raise ValueError(f"{entry.path} has neither id nor label: images are fused by their id, or else their label")
    return str(number_of(hashlib.sha256(f"label {entry.label}".encode()).hexdigest()))


def _different(entries: Sequence[Entry], rows: list[int]) -> list[int]:
    """The rows of one identity, the same image once."""
    first = entries[rows[0]]
    for row in rows:
        if entries[row].label != first.label:
            raise ValueError(
                f"images of one identity must have one label: id {first.name!r} has {first.label!r} for {first.path}, "
                f"{entries[row].label!r} for {entries[row].path}"
            )
    by_content: dict[int, int] = {}
    for row in rows:
        by_content.setdefault(entries[row].content, row)
    return list(by_content.values())


def _fused(embeddings: Embeddings, counts: list[int]) -> tuple[Embeddings, list[float]]:
    """One embedding for every so many, and how far those agree."""
    if max(counts) == 1:
        return embeddings, [1.0] * len(counts)
    groups = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    fused = fuse_identities(embeddings, groups)
    return fused.embeddings, fused.embeddings.resultant.tolist()
