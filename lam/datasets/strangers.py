"""Classes held out of training, so that a run can bound its errors on strangers (items of unseen classes)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lam.datasets.base import Dataset, Preview
from lam.datasets.splits import Splits
from lam.inputs.thumbnails import SIZE

SHARE, LEAST_CLASSES = 0.1, 20
"""The default share of held-out classes, and the least number of classes for it."""


def hold_out_classes(splits: Splits, share: float | None = None, *, seed: int) -> Splits:
    """Splits without some random classes; the items of these classes become the `strangers`.

    For questions with answers, the strangers are only the questions of these classes.

    Args:
        share: share of all classes, in [0, 1); a positive share holds out at least one class. The default is `SHARE`,
            but 0 for fewer than `LEAST_CLASSES` classes, for classes of one item each, for places, and for splits with
            a common gallery, which must stay complete.
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
    items = [(part, row) for part in strangers for row in range(len(part))]
    return replace(splits, **rest, strangers=JoinedItems(items))


class JoinedItems(Dataset):
    """Items of several data sets with the same list of classes, stored as pairs of data set and position."""

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
        names = {key: part.names for key, part in {id(part): part for part, _ in self.items}.items()}
        return [names[id(part)][row] for part, row in self.items if names[id(part)]]

    @property
    def files(self) -> Sequence[Path]:
        return [part.files[row] for part, row in self.items if part.files]

    def preview(self, index: int, *, side: int = SIZE) -> Preview:
        part, row = self.items[index]
        return part.preview(row, side=side)
