"""`Diagonal`: the diagonal GGN of a last layer."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians.losses import Curvature
from lam.hessians.losses.items import ItemCurvature
from lam.hessians.structures.base import MAX_MEMORY, Structure

BLOCK = 1 << 16
"""How many squares of features are held at once."""


@dataclass(frozen=True)
class Diagonal(Structure):
    """The diagonal GGN: sums (T, D, F) of H_a,ii φ_aj², and the cross terms where the loss has any; see `Structure`."""

    name = "diag"
    takes_cross_terms = True

    sums: Float[Tensor, "T D F"]

    @classmethod
    def zeros(
        cls, weight: Float[Tensor, "D P"], curvature: Curvature, *, has_bias: bool, max_memory: int = MAX_MEMORY
    ) -> "Diagonal":
        """The sums over no batch at all, float64."""
        T, D, F = len(curvature.terms), len(weight), weight.shape[1] + has_bias
        cls.check(curvature, (D, F), cls.n_bytes(T, D, F), max_memory)
        return cls(weight.new_zeros(T, D, F, dtype=torch.float64), (0,) * T, curvature, has_bias)

    @classmethod
    def n_bytes(cls, T: int, D: int, F: int) -> int:
        """Memory that the sums of T terms take, for a layer of D outputs and F inputs."""
        return 8 * T * D * F

    @torch.no_grad()
    def of_items(self, features: Float[Tensor, "N P"], items: ItemCurvature) -> "Diagonal":
        """Σ_a H_a,ii φ_aj²: one matmul; over some features at a time where their squares are more than the result."""
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
        """The signed h of the weights."""
        h = self.h
        return h[:, :-1] if self.has_bias else h

    @property
    def bias(self) -> Float[Tensor, " D"] | None:
        """The signed h of the bias, or None."""
        return self.h[:, -1] if self.has_bias else None

    @property
    def clipped(self) -> float:
        """The share of entries that `relu` sets to zero because they are negative."""
        return float((self.h < 0).double().mean())

    def relu(self) -> tuple[Float[Tensor, "D P"], Float[Tensor, " D"] | None]:
        """h of weights and bias with negative entries set to zero: what a precision uses."""
        bias = self.bias
        return self.weight.relu(), None if bias is None else bias.relu()
