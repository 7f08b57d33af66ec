"""The contrastive loss of Hadsell et al.; the default."""

import torch
from torch import Tensor

from lam.losses.base import MarginLoss, weighted_mean
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
