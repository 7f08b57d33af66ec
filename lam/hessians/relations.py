"""The pairs of a whole data set, from labels or from lists of neighbours, without a matrix of all pairs."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lam.pairs.pairs import Neighbours, check_label_vector


class LabelRelation:
    """The pairs among N items: items with the same label are positive pairs, all others negative pairs.

    Attributes:
        size: N.
        n_positives, n_negatives: numbers of ordered pairs.
        n_matched: number of items with a positive pair.
        order: (N,) order of the items for the blocks of `exclude`, by label.
        labels: (N,).
    """

    def __init__(self, labels: Int[Tensor, " N"]) -> None:
        check_label_vector(labels)
        self.order = labels.argsort(stable=True)
        self._sorted = labels[self.order]
        _, self._class, self._sizes = labels.unique(return_inverse=True, return_counts=True)
        self.labels = labels
        self.size = len(labels)
        self.n_positives = int((self._sizes * (self._sizes - 1)).sum())
        self.n_negatives = len(labels) ** 2 - int(self._sizes.square().sum())
        self.n_matched = int(self._sizes[self._sizes > 1].sum())

    def positive_partners(self, n: Float[Tensor, "N D"]) -> tuple[Float[Tensor, "N 1"], Float[Tensor, "N D"]]:
        """For each item, the number of its positive partners and the sum of their rows of n, in float64."""
        n = n.double()
        totals = n.new_zeros(len(self._sizes), n.shape[1]).index_add_(0, self._class, n)
        return (self._sizes[self._class] - 1).double()[:, None], totals[self._class] - n

    def exclude(self, t: Float[Tensor, "rows columns"], rows: slice, columns: slice) -> bool:
        """Set block `t` (items in `order`) to 0 except at negative pairs; return whether it may hold negative pairs."""
        left, right = self._sorted[rows], self._sorted[columns]
        if left[-1] < right[0]:  # sorted labels: the block holds only negative pairs
            return True
        t.mul_(left[:, None] != right[None, :])
        return not (left[0] == left[-1] == right[0] == right[-1])

    def block(self, rows: slice, columns: slice) -> tuple[Bool[Tensor, "rows columns"], Bool[Tensor, "rows columns"]]:
        """Masks of the positive and the negative pairs of a block, in the original order of the items."""
        positive = self._class[rows, None] == self._class[columns]
        negative = ~positive
        return _without_itself(positive, rows, columns), negative

    def positive_blocks(self, size: int) -> Sequence[Tensor]:
        """Blocks that cover the positive pairs: the (n,) items of a class, or ≤ `size` unordered pairs (n, 2)."""
        return self.order.split(self._sizes.tolist())


class NeighbourRelation:
    """As `LabelRelation`, for lists of positive pairs and of pairs that are neither; other pairs are negative."""

    labels = None

    def __init__(self, neighbours: Neighbours) -> None:
        self.size = size = neighbours.size
        self.order = torch.arange(size, device=neighbours.positive.device)
        self._unordered = neighbours.positive
        self._positive = _both_ways(neighbours.positive)
        self._near = _both_ways(torch.cat([neighbours.positive, neighbours.neither]))
        self.n_positives = self._positive.shape[1]
        self.n_negatives = size * (size - 1) - self._near.shape[1]
        self.n_matched = len(neighbours.positive.unique())

    def positive_partners(self, n: Float[Tensor, "N D"]) -> tuple[Float[Tensor, "N 1"], Float[Tensor, "N D"]]:
        extended = torch.cat([n.double(), n.new_ones(len(n), 1).double()], 1)
        first, second = self._positive
        totals = torch.zeros_like(extended).index_add_(0, first, extended[second])
        return totals[:, -1:], totals[:, :-1]

    def exclude(self, t: Float[Tensor, "rows columns"], rows: slice, columns: slice) -> bool:
        t[_of_block(self._near, rows, columns)] = 0
        _without_itself(t, rows, columns)
        return True

    def block(self, rows: slice, columns: slice) -> tuple[Bool[Tensor, "rows columns"], Bool[Tensor, "rows columns"]]:
        shape = rows.stop - rows.start, columns.stop - columns.start
        positive = torch.zeros(shape, dtype=torch.bool, device=self._near.device)
        positive[_of_block(self._positive, rows, columns)] = True
        negative = torch.ones_like(positive)
        negative[_of_block(self._near, rows, columns)] = False
        return positive, _without_itself(negative, rows, columns)

    def positive_blocks(self, size: int) -> Sequence[Tensor]:
        return self._unordered.split(size)


Related = LabelRelation | NeighbourRelation


def cost_of(n_pairs: int, n_bytes: int) -> str:
    """Cost of a pass over pairs, as text."""
    return f"{n_pairs:,} pairs, {n_bytes / 2**20:.0f} MiB"


def _both_ways(pairs: Int[Tensor, "pairs 2"]) -> Int[Tensor, "2 ordered"]:
    """Both orders of unordered pairs, sorted by their first item."""
    ordered = torch.cat([pairs, pairs.flip(1)])
    return ordered[ordered[:, 0].argsort()].T.contiguous()


def _of_block(ordered: Int[Tensor, "2 ordered"], rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
    """Row and column within a block for each listed pair in the block."""
    start, stop = torch.searchsorted(ordered[0], ordered.new_tensor([rows.start, rows.stop])).tolist()
    first, second = ordered[:, start:stop]
    inside = (second >= columns.start) & (second < columns.stop)
    return first[inside] - rows.start, second[inside] - columns.start


def _without_itself(pairs: Tensor, rows: slice, columns: slice) -> Tensor:
    """A block in which the pair of an item with itself is set to False or 0, in place."""
    start, stop = max(rows.start, columns.start), min(rows.stop, columns.stop)
    itself = torch.arange(start, max(start, stop), device=pairs.device)
    pairs[itself - rows.start, itself - columns.start] = False
    return pairs
