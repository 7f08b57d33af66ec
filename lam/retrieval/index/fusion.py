"""Several images of one identity as one entry of a gallery, no surer of itself than the weights allow.

The product of densities itself is `lam.vmf.fuse`; which images show the same is the caller's to say.

Why a cap. The product of K von Mises-Fisher densities adds their concentrations, κ = ‖Σ κ_k μ_k‖ ≤ Σ κ_k, as if each
image were a measurement of its own. But κ_k comes from the posterior over the *weights*, and one weight error
moves all images at once: asking the same uncertain network again does not make it surer. Near its mean direction a
concentrated density is a Gaussian of variance 1/κ_k in each tangent direction. Let e_k be the errors of the K mean
directions, of variance 1/κ_k and, for images of one identity, of correlation ρ between any two. The fused direction is
that of f = Σ κ_k μ_k, whose error Σ κ_k e_k has the variance

    Σ_jk κ_j κ_k Cov(e_j, e_k) = (1 − ρ) Σ κ_k + ρ (Σ √κ_k)²,

and whose length is R Σκ, R = ‖Σ κ_k μ_k‖ / Σκ being the resultant of the images. The variance of the direction is the
former over the square of the latter, and the fused concentration at most its inverse,

    κ_cap = (R Σκ)² / ((1 − ρ) Σκ + ρ (Σ√κ)²).

For K images of the same κ and direction it is Kκ/(1 + (K − 1)ρ), which never exceeds κ/ρ, however many there are. For
ρ = 0 it is R times the plain product, and that itself where the images agree. For ρ = 1 it is R² (Σκ/Σ√κ)², and
(Σκ/Σ√κ)² lies between the least and the greatest κ_k: K images are as sure as one. What ρ is depends on the network;
1 is assumed unless the caller knows better, which is safe. The direction, and with it retrieval, gains from fusing
whatever the cap. R and K are kept: a small R means that the images may not show the same.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from lam.retrieval.index.checks import NORM_TOLERANCE, Ids
from lam.utils.checks import check_finite, check_length, integers
from lam.vmf.embeddings import Embeddings

_LEAST_RESULTANT = 1e-12
"""Images cancel whose resultant is at most this."""


@dataclass(frozen=True)
class Sums:
    """Sums over the images of G identities, in float64; with more images, the sums of those are added.

    Attributes:
        product: (G, D) Σ κ_k μ_k.
        mass: (G,) Σ κ_k, positive.
        roots: (G,) Σ √κ_k.
    """

    product: Float[Tensor, "G D"]
    mass: Float[Tensor, " G"]
    roots: Float[Tensor, " G"]

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.product + other.product, self.mass + other.mass, self.roots + other.roots)

    @property
    def uncapped(self) -> Float[Tensor, " G"]:
        """(G,) the κ of the plain product; 0 where the images cancel."""
        length = torch.linalg.vector_norm(self.product, dim=1)
        return length.masked_fill(length <= _LEAST_RESULTANT * self.mass, 0.0)

    @property
    def resultant(self) -> Float[Tensor, " G"]:
        """(G,) how far the images agree, R in [0, 1]."""
        return (self.uncapped / self.mass).clamp(max=1)

    def kappa(self, correlation: float = 1.0) -> Float[Tensor, " G"]:
        """(G,) the κ of the product with its cap, for ρ in [0, 1]."""
        error_variance = (1 - correlation) * self.mass + correlation * self.roots.square()
        return torch.minimum(self.uncapped, self.uncapped.square() / error_variance)

    def direction(self, otherwise: Float[Tensor, "G D"]) -> Float[Tensor, "G D"]:
        """(G, D) the mean directions, and where the images cancel, another."""
        length = self.uncapped[:, None]
        return torch.where(length == 0, otherwise, self.product / length.where(length > 0, 1))


@dataclass(frozen=True)
class FusedIdentities:
    """G identities, each fused from its images, in rising order of identity.

    Attributes:
        embeddings: one mean direction and capped κ each; `resultant` is that of the images, R in [0, 1], and `variance`
            the mean of theirs.
        identities: (G,) whose they are.
        counts: (G,) how many images each was fused from.
        uncapped: (G,) the κ of the plain product, for comparison.
    """

    embeddings: Embeddings
    identities: Int64[Tensor, " G"]
    counts: Int64[Tensor, " G"]
    uncapped: Float[Tensor, " G"]


def fuse_identities(embeddings: Embeddings, identities: Ids, *, correlation: float = 1.0) -> FusedIdentities:
    """Fuse the images of each identity by the product of their densities, with a cap on κ for what errors they share.

    mean = Σ κ_k μ_k / ‖Σ κ_k μ_k‖, κ = min(‖Σ κ_k μ_k‖, κ_cap); the cap is derived above.

    Args:
        embeddings: of N images, N ≥ 1, with κ > 0; one without a direction, a row of zeros, adds doubt alone.
        identities: (N,) which show the same.
        correlation: ρ in [0, 1] of the errors of two images of one identity.

    Returns:
        One entry an identity, in the type of the embeddings. An identity of one image keeps its direction and κ. Where
        images cancel, κ is 0 and the direction that of the identity's first image.

    Raises:
        ValueError: for no image, a mean that is no unit vector, a κ that is not positive and finite, another length, or
            a correlation outside [0, 1].

    Example:
        >>> n = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> fused = fuse_identities(Embeddings(n, torch.full((3,), 9.0), torch.ones(3), torch.ones(3)), [7, 7, 8])
        >>> fused.embeddings.kappa.tolist(), fused.uncapped.tolist(), fused.counts.tolist()
        ([9.0, 9.0], [18.0, 9.0], [2, 1])
    """
    if not 0 <= correlation <= 1:
        raise ValueError(f"correlation must lie in [0, 1], got {correlation}")
    identity = integers("identities", identities)
    check_length("identities", identity, "the embeddings", len(embeddings))
    check_finite("kappa", embeddings.kappa)
    check_finite("embeddings", embeddings.mean)
    length = torch.linalg.vector_norm(embeddings.mean.double(), dim=1)
    wrong = (((length - 1).abs() > NORM_TOLERANCE) & (length > 0)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(f"embeddings must be unit vectors, got length {float(length[row]):.6g} at index {row}")
    if len(embeddings) == 0 or not (embeddings.kappa > 0).all():
        least = float(embeddings.kappa.min()) if len(embeddings) else "no image"
        raise ValueError(f"there must be images, each with a positive kappa, got {least}")
    distinct, group, counts = identity.unique(return_inverse=True, return_counts=True)
    group = group.to(embeddings.mean.device)

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(len(distinct), *values.shape[1:], dtype=torch.float64).index_add(
            0, group, values.double()
        )

    kappa, mean = embeddings.kappa.double(), embeddings.mean.double()
    sums = Sums(total(kappa[:, None] * mean), total(kappa), total(kappa.sqrt()))
    first = group.argsort(stable=True)[(counts.cumsum(0) - counts).to(group.device)]
    dtype = embeddings.kappa.dtype
    fused = Embeddings(
        sums.direction(mean[first]).to(embeddings.mean.dtype),
        sums.kappa(correlation).to(dtype),
        sums.resultant.to(dtype),
        (total(embeddings.variance) / counts.to(group.device)).to(dtype),
        mean_samples=embeddings.mean_samples,
    )
    return FusedIdentities(fused, distinct, counts, sums.uncapped.to(dtype))
