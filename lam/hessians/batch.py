"""Diagonal GGN of the last layer over all pairs of a batch.

No array of size pairs × D × P is ever made: what one item contributes with itself is one matmul with φ², and the cross
terms are a matmul per output or a matmul over blocks of pairs, whichever is cheaper. Whole data sets: see
`lam.hessians.dataset`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians.contrastive import FIXES, SPLITS, Fix, Split, cross_curvature, own_curvature
from lam.hessians.diagonal import Diagonal
from lam.pairs.pairs import Pairs
from lam.utils.autocast import without_autocast

BLOCK_ELEMENTS = 1 << 22
"""How many products φ_aj φ_bj of pairs are held at once."""

GATHER_COST = 40
"""What forming one such product costs, in multiply-adds of a matmul (measured on two cores: 30 to 60)."""

ALL_ZERO = "features are all zero: the network says nothing about its inputs"

_LENGTHEN = "scale the network's output up, or give features and weight in float64"


@without_autocast()
def contrastive_ggn(
    features: Float[Tensor, "N P"],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    pairs: Pairs,
    *,
    margin: float,
    split: Split = "arccos",
    fix: Fix = "fixed",
    negative_weight: float = 1.0,
) -> Diagonal:
    """Give the diagonal GGN of the contrastive loss in a linear last layer, exactly, over all pairs given.

    L = Σ_ab ½ t_ab ‖n_a − n_b‖² over ordered pairs, n = f/‖f‖, f = Wφ + b, with t = 1/n⁺ for positive pairs, −w/n⁻ for
    negative pairs nearer than the margin, else 0. `fixed` differentiates each item with the other held still, `full`
    keeps the cross terms, `positive` keeps them too but drops the negative pairs.

    Source: Warburg et al. (2023), equations 6 to 9 and appendix F.

    Args:
        features: (N, P) what enters the layer.
        weight: (D, P) the layer's weight.
        bias: (D,) its bias, or None.
        pairs: which of the N items form pairs.
        margin: in (0, 2]; negative pairs at this distance or farther have no curvature. float32 resolves margins
            down to about 0.01; smaller ones need float64 features.
        split: whether the normalisation is linearised (`euclidean`) or not (`arccos`).
        fix: which terms are kept.
        negative_weight: w in [0, 1].

    Returns:
        The sums behind h, in the type of the features.

    Raises:
        ValueError: for settings outside their range, shapes that disagree, features that are not finite or all zero,
            or an output of length zero.

    Example:
        >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.2], [0.0, 1.0]])
        >>> pairs = Pairs.by_label(torch.tensor([0, 0, 1]))
        >>> ggn = contrastive_ggn(features, torch.eye(2), None, pairs, margin=1.0)
        >>> ggn.weight.shape, ggn.n_positives, ggn.n_negatives
        (torch.Size([2, 2]), 2, 4)
    """
    check_settings(margin=margin, split=split, fix=fix, negative_weight=negative_weight)
    check_layer(features, weight, bias)
    check_not_all_zero(features)
    if pairs.size != len(features):
        raise ValueError(f"pairs speak of {pairs.size} items, features of {len(features)}")
    inputs, n, r = outputs(features, weight, bias, working_dtype(fix, features))
    positive = pairs.positive.to(n)
    negative = pairs.negative.to(n) * (n @ n.T > least_cosine(margin))
    kinds = [positive] if fix == "positive" else [positive, negative]
    own = torch.cat([own_curvature(split, n, r, T.sum(1, keepdim=True), T @ n) for T in kinds], 1)
    sums = list(((2 * own).T @ inputs.square()).split(len(weight)))
    if fix != "fixed":
        sums = [total + cross_sum(inputs, n, r, T) for total, T in zip(sums, kinds, strict=True)]
    sums = [total.to(working_dtype("fixed", features)) for total in sums]
    return Diagonal(
        positive=sums[0],
        negative=torch.zeros_like(sums[0]) if fix == "positive" else sums[1],
        n_positives=pairs.n_positives,
        n_negatives=pairs.n_negatives,
        has_bias=bias is not None,
        margin=float(margin),
        split=split,
        fix=fix,
        negative_weight=float(negative_weight),
    )


def cross_sum(
    inputs: Float[Tensor, "N F"], n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], T: Float[Tensor, "N N"]
) -> Float[Tensor, "D F"]:
    """Sum 2 T_ab H12_i φ_aj φ_bj over ordered pairs."""
    N, D = n.shape
    first, second = T.triu(1).nonzero(as_tuple=True)
    if len(first) * (2 * D + GATHER_COST) < 2 * D * N * N:
        return cross_sum_over_pairs(inputs, n, r, first, second, T[first, second])
    return _cross_sum_by_output(inputs, n, r, T)


def cross_sum_over_pairs(
    inputs: Float[Tensor, "N F"],
    n: Float[Tensor, "N D"],
    r: Float[Tensor, "N 1"],
    first: Tensor,
    second: Tensor,
    weights: Float[Tensor, " pairs"],
) -> Float[Tensor, "D F"]:
    """Sum 4 T_ab H12_i φ_aj φ_bj over unordered pairs, listed: a matmul over blocks of pairs."""
    total = inputs.new_zeros(n.shape[1], inputs.shape[1])
    size = max(1, BLOCK_ELEMENTS // max(inputs.shape[1], n.shape[1]))
    for a, b, t in zip(first.split(size), second.split(size), weights.split(size), strict=True):
        H12 = cross_curvature(n[a], r[a], n[b], r[b]) * (4 * t[:, None])
        total.addmm_(H12.T, inputs[a] * inputs[b])
    return total


def _cross_sum_by_output(inputs: Tensor, n: Tensor, r: Tensor, T: Tensor) -> Tensor:
    total = inputs.new_empty(n.shape[1], inputs.shape[1])
    scaled = 2 * T / (r * r.T)
    scaled_cosine = scaled * (n @ n.T)
    for i, n_i in enumerate(n.T):
        square = n_i.square()
        H12 = scaled * (square[:, None] + square[None, :] - 1) - scaled_cosine * n_i[:, None] * n_i[None, :]
        total[i] = (inputs * (H12 @ inputs)).sum(0)
    return total


def outputs(
    features: Float[Tensor, "N P"],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    dtype: torch.dtype,
    *,
    offset: int = 0,
) -> tuple[Float[Tensor, "N F"], Float[Tensor, "N D"], Float[Tensor, "N 1"]]:
    """Give the layer's inputs (with a column of ones for a bias), its unit outputs and their lengths.

    Raises:
        ValueError: where an output has length zero, or one whose inverse square the type of the features cannot hold.
    """
    given = torch.finfo(torch.promote_types(features.dtype, torch.float32))
    least = given.max**-0.25
    features, weight = features.to(dtype), weight.to(dtype)
    if bias is not None:
        features = torch.cat([features, features.new_ones(len(features), 1)], 1)
        weight = torch.cat([weight, bias.to(dtype)[:, None]], 1)
    f = features @ weight.T
    r = torch.linalg.vector_norm(f, dim=1, keepdim=True, dtype=torch.float64)  # squares would leave float32 before f
    for wrong, why in (
        (r == 0, "is zero and has no direction"),
        (r < least, f"has a length of {{:.2g}}, too short for {given.dtype}, at least {least:.2g}: {_LENGTHEN}"),
        (~r.isfinite(), f"is too large for {dtype}"),
    ):
        if wrong.any():
            item = int(wrong.nonzero()[0, 0])
            raise ValueError(f"the output of item {item + offset} {why.format(r[item].item())}")
    r = r.to(dtype)
    return features, f / r, r


def working_dtype(fix: Fix, features: Tensor) -> torch.dtype:
    """Give the type to compute in: where the cross terms cancel most of the rest, float32 would lose its digits."""
    return torch.promote_types(features.dtype, torch.float32) if fix == "fixed" else torch.float64


def least_cosine(margin: float) -> float:
    """Give the cosine above which two unit vectors are nearer than the margin."""
    return 1 - margin**2 / 2


def check_settings(*, margin: float, split: str, fix: str, negative_weight: float) -> None:
    """Refuse settings outside their range."""
    if not 0 < margin <= 2:
        raise ValueError(f"margin must be in (0, 2], the distances on the unit sphere, got {margin}")
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if fix not in FIXES:
        raise ValueError(f"fix must be one of {', '.join(FIXES)}, got {fix!r}")
    if not 0 <= negative_weight <= 1:
        raise ValueError(f"negative_weight must be in [0, 1], got {negative_weight}")


def check_layer(features: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Refuse features that do not fit the layer or are not finite, and parameters that are not."""
    check_features(features, weight)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    if weight.shape[0] < 2:
        raise ValueError(f"the layer must have at least 2 outputs to lie on a sphere, got {weight.shape[0]}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and not parameter.sum().isfinite() and not parameter.isfinite().all():
            raise ValueError(f"{name} must be finite")


def check_features(features: Tensor, weight: Tensor) -> None:
    """Refuse features that do not fit the layer or are not finite."""
    if features.ndim != 2 or weight.ndim != 2 or features.shape[1] != weight.shape[1]:
        raise ValueError(
            f"features must be (N, P) and weight (D, P), got {tuple(features.shape)} and {tuple(weight.shape)}"
        )
    check_finite(features)


def check_not_all_zero(features: Tensor) -> None:
    """Refuse data whose features are all zero."""
    if len(features) and not features.any():
        raise ValueError(ALL_ZERO)


def check_finite(features: Tensor, offset: int = 0) -> None:
    """Refuse features that are not finite, or too large for their squares to be summed, naming the first."""
    if not features.numel():
        return
    limit = torch.finfo(torch.promote_types(features.dtype, torch.float32)).max ** 0.25
    low, high = features.aminmax()
    if -limit <= low and high <= limit:  # false for NaN
        return
    bad = ~(features.abs() <= limit)
    item, feature = bad.nonzero()[0].tolist()
    place = f"got {features[item, feature].item():.3g} at item {item + offset}, feature {feature}"
    if features.isfinite().all():
        raise ValueError(f"features must be at most {limit:.2g} in size, so that sums of squares stay finite, {place}")
    raise ValueError(f"features must be finite, {place}")
