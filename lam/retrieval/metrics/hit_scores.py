"""Scores of doubt from the cosines and labels of a query's first hits.

A higher value means more doubt. Distances from training features are in `lam.retrieval.metrics.reference`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

NEAREST = 10
"""Default number of first hits that are averaged or counted."""
N_HITS = 50
"""Number of hits that these scores use; a smaller gallery gives all its items."""


def margin(cosines: Float[Tensor, "N K"], labels: Int[Tensor, "N K"] | None = None) -> Float[Tensor, " N"]:
    """Cosine of the best hit with another label than the first hit, minus the first hit's cosine.

    Without labels, the second hit is used; if all labels are equal, the last hit. A missing second hit has cosine −1.

    Example:
        >>> cosines, labels = torch.tensor([[0.9, 0.8, 0.5]]), torch.tensor([[1, 1, 2]])
        >>> margin(cosines), margin(cosines, labels)
        (tensor([-0.1000]), tensor([-0.4000]))
    """
    if cosines.shape[1] < 2:
        return -1 - cosines[:, 0]
    if labels is None:
        return cosines[:, 1] - cosines[:, 0]
    other = (labels != labels[:, :1]).to(torch.int8)
    place = torch.where(other.any(1), other.argmax(1), cosines.shape[1] - 1)
    return cosines.gather(1, place[:, None])[:, 0] - cosines[:, 0]


def mean_cosine(cosines: Float[Tensor, "N K"], *, k: int = NEAREST) -> Float[Tensor, " N"]:
    """Minus the mean cosine of the first k hits."""
    return -cosines[:, :k].mean(1)


def cosine_spread(cosines: Float[Tensor, "N K"], *, k: int = NEAREST) -> Float[Tensor, " N"]:
    """Standard deviation of the first k cosines: large if only some hits are near."""
    centered = cosines[:, :k] - cosines[:, :k].mean(1, keepdim=True)
    return centered.square().mean(1).sqrt()


def disagreement(labels: Int[Tensor, "N K"], *, k: int = NEAREST) -> Float[Tensor, " N"]:
    """Share of the first k hits whose label differs from the first hit's."""
    return (labels[:, :k] != labels[:, :1]).float().mean(1)


def weighted_disagreement(
    cosines: Float[Tensor, "N K"], labels: Int[Tensor, "N K"], *, k: int = N_HITS
) -> Float[Tensor, " N"]:
    """Share of the first k hits whose label differs from the first hit's; near hits count more.

    The share is Σ_j w_j [label_j ≠ label_1] / Σ_j w_j, with w_j = (c_j − c_k)/(c_1 − c_k) for cosines c_j; weights are
    equal if all cosines are equal.

    Source: Dudani (1976), equation 1, with cosines instead of distances.

    Example:
        >>> weighted_disagreement(torch.tensor([[0.9, 0.8, 0.7]]), torch.tensor([[1, 2, 3]]))
        tensor([0.3333])
    """
    cosines, labels = cosines[:, :k], labels[:, :k]
    weights = cosines - cosines[:, -1:]
    weights = weights.masked_fill((weights[:, :1] == 0).expand_as(weights), 1.0)
    return (weights * (labels != labels[:, :1])).sum(1) / weights.sum(1)
