"""`Full`: the whole GGN of a last layer."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians.losses import Curvature
from lam.hessians.losses.items import ItemCurvature
from lam.hessians.structures.base import MAX_MEMORY, Structure, eigen, is_negative, with_ones


@dataclass(frozen=True)
class Full(Structure):
    """Σ_a H_a ⊗ φ_a φ_aᵀ, exactly; weight (i, j) of the layer is row i F + j. For small layers: (D F)² numbers a term.

    Negative eigenvalues are set to zero.

    Attributes:
        sums: (T, D F, D F) of the terms.
    """

    name = "full"

    sums: Float[Tensor, "T DF DF"]

    @classmethod
    def zeros(
        cls, weight: Float[Tensor, "D P"], curvature: Curvature, *, has_bias: bool, max_memory: int = MAX_MEMORY
    ) -> "Full":
        """The sums over no batch at all, float64."""
        T, D, F = len(curvature.terms), len(weight), weight.shape[1] + has_bias
        cls.check(curvature, (D, F), cls.n_bytes(T, D, F), max_memory)
        return cls(weight.new_zeros(T, D * F, D * F, dtype=torch.float64), (0,) * T, curvature, has_bias)

    @classmethod
    def n_bytes(cls, T: int, D: int, F: int) -> int:
        """Memory that the sums of T terms take, for a layer of D outputs and F inputs."""
        return 8 * T * (D * F) ** 2

    def of_items(self, features: Float[Tensor, "N P"], items: ItemCurvature) -> "Full":
        """One matmul for every term and pair of outputs."""
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
        """Signed eigenvalues and eigenvectors, as columns."""
        return eigen(self.h)

    @property
    def clipped(self) -> float:
        """The share of eigenvalues that are negative."""
        return float(is_negative(self.eigenbasis[0]).double().mean())
