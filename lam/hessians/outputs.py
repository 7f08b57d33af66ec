"""Outputs of a linear last layer as directions and lengths, and checks of the layer's inputs."""

import torch
from jaxtyping import Float
from torch import Tensor

from lam.utils.checks import check_tensor

_ADVICE = "scale the network's output up, or give features and weight in float64"


def outputs(
    features: Float[Tensor, "N P"],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    dtype: torch.dtype,
    *,
    offset: int = 0,
) -> tuple[Float[Tensor, "N P"], Float[Tensor, "N D"], Float[Tensor, "N 1"]]:
    """Features in type `dtype`, and the layer's outputs as directions and lengths; see `directions` for errors."""
    storage = torch.promote_types(features.dtype, torch.float32)
    features, weight = features.to(dtype), weight.to(dtype)
    start = torch.zeros((), dtype=dtype, device=weight.device) if bias is None else bias.to(dtype)[:, None]
    f = torch.addmm(start, weight, features.T).T.contiguous()  # faster than `F.linear` for a narrow layer
    try:
        return features, *directions(f, storage, offset=offset)
    except ValueError:
        for name, parameter in (("weight", weight), ("bias", bias)):  # checked only now, when an output is invalid
            if parameter is not None and not parameter.isfinite().all():
                raise ValueError(f"{name} must be finite") from None
        raise


def directions(
    f: Float[Tensor, "N D"], storage: torch.dtype, *, offset: int = 0
) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N 1"]]:
    """Outputs as unit vectors and lengths.

    Args:
        f: (N, D) outputs.
        storage: the type that must hold inverse fourth powers of the lengths.
        offset: index of the first item, for error messages.

    Raises:
        ValueError: for an output that is zero, not finite, or too short for `storage`.
    """
    limits = torch.finfo(storage)
    least = limits.max**-0.25
    r = torch.linalg.vector_norm(f, dim=1, keepdim=True, dtype=torch.float64)  # float32 squares overflow before f does
    if not r.equal(r.clamp(least, torch.finfo(r.dtype).max)):  # also for NaN
        problems = (
            (r == 0, "is zero and has no direction"),
            (r < least, f"has a length of {{:.2g}}, too short for {limits.dtype}, at least {least:.2g}: {_ADVICE}"),
            (~r.isfinite(), f"is too large for {f.dtype}"),
        )
        invalid, problem = next((invalid, problem) for invalid, problem in problems if invalid.any())
        item = int(invalid.nonzero()[0, 0])
        raise ValueError(f"the output of item {item + offset} {problem.format(r[item].item())}")
    r = r.to(f.dtype)
    return f / r, r


def check_layer(features: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Reject features that do not fit the layer, and a layer with fewer than two outputs."""
    check_features(features, weight)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    check_sphere(weight.shape[0])


def check_sphere(D: int) -> None:
    """Reject a layer of fewer than two outputs."""
    if D < 2:
        raise ValueError(f"the layer must have at least 2 outputs to lie on a sphere, got {D}")


def check_features(features: Tensor, weight: Tensor) -> None:
    """Reject features and weights with wrong shapes, types or values."""
    if features.ndim != 2 or weight.ndim != 2 or features.shape[1] != weight.shape[1]:
        raise ValueError(
            f"features must be (N, P) and weight (D, P), got {tuple(features.shape)} and {tuple(weight.shape)}"
        )
    check_kinds(features, weight)
    check_feature_values(features)


def check_kinds(features: Tensor, weight: Tensor) -> None:
    """Reject integer features and weights, and tensors without values."""
    for name, tensor in (("features", features), ("weight", weight)):
        check_tensor(name, tensor)
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be of a floating type, got {tensor.dtype}: convert them, .to(torch.float32)")
        if tensor.is_meta:
            raise ValueError(f"{name} must have values, got a tensor on the meta device, which has only a shape")


def check_feature_values(features: Tensor, offset: int = 0, *, name: str = "features") -> None:
    """Reject features (N, P) that are not finite, or too large for a sum of their squares.

    Error messages count items from `offset`, and call the features `name`.
    """
    if not features.numel():
        return
    limit = torch.finfo(torch.promote_types(features.dtype, torch.float32)).max ** 0.25
    # The norm is one fast pass. If a value is NaN, so is the norm, and the first comparison is false.
    if float(torch.linalg.vector_norm(features)) <= limit or (features.abs() <= limit).all():
        return
    item, place = (~(features.abs() <= limit)).nonzero()[0].tolist()
    got = f"got {features[item, place].item():.3g} at item {item + offset}, {name[:-1]} {place}"
    if features.isfinite().all():
        raise ValueError(f"{name} must be at most {limit:.2g} in size, so that sums of squares stay finite, {got}")
    raise ValueError(f"{name} must be finite, {got}")
