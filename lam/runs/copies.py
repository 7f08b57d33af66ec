"""Copies among the data of a run: an image or text in several splits, under several labels, or twice in one split.

Copies make recall too good, because any network finds a copy of the query. A copy in an OOD set makes AUROC too low,
because a copy is not a stranger. Exact copies have the same file content or text. Near copies, such as resized or
recompressed images, have similar perceptual hashes (ImageHash's `phash`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import imagehash
import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from lam.datasets import Dataset, Splits, Texts
from lam.inputs.preprocessing import Preprocessing
from lam.runs.config import Duplicates
from lam.utils.blocks import row_blocks
from lam.utils.files import read_csv, sha256_of, write_csv

COPIES = "copies.csv"  # file in a run's folder that lists copies
_PARTS = ("test", "validation", "train", "strangers")  # among copies, the item in the earliest split is the original
OOD_SET = "OOD set "  # beginning of an OOD set's name among the parts of a run's data
_HASH_SIDE = 16
_NEAR = 24  # greatest number of bits, of 256, in which hashes of near copies differ
_LEAST_SIDE = 32  # least length of an image's side, in pixels; perceptual hashes confuse smaller images
_MOST_COMPARED = 100_000
"""Largest number of images that are compared for near copies; the comparison takes half a minute on one core."""

_BLOCK = 256  # images compared with each other at once


class Item(NamedTuple):
    """An item of a split or OOD set; `path` is its file or number, and `label` is empty without a label."""

    part: str
    row: int
    path: str
    label: str


@dataclass(frozen=True)
class Copy:
    """An item and its original; the kind is `exact` or `near`."""

    kind: str
    path: str
    part: str
    label: str
    path_of_original: str
    part_of_original: str
    label_of_original: str

    @classmethod
    def of(cls, kind: str, item: Item, original: Item) -> "Copy":
        """The record of an item and its original."""
        return cls(kind, item.path, item.part, item.label, original.path, original.part, original.label)


def exact_copies(splits: Splits, ood: Mapping[str, Dataset]) -> list[list[Item]]:
    """Groups of items with equal content, the original first. Images without files are not compared.

    Groups that lie only in OOD sets are left out.
    """
    groups: dict[str, list[Item]] = {}
    for name, part in _in_order(splits, ood):
        for row, content in _contents(part):
            groups.setdefault(content, []).append(_item(name, part, row))
    return [group for group in groups.values() if len(group) > 1 and not _is_outside(group[0].part)]


def without_copies(splits: Splits, ood: Mapping[str, Dataset]) -> tuple[Splits, dict[str, Dataset], list[Copy]]:
    """Splits and OOD sets with one item of each content, and the list of exact copies.

    If items of the splits have equal content but different labels, all copies are dropped: the right label is unknown.
    """
    groups = exact_copies(splits, ood)
    dropped: dict[str, set[int]] = {}
    for group in groups:
        contradict = len({item.label for item in group if not _is_outside(item.part)}) > 1
        for item in group if contradict else group[1:]:
            dropped.setdefault(item.part, set()).add(item.row)

    def kept(name: str, part: Dataset) -> Dataset:
        if name not in dropped:
            return part
        rows = [row for row in range(len(part)) if row not in dropped[name]]
        if not rows:
            raise ValueError(f"--data.duplicates=drop leaves nothing of the part '{name}': all its items are copies")
        return part.subset(torch.tensor(rows))

    known = {name: kept(name, part) for name, part in splits.parts().items()}
    outside = {name: kept(OOD_SET + name, part) for name, part in ood.items()}
    return replace(splits, **known), outside, _as_copies(groups)


def find_copies(splits: Splits, ood: Mapping[str, Dataset], hashes: Mapping[Path, UInt8[Tensor, " B"]]) -> list[Copy]:
    """All copies in splits and OOD sets. `hashes` holds perceptual hashes by file; other files have no near copies."""
    exact = exact_copies(splits, ood)
    repeated = {(item.part, item.row) for group in exact for item in group[1:]}
    items, bits = list[Item](), list[Tensor]()
    for name, part in _in_order(splits, ood):
        for row, path in enumerate(part.files):
            if path in hashes and (name, row) not in repeated:
                items.append(_item(name, part, row))
                bits.append(hashes[path])
    return [*_as_copies(exact), *_near_copies(items, bits)]


def perceptual_hash(preprocessing: Preprocessing, image: Tensor) -> UInt8[Tensor, " B"] | None:
    """A 256-bit hash of an input (C, H, W), nearly equal for images that look alike; None if small or uniform."""
    if min(image.shape[1:]) < _LEAST_SIDE:
        return None
    pixels = preprocessing.denormalize(image).mean(0).mul(255).round().byte().numpy()
    if pixels.max() == pixels.min():
        return None
    bits = imagehash.phash(Image.fromarray(pixels), _HASH_SIDE).hash
    return torch.from_numpy(np.packbits(bits.flatten()))


def check_copies(copies: Sequence[Copy], duplicates: Duplicates) -> None:
    """Reject copies if `duplicates` is `refuse`."""
    if copies and duplicates == "refuse":
        first = copies[0]
        raise ValueError(
            f"{_counts(copies)}, such as {first.path} ({first.part}) of {first.path_of_original} "
            f"({first.part_of_original}): remove them, or give --data.duplicates=keep or drop"
        )


def remark_on(copies: Sequence[Copy], duplicates: Duplicates) -> str | None:
    """A sentence on how copies affect the results; None without copies."""
    if not copies:
        return None
    if duplicates == "drop":
        dropped = "exact copies are left out, and so are the originals if the labels differ"
        return f"{_counts(copies)}: {dropped}; {COPIES} lists all"
    outside = sum(_is_outside(copy.part) for copy in copies)
    effects = ["any network finds such items, so recall is too good"] * (outside < len(copies))
    effects += ["OOD items that copy known ones are not strangers, so AUROC is too low"] * (outside > 0)
    return f"{_counts(copies)}: {'; '.join(effects)}; {COPIES} lists them, --data.duplicates=drop leaves exact ones out"


def write_copies(copies: Iterable[Copy], folder: Path) -> None:
    """Write copies as CSV into a run's folder."""
    write_csv(folder / COPIES, [field.name for field in fields(Copy)], (asdict(copy) for copy in copies))


def read_copies(folder: Path) -> list[Copy]:
    """The copies listed in a run's folder; empty without a list."""
    return [Copy(**row) for row in read_csv(folder / COPIES)]


def _in_order(splits: Splits, ood: Mapping[str, Dataset]) -> list[tuple[str, Dataset]]:
    known = sorted(splits.parts().items(), key=lambda named: _PARTS.index(named[0]))
    return [*known, *((OOD_SET + name, images) for name, images in ood.items())]


def _is_outside(part: str) -> bool:
    return part.startswith(OOD_SET)


def _contents(part: Dataset) -> Iterable[tuple[int, str]]:
    """Row and content (SHA-256 of a file, or a text) of each item, except for answers, which all splits share."""
    if part.files:
        return ((row, sha256_of(path)) for row, path in enumerate(part.files))
    if isinstance(part, Texts):
        is_query = part.is_query
        rows = range(len(part)) if is_query is None else is_query.nonzero().flatten().tolist()
        return ((row, str(part.preview(row).text)) for row in rows)
    return ()


def _item(name: str, part: Dataset, row: int) -> Item:
    label = "" if part.targets.ndim > 1 else part.classes[int(part.labels[row])]
    path = str(part.files[row]) if part.files else part.preview(row).path
    return Item(name, row, path, label)


def _as_copies(groups: Iterable[Sequence[Item]]) -> list[Copy]:
    return [Copy.of("exact", item, group[0]) for group in groups for item in group[1:]]


def _near_copies(items: Sequence[Item], bits: Sequence[Tensor]) -> list[Copy]:
    """Items with a hash close to an earlier item's hash; the closest earlier item is the original."""
    if not 1 < len(items) <= _MOST_COMPARED:
        return []
    import faiss  # slow to import, and optional

    hashes = torch.stack(list(bits)).numpy()
    inside = np.array([not _is_outside(item.part) for item in items])  # these come first
    index, copies = faiss.IndexBinaryFlat(8 * hashes.shape[1]), list[Copy]()
    for block in row_blocks(len(items), 1, elements=_BLOCK):
        own = hashes[block]
        apart = np.bitwise_count(own[:, None] ^ own).sum(2, dtype=np.int32)
        apart[~np.tri(len(own), k=-1, dtype=bool) | ~inside[block]] = _NEAR + 1  # originals are earlier, and not OOD
        nearest, originals = apart.min(1), block.start + apart.argmin(1)
        if index.ntotal:
            distances, found = index.search(own, 1)
            is_before = distances[:, 0] <= nearest
            nearest, originals = np.where(is_before, [distances[:, 0], found[:, 0]], [nearest, originals])
        index.add(own[inside[block]])
        near = (nearest <= _NEAR).nonzero()[0].tolist()
        copies += [Copy.of("near", items[block.start + row], items[originals[row]]) for row in near]
    return copies


def _counts(copies: Sequence[Copy]) -> str:
    """The beginning of a sentence that counts copies."""
    counts = list[str]()
    for kind in ("exact", "near"):
        some = [copy for copy in copies if copy.kind == kind]
        inside = [copy for copy in some if not _is_outside(copy.part)]
        numbers = {
            "in another split": sum(copy.part != copy.part_of_original for copy in inside),
            "under another label": sum(copy.label != copy.label_of_original for copy in inside),
            "in an OOD set": len(some) - len(inside),
        }
        where = [f"{number} {place}" for place, number in numbers.items() if number]
        noun = "copy" if len(some) == 1 else "copies"
        counts += [f"{len(some)} {kind} {noun}" + (f" ({', '.join(where)})" if where else "")] * bool(some)
    return "the data hold " + " and ".join(counts)
