"""GGN of the last layer over the pairs of a batch. Whole data sets: see `lam.hessians.dataset`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians.losses import ContrastiveCurvature, Curvature
from lam.hessians.losses.items import ItemCurvature
from lam.hessians.structures.base import Structure, weighted_by_term, with_ones
from lam.hessians.structures.diagonal import Diagonal
from lam.pairs.candidates import Candidates
from lam.pairs.pairs import Pairs
from lam.utils.autocast import without_autocast

ALL_ZERO = "features are all zero: the network says nothing about its inputs"

Sums = TypeVar("Sums", bound=Structure)

_ADVICE = "scale the network's output up, or give features and weight in float64"


@without_autocast()
def ggn_of_batch(
    empty: Sums,
    features: Float[Tensor, "N P"],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    pairs: Pairs | Candidates,
) -> Sums:
    """GGN of a loss in a linear last layer f = Wφ + b, exactly, over all pairs given, in the form of a structure.

    Args:
        empty: the structure of no batch at all; with the curvature of the loss.
        features: (N, P) what enters the layer.
        weight: (D, P) the layer's weight.
        bias: (D,) its bias, or None.
        pairs: which of the N items form pairs; or, where the curvature takes them, the candidates that they are
            compared with in place of one another.

    Returns:
        The sums behind h, in the type of the features.

    Raises:
        ValueError: for shapes that disagree, features that are not finite or all zero, an output of length zero, or
            candidates where the curvature takes none.
    """
    curvature = empty.curvature
    own, n, r, partners = _checked(features, weight, bias, pairs, curvature)
    part = empty.of_items(own, curvature.of_batch(n, r, partners))
    if curvature.has_cross_terms:
        part = replace(part, sums=part.sums + curvature.cross(with_ones(own, bias is not None), n, r, partners))
    part = replace(part, counts=curvature.counts(partners))
    return part.of_type(torch.promote_types(features.dtype, torch.float32))


def diagonal_ggn(
    features: Float[Tensor, "N P"],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    pairs: Pairs | Candidates,
    curvature: Curvature,
) -> Diagonal:
    """Diagonal GGN of a loss: `ggn_of_batch` of a `Diagonal`, Σ_a H_a,ii φ_aj² and any cross terms."""
    shape = len(curvature.terms), len(weight), weight.shape[1] + (bias is not None)
    zeros = weight.new_zeros(()).expand(shape)  # of any shape at no cost: it is summed with nothing
    empty = Diagonal(zeros, (0,) * shape[0], curvature, has_bias=bias is not None)
    return ggn_of_batch(empty, features, weight, bias, pairs)


def output_curvature(
    features: Float[Tensor, "N P"],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    pairs: Pairs | Candidates,
    curvature: Curvature,
) -> Float[Tensor, "N D D"]:
    """H_a of every item: the curvature of a loss in the output of each, the others held still, with h's average.

    Σ_a H_a ⊗ φ_a φ_aᵀ is the GGN in the weights. It takes 4 N D² bytes in float32: `total_output_curvature` is their
    sum, of which none is formed.

    Args, Raises: as `diagonal_ggn`, and
        ValueError: for a curvature with cross terms, of which items have no part of their own, and pairs of which none
            is a positive one: there is nothing to average over.

    Example:
        >>> features, pairs = torch.eye(3), Pairs.by_label(torch.tensor([0, 0, 1]))
        >>> output_curvature(features, torch.eye(3), None, pairs, ContrastiveCurvature(2.0, fix="projected")).shape
        torch.Size([3, 3, 3])
    """
    return _of_outputs(features, weight, bias, pairs, curvature, lambda items: items.matrices().movedim(1, 0))


def total_output_curvature(
    features: Float[Tensor, "N P"],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    pairs: Pairs | Candidates,
    curvature: Curvature,
) -> Float[Tensor, "D D"]:
    """Σ_a of `output_curvature`, from arrays of (N, N), (N, D) and (D, D) alone, but for `projected` softmaxes.

    Example:
        >>> features, pairs = torch.eye(3), Pairs.by_label(torch.tensor([0, 0, 1]))
        >>> total_output_curvature(features, torch.eye(3), None, pairs, ContrastiveCurvature(2.0)).shape
        torch.Size([3, 3])
    """
    return _of_outputs(features, weight, bias, pairs, curvature, lambda items: items.total())


@without_autocast()
def _of_outputs(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pairs: Pairs | Candidates,
    curvature: Curvature,
    sums: Callable[[ItemCurvature], Tensor],
) -> Tensor:
    if curvature.has_cross_terms:
        raise ValueError(f"items have no curvature of their own with the cross terms of {curvature}: use fix='fixed'")
    _, n, r, partners = _checked(features, weight, bias, pairs, curvature)
    return weighted_by_term(sums(curvature.of_batch(n, r, partners)), curvature, curvature.counts(partners))


def _checked(
    features: Tensor, weight: Tensor, bias: Tensor | None, pairs: Pairs | Candidates, curvature: Curvature
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """`outputs` in the type of a curvature and the partners of the items, once all of them are checked."""
    length = check_layer(features, weight, bias)
    if len(features) and length == 0 and not features.any():
        raise ValueError(ALL_ZERO)
    partners = checked_partners(pairs, len(features), curvature)
    return *outputs(features, weight, bias, curvature.working_dtype(features)), partners


def contrastive_ggn(
    features: Float[Tensor, "N P"],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    pairs: Pairs,
    **settings: Any,
) -> Diagonal:
    """Diagonal GGN of the contrastive loss: `diagonal_ggn` of a `ContrastiveCurvature` with these settings.

    Example:
        >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.2], [0.0, 1.0]])
        >>> pairs = Pairs.by_label(torch.tensor([0, 0, 1]))
        >>> ggn = contrastive_ggn(features, torch.eye(2), None, pairs, margin=1.0)
        >>> ggn.weight.shape, ggn.counts
        (torch.Size([2, 2]), (2, 4))
    """
    return diagonal_ggn(features, weight, bias, pairs, ContrastiveCurvature(**settings))


def outputs(
    features: Float[Tensor, "N P"],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    dtype: torch.dtype,
    *,
    offset: int = 0,
) -> tuple[Float[Tensor, "N P"], Float[Tensor, "N D"], Float[Tensor, "N 1"]]:
    """The layer's inputs in a type, its unit outputs and their lengths.

    Raises:
        ValueError: for parameters that are not finite, and where an output has length zero, or one whose inverse
            square the type of the features cannot hold.
    """
    storage = torch.promote_types(features.dtype, torch.float32)
    features, weight = features.to(dtype), weight.to(dtype)
    start = torch.zeros((), dtype=dtype, device=weight.device) if bias is None else bias.to(dtype)[:, None]
    f = torch.addmm(start, weight, features.T).T.contiguous()  # faster than `F.linear` where a layer is narrow
    try:
        return features, *directions(f, storage, offset=offset)
    except ValueError:  # every parameter that is not finite makes an output so
        check_parameters(weight, bias)
        raise


def directions(
    f: Float[Tensor, "N D"], storage: torch.dtype, *, offset: int = 0
) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N 1"]]:
    """Unit outputs and their lengths.

    Args:
        f: (N, D) outputs.
        storage: the type that inverse squares of the lengths must fit into.
        offset: the number of the first item.

    Raises:
        ValueError: where an output has length zero, or one whose inverse square that type cannot hold.
    """
    limits = torch.finfo(storage)
    least = limits.max**-0.25
    r = torch.linalg.vector_norm(f, dim=1, keepdim=True, dtype=torch.float64)  # squares would leave float32 before f
    problems = (
        ()
        if r.equal(r.clamp(least, torch.finfo(r.dtype).max))  # false for NaN
        else (
            (r == 0, "is zero and has no direction"),
            (r < least, f"has a length of {{:.2g}}, too short for {limits.dtype}, at least {least:.2g}: {_ADVICE}"),
            (~r.isfinite(), f"is too large for {f.dtype}"),
        )
    )
    for is_invalid, problem in problems:
        if is_invalid.any():
            item = int(is_invalid.nonzero()[0, 0])
            raise ValueError(f"the output of item {item + offset} {problem.format(r[item].item())}")
    r = r.to(f.dtype)
    return f / r, r


def checked_partners(pairs: Pairs | Candidates, size: int, curvature: Curvature) -> Any:
    """The same, of so many items, and no candidates where the curvature takes none."""
    pairs.check_size(size)
    if isinstance(pairs, Candidates) and not curvature.takes_candidates:
        raise ValueError(f"{type(curvature).__name__} compares items with one another: give Pairs, not Candidates")
    return pairs


def check_layer(features: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    """Refuse features that do not fit the layer or are not finite; `outputs` refuses parameters that are not.

    Returns:
        The root of the sum of all squares of features.
    """
    length = check_features(features, weight)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    check_sphere(weight.shape[0])
    return length


def check_sphere(D: int) -> None:
    """Refuse a layer of fewer than two outputs."""
    if D < 2:
        raise ValueError(f"the layer must have at least 2 outputs to lie on a sphere, got {D}")


def check_parameters(weight: Tensor, bias: Tensor | None) -> None:
    """Refuse parameters that are not finite."""
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and not parameter.isfinite().all():
            raise ValueError(f"{name} must be finite")


def check_features(features: Tensor, weight: Tensor) -> float:
    """Refuse features that do not fit the layer or are not finite; `check_layer` says what is returned."""
    if features.ndim != 2 or weight.ndim != 2 or features.shape[1] != weight.shape[1]:
        raise ValueError(
            f"features must be (N, P) and weight (D, P), got {tuple(features.shape)} and {tuple(weight.shape)}"
        )
    check_kinds(features, weight)
    return check_feature_values(features)


def check_kinds(features: Tensor, weight: Tensor) -> None:
    """Refuse features and weights of integers, or without values."""
    for name, tensor in (("features", features), ("weight", weight)):
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be of a floating type, got {tensor.dtype}: convert them, .to(torch.float32)")
        if tensor.is_meta:
            raise ValueError(f"{name} must have values, they are on the meta device, where tensors have shapes alone")


def check_feature_values(features: Tensor, offset: int = 0, *, name: str = "features") -> float:
    """Refuse features that are not finite, or too large for their squares to be summed, naming the first."""
    if not features.numel():
        return 0.0
    limit = torch.finfo(torch.promote_types(features.dtype, torch.float32)).max ** 0.25
    length = float(torch.linalg.vector_norm(features))
    if length <= limit or (features.abs() <= limit).all():  # the first is false for NaN
        return length
    item, place = (~(features.abs() <= limit)).nonzero()[0].tolist()
    got = f"got {features[item, place].item():.3g} at item {item + offset}, {name[:-1]} {place}"
    if features.isfinite().all():
        raise ValueError(f"{name} must be at most {limit:.2g} in size, so that sums of squares stay finite, {got}")
    raise ValueError(f"{name} must be finite, {got}")
