"""Exact GGN of a last layer: `Diagonal`, its diagonal, and `Full`, the whole matrix."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians.losses.base import ItemCurvature
from lam.hessians.structures.base import Shapes, Structure, eigen, share_negative, with_ones

BLOCK = 1 << 16
"""Number of squared features in memory at once."""


@dataclass(frozen=True)
class Diagonal(Structure):
    """The diagonal GGN: sums (T, D, F) of H_a,ii φ_aj², plus any cross terms of the loss; see `Structure`."""

    name = "diag"
    takes_cross_terms = True

    sums: Float[Tensor, "T D F"]

    @classmethod
    def shapes(cls, T: int, D: int, F: int) -> Shapes:
        return {"sums": (T, D, F)}

    @torch.no_grad()
    def of_items(self, features: Float[Tensor, "N P"], items: ItemCurvature) -> "Diagonal":
        """Σ_a H_a,ii φ_aj² by one matmul, or by blocks of features if the squares outnumber the results."""
        (N, P), own = features.shape, items.diagonal().flatten(1).to(features).T
        sums = features.new_empty(len(own), P + self.has_bias)
        size = max(1, BLOCK // N if len(own) < N else P)
        for start in range(0, P, size):
            some = slice(start, min(start + size, P))
            torch.mm(own, features[:, some].square(), out=sums[:, some])
        if self.has_bias:
            torch.sum(own, 1, out=sums[:, P])
        return replace(self, sums=sums.view_as(self.sums))

    @property
    def weight(self) -> Float[Tensor, "D P"]:
        """h of the weights, including negative entries."""
        h = self.h
        return h[:, :-1] if self.has_bias else h

    @property
    def bias(self) -> Float[Tensor, " D"] | None:
        """h of the bias, including negative entries; None without a bias."""
        return self.h[:, -1] if self.has_bias else None

    @property
    def clipped(self) -> float:
        return float((self.h < 0).double().mean())

    @property
    def level(self) -> float:
        return float(self.h.double().relu().mean())

    def relu(self) -> tuple[Float[Tensor, "D P"], Float[Tensor, " D"] | None]:
        """h of weights and bias with negative entries set to zero, for the posterior precision."""
        bias = self.bias
        return self.weight.relu(), None if bias is None else bias.relu()


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
