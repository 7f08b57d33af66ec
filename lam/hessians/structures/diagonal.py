"""`Diagonal`: the diagonal GGN of a last layer."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians.losses.base import ItemCurvature
from lam.hessians.structures.base import Shapes, Structure

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
