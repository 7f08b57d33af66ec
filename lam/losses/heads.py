"""Losses of heads that learn the uncertainty of embeddings: HIB and PFE."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lam.losses.base import weighted_mean
from lam.pairs.pairs import Pairs


def soft_contrastive(
    samples: Float[Tensor, "S N D"], pairs: Pairs, *, scale: Float[Tensor, ""], offset: Float[Tensor, ""]
) -> Float[Tensor, ""]:
    """Minus the log probability that positive pairs match and negative pairs do not.

    With the samples z₁ˢ and z₂ᵗ of two items, p(match) = 1/S² Σ_st sigmoid(b − a ‖z₁ˢ − z₂ᵗ‖). The loss is the mean of
    −log p over positive pairs plus the mean of −log(1 − p) over negative pairs. There are two means, because Oh et al.
    draw equally many pairs of each kind. Without pairs, the loss is zero.

    Source: Oh et al. (2019), "Modeling uncertainty with hedged instance embedding", section 2.

    Example:
        >>> samples, one = torch.tensor([[[0.0], [1.0]]]), torch.tensor(1.0)
        >>> soft_contrastive(samples, Pairs.by_label(torch.tensor([7, 7])), scale=one, offset=one)
        tensor(0.6931)
    """
    n_samples, n_items, dimension = samples.shape
    pairs.check_size(n_items)
    flat = samples.transpose(0, 1).reshape(n_items * n_samples, dimension)
    # Not by ‖x‖² + ‖y‖² − 2xy: its root has no gradient at 0 and loses half of the digits.
    distance = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
    blocks = distance.view(n_items, n_samples, n_items, n_samples).transpose(1, 2)

    def mean_log_probability(kind: Tensor, sign: int) -> Tensor:
        first, second = kind.triu().nonzero(as_tuple=True)  # the pairs are symmetric, and so is the probability
        log_matches = F.logsigmoid(sign * (offset - scale * blocks[first, second]))  # 1 − sigmoid(x) = sigmoid(−x)
        log_probability = log_matches.flatten(1).logsumexp(1) - 2 * math.log(n_samples)
        return weighted_mean(log_probability, kind[first, second])

    return -mean_log_probability(pairs.positive, 1) - mean_log_probability(pairs.negative, -1)


def mutual_likelihood(
    mean: Float[Tensor, "N D"], log_variance: Float[Tensor, "N D"], pairs: Pairs
) -> Float[Tensor, ""]:
    """Minus the mean log likelihood that the two embeddings of a positive pair are the same point.

    For a pair, −log ∫ N(z; μ₁, σ₁²) N(z; μ₂, σ₂²) dz is ½ Σ_d [(μ₁ − μ₂)² / (σ₁² + σ₂²) + log(σ₁² + σ₂²)], without the
    constant ½ D log 2π. Without positive pairs, the loss is zero.

    Source: Shi and Jain (2019), "Probabilistic face embeddings", section 3.2.

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
