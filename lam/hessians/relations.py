"""How the items of a whole data set are related, without a matrix of all pairs: by label, or by lists of neighbours.

Both kinds offer the same: the order in which blocks are cut, the counts of pairs, what the positive partners of each
item add up to, which pairs of a block are no negative pairs, and the cross terms of the positive pairs.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from lam.hessians.batch import outputs
from lam.hessians.losses.contrastive import BLOCK_ELEMENTS, cross_sum_over_pairs
from lam.hessians.losses.items import cost_of
from lam.hessians.structures.base import with_ones
from lam.pairs.neighbours import Neighbours
from lam.pairs.pairs import check_label_vector


class LabelRelation:
    """Items of one label are positive pairs, all others negative; sorted by label, so that blocks hold few labels."""

    def __init__(self, labels: Int[Tensor, " N"]) -> None:
        check_label_vector(labels)
        self.order = labels.argsort(stable=True)
        self._sorted = labels[self.order]
        _, self._class, self._sizes = labels.unique(return_inverse=True, return_counts=True)
        self.labels: Tensor | None = labels
        self.size = len(labels)
        self.n_positives = int((self._sizes * (self._sizes - 1)).sum())
        self.n_negatives = len(labels) ** 2 - int(self._sizes.square().sum())
        self.n_matched = int(self._sizes[self._sizes > 1].sum())

    def positive_partners(self, n: Float[Tensor, "N D"]) -> tuple[Float[Tensor, "N 1"], Float[Tensor, "N D"]]:
        """Sums of 1 and of n over the positive partners of each item, in float64."""
        n = n.double()
        totals = n.new_zeros(len(self._sizes), n.shape[1]).index_add_(0, self._class, n)
        return (self._sizes[self._class] - 1).double()[:, None], totals[self._class] - n

    def exclude(self, t: Float[Tensor, "rows columns"], rows: slice, columns: slice) -> bool:
        """Zero the pairs of a block (in sorted order) that are not negative; returns whether any negative is left."""
        left, right = self._sorted[rows], self._sorted[columns]
        if left[-1] < right[0]:
            return True
        t.mul_(left[:, None] != right[None, :])
        return not (left[0] == left[-1] == right[0] == right[-1])

    def block(self, rows: slice, columns: slice) -> tuple[Bool[Tensor, "rows columns"], Bool[Tensor, "rows columns"]]:
        """Which pairs of a block, in the items' own order, are positive and which are negative."""
        positive = self._class[rows, None] == self._class[columns]
        negative = ~positive
        return _without_itself(positive, rows, columns), negative

    def cross_terms(
        self, features: Tensor, weight: Tensor, bias: Tensor | None, *, progress: bool
    ) -> Float[Tensor, "D F"]:
        """Sum of the cross terms over all positive pairs, class by class: over its pairs, or from its moments."""
        total = weight.new_zeros(len(weight), weight.shape[1] + (bias is not None), dtype=torch.float64)
        sizes = self._sizes.tolist()
        title = cost_of(self.n_positives // 2, 8 * total.shape[1] * (2 * max(sizes) + 4 * total.shape[0]))
        for rows in tqdm(self.order.split(sizes), desc=title, unit="class", disable=not progress):
            part = features[rows.to(features.device)].to(weight.device)
            part, n, r = outputs(part, weight, bias, torch.float64)
            inputs = with_ones(part, bias is not None)
            if len(rows) <= n.shape[1]:
                first, second = torch.triu_indices(len(rows), len(rows), 1, device=n.device)
                total += cross_sum_over_pairs(inputs, n, r, first, second, n.new_ones(len(first)))
            else:
                total += cross_sum_of_class(inputs, n, r)
        return total


class NeighbourRelation:
    """Listed near pairs are positive or neither, all others negative."""

    def __init__(self, neighbours: Neighbours) -> None:
        self.size = size = neighbours.size
        self.order = torch.arange(size, device=neighbours.positive.device)
        self.labels: Tensor | None = None
        self._unordered = neighbours.positive
        self._positive = _both_ways(neighbours.positive)
        self._near = _both_ways(torch.cat([neighbours.positive, neighbours.neither]))
        self.n_positives = self._positive.shape[1]
        self.n_negatives = size * (size - 1) - self._near.shape[1]
        self.n_matched = len(neighbours.positive.unique())

    def positive_partners(self, n: Float[Tensor, "N D"]) -> tuple[Float[Tensor, "N 1"], Float[Tensor, "N D"]]:
        """Sums of 1 and of n over the positive partners of each item, in float64."""
        extended = torch.cat([n.double(), n.new_ones(len(n), 1).double()], 1)
        first, second = self._positive
        totals = torch.zeros_like(extended).index_add_(0, first, extended[second])
        return totals[:, -1:], totals[:, :-1]

    def exclude(self, t: Float[Tensor, "rows columns"], rows: slice, columns: slice) -> bool:
        """Zero the pairs of a block that are not negative; returns whether any negative may be left."""
        t[_of_block(self._near, rows, columns)] = 0
        _without_itself(t, rows, columns)
        return True

    def block(self, rows: slice, columns: slice) -> tuple[Bool[Tensor, "rows columns"], Bool[Tensor, "rows columns"]]:
        """Which pairs of a block are positive and which are negative."""
        shape = rows.stop - rows.start, columns.stop - columns.start
        positive = torch.zeros(shape, dtype=torch.bool, device=self._near.device)
        positive[_of_block(self._positive, rows, columns)] = True
        negative = torch.ones_like(positive)
        negative[_of_block(self._near, rows, columns)] = False
        return positive, _without_itself(negative, rows, columns)

    def cross_terms(
        self, features: Tensor, weight: Tensor, bias: Tensor | None, *, progress: bool
    ) -> Float[Tensor, "D F"]:
        """Sum of the cross terms over the listed positive pairs, block by block: only their items are held."""
        total = weight.new_zeros(len(weight), weight.shape[1] + (bias is not None), dtype=torch.float64)
        size = max(1, BLOCK_ELEMENTS // features.shape[1])
        title = f"{len(self._unordered):,} positive pairs"
        for pairs in tqdm(self._unordered.split(size), desc=title, disable=not progress):
            rows, local = pairs.unique(return_inverse=True)
            part = features[rows.to(features.device)].to(weight.device)
            part, n, r = outputs(part, weight, bias, torch.float64)
            inputs = with_ones(part, bias is not None)
            total += cross_sum_over_pairs(inputs, n, r, local[:, 0], local[:, 1], n.new_ones(len(pairs)))
        return total


def _both_ways(pairs: Int[Tensor, "pairs 2"]) -> Int[Tensor, "2 ordered"]:
    """Ordered pairs of unordered ones, sorted by their first item."""
    ordered = torch.cat([pairs, pairs.flip(1)])
    return ordered[ordered[:, 0].argsort()].T.contiguous()


def _of_block(ordered: Int[Tensor, "2 ordered"], rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
    """Which pairs of a block are listed, as rows and columns of it."""
    start, stop = torch.searchsorted(ordered[0], ordered.new_tensor([rows.start, rows.stop])).tolist()
    first, second = ordered[:, start:stop]
    inside = (second >= columns.start) & (second < columns.stop)
    return first[inside] - rows.start, second[inside] - columns.start


def _without_itself(pairs: Tensor, rows: slice, columns: slice) -> Tensor:
    """The pairs of a block without those of an item with itself."""
    start, stop = max(rows.start, columns.start), min(rows.stop, columns.stop)
    itself = torch.arange(start, max(start, stop), device=pairs.device)
    pairs[itself - rows.start, itself - columns.start] = False
    return pairs


def cross_sum_of_class(
    inputs: Float[Tensor, "N F"], n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"]
) -> Float[Tensor, "D F"]:
    """Σ 2 H12_i φ_aj φ_bj over all ordered pairs of one class from its moments, with no pair formed.

    With ψ = φ/r the sum over a, b of ψ_aj ψ_bj (1 − n_ai² − n_bi² + c_ab n_ai n_bi) is s_j² − 2 s_j u_ij + Σ_k Γ_kij²,
    where s = Σ_a ψ_a, u_i = Σ_a n_ai² ψ_a and Γ_ki = Σ_a n_ak n_ai ψ_a; the terms a = b are taken away.
    """
    psi, square = inputs / r, n.square()
    s, u = psi.sum(0), square.T @ psi
    moments = torch.zeros_like(u)
    for k in range(n.shape[1]):
        square_of_gamma = ((n[:, k : k + 1] * n[:, k:]).T @ psi).square_()
        moments[k:] += square_of_gamma
        moments[k] += square_of_gamma[1:].sum(0)
    itself = (1 - square).T @ psi.square()
    return -2 * (s * (s - 2 * u) + moments - itself)
