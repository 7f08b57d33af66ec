"""Doubt about an answer that is read off its first hits: their cosines, and their labels where items have any.

Each costs nothing beside the search. A higher value means more doubt. Distances from training features are in
`lam.retrieval.metrics.reference`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

NEAREST = 10
"""How many of the first hits are averaged and counted, unless another number is asked for."""
N_HITS = 50
"""How many hits a query needs for all of these scores; where a gallery holds fewer, all of them are looked at."""


def margin(cosines: Float[Tensor, "N K"], labels: Int[Tensor, "N K"] | None = None) -> Float[Tensor, " N"]:
    """−(cosine of the first hit − that of the first hit of another class); without labels, of the second hit.

    Where no hit is of another class it can be no nearer than the last hit, whose cosine counts; −1, the least there is,
    for a second hit that is none.

    Args:
        cosines: (N, K) of the first hits, falling.
        labels: (N, K) of the hits.

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
    """Standard deviation of the first k cosines: where it is large, few of the hits are near; 0 for a single hit."""
    centered = cosines[:, :k] - cosines[:, :k].mean(1, keepdim=True)
    return centered.square().mean(1).sqrt()


def disagreement(labels: Int[Tensor, "N K"], *, k: int = NEAREST) -> Float[Tensor, " N"]:
    """Share of the first k hits whose label is not the first hit's.

    Example:
        >>> disagreement(torch.tensor([[3, 3, 1, 3]]))
        tensor([0.2500])
    """
    return (labels[:, :k] != labels[:, :1]).float().mean(1)


def weighted_disagreement(
    cosines: Float[Tensor, "N K"], labels: Int[Tensor, "N K"], *, k: int = N_HITS
) -> Float[Tensor, " N"]:
    """Share of the first k hits whose label is not the first hit's, near hits counting more.

    Σ_j w_j [label_j ≠ label_1] / Σ_j w_j with w_j = (c_j − c_k)/(c_1 − c_k), c the cosines; equal weights where all
    cosines are one.

    Source: Dudani (1976), equation 1, with cosines in place of distances.

    Example:
        >>> weighted_disagreement(torch.tensor([[0.9, 0.8, 0.7]]), torch.tensor([[1, 2, 3]]))
        tensor([0.3333])
    """
    cosines, labels = cosines[:, :k], labels[:, :k]
    weights = cosines - cosines[:, -1:]
    weights = weights.masked_fill((weights[:, :1] == 0).expand_as(weights), 1.0)
    return (weights * (labels != labels[:, :1])).sum(1) / weights.sum(1)
