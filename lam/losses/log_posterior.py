"""The negative log posterior whose curvature `lam.hessians` computes."""

from torch import Tensor

from lam.losses.base import MarginLoss, squared_distances, weighted_sum
from lam.pairs.pairs import Pairs


class LogPosterior(MarginLoss):
    """Mean of ½ d² over positive pairs at distance d, plus mean of ½ max(0, margin² − d²) over *all* negative pairs.

    Up to a constant this is Σ ½ t d², with t = 1/n⁺ for positive pairs, −1/n⁻ for negative pairs inside the margin, and
    0 for other pairs. n⁺ and n⁻ count all positive and all negative pairs, also beyond the margin.

    Source: Warburg et al. (2023), "Bayesian metric learning for uncertainty quantification in image retrieval",
    equation 30.

    Example:
        >>> import torch
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> LogPosterior(margin=2.0)(embeddings, Pairs.by_label(torch.tensor([0, 0, 1])))
        tensor(1.5000)
    """

    def _compute(self, embeddings: Tensor, pairs: Pairs) -> Tensor:
        squared = squared_distances(embeddings)
        attraction = weighted_sum(squared, pairs.positive) / max(pairs.n_positives, 1)
        repulsion = weighted_sum((self.margin**2 - squared).relu(), pairs.negative) / max(pairs.n_negatives, 1)
        return (attraction + repulsion) / 2
