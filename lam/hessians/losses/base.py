"""`Curvature`: what the curvature of every loss offers. How outputs depend on weights: `lam.hessians.structures`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians.losses.items import BatchItems, ItemCurvature, SliceableItems
from lam.hessians.relations import Related
from lam.pairs.pairs import Pairs
from lam.pairs.relation import Scope

Same = TypeVar("Same", bound="Curvature")


class Curvature(ABC):
    """The curvature of a loss in the outputs f = r n of a network, n on the unit sphere.

    A subclass is a frozen dataclass of the loss's settings. It gives `diagonal`, and `matrices` for structures that
    are not diagonal. By default it has one term, averaged over the items.

    Attributes:
        average: whether each term is averaged over its count; else it is a plain sum.
        takes_candidates: whether items can be compared with `lam.pairs.Candidates` instead of one another.
    """

    average: bool = True
    takes_candidates: ClassVar[bool] = False

    def with_defaults(self: Same, settings: Mapping[str, Any]) -> Same:
        """The curvature with settings that are None taken from a mapping, such as a loss's settings."""
        record: Any = self
        return replace(record, **{name: settings[name] for name in self._unset if settings.get(name) is not None})

    def check_complete(self) -> None:
        """Require every setting; `with_defaults` replaces those that are None.

        Raises:
            ValueError: naming the settings that are None.
        """
        if self._unset:
            raise ValueError(f"{type(self).__name__} must have {' and '.join(self._unset)}, got None")

    @property
    def _unset(self) -> list[str]:
        record: Any = self
        return [field.name for field in fields(record) if getattr(self, field.name) is None]

    @property
    def terms(self) -> Mapping[str, float]:
        """What each of the T terms is a sum over, in the singular, and its weight in h."""
        return {"item": 1.0}

    @property
    def has_cross_terms(self) -> bool:
        """Whether second derivatives in the outputs of two items count; `cross` sums them."""
        return type(self).cross is not Curvature.cross

    def counts(self, pairs: Any) -> tuple[int, ...]:
        """The number of them that each of the T terms is averaged over."""
        return (pairs.size,)

    @abstractmethod
    def diagonal(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs) -> Float[Tensor, "N T D"]:
        """Second derivatives of each term in the outputs of each item, the other items held still.

        Args:
            n: (N, D) unit outputs.
            r: (N, 1) their lengths before normalisation.
            pairs: which of the N items match.

        Returns:
            (N, T, D) the diagonals, summed over the partners of each item.
        """

    def matrices(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs) -> Float[Tensor, "N T D D"]:
        """H_a of each item: the symmetric matrices of second derivatives that `diagonal` has the diagonals of.

        Raises:
            ValueError: for a loss that gives `diagonal` only.
        """
        raise ValueError(f'{type(self).__name__} gives a diagonal and no matrices: use structure="diag"')

    def of_batch(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Any) -> ItemCurvature:
        """H_a of each item from the pairs of a batch; arguments as `diagonal`."""
        return BatchItems(self, n, r, pairs)

    def cross(
        self, inputs: Float[Tensor, "N F"], n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Any
    ) -> Float[Tensor, "T D F"]:
        """Sum over all pairs of the second derivatives in two outputs, in the weights of a layer with these inputs.

        Raises:
            ValueError: for a curvature without cross terms.
        """
        raise ValueError(f"{type(self).__name__} has no cross terms: ask has_cross_terms first")

    def working_dtype(self, features: Tensor) -> torch.dtype:
        """The type to compute in. Cross terms cancel most of the rest: float32 would lose the digits that remain."""
        return torch.float64 if self.has_cross_terms else torch.promote_types(features.dtype, torch.float32)

    @property
    def in_blocks(self) -> bool:
        """Whether `over_dataset` forms it over all pairs of a data set, some at a time."""
        return type(self).over_dataset is not Curvature.over_dataset

    def over_dataset(
        self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], relation: Related, *, block_size: int, progress: bool
    ) -> SliceableItems:
        """H_a of each item over every pair of a data set.

        Args:
            n: (N, D) unit outputs.
            r: (N, 1) their lengths before normalisation.
            relation: which items match.
            block_size: items on a side of a block.
            progress: show a progress bar on standard error.

        Raises:
            ValueError: for a curvature that is formed within batches only.
        """
        raise ValueError(f"{type(self).__name__} is formed within batches only: ask in_blocks first")

    def check_scope(self, scope: Scope) -> None:
        """Reject pairs over a whole data set for a curvature that is formed within batches only."""
        if scope == "batch" or self.in_blocks:
            return
        fix = getattr(self, "fix", None)
        if self.has_cross_terms and fix is not None:
            raise ValueError(f'fix must be fixed with pairs="dataset", got {fix}: or use pairs="batch"')
        raise ValueError(f'pairs must be batch for {type(self).__name__}, formed within batches only, got "{scope}"')


class SummedByPartners(Curvature):
    """A curvature that `of_batch` forms from sums over the partners of each item."""

    @abstractmethod
    def of_batch(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Any) -> ItemCurvature:
        """H_a of each item from the pairs of a batch; arguments as `diagonal`."""

    def diagonal(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Any) -> Float[Tensor, "N T D"]:
        return self.of_batch(n, r, pairs).diagonal()

    def matrices(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Any) -> Float[Tensor, "N T D D"]:
        return self.of_batch(n, r, pairs).matrices()


def required(name: str, value: Any) -> Any:
    """A setting that `Curvature.with_defaults` may have left out; None is rejected."""
    if value is None:
        raise ValueError(f"{name} must be given, got None")
    return value
