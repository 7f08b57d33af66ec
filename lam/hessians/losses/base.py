"""What the curvature of every loss offers; one file a loss beside this one.

Nothing here knows of weights: how outputs depend on them is the part of `lam.hessians.structures`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians.losses.items import ItemCurvature, OfBatch, OfItems
from lam.hessians.relations import Related
from lam.pairs.pairs import Pairs
from lam.pairs.relation import Scope

Same = TypeVar("Same", bound="Curvature")


class Curvature(ABC):
    """The curvature of a loss in the outputs f = r n of a network, n on the unit sphere.

    A subclass is a frozen dataclass of the loss's settings, which it checks once, and has to give `diagonal`, and
    `matrices` for structures that are not diagonal; all else is that of a loss with one term, averaged over the items.

    Attributes:
        average: whether each term is averaged over its count, or is a plain sum.
    """

    average: bool = True

    takes_candidates: ClassVar[bool] = False
    """Whether items can be compared with `lam.pairs.Candidates`, in place of one another."""

    def filled(self: Same, settings: Mapping[str, Any]) -> Same:
        """The same with those of its settings that are None taken from others, such as a loss's."""
        record: Any = self
        names = [field.name for field in fields(record) if getattr(self, field.name) is None]
        return replace(record, **{name: settings[name] for name in names if settings.get(name) is not None})

    def check_filled(self) -> None:
        """Refuse settings that are still None, where they are taken from nothing any more; see `filled`.

        Raises:
            ValueError: naming them.
        """
        record: Any = self
        missing = [field.name for field in fields(record) if getattr(self, field.name) is None]
        if missing:
            raise ValueError(f"{type(self).__name__} must have {' and '.join(missing)}, got None")

    @property
    def terms(self) -> Mapping[str, float]:
        """What each of the T terms is a sum over, in the singular, and its weight in h."""
        return {"item": 1.0}

    @property
    def has_cross_terms(self) -> bool:
        """Whether outputs of two items share second derivatives that count: whether there is a `cross`."""
        return type(self).cross is not Curvature.cross

    def counts(self, pairs: Any) -> tuple[int, ...]:
        """How many of them each of the T terms is averaged over."""
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
        """H_a of each item: all second derivatives of each term in its outputs, the other items held still.

        Args, Returns: as `diagonal`, which is that of these symmetric matrices.

        Raises:
            ValueError: where the loss gives their diagonal alone.
        """
        raise ValueError(f'{type(self).__name__} gives a diagonal alone, and no matrices: use structure="diag"')

    def of_batch(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs) -> ItemCurvature:
        """H_a of each item from the pairs of a batch; arguments as those of `diagonal`."""
        return OfBatch(self, n, r, pairs)

    def cross(
        self, inputs: Float[Tensor, "N F"], n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs
    ) -> Float[Tensor, "T D F"]:
        """Sum over all pairs of what the outputs of two items share, in the weights of a layer with these inputs.

        Raises:
            ValueError: where they share nothing that counts; see `has_cross_terms`.
        """
        raise ValueError(f"{type(self).__name__} has no cross terms: ask has_cross_terms first")

    def working_dtype(self, features: Tensor) -> torch.dtype:
        """The type to compute in: where cross terms cancel most of the rest, float32 would lose its digits."""
        return torch.float64 if self.has_cross_terms else torch.promote_types(features.dtype, torch.float32)

    @property
    def in_blocks(self) -> bool:
        """Whether `over_dataset` forms it over all pairs of a data set, of which it holds some at a time."""
        return type(self).over_dataset is not Curvature.over_dataset

    def over_dataset(
        self,
        n: Float[Tensor, "N D"],
        r: Float[Tensor, "N 1"],
        relation: Related,
        *,
        block_size: int,
        progress: bool,
    ) -> OfItems:
        """H_a of each item over every pair of a data set, formed in blocks; arguments as those of `diagonal`, and

        Args:
            relation: which items match.
            block_size: how many items a block has on a side.
            progress: show a progress bar on standard error.

        Raises:
            ValueError: where the loss is formed in batches alone; see `in_blocks`.
        """
        raise ValueError(self._in_batches_alone)

    def check_scope(self, scope: Scope) -> None:
        """Refuse to form this curvature over all pairs of a data set, where only batches will do."""
        if scope == "dataset" and not self.in_blocks:
            raise ValueError(self._in_batches_alone)

    @property
    def _in_batches_alone(self) -> str:
        return f'pairs="dataset" is not for {type(self).__name__}, formed in batches alone: use pairs="batch"'
