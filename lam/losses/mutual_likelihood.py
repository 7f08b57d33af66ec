"""The mutual likelihood score of Gaussian embeddings as a loss."""

import torch
from jaxtyping import Float
from torch import Tensor

from lam.losses.base import weighted_mean
from lam.pairs.pairs import Pairs


def mutual_likelihood(
    mean: Float[Tensor, "N D"], log_variance: Float[Tensor, "N D"], pairs: Pairs
) -> Float[Tensor, ""]:
    """Minus the mean log likelihood that the two embeddings of a positive pair are the same point.

    For a pair, −log ∫ N(z; μ₁, σ₁²) N(z; μ₂, σ₂²) dz is ½ Σ_d [(μ₁ − μ₂)² / (σ₁² + σ₂²) + log(σ₁² + σ₂²)], without the
    constant ½ D log 2π.

    Source: Shi and Jain (2019), "Probabilistic face embeddings", section 3.2.

    Args:
        mean: (N, D) means.
        log_variance: (N, D) logarithms of the variances, which do not underflow.
        pairs: the pairs among these N items.

    Returns:
        A scalar, which may be negative; zero without a positive pair.

    Raises:
        ValueError: for mean and variance of different shapes, or pairs of another number of items.

    Example:
        >>> mean, log_variance = torch.tensor([[0.0], [2.0]]), torch.zeros(2, 1)
        >>> mutual_likelihood(mean, log_variance, Pairs.by_label(torch.tensor([7, 7])))
        tensor(1.3466)
    """
    if mean.shape != log_variance.shape:
        raise ValueError(
            f"mean and log_variance must have one shape, got {tuple(mean.shape)} and {tuple(log_variance.shape)}"
        )
    pairs.check_size(len(mean))
    first, second = pairs.positive.triu().nonzero(as_tuple=True)  # the pairs are symmetric, and so is the score
    log_sum = torch.logaddexp(log_variance[first], log_variance[second])
    scaled = (mean[first] - mean[second]) * (-log_sum / 2).exp()
    score = (scaled.square() + log_sum).sum(1) / 2
    return weighted_mean(score, pairs.positive[first, second])
