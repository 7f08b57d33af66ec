"""The von Mises-Fisher distribution on the unit sphere: density, moments, sampling, credible caps, fit and fusion.

`VonMisesFisher` is a `torch.distributions.Distribution`, and works with `Independent`, `MixtureSameFamily`,
`TransformedDistribution` and `kl_divergence`. It computes in float64 and returns the type of the input.
"""

import math
from typing import ClassVar, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributions import Distribution, constraints, register_kl
from torch.types import _size

from lam.utils.checks import check_share, unit_tolerance
from lam.vmf import angles
from lam.vmf.bessel import (
    bessel_ratio,
    bessel_ratio_complement,
    bessel_ratio_derivative,
    check_all,
    check_floating,
    check_parameters,
    log_normalizer,
)
from lam.vmf.embeddings import weighted_mean_resultant


class _UnitVector(constraints.Constraint):
    event_dim = 1

    def check(self, value: Float[Tensor, "... D"]) -> Bool[Tensor, "..."]:
        return (torch.linalg.vector_norm(value.detach(), dim=-1) - 1).abs() <= unit_tolerance(value.dtype)


unit_vector = _UnitVector()
"""The unit sphere as a constraint of `torch.distributions`."""


class VonMisesFisher(Distribution):
    """Batch of von Mises-Fisher distributions on the unit sphere in D dimensions.

    The density with respect to the area of the sphere is p(x) = C_D(kappa) exp(kappa loc.x).

    Source: Mardia and Jupp (2000), "Directional Statistics", section 9.3.2.

    Args:
        loc: mean directions (*B, D), unit vectors, D >= 2.
        concentration: kappa (*B), finite and at least 0; 0 is the uniform distribution for any `loc`. The batch shapes
            of `loc` and `concentration` are broadcast.
        validate_args: whether to check the parameters, and the values of `log_prob`. None means yes, except while torch
            compiles. torch's global default has no effect.

    Raises:
        ValueError: for batch shapes that do not broadcast, or integers. With `validate_args`, also for a loc that is
            not a unit vector, a concentration that is negative or not finite, or D below 2.

    Example:
        >>> vmf = VonMisesFisher(torch.tensor([[0.0, 1.0]]), torch.tensor([2.0]))
        >>> vmf.log_prob(torch.tensor([0.0, 1.0])), vmf.mean
        (tensor([-0.6619]), tensor([[0.0000, 0.6978]]))
    """

    arg_constraints: ClassVar = {  # pyright: ignore [reportIncompatibleMethodOverride, reportAssignmentType]
        "loc": unit_vector,
        "concentration": constraints.half_open_interval(0, math.inf),
    }
    support: ClassVar = unit_vector  # pyright: ignore [reportIncompatibleMethodOverride, reportAssignmentType]
    has_rsample = True

    loc: Float[Tensor, "*B D"]
    concentration: Float[Tensor, "*B"]

    def __init__(
        self, loc: Float[Tensor, "*#B D"], concentration: Float[Tensor, "*#B"], validate_args: bool | None = None
    ) -> None:
        check_floating(loc=loc, concentration=concentration)
        try:
            batch_shape = torch.broadcast_shapes(loc.shape[:-1], concentration.shape)
        except RuntimeError:
            shapes = f"{tuple(loc.shape)} and {tuple(concentration.shape)}"
            raise ValueError(f"loc must have shape (*concentration.shape, D), got {shapes}") from None
        validate_args = not torch.compiler.is_compiling() if validate_args is None else validate_args
        if validate_args:  # unlike torch's checks, these name the first invalid value
            check_parameters(loc.shape[-1], concentration, "concentration")
            _check_unit(loc, "loc")
        self.loc = loc.expand(*batch_shape, -1)
        self.concentration = concentration.expand(batch_shape)
        super().__init__(batch_shape, loc.shape[-1:], validate_args)

    def expand(self, batch_shape: _size, _instance: "VonMisesFisher | None" = None) -> "VonMisesFisher":
        """The distributions, broadcast to a batch shape as a view."""
        new = cast("VonMisesFisher", self._get_checked_instance(VonMisesFisher, _instance))
        new.loc = self.loc.expand(*batch_shape, -1)
        new.concentration = self.concentration.expand(batch_shape)
        super(VonMisesFisher, new).__init__(torch.Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Float[Tensor, "*B D"]:
        """Expected value A_D(kappa) loc, a point inside the sphere."""
        ratio = bessel_ratio(self.event_shape[0], self.concentration.double())
        return (ratio[..., None] * self._unit_loc()).to(self.loc.dtype)

    @property
    def mode(self) -> Float[Tensor, "*B D"]:
        """The point of highest density: `loc`."""
        return self.loc

    @property
    def variance(self) -> Float[Tensor, "*B D"]:
        """Variance of each coordinate, differentiable in loc only.

        The variance is loc_i^2 A_D'(kappa) + (1 - loc_i^2) A_D(kappa) / kappa, and 1 / D at kappa = 0.

        Source: Shyntar and Hillen (2025), "First and second moments and fractional anisotropy of general von
        Mises-Fisher and peanut distributions".
        """
        dimension, kappa = self.event_shape[0], self.concentration.double()
        across = bessel_ratio(dimension, kappa) / torch.where(kappa < angles.TINY, 1, kappa)
        across = torch.where(kappa < angles.TINY, 1 / dimension, across)[..., None]
        along = bessel_ratio_derivative(dimension, kappa)[..., None]
        loc = self._unit_loc()
        return (loc.square() * along + (1 - loc) * (1 + loc) * across).to(self.loc.dtype)

    def log_prob(self, value: Float[Tensor, "... D"]) -> Float[Tensor, "..."]:
        """Log density with respect to the area of the sphere, differentiable in value, loc and concentration.

        Args:
            value: unit vectors (..., D), broadcast against the batch.

        Returns:
            log p(value), in the wider type of `value` and `loc`. The gradient in `value` is correct along the sphere.

        Raises:
            ValueError: with `validate_args`, for a `value` of another dimension or batch shape, or not of unit length.
        """
        if self._validate_args:
            self._validate_sample(value)
        half_square = (value.double() - self._unit_loc()).square().sum(-1) / 2
        kappa = self.concentration.double()
        log_prob = log_normalizer(self.event_shape[0], kappa, scaled=True) - kappa * half_square
        return log_prob.to(torch.promote_types(value.dtype, self.loc.dtype))

    def entropy(self) -> Float[Tensor, "*B"]:
        """Differential entropy -log C_D - kappa A_D(kappa), differentiable in the concentration."""
        kappa = self.concentration.double()
        entropy = kappa * bessel_ratio_complement(self.event_shape[0], kappa)
        return (entropy - log_normalizer(self.event_shape[0], kappa, scaled=True)).to(self.concentration.dtype)

    def sample(self, sample_shape: _size = (), *, generator: torch.Generator | None = None) -> Float[Tensor, "..."]:
        """Draws of shape (*sample_shape, *B, D), detached; see `rsample`."""
        return self.rsample(sample_shape, generator=generator).detach()

    def rsample(self, sample_shape: _size = (), *, generator: torch.Generator | None = None) -> Float[Tensor, "..."]:
        """Draws with unbiased gradients in loc and concentration.

        A draw is x = cos(a) loc + sin(a) t. Rejection sampling draws the polar angle a; the tangent t is uniform and
        rotates with loc. The gradient of a is implicit: da/dkappa = -(dF/dkappa) / (dF/da), with F the distribution
        function of a.

        Source: Ulrich (1984) and Wood (1994) for the sampling; Figurnov, Mohamed and Mnih (2018) for the gradient.

        Args:
            sample_shape: leading shape of the draws.
            generator: generator on the device of `loc`; by default torch's global one.

        Returns:
            Unit vectors (*sample_shape, *B, D) in the type of `loc`.

        Example:
            >>> vmf = VonMisesFisher(torch.tensor([1.0, 0.0, 0.0]), torch.tensor(1e6))
            >>> vmf.rsample((4,), generator=torch.Generator().manual_seed(0)).shape
            torch.Size([4, 3])
        """
        shape = self._extended_shape(sample_shape)
        loc = self._unit_loc().expand(shape)
        kappa = self.concentration.double().expand(shape[:-1])
        angle, tangent = angles.draw(loc.detach().reshape(-1, shape[-1]), kappa.detach().reshape(-1), generator)
        angle, tangent = angle.reshape(shape[:-1]), tangent.reshape(shape)
        if kappa.requires_grad or torch.autograd.forward_ad.unpack_dual(kappa).tangent is not None:
            slope = angles.slope(shape[-1], kappa.detach(), angle, exact=self.loc.dtype == torch.float64)
            angle = angle + slope * (kappa - kappa.detach())
        tangent = tangent - (loc * tangent).sum(-1, keepdim=True) * loc
        return (angle.cos()[..., None] * loc + angle.sin()[..., None] * tangent).to(self.loc.dtype)

    def credible_cap(self, level: float) -> Float[Tensor, "*B"]:
        """Cosine c at the edge of the cap that holds probability `level` around loc: P(loc.x >= c) = level.

        Args:
            level: probability in (0, 1); other values raise a `ValueError`.

        Returns:
            c in [-1, 1], shape and type of `concentration`, detached. A larger c means a smaller cap.

        Example:
            >>> vmf = VonMisesFisher(torch.tensor([1.0, 0.0, 0.0]), torch.tensor(0.0))
            >>> vmf.credible_cap(0.75)  # on the sphere area is linear in the cosine
            tensor(-0.5000)
        """
        check_share("level", level)
        kappa = self.concentration.detach()
        return angles.quantile(self.event_shape[0], kappa.double(), level).cos().to(kappa.dtype)

    @classmethod
    def fit(
        cls, samples: Float[Tensor, "S *B D"], *, weights: Float[Tensor, " S *B"] | None = None, max_kappa: float = 1e8
    ) -> "VonMisesFisher":
        """Maximum likelihood fit over the first axis.

        loc is the direction of the (weighted) mean of the samples, and A_D(kappa) is its length.

        Source: Sra (2012), equations 2 to 5.

        Args:
            samples: unit vectors (S, *B, D), S >= 1.
            weights: non-negative weights (S, *B); equal by default.
            max_kappa: greatest kappa; the result for identical samples, whose likelihood has no maximum.

        Returns:
            Distributions of batch shape (*B), in the type of `samples`.

        Raises:
            ValueError: as `mean_resultant_length`, and for weights of another shape, negative, not finite or all 0.

        Example:
            >>> samples = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.6, -0.8]])
            >>> VonMisesFisher.fit(samples).concentration
            tensor(2.2388)
        """
        moments = weighted_mean_resultant(samples, weights)
        max_kappa = min(max_kappa, torch.finfo(samples.dtype).max)
        return cls(moments.mean, moments.kappa(max_kappa=max_kappa).to(samples.dtype))

    def _unit_loc(self) -> Tensor:
        return torch.nn.functional.normalize(self.loc.double(), dim=-1)

    def _validate_sample(self, value: Tensor) -> None:
        if value.shape[-1:] != self.event_shape:
            dimension = self.event_shape[0]
            raise ValueError(f"value must have a last dimension of {dimension}, got shape {tuple(value.shape)}")
        _check_unit(value, "value")
        super()._validate_sample(value)


@register_kl(VonMisesFisher, VonMisesFisher)
def _kl_divergence(p: VonMisesFisher, q: VonMisesFisher) -> Tensor:
    """KL(p || q) = log C_D(kappa_p) - log C_D(kappa_q) + A_D(kappa_p) (kappa_p - kappa_q loc_p.loc_q), differentiable.

    The code uses log C_D + kappa, 1 - A_D and ||loc_p - loc_q||^2 / 2, to avoid cancellation.

    Source: Kitagawa and Rowley (2022), "von Mises-Fisher distributions and their statistical divergence".
    """
    if p.event_shape != q.event_shape:
        shapes = f"{tuple(p.event_shape)} and {tuple(q.event_shape)}"
        raise ValueError(f"the KL divergence needs two distributions on one sphere, got event shapes {shapes}")
    dimension, kappa, other = p.event_shape[0], p.concentration.double(), q.concentration.double()
    complement = bessel_ratio_complement(dimension, kappa)
    half_square = (p._unit_loc() - q._unit_loc()).square().sum(-1) / 2
    normalizers = log_normalizer(dimension, kappa, scaled=True) - log_normalizer(dimension, other, scaled=True)
    divergence = normalizers + (other - kappa) * complement + other * (1 - complement) * half_square
    return divergence.clamp(min=0).to(torch.promote_types(p.loc.dtype, q.loc.dtype))


def fuse(means: Float[Tensor, "*B N D"], kappas: Float[Tensor, "*B N"]) -> VonMisesFisher:
    """Normalised product of N von Mises-Fisher densities, with kappa loc = sum_i kappa_i mean_i; differentiable.

    Args:
        means: mean directions (*B, N, D), unit vectors, N >= 1.
        kappas: concentrations (*B, N), finite and at least 0.

    Returns:
        Distributions of batch shape (*B), in the type of `means`. If the sum is 0, the product is uniform: kappa is 0,
        and `loc` is the first mean.

    Raises:
        ValueError: for N = 0, and as `VonMisesFisher`.

    Example:
        >>> fused = fuse(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([3.0, 4.0]))
        >>> fused.loc, fused.concentration
        (tensor([0.6000, 0.8000]), tensor(5.))
    """
    if means.shape[-2] < 1:
        raise ValueError(f"fuse needs at least one distribution, got means of shape {tuple(means.shape)}")
    factors = VonMisesFisher(means, kappas)
    total = (factors.concentration.double()[..., None] * factors._unit_loc()).sum(-2)
    kappa = torch.linalg.vector_norm(total, dim=-1)
    vanishes = (kappa < angles.TINY)[..., None]
    mean = torch.where(vanishes, means[..., 0, :], total / torch.where(vanishes, 1, kappa[..., None]))
    return VonMisesFisher(mean.to(means.dtype), kappa.to(means.dtype))


def credible_cosine(kappa: Float[Tensor, " Q"], dimension: int, *, level: float = 0.95) -> Float[Tensor, " Q"]:
    """Cosine at the edge of each item's credible cap, `VonMisesFisher.credible_cap`.

    `dimension` is `Encoder.kappa_dimension`; points in the cap have cosines *above* the result.

    Source: Kirchhof, Kasneci and Oh (2023), appendix C.5.
    """
    mean = torch.eye(1, dimension, dtype=torch.float64, device=kappa.device)
    return VonMisesFisher(mean.expand(len(kappa), -1), kappa.double()).credible_cap(level)


def _check_unit(vectors: Tensor, name: str) -> None:
    length = torch.linalg.vector_norm(vectors.detach(), dim=-1)
    check_all(unit_vector.check(vectors), f"{name} must be of unit length (normalise it first)", length)
