"""`FullPosterior`: a Gaussian with a full covariance matrix over the weights of the last layer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians import Full
from lam.hessians.structures.base import is_negative
from lam.posteriors.base import Noise, Posterior, Sampled
from lam.posteriors.spread import FullSpread, Spread, share_of


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
