"""InfoNCE, also called NT-Xent, and what the losses of its family share: log ratios of positive pairs to negatives."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from lam.losses.base import TemperatureLoss, weighted_mean
from lam.pairs.pairs import Pairs


class InfoNCE(TemperatureLoss):
    """Mean over positive pairs (a, p) of −log e^(n_a·n_p/τ) / (e^(n_a·n_p/τ) + Σ_n e^(n_a·n_n/τ)), n negatives of a.

    Of two views of each item, `two_views`, it is NT-Xent; of classes, other items of the class do not count against a
    pair, unlike in SupCon.

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
    """Mean over positive pairs of minus `log_ratios`; zero where there is no positive pair."""
    ratios, weights = log_ratios(logits, pairs)
    return -weighted_mean(ratios, weights)


def log_ratios(
    logits: Float[Tensor, "*S N N"], pairs: Pairs
) -> tuple[Float[Tensor, "*S pairs"], Shaped[Tensor, " pairs"]]:
    """log e^l_ap / (e^l_ap + Σ_n w_an e^l_an) of all positive pairs (a, p), and the weights of these pairs.

    The sum is over the negatives of the anchor a; where it has none, the ratio is 1.
    """
    negatives = log_weighted_sum(logits, pairs.negative)
    anchor, positive = pairs.positive.nonzero(as_tuple=True)
    own = logits[..., anchor, positive]
    return own - torch.logaddexp(own, negatives[..., anchor]), pairs.positive[anchor, positive]


def log_weighted_sum(logits: Float[Tensor, "*S R N"], weights: Shaped[Tensor, "R N"]) -> Float[Tensor, "*S R"]:
    """log Σ_n w_an e^l_an of each row; of a row without weights a number that adds nothing."""
    nothing = torch.finfo(logits.dtype).min / 2  # finite, as the gradient of −∞ − (−∞) is NaN
    log_weights = weights.to(logits).clamp(min=1e-30).log()
    return torch.where(weights > 0, logits + log_weights, nothing).logsumexp(-1)


def two_views(first: Tensor, second: Tensor) -> tuple[Tensor, Pairs]:
    """Two views of N items one below the other, and their pairs: each view's only positive is the other of its item.

    Args:
        first: (N, ...) a view of each item.
        second: (N, ...) another.

    Returns:
        (2N, ...) both, and the pairs among them.

    Raises:
        ValueError: where the views are of different shapes.

    Example:
        >>> views, pairs = two_views(torch.eye(3), torch.eye(3))
        >>> views.shape, pairs.n_positives, pairs.n_negatives
        (torch.Size([6, 3]), 6, 24)
    """
    if first.shape != second.shape:
        shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
        raise ValueError(f"the two views must be of the same items in the same order, got shapes {shapes}")
    return torch.cat([first, second]), Pairs.by_label(torch.arange(len(first), device=first.device).repeat(2))
