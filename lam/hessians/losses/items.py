"""`ItemCurvature`: the curvature with respect to every item's output, from the pairs of a batch or a data set."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


class ItemCurvature(ABC):
    """H_a, the curvature with respect to the output of item a, for N items and T terms."""

    @abstractmethod
    def diagonal(self) -> Float[Tensor, "N T D"]:
        """The diagonal of each H_a."""

    @abstractmethod
    def matrices(self) -> Float[Tensor, "N T D D"]:
        """Each H_a."""

    @abstractmethod
    def total(self) -> Float[Tensor, "T D D"]:
        """Σ_a H_a."""

    @abstractmethod
    def in_basis(self, basis: Float[Tensor, "D D"]) -> Float[Tensor, "N T D"]:
        """The diagonal of each Uᵀ H_a U, with the basis U."""


@dataclass(frozen=True)
class BatchItems(ItemCurvature):
    """H_a from a curvature that implements only `diagonal` and `matrices`."""

    curvature: Any
    n: Float[Tensor, "N D"]  # unit outputs
    r: Float[Tensor, "N 1"]  # their lengths before normalisation
    pairs: Any  # pairs of the items, or their candidates

    def diagonal(self) -> Float[Tensor, "N T D"]:
        return self._checked("diagonal", self.curvature.diagonal(self.n, self.r, self.pairs))

    def matrices(self) -> Float[Tensor, "N T D D"]:
        return self._checked("matrices", self.curvature.matrices(self.n, self.r, self.pairs))

    def total(self) -> Float[Tensor, "T D D"]:
        return self.matrices().sum(0)

    def in_basis(self, basis: Float[Tensor, "D D"]) -> Float[Tensor, "N T D"]:
        basis = basis.to(self.n)
        return torch.einsum("di,atde,ei->ati", basis, self.matrices(), basis)

    def _checked(self, method: str, h: Any) -> Tensor:
        """`h`, the result of a method, after a check of its shape and its number of terms."""
        (N, D), name = self.n.shape, type(self.curvature).__name__
        rest = (D,) if method == "diagonal" else (D, D)
        if not isinstance(h, Tensor) or h.ndim != 2 + len(rest) or (len(h), *h.shape[2:]) != (N, *rest):
            actual = tuple(h.shape) if isinstance(h, Tensor) else type(h).__name__
            sizes = ", ".join(map(str, (N, "T", *rest)))
            raise ValueError(f"{name}.{method} must return a tensor of shape ({sizes}), T terms, got {actual}")
        if h.shape[1] != (T := len(self.curvature.terms)):
            raise ValueError(
                f"{name} gives {h.shape[1]} terms, but its property `terms` names {T}: name each in `terms`"
            )
        return h


class SliceableItems(ItemCurvature):
    """H_a of items that can be sliced."""

    n: Float[Tensor, "N D"]  # unit outputs of all items
    cost: str | None = None  # the number of pairs and the memory as text, if the computation takes long

    @abstractmethod
    def __getitem__(self, rows: slice) -> "SliceableItems":
        """H_a of some of the items."""
