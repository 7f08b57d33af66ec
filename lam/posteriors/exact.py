"""Gaussians over a last layer, with a diagonal or a full covariance: `DiagonalPosterior` and `FullPosterior`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lam.hessians import Diagonal, Full
from lam.hessians.structures.base import is_negative
from lam.posteriors.base import Noise, Posterior, Sampled
from lam.posteriors.spread import AxisSpread, FullSpread, Spread, share_of, sum_along


@dataclass(frozen=True)
class DiagonalPosterior(Posterior):
    """q(θ) = N(θ*, diag(1/(s·relu(h) + α))) over weight and bias of a linear layer; see `Posterior`.

    Source: Warburg et al. (2023), equation 3. lam adds the factor s, because h is an average over pairs.
    """

    structure = Diagonal

    @cached_property
    def variance(self) -> tuple[Float[Tensor, "D P"], Float[Tensor, " D"] | None]:
        """The variances 1/(s·relu(h) + α) of weight and bias, in the type of the weight."""
        weight, bias = self.curvature.relu()
        return self._variance(weight), None if bias is None else self._variance(bias)

    def clipped_variance_share(self, features: Float[Tensor, "N P"]) -> float:
        h, variance = self.curvature.weight, self.variance[0]
        return share_of(features.to(variance.dtype).square().mean(0) * variance, h < 0)

    def noise(self, n_samples: int, *, generator: torch.Generator | None = None) -> Noise:
        shapes = [part.shape for part in (self.weight, self.bias) if part is not None]
        return list(self._normal(n_samples, shapes, generator, self.weight.dtype))

    def layers_from(self, noise: Noise) -> Sampled:
        (first, *rest), (weight, bias) = noise, self.variance
        weights = torch.addcmul(self.weight, first, weight.sqrt())
        return weights, None if self.bias is None else torch.addcmul(self.bias, *rest, bias.sqrt())  # pyright: ignore

    def output_spread(self) -> Callable[[Tensor], Spread]:
        """Variances Σ_j φ_j² σ²_ij + σ²_bi of each output i, for variances σ² of weight and bias."""
        weight, bias = self.variance
        return lambda features: AxisSpread(F.linear(features.square(), weight, bias))

    def variance_along(self, slopes: Float[Tensor, "K N D"], inputs: Float[Tensor, "K N F"]) -> Float[Tensor, " N"]:
        weight, bias = self.variance
        return sum_along(slopes, inputs, weight if bias is None else torch.cat([weight, bias[:, None]], 1))

    def log_det_precision(self, prior_precision: float) -> float:
        parts = [part.double() for part in self.curvature.relu() if part is not None]
        return sum(float((self.scale * part + prior_precision).log().sum()) for part in parts)

    def _variance(self, h: Tensor) -> Tensor:
        return (self.scale * h.double() + self.alpha).reciprocal().to(self.weight.dtype)


@dataclass(frozen=True)
class FullPosterior(Posterior):
    """q(θ) = N(θ*, V diag(1/(s·relu(λ) + α)) Vᵀ), with eigenvalues λ and eigenvectors V of h; see `Posterior`.

    Computations are in float64, because the variance of an output sums terms of very different sizes.
    """

    structure = Full

    @property
    def elements_per_item(self) -> int:
        return len(self.weight) * self.theta.numel()

    def noise(self, n_samples: int, *, generator: torch.Generator | None = None) -> Noise:
        return list(self._normal(n_samples, [self.theta.shape], generator, torch.float64))

    def layers_from(self, noise: Noise) -> Sampled:
        (noise,) = noise
        return self._layers((noise.flatten(1) @ self._root.T).view_as(noise))

    def output_spread(self) -> Callable[[Tensor], Spread]:
        """Covariances (I ⊗ φ)ᵀ Σ (I ⊗ φ)."""
        root = self._root.view(*self.theta.shape, -1)

        def spread(features: Tensor) -> Spread:
            seen = torch.einsum("nf,dfk->ndk", self._inputs(features).double(), root)
            return FullSpread(seen @ seen.mT)

        return spread

    def variance_along(self, slopes: Float[Tensor, "K N D"], inputs: Float[Tensor, "K N F"]) -> Float[Tensor, " N"]:
        along = torch.einsum("knd,knf->ndf", slopes, inputs.double())
        return (along.flatten(1) @ self._root).square().sum(1)

    def log_det_precision(self, prior_precision: float) -> float:
        return float((self.scale * self.curvature.eigenbasis[0].relu() + prior_precision).log().sum())

    def clipped_variance_share(self, features: Float[Tensor, "N P"]) -> float:
        inputs, root = self._inputs(features.double()), self._root.view(*self.theta.shape, -1)
        moment = inputs.T @ inputs / len(inputs)
        contributions = torch.einsum("dfk,fg,dgk->k", root, moment, root)
        return share_of(contributions, is_negative(self.curvature.eigenbasis[0]))

    @cached_property
    def _root(self) -> Float[Tensor, "DF DF"]:
        """R = V diag(1/√(s·relu(λ) + α)), so that the covariance is R Rᵀ."""
        values, vectors = self.curvature.eigenbasis
        return vectors * (self.scale * values.relu() + self.alpha).rsqrt()
