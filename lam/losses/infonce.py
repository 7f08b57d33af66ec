"""InfoNCE, also called NT-Xent, and the log ratios of positive pairs to negatives that related losses share."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from lam.losses.base import TemperatureLoss, weighted_mean
from lam.pairs.pairs import Pairs


class InfoNCE(TemperatureLoss):
    """Mean over positive pairs (a, p) of −log e^(z_a·z_p/τ) / (e^(z_a·z_p/τ) + Σ_n e^(z_a·z_n/τ)).

    z_a is the embedding of a, and the sum is over the negatives n of a. With two views of each item, this is NT-Xent.
    With classes, unlike in SupCon, other items of a pair's class are not in its denominator.

    Source: Chen et al. (2020), "A simple framework for contrastive learning of visual representations", equation 1;
    van den Oord, Li and Vinyals (2018).

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> InfoNCE(temperature=1.0)(embeddings, Pairs.by_label(torch.tensor([0, 0, 1])))
        tensor(0.3133)
    """

    curvature = "infonce"

    def _compute(self, embeddings: Tensor, pairs: Pairs) -> Tensor:
        pairs.check_positives()
        return mean_cross_entropy(embeddings @ embeddings.T / self.temperature, pairs)


def mean_cross_entropy(logits: Float[Tensor, "N N"], pairs: Pairs) -> Float[Tensor, ""]:
    """Mean over positive pairs of minus `log_ratios`; zero without a positive pair."""
    ratios, weights = log_ratios(logits, pairs)
    return -weighted_mean(ratios, weights)


def log_ratios(
    logits: Float[Tensor, "*S N N"], pairs: Pairs
) -> tuple[Float[Tensor, "*S pairs"], Shaped[Tensor, " pairs"]]:
    """log e^l_ap / (e^l_ap + Σ_n w_an e^l_an) of all positive pairs (a, p), and the weights of these pairs.

    l are the logits. The sum is over the negatives n of a, with their weights w; without negatives the ratio is 1.
    """
    negatives = log_weighted_sum(logits, pairs.negative)
    anchor, positive = pairs.positive.nonzero(as_tuple=True)
    own = logits[..., anchor, positive]
    return own - torch.logaddexp(own, negatives[..., anchor]), pairs.positive[anchor, positive]


def log_weighted_sum(logits: Float[Tensor, "*S R N"], weights: Shaped[Tensor, "R N"]) -> Float[Tensor, "*S R"]:
    """log Σ_n w_an e^l_an of each row a; if all weights are 0, a low finite number whose exponential rounds to 0."""
    nothing = torch.finfo(logits.dtype).min / 2  # finite: the gradient of −∞ − (−∞) is NaN
    log_weights = weights.to(logits).clamp(min=1e-30).log()
    return torch.where(weights > 0, logits + log_weights, nothing).logsumexp(-1)
