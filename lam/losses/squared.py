"""Twice the loss of `log_posterior`, with the second mean only over negative pairs inside the margin."""

from torch import Tensor

from lam.losses.base import MarginLoss, squared_distances, weighted_mean
from lam.pairs.pairs import Pairs


class Squared(MarginLoss):
    """Mean of d² over positive pairs at distance d, plus mean of margin² − d² over negative pairs inside the margin.

    Example:
        >>> import torch
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> Squared(margin=2.0)(embeddings, Pairs.by_label(torch.tensor([0, 0, 1])))
        tensor(4.)
    """

    def _compute(self, embeddings: Tensor, pairs: Pairs) -> Tensor:
        squared = squared_distances(embeddings)
        gap = self.margin**2 - squared
        return weighted_mean(squared, pairs.positive) + weighted_mean(gap, pairs.negative * (gap > 0))
