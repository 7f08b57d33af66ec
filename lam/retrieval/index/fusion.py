"""Several images of one identity fused into one gallery entry, with a cap on κ.

The product of K von Mises-Fisher densities with mean directions μ_k and concentrations κ_k (`lam.vmf.fuse`) has the
concentration ‖Σ κ_k μ_k‖ ≤ Σ κ_k, as if the images were independent measurements. But κ_k comes from the posterior over
the *weights*, and an error of the weights moves all images at once. Near its mean direction, a concentrated density is
a Gaussian with variance 1/κ_k in each tangent direction. Let e_k be the error of μ_k, with variance 1/κ_k, and with
correlation ρ between two images of one identity. The fused direction is the direction of f = Σ κ_k μ_k. The error of f
is Σ κ_k e_k, with variance

    Σ_jk κ_j κ_k Cov(e_j, e_k) = (1 − ρ) Σ κ_k + ρ (Σ √κ_k)².

The length of f is R Σκ, where R = ‖Σ κ_k μ_k‖ / Σκ is the resultant of the images. The variance of the fused direction
is the variance of f, divided by the squared length of f. The inverse of this variance caps the fused concentration:

    κ_cap = (R Σκ)² / ((1 − ρ) Σκ + ρ (Σ√κ)²).

For K images with the same κ and direction, κ_cap is Kκ/(1 + (K − 1)ρ), at most κ/ρ for any K. For ρ = 1, κ_cap is
R² (Σκ/Σ√κ)², and (Σκ/Σ√κ)² lies between the least and the greatest κ_k: K images are as certain as one. ρ depends on
the network; the default of 1 is safe. A small R means that the images may not show the same identity.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from lam.retrieval.index.checks import Ids, check_unit_lengths
from lam.utils.checks import check_finite, check_length, integers
from lam.vmf.embeddings import Embeddings

_LEAST_RESULTANT = 1e-12  # if the resultant is smaller, the images count as cancelling each other


@dataclass(frozen=True)
class Sums:
    """Sums over the images of G identities, in float64; `+` adds the sums of further images.

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
        """(G,) the κ of the plain product; 0 if the images cancel each other."""
        length = torch.linalg.vector_norm(self.product, dim=1)
        return length.masked_fill(length <= _LEAST_RESULTANT * self.mass, 0.0)

    @property
    def resultant(self) -> Float[Tensor, " G"]:
        """(G,) agreement R of the images, in [0, 1]."""
        return (self.uncapped / self.mass).clamp(max=1)

    def kappa(self, correlation: float = 1.0) -> Float[Tensor, " G"]:
        """(G,) the capped κ of the product, for ρ in [0, 1]."""
        error_variance = (1 - correlation) * self.mass + correlation * self.roots.square()
        return torch.minimum(self.uncapped, self.uncapped.square() / error_variance)

    def direction(self, otherwise: Float[Tensor, "G D"]) -> Float[Tensor, "G D"]:
        """(G, D) the mean directions; `otherwise` if the images cancel each other."""
        length = self.uncapped[:, None]
        return torch.where(length == 0, otherwise, self.product / length.where(length > 0, 1))


@dataclass(frozen=True)
class FusedIdentities:
    """G identities, each fused from its images, in rising order of identity.

    Attributes:
        embeddings: for each identity, the mean direction, the capped κ, the resultant R and the images' mean variance.
        identities: (G,) the identities.
        counts: (G,) number of images of each identity.
        uncapped: (G,) the κ of the plain product, for comparison.
    """

    embeddings: Embeddings
    identities: Int64[Tensor, " G"]
    counts: Int64[Tensor, " G"]
    uncapped: Float[Tensor, " G"]


def fuse_identities(embeddings: Embeddings, identities: Ids, *, correlation: float = 1.0) -> FusedIdentities:
    """Fuse the images of each identity by the product of their densities, with a cap on κ for shared errors.

    mean = Σ κ_k μ_k / ‖Σ κ_k μ_k‖, κ = min(‖Σ κ_k μ_k‖, κ_cap); the module's docstring derives κ_cap.

    Args:
        embeddings: N ≥ 1 images with κ > 0. An image whose mean is zero only lowers the identity's κ.
        identities: (N,) the identity of each image.
        correlation: correlation ρ in [0, 1] between the errors of two images of one identity.

    Returns:
        One entry for each identity, in the precision of the embeddings. A single image keeps its direction and κ. If
        the images of an identity cancel each other, κ is 0 and the direction is the first image's.

    Raises:
        ValueError: for no image, a mean of another length than 1 or 0, or a wrong κ, correlation or count of ids.

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
    check_unit_lengths(length, exempt=length == 0)
    if len(embeddings) == 0 or not (embeddings.kappa > 0).all():
        least = float(embeddings.kappa.min()) if len(embeddings) else "no image"
        raise ValueError(f"embeddings must hold images, each with a positive kappa, got {least}")
    distinct, group, counts = identity.unique(return_inverse=True, return_counts=True)
    group = group.to(embeddings.mean.device)

    def total(values: Tensor) -> Tensor:
        zeros = values.new_zeros(len(distinct), *values.shape[1:], dtype=torch.float64)
        return zeros.index_add(0, group, values.double())

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
