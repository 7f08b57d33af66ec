"""Gaussians over a last layer: with a diagonal or a full covariance, or from Kronecker factors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lam.hessians import Diagonal, Ekfac, Full, Kron, LowRank, Structure
from lam.hessians.structures.base import is_negative, split_bias
from lam.posteriors.base import Noise, Posterior, Same, Sampled
from lam.posteriors.spread import AxisSpread, FullSpread, Spread, share_of, sum_along
from lam.utils.autocast import without_autocast


@dataclass(frozen=True)
class DiagonalPosterior(Posterior):
    """`Posterior` with a diagonal covariance: q(θ) = N(θ*, diag(1/(s·relu(h) + α))).

    Source: Warburg et al. (2023), equation 3. lam adds the factor s, because h is an average over pairs.
    """

    structure = Diagonal

    @cached_property
    def variance(self) -> Float[Tensor, "D F"]:
        """The variances 1/(s·relu(h) + α), with the bias as the last column, in the type of the weight."""
        return (self.scale * self.curvature.spectrum.relu() + self.alpha).reciprocal().to(self.weight.dtype)

    def clipped_variance_share(self, features: Float[Tensor, "N P"]) -> float:
        inputs = self._inputs(features.to(self.weight.dtype))
        return share_of(inputs.square().mean(0) * self.variance, self.curvature.h < 0)

    def noise(self, n_samples: int, *, generator: torch.Generator | None = None) -> Noise:
        """Standard normal noise (S, D, F); the last column is for the bias."""
        shapes = [part.shape for part in (self.weight, self.bias) if part is not None]
        weight, *bias = self._normal(n_samples, shapes, generator, self.weight.dtype)
        return [torch.cat([weight, *(part[..., None] for part in bias)], 2)]

    def layers_from(self, noise: Noise) -> Sampled:
        (noise,) = noise
        return split_bias(torch.addcmul(self.theta, noise, self.variance.sqrt()), self.bias is not None)

    def output_spread(self) -> Callable[[Tensor], Spread]:
        """Variances Σ_j φ_j² σ²_ij + σ²_bi of each output i, for variances σ² of weight and bias."""
        weight, bias = split_bias(self.variance, self.bias is not None)
        weight = weight.contiguous()
        return lambda features: AxisSpread(F.linear(features.square(), weight, bias))

    def variance_along(self, slopes: Float[Tensor, "K N D"], inputs: Float[Tensor, "K N F"]) -> Float[Tensor, " N"]:
        return sum_along(slopes, inputs, self.variance)

    def log_det_precision(self, prior_precision: float) -> float:
        parts = [part for part in split_bias(self.curvature.spectrum.relu(), self.bias is not None) if part is not None]
        return sum(float((self.scale * part + prior_precision).log().sum()) for part in parts)


@dataclass(frozen=True)
class FullPosterior(Posterior):
    """`Posterior` N(θ*, V diag(1/(s·relu(λ) + α)) Vᵀ), with eigenvalues λ and eigenvectors V of h.

    Computations are in float64.
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
        """Covariances (I ⊗ φ)ᵀ Σ (I ⊗ φ) of the outputs."""
        root = self._root.view(*self.theta.shape, -1)

        def spread(features: Tensor) -> Spread:
            seen = torch.einsum("nf,dfk->ndk", self._inputs(features).double(), root)
            return FullSpread(seen @ seen.mT)

        return spread

    def variance_along(self, slopes: Float[Tensor, "K N D"], inputs: Float[Tensor, "K N F"]) -> Float[Tensor, " N"]:
        along = torch.einsum("knd,knf->ndf", slopes, inputs.double())
        return (along.flatten(1) @ self._root).square().sum(1)

    def clipped_variance_share(self, features: Float[Tensor, "N P"]) -> float:
        inputs, root = self._inputs(features.double()), self._root.view(*self.theta.shape, -1)
        moment = inputs.T @ inputs / len(inputs)
        contributions = torch.einsum("dfk,fg,dgk->k", root, moment, root)
        return share_of(contributions, is_negative(self.curvature.spectrum))

    @cached_property
    def _root(self) -> Float[Tensor, "DF DF"]:
        """R = V diag(1/√(s·relu(λ) + α)), so that the covariance is R Rᵀ."""
        values, vectors = self.curvature.eigenbasis
        return vectors * (self.scale * values.relu() + self.alpha).rsqrt()


@dataclass(frozen=True)
class EkfacPosterior(Posterior):
    """`Posterior` N(θ*, Q diag(1/(s·relu(λ) + α)) Qᵀ), with Q = U_B ⊗ U_A and the diagonal λ of Qᵀ h Q.

    U_B and U_A hold the eigenvectors of the Kronecker factors for the layer's outputs and inputs.

    Source: George et al. (2018), eigenvalue-corrected Kronecker factors.
    """

    structure: ClassVar[type[Structure]] = Ekfac

    @cached_property
    def variance(self) -> Float[Tensor, "D F"]:
        """The variances 1/(s·relu(λ) + α) along the eigenvectors, in the type of the weight."""
        precision = self.scale * self.curvature.spectrum.relu() + self.alpha
        return precision.reciprocal().to(self.weight.dtype)

    @cached_property
    def basis(self) -> tuple[Float[Tensor, "D D"], Float[Tensor, "F F"]]:
        """U_B and U_A, in the type of the weight."""
        U_B, U_A = self.curvature.eigenbasis
        return U_B.to(self.weight.dtype), U_A.to(self.weight.dtype)

    @without_autocast()
    def noise(self, n_samples: int, *, generator: torch.Generator | None = None) -> Noise:
        """U_Bᵀ ε U_A for standard normal ε, so that the signs of eigenvectors do not change the samples."""
        (noise,), (U_B, U_A) = super().noise(n_samples, generator=generator), self.basis
        return [U_B.T @ noise @ U_A]

    @without_autocast()
    def layers_from(self, noise: Noise) -> Sampled:
        """θ* + U_B (√variance ∘ U_Bᵀ ε U_A) U_Aᵀ."""
        (noise,), (U_B, U_A) = noise, self.basis
        return self._layers(U_B @ (noise * self.variance.sqrt()) @ U_A.T)

    def output_spread(self) -> Callable[[Tensor], Spread]:
        """Covariances U_B diag_i(Σ_j (U_Aᵀφ)_j² variance_ij) U_Bᵀ of the outputs."""
        (U_B, U_A), variance = self.basis, self.variance
        return lambda features: AxisSpread((self._inputs(features) @ U_A).square() @ variance.T, U_B)

    def _network_outputs(self, noise: Noise) -> Callable[[Tensor], Tensor]:
        """Wφ + b + U_B (√variance ∘ U_Bᵀ ε U_A) (U_Aᵀφ); this order avoids products of all S layers with U_A."""
        (noise,), (U_B, U_A) = noise, self.basis
        deviations = noise * self.variance.sqrt()

        def outputs(features: Tensor) -> Tensor:
            inputs = self._inputs(features.to(self.weight.dtype)) @ U_A
            return self.outputs(features) + torch.einsum("nf,sdf->snd", inputs, deviations) @ U_B.T

        return outputs

    def variance_along(self, slopes: Float[Tensor, "K N D"], inputs: Float[Tensor, "K N F"]) -> Float[Tensor, " N"]:
        U_B, U_A = self.basis
        return sum_along(slopes @ U_B.double(), inputs @ U_A, self.variance)

    @without_autocast()
    def clipped_variance_share(self, features: Float[Tensor, "N P"]) -> float:
        along = (self._inputs(features.to(self.weight.dtype)) @ self.basis[1]).square().mean(0)
        return share_of(along.double() * self.variance.double(), is_negative(self.curvature.spectrum))


@dataclass(frozen=True)
class KronPosterior(EkfacPosterior):
    """`EkfacPosterior` with λ_ij = b_i a_j, the products of the eigenvalues of the factors h and A of a `Kron`.

    Source: Ritter, Botev and Barber (2018), with the prior of Daxberger et al. (2021), laplace-torch.
    """

    structure = Kron

    def tensors(self) -> dict[str, Tensor]:
        """Weight, bias, curvature, and eigenvalues and eigenvectors of A (slow to compute), by name."""
        return {**super().tensors(), "input_values": self.curvature.input_eigen[0], "input_vectors": self.basis[1]}

    @classmethod
    def restored(cls: type[Same], tensors: Mapping[str, Tensor], settings: Mapping[str, Any], **further: Any) -> Same:
        posterior: Any = super().restored(tensors, settings, **further)
        curvature = posterior.curvature.with_input_eigen(tensors["input_values"], tensors["input_vectors"])
        return replace(posterior, curvature=curvature)


@dataclass(frozen=True)
class LowRankPosterior(Posterior):
    """A Gaussian with precision s·relu(h) ⊗ (L Lᵀ + diag δ) + α; see `Posterior` and `lam.hessians.LowRank`.

    L and δ are `factor` and `rest` of the `LowRank`. Eigenvalue i of relu(h) is b_i. Along its eigenvector, the
    precision over the F inputs is diag(d_i) + s b_i L Lᵀ with d_i = s b_i δ + α. By Woodbury's identity, the output's
    variance there is Σ_j φ_j²/d_ij − Σ_k y_k²/(1 + σ_k) for an input φ, with y = √(s b_i) Qᵀ Lᵀ (φ/d_i). Q and σ are
    eigenvectors and eigenvalues of the (J, J) matrix s b_i Lᵀ diag(1/d_i) L. Computations are in float64.
    """

    structure = LowRank

    @property
    def elements_per_item(self) -> int:
        return 2 * self.theta.shape[1]

    def noise(self, n_samples: int, *, generator: torch.Generator | None = None) -> Noise:
        """Noise along the eigenvectors of h; see `EkfacPosterior.noise`."""
        (noise,) = self._normal(n_samples, [self.theta.shape], generator, torch.float64)
        return [self.curvature.output_eigen[1].T @ noise]

    def layers_from(self, noise: Noise) -> Sampled:
        factor, diagonal, (rotated, sigma) = self.curvature.factor, self._diagonal, self._inner
        deviations = next(iter(noise)).clone()
        for i, z in enumerate(deviations.unbind(1)):
            root = (1 + sigma[i]).sqrt()
            y = (z / diagonal[i].sqrt()) @ factor @ rotated[i] / (root * (root + 1))
            z.sub_(y @ rotated[i].T @ factor.T / diagonal[i].sqrt()).div_(diagonal[i].sqrt())
        return self._layers(self.curvature.output_eigen[1] @ deviations)

    def output_spread(self) -> Callable[[Tensor], Spread]:
        """Variances along the eigenvectors of h."""
        diagonal, (rotated, sigma), factor = self._diagonal, self._inner, self.curvature.factor
        scaled = rotated * (1 + sigma[:, None]).rsqrt()
        axes = self.curvature.output_eigen[1]

        def spread(features: Tensor) -> Spread:
            inputs = self._inputs(features).double()
            known = [((inputs / diagonal[i]) @ factor @ scaled[i]).square().sum(1) for i in range(len(scaled))]
            variances = inputs.square() @ diagonal.reciprocal().T - torch.stack(known, 1)
            return AxisSpread(variances.clamp(min=0), axes)

        return spread

    def variance_along(self, slopes: Float[Tensor, "K N D"], inputs: Float[Tensor, "K N F"]) -> Float[Tensor, " N"]:
        diagonal, (rotated, sigma), factor = self._diagonal, self._inner, self.curvature.factor
        along, inputs = slopes @ self.curvature.output_eigen[1], inputs.double()
        total = inputs.new_zeros(inputs.shape[1])
        for i, (Q, values) in enumerate(zip(rotated, sigma, strict=True)):
            z = (along[:, :, i, None] * inputs).sum(0)
            known = (z / diagonal[i]) @ factor @ Q
            total += (z.square() / diagonal[i]).sum(1) - (known.square() / (1 + values)).sum(1)
        return total.clamp(min=0)

    def log_det_precision(self, prior_precision: float) -> float:
        """Σ_i (Σ_j log d_ij + Σ_k log(1 + σ_ik))."""
        other = self._with_prior(prior_precision)
        return float(other._diagonal.log().sum() + other._inner[1].log1p().sum())

    def clipped_variance_share(self, features: Float[Tensor, "N P"]) -> float:
        along = self.output_spread()(features.to(self.weight.dtype)).variances.sum(0)  # pyright: ignore
        return share_of(along, is_negative(self.curvature.output_eigen[0]))

    @property
    def _scaled(self) -> Float[Tensor, " D"]:
        """s b_i."""
        return self.scale * self.curvature.output_eigen[0].relu()

    @property
    def _diagonal(self) -> Float[Tensor, "D F"]:
        """Entries d_ij of the diagonal part of the precision."""
        return self._scaled[:, None] * self.curvature.rest + self.alpha

    @cached_property
    def _inner(self) -> tuple[Float[Tensor, "D J J"], Float[Tensor, "D J"]]:
        """√(s b_i) Q and σ for each eigenvector i of h."""
        factor, parts = self.curvature.factor, []
        for scaled, diagonal in zip(self._scaled, self._diagonal, strict=True):
            sigma, Q = torch.linalg.eigh(scaled * (factor.T @ (factor / diagonal[:, None])))
            parts.append((scaled.sqrt() * Q, sigma.clamp(min=0)))
        rotated, sigma = zip(*parts, strict=True)
        return torch.stack(rotated), torch.stack(sigma)
