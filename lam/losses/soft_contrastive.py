"""The soft contrastive loss of sampled embeddings."""

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
    −log p over positive pairs plus the mean of −log(1 − p) over negative pairs. There are two means, because the source
    draws equally many pairs of each kind.

    Source: Oh et al. (2019), "Modeling uncertainty with hedged instance embedding", section 2.

    Args:
        samples: (S, N, D), S ≥ 1 samples of each item; all pairs of samples are compared.
        pairs: the pairs among these N items.
        scale: a > 0.
        offset: b.

    Returns:
        A scalar, ≥ 0; zero without a pair.

    Raises:
        ValueError: for pairs of another number of items.

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
