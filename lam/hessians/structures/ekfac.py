"""`Ekfac`: the diagonal of a last layer's GGN in the eigenbasis of its Kronecker factors."""

from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from lam.hessians.losses.items import ItemCurvature
from lam.hessians.structures.base import MAX_MEMORY, Shapes, Structure, share_negative, with_ones
from lam.hessians.structures.kron import Kron


@dataclass(frozen=True)
class Ekfac(Structure):
    """Exact diagonal of (U_B ⊗ U_A)ᵀ (Σ_a H_a ⊗ φ_a φ_aᵀ) (U_B ⊗ U_A), with the eigenvectors U_B and U_A of a `Kron`.

    `Structure` defines H_a and φ_a. A fit takes two passes over the data, one for the basis and one for the diagonal.
    Only sums in the same basis can be added and subtracted; two fits have different bases. In the posterior precision,
    negative entries count as zero.

    Source: George et al. (2018), eigenvalue-corrected Kronecker factors.

    Attributes:
        sums: (T, D, F) Σ_a (U_Bᵀ H_a U_B)_ii (U_Aᵀ φ_a)_j².
        output_basis: (D, D) U_B, orthonormal columns.
        input_basis: (F, F) U_A, orthonormal columns.
    """

    name = "ekfac"
    shared_fields = ("output_basis", "input_basis")
    shared_hint = 'each fit has a basis of its own, so fit with structure="kron", or accumulate both from one `empty()`'

    sums: Float[Tensor, "T D F"]
    output_basis: Float[Tensor, "D D"]
    input_basis: Float[Tensor, "F F"]

    @classmethod
    def in_basis_of(cls, kron: Kron, *, max_memory: int = MAX_MEMORY) -> "Ekfac":
        """An `Ekfac` with all sums zero, in float64, in the eigenbasis of a fitted `Kron`."""
        U_B, U_A = kron.eigenbasis
        T, D, F = len(kron.curvature.terms), len(U_B), len(U_A)
        cls.check(kron.curvature, (D, F), cls.n_bytes(T, D, F), max_memory)
        return cls(U_A.new_zeros(T, D, F), (0,) * T, kron.curvature, kron.has_bias, U_B, U_A)

    @classmethod
    def shapes(cls, T: int, D: int, F: int) -> Shapes:
        return {"sums": (T, D, F)}

    @classmethod
    def n_bytes(cls, T: int, D: int, F: int) -> int:
        """Bytes that the sums of T terms and the two bases take."""
        return super().n_bytes(T, D, F) + 8 * (D * D + F * F)

    def of_items(self, features: Float[Tensor, "N P"], items: ItemCurvature) -> "Ekfac":
        inputs = with_ones(features, self.has_bias)
        rotated = (inputs @ self.input_basis.to(inputs)).square_()
        sums = items.in_basis(self.output_basis).flatten(1).to(inputs).T @ rotated
        return replace(self, sums=sums.view_as(self.sums))

    @property
    def eigenbasis(self) -> tuple[Float[Tensor, "D D"], Float[Tensor, "F F"]]:
        """U_B and U_A."""
        return self.output_basis, self.input_basis

    @property
    def spectrum(self) -> Float[Tensor, "D F"]:
        """The diagonal of the GGN in `eigenbasis`, including negative entries."""
        return self.h

    @property
    def level(self) -> float:
        return float(self.spectrum.relu().mean())

    @property
    def clipped(self) -> float:
        return share_negative(self.h)
