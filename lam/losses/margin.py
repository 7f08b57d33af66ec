"""Losses of distances with a margin; negative pairs beyond the margin have no gradient."""

import torch
from torch import Tensor

from lam.losses.base import MarginLoss, squared_distances, weighted_mean, weighted_sum
from lam.pairs.pairs import Pairs


class Contrastive(MarginLoss):
    """Mean of d² over positive pairs at distance d, plus mean of (margin − d)² over negative pairs inside the margin.

    Source: Hadsell, Chopra and LeCun (2006), equation 4, with a mean for each kind of pair.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> Contrastive(margin=2.0)(embeddings, Pairs.by_label(torch.tensor([0, 0, 1])))
        tensor(2.3431)
    """

    def _compute(self, embeddings: Tensor, pairs: Pairs) -> Tensor:
        # The difference of the rows, not 2 − 2 a·b: its root has no gradient at 0 and loses half of the digits.
        distance = torch.cdist(embeddings, embeddings, compute_mode="donot_use_mm_for_euclid_dist")
        active = pairs.negative * (distance < self.margin)
        repulsion = (self.margin - distance).square()
        return weighted_mean(distance.square(), pairs.positive) + weighted_mean(repulsion, active)


class Squared(MarginLoss):
    """Mean of d² over positive pairs at distance d, plus mean of margin² − d² over negative pairs inside the margin.

    Twice `LogPosterior`, except that the second mean leaves out negative pairs beyond the margin.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> Squared(margin=2.0)(embeddings, Pairs.by_label(torch.tensor([0, 0, 1])))
        tensor(4.)
    """

    def _compute(self, embeddings: Tensor, pairs: Pairs) -> Tensor:
        squared = squared_distances(embeddings)
        gap = self.margin**2 - squared
        return weighted_mean(squared, pairs.positive) + weighted_mean(gap, pairs.negative * (gap > 0))


class LogPosterior(MarginLoss):
    """Mean of ½ d² over positive pairs at distance d, plus mean of ½ max(0, margin² − d²) over *all* negative pairs.

    Up to a constant this is Σ ½ t d², with t = 1/n⁺ for positive pairs, −1/n⁻ for negative pairs inside the margin, and
    0 for other pairs. n⁺ and n⁻ are the numbers of positive and negative pairs, including pairs beyond the margin.
    `lam.hessians` computes the curvature of this loss.

    Source: Warburg et al. (2023), "Bayesian metric learning for uncertainty quantification in image retrieval",
    equation 30.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> LogPosterior(margin=2.0)(embeddings, Pairs.by_label(torch.tensor([0, 0, 1])))
        tensor(1.5000)
    """

    def _compute(self, embeddings: Tensor, pairs: Pairs) -> Tensor:
        squared = squared_distances(embeddings)
        attraction = weighted_sum(squared, pairs.positive) / max(pairs.n_positives, 1)
        repulsion = weighted_sum((self.margin**2 - squared).relu(), pairs.negative) / max(pairs.n_negatives, 1)
        return (attraction + repulsion) / 2


class PytorchMetricLearning(MarginLoss):
    """Mean distance d of positive pairs, plus mean of margin − d over negative pairs inside the margin.

    Both means are over non-zero terms.

    Source: pytorch-metric-learning's `ContrastiveLoss`, with `neg_margin=margin`.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> PytorchMetricLearning(margin=1.5)(embeddings, Pairs.by_label(torch.tensor([0, 0, 1])))
        tensor(1.5000)
    """

    def _compute(self, embeddings: Tensor, pairs: Pairs) -> Tensor:
        from pytorch_metric_learning.losses import ContrastiveLoss

        tuples = (*_indices(pairs.positive), *_indices(pairs.negative))
        if len(tuples[0]) == len(tuples[2]) == 0:
            return 0 * embeddings.sum()
        # The library's defaults, 0 and 1, make type checkers take its margins for integers.
        loss = ContrastiveLoss(pos_margin=0, neg_margin=self.margin)  # pyright: ignore[reportArgumentType]
        return loss(embeddings, indices_tuple=tuples)


def _indices(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the pairs, each repeated 2 w times for its weight w, a multiple of ½."""
    first, second = weights.nonzero(as_tuple=True)
    times = (2 * weights[first, second].to(torch.float64)).round().long()
    return first.repeat_interleave(times), second.repeat_interleave(times)
