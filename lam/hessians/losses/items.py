"""The curvature in the output of every item: from the pairs of a batch or of a data set."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


class ItemCurvature(ABC):
    """H_a of N items and T terms of a loss: all that a structure needs besides features."""

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
        """The diagonal of each Uᵀ H_a U."""


@dataclass(frozen=True)
class BatchItems(ItemCurvature):
    """From a curvature that gives diagonals and matrices only."""

    curvature: Any
    n: Float[Tensor, "N D"]  # unit outputs
    r: Float[Tensor, "N 1"]  # their lengths before normalisation
    pairs: Any  # of the items, or the candidates that they are compared with

    def diagonal(self) -> Float[Tensor, "N T D"]:
        return self.curvature.diagonal(self.n, self.r, self.pairs)

    def matrices(self) -> Float[Tensor, "N T D D"]:
        return self.curvature.matrices(self.n, self.r, self.pairs)

    def total(self) -> Float[Tensor, "T D D"]:
        return self.matrices().sum(0)

    def in_basis(self, basis: Float[Tensor, "D D"]) -> Float[Tensor, "N T D"]:
        basis = basis.to(self.n)
        return torch.einsum("di,atde,ei->ati", basis, self.matrices(), basis)


class SliceableItems(ItemCurvature):
    """The curvature of items that can be taken some at a time."""

    n: Float[Tensor, "N D"]  # unit outputs of all items
    cost: str | None = None  # what forming it takes, in words, if it takes long

    @abstractmethod
    def __getitem__(self, rows: slice) -> "SliceableItems":
        """Of some of the items."""
