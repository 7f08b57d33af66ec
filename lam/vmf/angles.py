"""Polar angle between a von Mises-Fisher draw and the mean direction: draws, quantiles, derivative in kappa."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from lam.vmf.bessel import bessel_ratio_complement

_NODES, _FEW_NODES = (np.stack(np.polynomial.legendre.leggauss(n), 1).tolist() for n in (64, 20))  # (node, weight)
_REACH, _SHORT_REACH = 12, 8  # standard deviations of the polar angle; beyond, the probability is below 1e-13, 1e-7
_SETTLED = 1e-12  # greatest error of a quantile, in probability
TINY = torch.finfo(torch.float64).tiny
_TRIES = {"cpu": 1, "cuda": 8}  # proposals for one draw in a round; the code waits for the GPU after each round
_AT_ONCE = 1 << 25  # greatest number of coordinates of all proposals in one round


def draw(loc: Tensor, kappa: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """One draw from each distribution, by rejection: polar angles (N,) and unit tangents (N, D).

    A uniform point on the sphere has a cosine to `loc` and an independent tangent. Ulrich's Moebius map turns this
    cosine into w, the proposal for the cosine of the polar angle. With b = (D - 1) / (2 kappa + sqrt(4 kappa^2 +
    (D - 1)^2)) and z = (1 - cosine) / 2, the map is 1 - w = 2 b z / (1 - (1 - b) z).
    """
    n = loc.shape[-1] - 1
    b = n / (2 * kappa + torch.hypot(2 * kappa, kappa.new_tensor(n)))
    angle, tangent = torch.empty_like(kappa), torch.empty_like(loc)
    pending = torch.arange(len(kappa), device=kappa.device)
    tries = max(1, min(_TRIES.get(kappa.device.type, 1), _AT_ONCE // max(1, loc.numel())))
    while len(pending):
        pole, shape = loc[pending], (tries, len(pending))
        point = torch.randn((*shape, n + 1), dtype=pole.dtype, device=pole.device, generator=generator)
        point = point / torch.linalg.vector_norm(point, dim=-1, keepdim=True)
        cosine = (point * pole).sum(-1)
        z = ((1 - cosine) / 2).clamp(0, 1)
        centre, ratio = 2 * b / (1 + b), (1 + b) * z / (1 - (1 - b) * z)
        log_odds = kappa[pending] * centre * (1 - ratio) + n * torch.log((1 + (1 - centre) * ratio) / (2 - centre))
        uniform = torch.rand(shape, dtype=pole.dtype, device=pole.device, generator=generator)
        accepted = ~(log_odds < uniform.log())  # NaN is accepted, or else its draw would never end
        found = accepted.any(0)
        chosen = accepted.int().argmax(0)[found], found.nonzero()[:, 0]  # the first accepted proposal
        done = pending[found]
        angle[done] = 2 * (centre * ratio / 2).clamp(max=1).sqrt().asin()[chosen]
        tangent[done] = torch.nn.functional.normalize(point[chosen] - cosine[chosen][:, None] * pole[found], dim=-1)
        pending, b = pending[~found], b[~found]
    return angle, tangent


def _log_density(dimension: int, kappa: Tensor, angle: Tensor, reference: Tensor) -> Tensor:
    """Log density of the polar angle, sin(a)^(D-2) exp(kappa cos(a)), relative to a reference angle."""
    sines: Tensor | int = 0
    if dimension > 2:
        sines = torch.xlogy(dimension - 2, angle.sin()) - torch.xlogy(dimension - 2, reference.sin())
    return sines - 2 * kappa * ((angle - reference) / 2).sin() * ((angle + reference) / 2).sin()


def _mode_and_width(dimension: int, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """Mode of the polar angle, and standard deviation of its Laplace approximation."""
    power = dimension - 2
    hypotenuse = torch.hypot(2 * kappa, kappa.new_tensor(power))
    share = power / (hypotenuse + 2 * kappa).clamp(min=TINY)
    one_minus_cosine = power * (1 + share) / (power + hypotenuse).clamp(min=TINY)
    mode = 2 * (one_minus_cosine / 2).sqrt().asin()
    curvature = power / mode.sin().square().clamp(min=TINY) + kappa * mode.cos()
    return mode, curvature.rsqrt()


def slope(dimension: int, kappa: Tensor, angle: Tensor, *, exact: bool = True) -> Tensor:
    """Derivative da/dkappa of the polar angle a at a fixed value of its distribution function.

    With density p and the ratio A_D of `bessel_ratio`, da/dkappa = -(integral from 0 to a of (cos(t) - A_D) p(t) dt)
    / p(a). The integral over all angles is 0, so the code integrates only the tail on a's side of the mode. The error
    is 1e-13 of the largest derivative. Without `exact`, the error is as in float32, and the time is a third.
    """
    mode, width = _mode_and_width(dimension, kappa)
    angle = angle.clamp(min=1e-150)  # at the mean direction itself density and slope are 0
    reach = torch.where(angle < mode, -1, 1) * (_REACH if exact else _SHORT_REACH) * width
    complement = bessel_ratio_complement(dimension, kappa)

    def integrand(other: Tensor) -> Tensor:
        return (complement - 2 * (other / 2).sin().square()) * _log_density(dimension, kappa, other, angle).exp()

    return _integrate(integrand, angle, (angle + reach).clamp(0, math.pi), _NODES if exact else _FEW_NODES)


def quantile(dimension: int, kappa: Tensor, level: float) -> Tensor:
    """The `level` quantile of the polar angle, by Newton's method, safeguarded by bisection."""
    mode, width = _mode_and_width(dimension, kappa)
    start, stop = (mode - _REACH * width).clamp(min=0), (mode + _REACH * width).clamp(max=math.pi)

    def density(angle: Tensor) -> Tensor:
        return _log_density(dimension, kappa, angle, mode).exp()

    total = _integrate(density, start, stop)
    angle, lower, upper = mode, start, stop
    for _ in range(100):
        excess = _integrate(density, start, angle) / total - level
        lower, upper = torch.where(excess < 0, angle, lower), torch.where(excess < 0, upper, angle)
        newton = angle - excess * total / density(angle)
        settled = excess.abs() <= _SETTLED
        fallback = torch.where(settled, angle, (lower + upper) / 2)
        angle = torch.where((newton > lower) & (newton < upper), newton, fallback)
        if torch.func.debug_unwrap(settled).all():
            break
    return angle


def _integrate(
    function: Callable[[Tensor], Tensor], start: Tensor, stop: Tensor, nodes: Sequence[Sequence[float]] = _NODES
) -> Tensor:
    half = (stop - start) / 2
    return half * sum(weight * function(start + (1 + node) * half) for node, weight in nodes)
