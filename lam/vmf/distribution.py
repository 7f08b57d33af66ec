"""The von Mises-Fisher distribution on the unit sphere: density, sampling, credible caps, fit and fusion.

Everything is batched: a tensor of mean directions (*B, D) goes with a tensor of concentrations (*B). All sums run in
float64 and come back in the type of the input. The Bessel functions behind it live in `lam.vmf.bessel`; nothing here
knows of networks, posteriors or retrieval.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lam.vmf.bessel import bessel_ratio_complement, check_all, check_parameters, kappa_from_resultant, log_normalizer

_UNIT_TOLERANCE = 1e-4
_NODES = np.stack(np.polynomial.legendre.leggauss(64), 1).tolist()  # and their weights
_REACH = 12  # in standard deviations of the polar angle; what lies beyond is below 1e-13
_SETTLED = 1e-12  # in probability
_BLOCKS = 64  # the most steps in which samples are summed, each over one block of them
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, eq=False)
class VonMisesFisher:
    """Batch of von Mises-Fisher distributions on the unit sphere in D dimensions.

    p(x) = C_D(kappa) exp(kappa mean.x)

    Source: Mardia and Jupp (2000), "Directional Statistics", section 9.3.2.

    Args:
        mean: mean directions (*B, D), unit vectors, D >= 2.
        kappa: concentrations (*B), finite and at least 0; 0 is the uniform distribution, whatever `mean`.

    Raises:
        ValueError: if a mean is not a unit vector, a kappa is negative or not finite, or D is below 2.

    Example:
        >>> vmf = VonMisesFisher(torch.tensor([[0.0, 1.0]]), torch.tensor([2.0]))
        >>> vmf.log_prob(torch.tensor([0.0, 1.0]))
        tensor([-0.6619])
    """

    mean: Float[Tensor, "*B D"]
    kappa: Float[Tensor, "*B"]

    def __post_init__(self) -> None:
        if self.mean.shape[:-1] != self.kappa.shape:
            raise ValueError(f"mean must have shape (*kappa.shape, D), got {self.mean.shape} and {self.kappa.shape}")
        check_parameters(self.dimension, self.kappa)
        _check_unit(self.mean, "mean")

    @property
    def dimension(self) -> int:
        """D, the dimension of the space that holds the sphere."""
        return self.mean.shape[-1]

    def log_prob(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "..."]:
        """Log density, with respect to the area of the sphere, differentiable in x, mean and kappa.

        log C_D + kappa - kappa ||x - mean||^2 / 2, in which nothing large cancels.

        Args:
            x: unit vectors (..., D), broadcast against the batch.

        Returns:
            log p(x), in the wider type of `x` and `mean`. The gradient in x is right along the sphere.

        Raises:
            ValueError: if x has another last dimension or is not of unit vectors.
        """
        if x.shape[-1] != self.dimension:
            raise ValueError(f"x must have a last dimension of {self.dimension}, got shape {tuple(x.shape)}")
        _check_unit(x, "x")
        half_square = (x.double() - self._unit_mean()).square().sum(-1) / 2
        kappa = self.kappa.double()
        log_prob = log_normalizer(self.dimension, kappa, scaled=True) - kappa * half_square
        return log_prob.to(torch.promote_types(x.dtype, self.mean.dtype))

    def entropy(self) -> Float[Tensor, "*B"]:
        """Differential entropy -log C_D - kappa A_D(kappa), differentiable in kappa."""
        kappa = self.kappa.double()
        entropy = kappa * bessel_ratio_complement(self.dimension, kappa)
        return (entropy - log_normalizer(self.dimension, kappa, scaled=True)).to(self.kappa.dtype)

    def sample(self, shape: tuple[int, ...] = (), *, generator: torch.Generator) -> Float[Tensor, "..."]:
        """Draws of shape (*shape, *B, D), detached; see `rsample`."""
        with torch.no_grad():
            return self.rsample(shape, generator=generator)

    def rsample(self, shape: tuple[int, ...] = (), *, generator: torch.Generator) -> Float[Tensor, "..."]:
        """Draws whose gradients in mean and kappa are unbiased.

        x = cos(a) mean + sin(a) t, with the polar angle a by rejection and the tangent t uniform. The gradient takes
        a by implicit reparameterisation, da/dkappa = -(dF/dkappa) / (dF/da) of its distribution function F, for the
        pathwise one forgets that the acceptance depends on kappa; and it carries t along with the mean by rotation.

        Source: Ulrich (1984) and Wood (1994) for the rejection; Figurnov, Mohamed and Mnih (2018) for the gradient.

        Args:
            shape: leading shape of the draws.
            generator: source of all randomness, on the device of `mean`.

        Returns:
            Unit vectors (*shape, *B, D) in the type of `mean`.

        Example:
            >>> vmf = VonMisesFisher(torch.tensor([1.0, 0.0, 0.0]), torch.tensor(1e6))
            >>> vmf.rsample((4,), generator=torch.Generator().manual_seed(0)).shape
            torch.Size([4, 3])
        """
        shape = (*shape, *self.kappa.shape)
        mean = self._unit_mean().expand(*shape, -1)
        kappa = self.kappa.double().expand(shape)
        with torch.no_grad():
            angle, tangent = _draw(mean.reshape(-1, self.dimension), kappa.reshape(-1), generator)
            angle, tangent = angle.reshape(shape), tangent.reshape(mean.shape)
        if kappa.requires_grad:
            angle = angle + _angle_slope(self.dimension, kappa.detach(), angle) * (kappa - kappa.detach())
        tangent = tangent - (mean * tangent).sum(-1, keepdim=True) * mean
        return (angle.cos()[..., None] * mean + angle.sin()[..., None] * tangent).to(self.mean.dtype)

    @torch.no_grad()
    def credible_cap(self, level: float) -> Float[Tensor, "*B"]:
        """Cosine of the cap around the mean direction that encloses a given probability.

        P(mean.x >= c) = level, by quadrature over the polar angle and a bracketed Newton iteration.

        Args:
            level: probability, in (0, 1).

        Returns:
            c in [-1, 1], shape and type of `kappa`, detached. Larger means more certain.

        Raises:
            ValueError: if `level` is not in (0, 1).

        Example:
            >>> vmf = VonMisesFisher(torch.tensor([1.0, 0.0, 0.0]), torch.tensor(0.0))
            >>> vmf.credible_cap(0.75)  # on the sphere area is linear in the cosine
            tensor(-0.5000)
        """
        if not 0 < level < 1:
            raise ValueError(f"level must lie in (0, 1), got {level}")
        return _angle_quantile(self.dimension, self.kappa.double(), level).cos().to(self.kappa.dtype)

    @classmethod
    def fit(
        cls,
        samples: Float[Tensor, "S *B D"],
        *,
        weights: Float[Tensor, " S *B"] | None = None,
        max_kappa: float = 1e8,
    ) -> "VonMisesFisher":
        """Maximum likelihood fit over the first axis.

        The mean direction is that of the mean; kappa solves A_D(kappa) = length of the mean.

        Source: Sra (2012), equations 2 to 5.

        Args:
            samples: unit vectors (S, *B, D), S >= 1.
            weights: non-negative weights (S, *B), all alike where not given.
            max_kappa: largest kappa returned. The likelihood of samples that are all equal has no maximum: they get
                exactly this value.

        Returns:
            Distributions of batch shape (*B), in the type of `samples`.

        Raises:
            ValueError: as `mean_resultant_length`; if the weights of an item are negative, not finite or all 0.

        Example:
            >>> samples = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, -0.8]])
            >>> VonMisesFisher.fit(samples).kappa
            tensor(2.2388)
        """
        moments = _mean_resultant(samples, None if weights is None else _normalised(weights))
        return cls(moments.mean, moments.kappa(max_kappa=max_kappa).to(samples.dtype))

    def _unit_mean(self) -> Tensor:
        return torch.nn.functional.normalize(self.mean.double(), dim=-1)


@dataclass(frozen=True, eq=False)
class MeanResultant:
    """Mean direction of samples and length of their mean.

    Args:
        mean: mean directions (*B, D), unit vectors, in the type of the samples.
        resultant: lengths R (*B) in [0, 1], float64.
        one_minus_resultant: 1 - R, float64, precise also where R is near 1.
    """

    mean: Float[Tensor, "*B D"]
    resultant: Float[Tensor, "*B"]
    one_minus_resultant: Float[Tensor, "*B"]

    def kappa(self, *, max_kappa: float = 1e8) -> Float[Tensor, "*B"]:
        """Concentration of that length, float64, at most `max_kappa`; see `lam.vmf.bessel.kappa_from_resultant`."""
        rest = self.one_minus_resultant
        return kappa_from_resultant(self.resultant, self.mean.shape[-1], one_minus_resultant=rest, max_kappa=max_kappa)


def mean_resultant_length(samples: Float[Tensor, "S *B D"], *, unbiased: bool) -> MeanResultant:
    """Mean direction and mean resultant length over the first axis.

    R = ||sum_s x_s|| / S and 1 - R = sum_s ||x_s - mean||^2 / (2 S). Chance alone gives R about 1 / sqrt(S), so the
    unbiased estimate is R^2 = max(0, (S R^2 - 1) / (S - 1)).

    Source: Mardia and Jupp (2000), section 9.2.1.

    Args:
        samples: unit vectors (S, *B, D), D >= 2, S >= 1.
        unbiased: correct R for chance, which needs S >= 2.

    Returns:
        Mean directions, R and 1 - R.

    Raises:
        ValueError: if there are too few samples, or, naming the first such item, if its samples are not unit vectors
            (NaN included) or cancel, so that their mean has no direction.

    Example:
        >>> moments = mean_resultant_length(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), unbiased=False)
        >>> moments.mean, moments.resultant
        (tensor([0.7071, 0.7071]), tensor(0.7071, dtype=torch.float64))
    """
    n_samples = len(samples)
    if unbiased and n_samples < 2:
        raise ValueError(f"the unbiased length needs at least 2 samples, got {n_samples}; pass unbiased=False")
    moments = _mean_resultant(samples, None)
    if not unbiased:
        return moments
    squared = (n_samples * moments.resultant.square() - 1) / (n_samples - 1)
    shortfall = n_samples / (n_samples - 1) * moments.one_minus_resultant * (1 + moments.resultant)  # 1 - squared
    resultant = squared.clamp(min=0).sqrt()
    return MeanResultant(moments.mean, resultant, shortfall.clamp(max=1) / (1 + resultant))


def fuse(means: Float[Tensor, "*B K D"], kappas: Float[Tensor, "*B K"]) -> VonMisesFisher:
    """Normalised product of K von Mises-Fisher densities, differentiable.

    kappa mean = sum_k kappa_k mean_k

    Args:
        means: mean directions (*B, K, D), unit vectors, K >= 1.
        kappas: concentrations (*B, K), finite and at least 0.

    Returns:
        Distributions of batch shape (*B), in the type of `means`. Where the sum vanishes they are uniform (kappa 0)
        and carry the first mean.

    Raises:
        ValueError: if K is 0, or as `VonMisesFisher`.

    Example:
        >>> fuse(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([3.0, 4.0]))
        VonMisesFisher(mean=tensor([0.6000, 0.8000]), kappa=tensor(5.))
    """
    if means.shape[-2] < 1:
        raise ValueError(f"fuse needs at least one distribution, got means of shape {tuple(means.shape)}")
    factors = VonMisesFisher(means, kappas)
    total = (factors.kappa.double()[..., None] * factors._unit_mean()).sum(-2)
    kappa = torch.linalg.vector_norm(total, dim=-1)
    vanishes = (kappa < _TINY)[..., None]
    mean = torch.where(vanishes, means[..., 0, :], total / torch.where(vanishes, 1, kappa[..., None]))
    return VonMisesFisher(mean.to(means.dtype), kappa.to(means.dtype))


def _check_unit(vectors: Tensor, name: str) -> None:
    length = torch.linalg.vector_norm(vectors.detach(), dim=-1)
    check_all((length - 1).abs() <= _UNIT_TOLERANCE, f"{name} must be of unit length (normalise it first)", length)


def _normalised(weights: Tensor) -> Tensor:
    check_all((weights >= 0) & weights.isfinite(), "weights must be finite and at least 0", weights)
    total = weights.double().sum(0)
    check_all(total > 0, "weights must have a positive sum over the samples", total)
    return weights.double() / total


def _mean_resultant(samples: Tensor, weights: Tensor | None) -> MeanResultant:
    """One pass for the mean and one for the spread around it, in blocks: no float64 copy of all samples is made.

    Of unit vectors 1 - R equals the mean of ||x - mean||^2 / 2; where it does not, some were not unit vectors.
    """
    if samples.ndim < 2 or len(samples) < 1 or samples.shape[-1] < 2:
        raise ValueError(f"samples must have shape (S, ..., D) with S >= 1 and D >= 2, got {tuple(samples.shape)}")
    if weights is None:
        weights = samples.new_full((len(samples), *[1] * (samples.ndim - 2)), 1 / len(samples), dtype=torch.float64)
    size = -(-len(samples) // _BLOCKS)
    totals = torch.zeros_like(samples[:size], dtype=torch.float64)
    for block, weight in zip(samples.split(size), weights[..., None].split(size), strict=True):
        totals[: len(block)].addcmul_(block, weight)
    total = totals[0] if size == 1 else totals.sum(0)
    length = torch.linalg.vector_norm(total, dim=-1)
    vanishes = length <= torch.finfo(samples.dtype).eps
    check_all(~vanishes, "samples of an item must have a mean of positive length", length)
    mean = total / length[..., None]
    spreads = torch.zeros_like(totals[..., 0])
    for block, weight in zip(samples.split(size), weights.split(size), strict=True):
        spreads[: len(block)].addcmul_(weight, torch.linalg.vector_norm(block - mean, dim=-1).square(), value=0.5)
    spread = spreads.sum(0)
    square = 2 * (spread + length) - 1
    check_all((square - 1).abs() <= _UNIT_TOLERANCE, "samples of an item must have a mean squared length of 1", square)
    return MeanResultant(mean.to(samples.dtype), torch.where(length < 0.5, length, 1 - spread), spread)


def _draw(mean: Tensor, kappa: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Polar angles (M,) and unit tangents (M, D).

    A uniform point on the sphere gives both: its cosine, moved by Ulrich's Moebius map, is the proposal, and its
    tangent does not depend on it. With b = (D - 1) / (2 kappa + sqrt(4 kappa^2 + (D - 1)^2)) and z = (1 - cosine) / 2
    the proposal has 1 - w = 2 b z / (1 - (1 - b) z), from which everything follows without cancellation.
    """
    n = mean.shape[-1] - 1
    b = n / (2 * kappa + torch.hypot(2 * kappa, kappa.new_tensor(n)))
    angle, tangent = torch.empty_like(kappa), torch.empty_like(mean)
    pending = torch.arange(len(kappa), device=kappa.device)
    while len(pending):
        pole = mean[pending]
        point = torch.randn(pole.shape, dtype=pole.dtype, device=pole.device, generator=generator)
        point = point / torch.linalg.vector_norm(point, dim=-1, keepdim=True)
        cosine = (point * pole).sum(-1)
        z = ((1 - cosine) / 2).clamp(0, 1)
        centre, ratio = 2 * b / (1 + b), (1 + b) * z / (1 - (1 - b) * z)
        log_odds = kappa[pending] * centre * (1 - ratio) + n * torch.log((1 + (1 - centre) * ratio) / (2 - centre))
        uniform = torch.rand(cosine.shape, dtype=pole.dtype, device=pole.device, generator=generator)
        accepted = log_odds >= uniform.log()
        chosen = pending[accepted]
        angle[chosen] = 2 * (centre * ratio / 2).clamp(max=1).sqrt().asin()[accepted]
        tangent[chosen] = torch.nn.functional.normalize(point - cosine[:, None] * pole, dim=-1)[accepted]
        pending, b = pending[~accepted], b[~accepted]
    return angle, tangent


def _log_density(dimension: int, kappa: Tensor, angle: Tensor, reference: Tensor) -> Tensor:
    """Log of the density of the polar angle, sin(a)^(D-2) exp(kappa cos(a)), relative to that at another angle."""
    sines = torch.xlogy(dimension - 2, angle.sin()) - torch.xlogy(dimension - 2, reference.sin())
    return sines - 2 * kappa * ((angle - reference) / 2).sin() * ((angle + reference) / 2).sin()


def _mode_and_width(dimension: int, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """Where the density of the polar angle peaks, and its standard deviation there."""
    power = dimension - 2
    hypotenuse = torch.hypot(2 * kappa, kappa.new_tensor(power))
    share = power / (hypotenuse + 2 * kappa).clamp(min=_TINY)
    one_minus_cosine = power * (1 + share) / (power + hypotenuse).clamp(min=_TINY)
    mode = 2 * (one_minus_cosine / 2).sqrt().asin()
    curvature = power / mode.sin().square().clamp(min=_TINY) + kappa * mode.cos()
    return mode, curvature.rsqrt()


def _angle_slope(dimension: int, kappa: Tensor, angle: Tensor) -> Tensor:
    """da/dkappa at a fixed value of the distribution function, from the tail on the side of the angle.

    da/dkappa = -(integral from 0 to a of (cos - A_D) density) / density(a), the integral over the whole being 0.
    """
    mode, width = _mode_and_width(dimension, kappa)
    reach = torch.where(angle < mode, -_REACH, _REACH) * width
    complement = bessel_ratio_complement(dimension, kappa)

    def integrand(other: Tensor) -> Tensor:
        return (complement - 2 * (other / 2).sin().square()) * _log_density(dimension, kappa, other, angle).exp()

    return _integrate(integrand, angle, (angle + reach).clamp(0, math.pi))


def _angle_quantile(dimension: int, kappa: Tensor, level: float) -> Tensor:
    """Polar angle below which the probability is `level`: Newton's method, by bisection where it would leave."""
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
        if settled.all():
            break
    return angle


def _integrate(function: Callable[[Tensor], Tensor], start: Tensor, stop: Tensor) -> Tensor:
    """Gauss-Legendre quadrature, elementwise between the limits."""
    half = (stop - start) / 2
    return half * sum(weight * function(start + (1 + node) * half) for node, weight in _NODES)
