"""The curvature of every item's output, whatever its partners were: pairs of a batch, or sums over a data set."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians.losses.base import Curvature
from lam.hessians.losses.contrastive import Split, own_curvature, own_matrices, own_total


class ItemCurvature(ABC):
    """H_a of N items and T terms of a loss: all that a structure sums up beside features."""

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
class OfBatch(ItemCurvature):
    """Of the pairs of a batch.

    Attributes:
        curvature: of the loss.
        n: (N, D) unit outputs.
        r: (N, 1) their lengths before normalisation.
        pairs: which of the N items match, or, where the loss takes them, the candidates that they are compared with.
    """

    curvature: Curvature
    n: Float[Tensor, "N D"]
    r: Float[Tensor, "N 1"]
    pairs: Any

    def diagonal(self) -> Float[Tensor, "N T D"]:
        """The diagonal of each H_a."""
        return self.curvature.diagonal(self.n, self.r, self.pairs)

    def matrices(self) -> Float[Tensor, "N T D D"]:
        """Each H_a."""
        return self.curvature.matrices(self.n, self.r, self.pairs)

    def total(self) -> Float[Tensor, "T D D"]:
        """Σ_a H_a."""
        return self.curvature.total(self.n, self.r, self.pairs)

    def in_basis(self, basis: Float[Tensor, "D D"]) -> Float[Tensor, "N T D"]:
        """The diagonal of each Uᵀ H_a U."""
        return self.curvature.in_basis(self.n, self.r, self.pairs, basis.to(self.n))


@dataclass(frozen=True)
class OfPartners(ItemCurvature):
    """Of the contrastive loss, from what the partners of each item add up to.

    Attributes:
        split: how loss∘network is split.
        n: (N, D) unit outputs.
        r: (N, 1) their lengths before normalisation.
        count: (T, N, 1) Σ_b t_ab.
        partners: (T, N, D) Σ_b t_ab n_b.
    """

    split: Split
    n: Float[Tensor, "N D"]
    r: Float[Tensor, "N 1"]
    count: Float[Tensor, "T N 1"]
    partners: Float[Tensor, "T N D"]

    def __getitem__(self, rows: slice) -> "OfPartners":
        """Of some of the items."""
        return OfPartners(self.split, self.n[rows], self.r[rows], self.count[:, rows], self.partners[:, rows])

    def diagonal(self) -> Float[Tensor, "N T D"]:
        """The diagonal of each H_a."""
        return torch.stack([2 * own_curvature(self.split, self.n, self.r, *term) for term in self._terms()], 1)

    def matrices(self) -> Float[Tensor, "N T D D"]:
        """Each H_a."""
        return torch.stack([2 * own_matrices(self.split, self.n, self.r, *term) for term in self._terms()], 1)

    def total(self) -> Float[Tensor, "T D D"]:
        """Σ_a H_a."""
        return torch.stack([2 * own_total(self.split, self.n, self.r, *term) for term in self._terms()])

    def in_basis(self, basis: Float[Tensor, "D D"]) -> Float[Tensor, "N T D"]:
        """The diagonal of each Uᵀ H_a U: that of rotated outputs."""
        basis = basis.to(self.n)
        return OfPartners(self.split, self.n @ basis, self.r, self.count, self.partners @ basis).diagonal()

    def _terms(self) -> "zip[tuple[Tensor, Tensor]]":
        return zip(self.count, self.partners, strict=True)
