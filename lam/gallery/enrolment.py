"""From embedded images to the entries of an index: their ids, the gate for poor images, and fusion of one identity's.

The id of an image is the one that its list gives it, or else the first 63 bits of its SHA-256, so that one image is one
row however often it is there and whatever it is called. What an id, a label and metadata may be is said here for the
index and the service alike. Reading images and lists, and writing the index, is done elsewhere.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from lam.retrieval.index.fusion import fuse_identities
from lam.utils.files import sha256_of
from lam.vmf.embeddings import Embeddings

Item = dict[str, Any]
"""What is known of an id, as JSON: `label` and `path`; and where there is one, its `id` as it was given, `contents`
with the ids by content of its images where its own is not that, `metadata`, `poor` with the κ that is too low, and
`fused` with the number of `images`, their `resultant`, `paths` and `kappa`."""

ID_RULE = "1 to 128 letters, digits, spaces or ._:@+=-, with no space at an end"
MAX_LABEL, MAX_METADATA, MAX_DEPTH = 1024, 16384, 32
_ID = re.compile(r"(?!\.{1,2}$)(?! )[\w .:@+=-]{1,128}(?<! )")
_MOST = 2**63


@dataclass(frozen=True)
class Entry:
    """An image that shall be indexed.

    Attributes:
        path: its file.
        label: what it shows; empty where that is not known.
        content: its id by its bytes.
        name: its stable id, where its list gives one.
        metadata: whatever else the list says.

    Raises:
        ValueError: for an id that is none, or a label or metadata that are too long.
    """

    path: str
    label: str
    content: int
    name: str | None = None
    metadata: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if self.name is not None and not is_id(self.name):
            raise ValueError(f"{self.path}: the id must have {ID_RULE}, got {self.name!r}")
        if len(self.label) > MAX_LABEL:
            raise ValueError(f"{self.path}: the label may have {MAX_LABEL} characters, got {len(self.label)}")
        if (size := len(json.dumps(self.metadata or {}))) > MAX_METADATA:
            raise ValueError(f"{self.path}: metadata may have {MAX_METADATA} characters as JSON, got {size}")

    @property
    def id(self) -> int:
        """The number under which the index keeps it."""
        return self.content if self.name is None else named_id(self.name)

    @property
    def item(self) -> Item:
        """What is kept of it beside the index."""
        known: Item = {"label": self.label, "path": self.path}
        if self.name is not None:
            known |= {"id": self.name, "contents": [self.content]}
        return known | ({"metadata": self.metadata} if self.metadata else {})


@dataclass(frozen=True)
class Enrolled:
    """What goes into an index.

    Attributes:
        ids: (N,) one an entry.
        embeddings: of the entries.
        items: of each.
        poor: path and κ of every image below the flag.
        skipped: whether those were left out.
    """

    ids: Int64[Tensor, " N"]
    embeddings: Embeddings
    items: tuple[Item, ...]
    poor: tuple[tuple[str, float], ...] = ()
    skipped: bool = False

    def __len__(self) -> int:
        return len(self.ids)


def content_id(path: str | Path) -> int:
    """Give the id of an image that has none: the first 63 bits of its SHA-256."""
    return id_of_digest(sha256_of(Path(path)))


def id_of_digest(digest: str) -> int:
    """Give the first 63 bits of a SHA-256 in hexadecimal digits."""
    return int(digest[:16], 16) >> 1


def is_id(name: str) -> bool:
    """Tell whether a text can be a stable id, which is part of addresses."""
    return _ID.fullmatch(name) is not None


def name_of(number: int, item: Item) -> str:
    """Give the stable id of what an index keeps under a number: the one that its list gave, or else that number."""
    return item.get("id", str(number))


def named_id(name: str) -> int:
    """Give the number of a stable id: the number that it is, or else the first 63 bits of the SHA-256 of its text.

    Example:
        >>> named_id("42"), named_id("042") == 42
        (42, False)
    """
    if name.isascii() and name.isdecimal() and str(int(name)) == name and int(name) < _MOST:
        return int(name)
    return id_of_digest(hashlib.sha256(name.encode()).hexdigest())


def enrol(
    entries: Sequence[Entry],
    embeddings: Embeddings,
    *,
    flag_below: float | None = None,
    skip_poor: bool = False,
    fuse: bool = False,
) -> Enrolled:
    """Gate, and drop or fuse what belongs to one id; the order is that of each id's first image.

    Images of one identity, the same stable id or, without one, the same label, are fused as by
    `lam.retrieval.fuse_identities` with errors that are wholly shared, so that κ does not rise by their number.
    The entry has the first image's path and metadata; the same image twice counts once.

    Args:
        entries: N images.
        embeddings: of those.
        flag_below: the κ below which an image is poor; None for no gate.
        skip_poor: leave poor images out.
        fuse: make one entry of each identity, instead of one of each image.

    Raises:
        ValueError: where no image is left; or, fusing, for an image without id or label, or labels that differ within
            one identity.
    """
    kappa = embeddings.kappa.tolist()
    is_poor = [flag_below is not None and value < flag_below for value in kappa]
    poor = tuple((entry.path, kappa[row]) for row, entry in enumerate(entries) if is_poor[row])
    kept = [row for row in range(len(entries)) if not (skip_poor and is_poor[row])]
    if not kept:
        raise ValueError(f"no image is left: kappa is below the flag {flag_below:.4g} for all {len(entries)}")
    groups: dict[int, list[int]] = {}
    for row in kept:
        identity = _identity(entries[row]) if fuse else entries[row].id
        groups.setdefault(identity, []).append(row)
    alone = {identity: _different(entries, rows) if fuse else rows[:1] for identity, rows in groups.items()}
    rows = torch.tensor([row for of_one in alone.values() for row in of_one])
    made, resultants = _fused(embeddings[rows], [len(of_one) for of_one in alone.values()])
    items: list[Item] = []
    for number, of_one in enumerate(alone.values()):
        item = entries[of_one[0]].item
        if len(of_one) > 1:
            item["contents"] = [entries[row].content for row in of_one]
            item["fused"] = {
                "images": len(of_one),
                "resultant": resultants[number],
                "paths": [entries[row].path for row in of_one],
                "kappa": [kappa[row] for row in of_one],
            }
        if any(is_poor[row] for row in of_one):
            item["poor"] = min(kappa[row] for row in of_one)
        items.append(item)
    return Enrolled(torch.tensor(list(alone)), made, tuple(items), poor, skip_poor)


def _identity(entry: Entry) -> int:
    if entry.name is not None:
        return entry.id
    if not entry.label:
        raise ValueError(f"{entry.path} has neither id nor label: images are fused by their id, or else their label")
    return named_id(f"label {entry.label}")


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
