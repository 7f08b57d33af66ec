"""`Splits`: a data set in three disjoint parts, drawn at random or with held-out classes, the strangers."""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lam.datasets.base import Dataset, Items, stratified_split
from lam.utils.checks import check_share, first_of
from lam.utils.notes import Note

GalleryKind = Literal["classes", "identities"]
"""Kind of a gallery: examples of classes ("which is it?"), or individuals ("is it here?")."""

PARTS = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test", "testing", "eval"),
}
"""Allowed names of the folder or file of each split."""

_LEAST_TRAINED_ON = 5  # least number of training items for a run
SHARE, LEAST_CLASSES = 0.1, 20  # the default share of held-out classes, and the least number of classes for it


@dataclass(frozen=True)
class Splits:
    """Three disjoint splits of a data set.

    Attributes:
        train: items for training and fitting.
        validation: items for tuning and for the choice of the epoch.
        test: items for the reported metrics.
        strangers: items of held-out classes, see `lam.datasets.splits`; None without them.
        gallery: `classes` if the gallery's items are examples of classes, `identities` if they are individuals.
        answers: whether the gallery holds answers to questions. Answers are never used as queries.
        notes: remarks on the data for a run's report.

    Raises:
        ValueError: If the splits differ in the shape of items or in classes.
    """

    train: Dataset
    validation: Dataset
    test: Dataset
    strangers: Dataset | None = None
    gallery: GalleryKind = "classes"
    answers: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, part in (("validation", self.validation), ("test", self.test)):
            if part.shape != self.train.shape:
                raise ValueError(f"train has items of shape {self.train.shape}, {name} of shape {part.shape}")
            if part.classes != self.train.classes:
                raise ValueError(f"train and {name} must share one list of classes: a label is a position in it")

    def parts(self) -> dict[str, Dataset]:
        """The splits by name, including strangers if there are any."""
        return {name: part for name, part in vars(self).items() if isinstance(part, Dataset)}


def note_like_names(classes: Iterable[str], source: object) -> None:
    """Warn, by a `Note`, of class names that are equal up to case and blanks, or as numbers (1 and 1.0)."""
    groups: dict[str, list[str]] = {}
    for name in classes:
        plain = " ".join(name.casefold().split())
        groups.setdefault(plain[:-2] if re.fullmatch(r"-?\d+\.0", plain) else plain, []).append(name)
    if like := [names for names in groups.values() if len(names) > 1]:
        first = " and ".join(repr(name[:60]) for name in like[0])
        note = f"{source}: the classes {first} differ only in case, blanks or as numbers ({len(like)} such groups)"
        warnings.warn(f"{note}: rename them if they are one class", Note, stacklevel=3)


def note_lost_metadata(pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], source: object) -> None:
    """Warn, by a `Note`, of metadata (kept, lost) of one answer that differ in more than an id or a split."""
    names = {name for kept, lost in pairs for name in {**kept, **lost} if kept.get(name) != lost.get(name)}
    if different := sorted(name for name in names if name.lower() not in ("id", "split")):
        note = f"{source}: rows of one answer differ in {first_of(different)}: the gallery keeps the first row"
        advice = "for separate items, give `lam index` a table with the columns id and text"
        warnings.warn(f"{note}; {advice}", Note, stacklevel=4)


def carve(dataset: Items, sizes: Sequence[int], *, seed: int) -> tuple[Items, ...]:
    """Random subsets of these sizes, stratified by class, and then the subset of all other items."""
    rest = len(dataset) - sum(sizes)
    parts = stratified_split(dataset.labels, (*sizes, rest), seed=seed)
    return tuple(dataset.subset(part) for part in parts)


def carve_missing(
    parts: Mapping[str, Items], *, validation: float, test: float, seed: int, source: object, by_class: bool = True
) -> dict[str, Any]:
    """The splits `train`, `validation` and `test`; missing ones are drawn at random from `train`.

    The draw is stratified by class; `validation` and `test` are fractions of `train`. If small classes would leave too
    many items without a match, the drawn splits get pairs of items of one class instead. At least two items of each
    class stay in `train`, and more if larger classes can give the pairs. If the classes are too small, the drawn splits
    get whole classes, or pairs without this limit. A `Note` says so.
    Questions match only answers: with `by_class=False`, there is no exception. Errors name the `source`.
    """
    dataset = parts["train"]
    missing = {part: share for part, share in (("test", test), ("validation", validation)) if part not in parts}
    sizes = [fraction_of(len(dataset), share, name=part) for part, share in missing.items()]
    if sum(sizes) >= len(dataset):
        raise ValueError(f"{source} has {len(dataset)} items, too few to carve {' and '.join(missing)} out of them")
    carved = carve(dataset, sizes, seed=seed)
    if by_class and any(_share_matched(part) < _share_matched(dataset) / 2 for part in carved):
        carved = _carve_matched(dataset, missing, seed=seed, source=source) or carved
    *held_out, train = carved
    return {**parts, **dict(zip(missing, held_out, strict=True)), "train": train}


def _carve_matched(
    dataset: Items, shares: Mapping[str, float], *, seed: int, source: object
) -> tuple[Items, ...] | None:
    """For each share, a subset in which items have matches; last, the rest. None if there are too few items."""
    classes, counts = dataset.labels.unique(return_counts=True)
    n_classes = [max(2, fraction_of(int((counts > 1).sum()), share, name=part)) for part, share in shares.items()]
    sizes = [max(3, fraction_of(len(dataset), share, name=part)) for part, share in shares.items()]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(dataset), generator=generator)
    how = f"pairs of one class are held out, {_by_part(shares, sizes)}"
    held_out = None
    for keep in range(max(2, int(counts.median()) - 2), 1, -1):  # half of the classes can give pairs
        held_out = held_out or _draw_pairs(dataset.labels, order, sizes, n_classes, keep=keep)
    if held_out is None and sum(n_classes) + 2 <= (counts > 1).sum():
        classes = classes[counts > 1]
        drawn = classes[torch.randperm(len(classes), generator=generator)][: sum(n_classes)].split(n_classes)
        held_out = [torch.isin(dataset.labels, of_part).nonzero().flatten() for of_part in drawn]
        how = f"of the {len(classes)} classes with two or more, {_by_part(shares, n_classes)} are held out as a whole"
    held_out = held_out or _draw_pairs(dataset.labels, order, sizes, [2] * len(sizes), keep=0)
    if held_out is None:
        return None
    note = f"{source} has few items in a class ({int(counts.median())}): {how}, so that their items have matches"
    warnings.warn(note, Note, stacklevel=4)
    rest = torch.ones(len(dataset), dtype=torch.bool)
    rest[torch.cat(held_out)] = False
    return tuple(dataset.subset(part) for part in (*held_out, rest.nonzero().flatten()))


def _by_part(parts: Iterable[str], numbers: Iterable[int]) -> str:
    return " and ".join(f"{number} for {part}" for part, number in zip(parts, numbers, strict=True))


def _draw_pairs(
    labels: Tensor, order: Tensor, sizes: list[int], n_classes: list[int], *, keep: int
) -> list[Tensor] | None:
    """Positions of items of each part, drawn in pairs of one class; None if a part would lack items or `n_classes`.

    In each round, every class with two items more than `keep` gives a pair. Classes come in the `order` of their first
    item, so larger classes tend to come first. If `keep` is 0 and one class gives pairs, single items of other
    classes join them.
    """
    left = dict[int, list[int]]()
    for position, label in zip(order.tolist(), labels[order].tolist(), strict=True):
        left.setdefault(label, []).append(position)
    drawn = list[int]()
    while len(drawn) < sum(sizes):
        givers = [items for items in left.values() if len(items) >= keep + 2]
        if not givers or sum(sizes) + _LEAST_TRAINED_ON > len(order):
            return None
        if len(givers) == 1 and not keep:
            givers += [items for items in left.values() if len(items) == 1][:1]
        drawn += [items.pop() for items in givers for _ in range(min(2, len(items)))]
    parts = torch.tensor(drawn[: sum(sizes)]).split(sizes)
    if any(len(labels[part].unique()) < least for part, least in zip(parts, n_classes, strict=True)):
        return None
    return [part.sort().values for part in parts]


def _share_matched(dataset: Dataset) -> float:
    counts = dataset.labels.unique(return_counts=True)[1]
    return float(counts[counts > 1].sum()) / len(dataset)


def fraction_of(n: int, fraction: float, *, name: str) -> int:
    """Number of items in a fraction of n, at least one."""
    check_share(name, fraction)
    return max(1, round(n * fraction))


def hold_out_classes(splits: Splits, share: float | None = None, *, seed: int) -> Splits:
    """Splits without some random classes; the items of these classes become the `strangers`.

    For questions with answers, the strangers are only the questions of these classes.

    Args:
        share: share of all classes, in [0, 1); a positive share holds out at least one class. By default `SHARE`. The
            default is 0 for fewer than `LEAST_CLASSES` classes, for classes of one item each, for places, and for
            splits with a common gallery, which must stay complete.
    """
    parts = splits.parts()
    if any(part.targets.ndim > 1 for part in parts.values()):
        if share:
            raise ValueError("strangers are held-out classes, but places have no classes: leave data.strangers out")
        return splits
    classes, counts = torch.cat([part.labels for part in parts.values()]).unique(return_counts=True)
    if share is None:
        shares_gallery = any(part.is_query is not None for part in parts.values())
        share = SHARE if len(classes) >= LEAST_CLASSES and counts.max() > 1 and not shares_gallery else 0.0
    if share == 0:
        return splits
    count = max(1, round(share * len(classes)))
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))
    held_out = classes[order[:count]]
    rest, strangers = dict[str, Any](), list[Dataset]()
    for name, part in parts.items():
        queries = part.queries  # their answers are in every part
        mask = torch.isin(queries.labels, held_out)
        if mask.all():
            raise ValueError(
                f"holding out {count} of {len(classes)} classes leaves the {name} split without an item: give more "
                "data or a smaller data.strangers"
            )
        strangers += [queries.subset(mask.nonzero()[:, 0])] if mask.any() else []
        rest[name] = part.subset((~torch.isin(part.labels, held_out)).nonzero()[:, 0])
    joined = strangers[0].joined(*strangers[1:])
    joined.is_query = None
    return replace(splits, **rest, strangers=joined)
