"""`Curvature` of a loss with respect to a network's outputs, and `ItemCurvature`, its value for each item."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians.relations import Related
from lam.pairs.pairs import Pairs
from lam.pairs.relation import Scope
from lam.utils.registry import check_class


class ItemCurvature(ABC):
    """H_a, the curvature with respect to the output of item a, for N items and T terms."""

    @abstractmethod
    def diagonal(self) -> Float[Tensor, "N T D"]:
        """The diagonal of each H_a."""

    @abstractmethod
    def matrices(self) -> Float[Tensor, "N T D D"]:
        """Each H_a."""

    def total(self) -> Float[Tensor, "T D D"]:
        """Σ_a H_a."""
        return self.matrices().sum(0)

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

    def in_basis(self, basis: Float[Tensor, "D D"]) -> Float[Tensor, "N T D"]:
        basis = basis.to(self.n)
        return torch.einsum("di,atde,ei->ati", basis, self.matrices(), basis)

    def _checked(self, method: str, h: Any) -> Tensor:
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


Same = TypeVar("Same", bound="Curvature")


class Curvature(ABC):
    """Curvature of a loss with respect to a network's outputs f = r n, with lengths r and directions n.

    A subclass is a frozen dataclass of the loss's settings. It implements `diagonal`. All structures except `Diagonal`
    also need `matrices`. The total curvature h is a weighted sum of T terms; by default, one term sums over all items.

    Attributes:
        average: whether each term is divided by its count; if not, each term is a plain sum.
        takes_candidates: whether the loss can compare items with `lam.pairs.Candidates` instead of each other.
    """

    average: bool = True
    takes_candidates: ClassVar[bool] = False

    def with_defaults(self: Same, settings: Mapping[str, Any]) -> Same:
        """The curvature with values from `settings`, such as a loss's settings, for its settings that are None."""
        record: Any = self
        return replace(record, **{name: settings[name] for name in self.unset if settings.get(name) is not None})

    def check_complete(self) -> None:
        """Reject settings that are None; the error names them."""
        if self.unset:
            raise ValueError(f"{type(self).__name__} must have {' and '.join(self.unset)}, got None")

    def non_negative(self: Same) -> Iterable[Same]:
        """Other curvatures of the same loss, never negative; empty by default."""
        return ()

    @property
    def unset(self) -> list[str]:
        """Names of the settings that are None."""
        check_class("curvature", type(self), Curvature, record=True)
        record: Any = self
        return [field.name for field in fields(record) if getattr(self, field.name) is None]

    @property
    def terms(self) -> Mapping[str, float]:
        """Weight of each term in h. The key names one summand of the term, such as "item"."""
        return {"item": 1.0}

    @property
    def has_cross_terms(self) -> bool:
        """Whether h has cross terms: derivatives with respect to the outputs of two different items; see `cross`."""
        return type(self).cross is not Curvature.cross

    @property
    def has_matrices(self) -> bool:
        """Whether the class implements `matrices`, which all structures except `Diagonal` need."""
        return type(self).matrices is not Curvature.matrices

    def counts(self, pairs: Any) -> tuple[int, ...]:
        """Number of summands of each term, the divisor of its average."""
        return (pairs.size,)

    @abstractmethod
    def diagonal(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs) -> Float[Tensor, "N T D"]:
        """Second derivatives of each term with respect to the outputs of each item, with the other items fixed.

        Args:
            n: (N, D) unit outputs.
            r: (N, 1) their lengths before normalisation.
            pairs: pairs of the N items.

        Returns:
            (N, T, D) diagonals, summed over the partners of each item.
        """

    def matrices(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs) -> Float[Tensor, "N T D D"]:
        """H_a of each item and term: symmetric matrices of second derivatives. `diagonal` returns their diagonals."""
        raise ValueError(
            f'{type(self).__name__} has a diagonal, but no matrices: use structure="diag" and the last layer alone'
        )

    def of_batch(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Any) -> ItemCurvature:
        """H_a of each item from the pairs of a batch; arguments as `diagonal`."""
        return BatchItems(self, n, r, pairs)

    def cross(
        self, inputs: Float[Tensor, "N F"], n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Any
    ) -> Float[Tensor, "T D F"]:
        """Diagonal of the cross terms in the weights of a layer with these inputs, summed over all pairs."""
        raise ValueError(f"{type(self).__name__} has no cross terms: check has_cross_terms first")

    def working_dtype(self, features: Tensor) -> torch.dtype:
        """Type of the computation: float64 with cross terms, because they cancel most of the other terms."""
        return torch.float64 if self.has_cross_terms else torch.promote_types(features.dtype, torch.float32)

    @property
    def in_blocks(self) -> bool:
        """Whether `over_dataset` is implemented: the curvature over all pairs of a data set, in blocks."""
        return type(self).over_dataset is not Curvature.over_dataset

    def over_dataset(
        self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], relation: Related, *, block_size: int, progress: bool
    ) -> SliceableItems:
        """Curvature with respect to the output of each item, over every pair of a data set.

        Args:
            n, r: as for `diagonal`.
            relation: the pairs of the data set.
            block_size: rows and columns of a block of similarities.
            progress: show a progress bar on standard error.

        Raises:
            ValueError: for a curvature that is not `in_blocks`.
        """
        raise ValueError(f"{type(self).__name__} is formed only within batches: check in_blocks first")

    def check_scope(self, scope: Scope) -> None:
        """Reject pairs over a whole data set for a curvature without `in_blocks`."""
        if scope == "dataset" and not self.in_blocks:
            raise ValueError(f'pairs must be batch for {self}, got "dataset": give fix="fixed", or another curvature')


class SummedByPartners(Curvature):
    """A curvature that `of_batch` of a subclass computes from sums over the partners of each item."""

    def diagonal(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Any) -> Float[Tensor, "N T D"]:
        return self.of_batch(n, r, pairs).diagonal()

    def matrices(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Any) -> Float[Tensor, "N T D D"]:
        return self.of_batch(n, r, pairs).matrices()


def required(name: str, value: Any) -> Any:
    """The value of a setting; None is rejected, because `Curvature.with_defaults` should have replaced it."""
    if value is None:
        raise ValueError(f"{name} must be given, got None")
    return value
