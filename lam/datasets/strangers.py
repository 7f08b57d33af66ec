"""Whole classes set aside before training: what the network never sees, so that errors on strangers can be promised.

Which rate so many classes can promise is told by `lam.retrieval.decisions.conformal`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lam.datasets.base import Dataset, Shown, Splits
from lam.inputs.thumbnails import SIZE

SHARE, LEAST_CLASSES = 0.1, 20
"""The share of the classes that is set aside by default, and how many classes there must be for that."""


def set_classes_aside(splits: Splits, share: float | None = None, *, seed: int) -> Splits:
    """Splits without the items of some classes, drawn at random, which are `strangers` instead.

    Of questions with answers the questions are; the answers of their classes are left out.

    Args:
        splits: of labelled items.
        share: of the classes of all three parts, in [0, 1), rounded to at least one class; 0 for none. By default
            `SHARE` where there are at least `LEAST_CLASSES` classes; none where there are fewer, no class has two
            items, items are places, or all parts share a gallery beside their queries, from which nothing may be
            missing.
        seed: of the draw.

    Raises:
        ValueError: for a share of the classes of places, or one that leaves a part without an item.
    """
    parts = splits.parts()
    if any(part.targets.ndim > 1 for part in parts.values()):
        if share:
            raise ValueError("strangers are set aside by class, and places have none: leave data.strangers out")
        return splits
    classes, counts = torch.cat([part.labels for part in parts.values()]).unique(return_counts=True)
    if share is None:
        shares_gallery = any(part.is_query is not None for part in parts.values())
        share = SHARE if len(classes) >= LEAST_CLASSES and counts.max() > 1 and not shares_gallery else 0.0
    if share == 0:
        return splits
    count = max(1, round(share * len(classes)))
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))
    aside = classes[order[:count]]
    strangers: list[Dataset] = []
    for name, part in parts.items():
        queries = part.queries  # answers beside them are in every part
        mask = torch.isin(queries.labels, aside)
        if mask.all():
            raise ValueError(
                f"setting {count} of {len(classes)} classes aside leaves the {name} split without an item: give more "
                "data or a smaller data.strangers"
            )
        strangers += [queries.subset(mask.nonzero()[:, 0])] if mask.any() else []
    rest = {name: part.subset((~torch.isin(part.labels, aside)).nonzero()[:, 0]) for name, part in parts.items()}
    return replace(
        splits, **rest, strangers=JoinedItems([(part, row) for part in strangers for row in range(len(part))])
    )


class JoinedItems(Dataset):
    """Items of several data sets with one list of classes, one after the other.

    Args:
        items: each as its data set and the position there.
    """

    items: tuple[tuple[Dataset, int], ...]

    def __init__(self, items: Sequence[tuple[Dataset, int]]) -> None:
        labels = torch.tensor([int(part.labels[row]) for part, row in items], dtype=torch.int64)
        first = items[0][0]
        options: Any = {"name": first.name, "classes": first.classes, "preprocessing": first.preprocessing}
        super().__init__(labels, **options, items=tuple(items))

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        part, row = self.items[index]
        return part[row]

    @property
    def names(self) -> Sequence[str]:
        """Those of the parts."""
        names = {key: part.names for key, part in {id(part): part for part, _ in self.items}.items()}
        return [names[id(part)][row] for part, row in self.items if names[id(part)]]

    @property
    def files(self) -> Sequence[Path]:
        """Those of the parts."""
        return [part.files[row] for part, row in self.items if part.files]

    def shown(self, index: int, *, side: int = SIZE) -> Shown:
        """As its own data set shows it."""
        part, row = self.items[index]
        return part.shown(row, side=side)
