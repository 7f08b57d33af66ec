"""`DiagonalPosterior`: a Gaussian with diagonal covariance over the weights of the last layer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lam.hessians import Diagonal
from lam.posteriors.base import Noise, Posterior, Sampled
from lam.posteriors.spread import AxisSpread, Spread, share_of, sum_along


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
