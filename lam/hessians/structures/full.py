"""`Full`: the whole GGN of a last layer."""

from dataclasses import dataclass, replace
from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from lam.hessians.losses.base import ItemCurvature
from lam.hessians.structures.base import Shapes, Structure, eigen, share_negative, with_ones


@dataclass(frozen=True)
class Full(Structure):
    """The exact matrix Σ_a H_a ⊗ φ_a φ_aᵀ; weight (i, j) of the layer has the index i F + j.

    `Structure` defines H_a and φ_a. The posterior takes negative eigenvalues of the matrix as zero.

    Attributes:
        sums: (T, D F, D F) the sum for each of the T terms of the loss.
    """

    name = "full"

    sums: Float[Tensor, "T DF DF"]

    @classmethod
    def shapes(cls, T: int, D: int, F: int) -> Shapes:
        return {"sums": (T, D * F, D * F)}

    def of_items(self, features: Float[Tensor, "N P"], items: ItemCurvature) -> "Full":
        inputs = with_ones(features, self.has_bias)
        matrices, F = items.matrices().to(inputs), inputs.shape[1]
        n_terms, D = matrices.shape[1:3]
        sums = inputs.new_empty(n_terms, D, F, D, F)
        for term in range(n_terms):
            for i in range(D):
                for k in range(i, D):
                    block = (inputs * matrices[:, term, i, k, None]).T @ inputs
                    sums[term, i, :, k] = sums[term, k, :, i] = block
        return replace(self, sums=sums.reshape(self.sums.shape))

    @cached_property
    def eigenbasis(self) -> tuple[Float[Tensor, " DF"], Float[Tensor, "DF DF"]]:
        """Eigenvalues of h, including negative values, and its eigenvectors as columns."""
        return eigen(self.h)

    @property
    def level(self) -> float:
        return float(self.eigenbasis[0].relu().mean())

    @property
    def clipped(self) -> float:
        return share_negative(self.eigenbasis[0])
