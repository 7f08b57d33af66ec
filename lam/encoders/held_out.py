"""`HeldOut`: batches that nothing was fitted to, and what makes an answer right."""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from lam.encoders.batches import Batch
from lam.pairs.relation import Relation
from lam.pairs.relevance import Relevance, relevance_of


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out items, to evaluate, tune or learn on.

    Attributes:
        batches: (inputs, labels) or, for places, (inputs, positions).
        is_query: (N,) which items are queries; the others are the gallery. By default every item is both.
        relevant_within: metres to a right answer, for places; by default the distance of a positive pair in training.
        soft_labels: (N, C) how often people gave each class to each item.

    Example:
        >>> import torch
        >>> items, labels = torch.randn(4, 8), torch.tensor([0, 0, 1, 1])
        >>> held_out = HeldOut([(items, labels)], is_query=torch.tensor([True, False, True, False]))
        >>> held_out.relevance(Relation(), labels).count()
        tensor([1, 1])
    """

    batches: Iterable[Batch]
    is_query: Bool[Tensor, " N"] | None = None
    relevant_within: float | None = None
    soft_labels: Float[Tensor, "N C"] | None = None

    @classmethod
    def of(cls, items: "HeldOut | Iterable[Batch]") -> "HeldOut":
        """Wrap batches, unless they are wrapped already."""
        return items if isinstance(items, HeldOut) else cls(items)

    def relevance(self, relation: Relation, targets: Tensor) -> Relevance:
        """Which items match each query.

        Raises:
            ValueError: as `lam.pairs.relevance.relevance_of`.
        """
        return relevance_of(relation, targets, is_query=self.is_query, relevant_within=self.relevant_within)
