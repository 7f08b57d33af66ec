"""`Relevance`: the items of a gallery that match each query, by label or distance."""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lam.pairs.pairs import check_label_vector, check_not_missing, negative_distance, squared_distance
from lam.pairs.relation import Relation
from lam.utils.blocks import row_blocks

_BLOCK_ELEMENTS = 1 << 22


class Relevance(ABC):
    """The matches between queries and a gallery, both taken from N items.

    Attributes:
        queries: (Q,) indices of the queries.
        gallery: (G,) indices of the gallery's items; None if every item is a query and searches all other items.

    Args:
        n_items: number of items N.
        is_query: (N,) True for queries, False for the gallery; by default every item is both.

    Raises:
        ValueError: for a mask of another length or type, or without a query or a gallery.
    """

    def __init__(self, n_items: int, is_query: Bool[Tensor, " N"] | None) -> None:
        self.queries = torch.arange(n_items)
        self.gallery: Tensor | None = None
        if is_query is None:
            return
        if not isinstance(is_query, Tensor) or is_query.dtype != torch.bool:  # ~0 and ~1 are both true
            kind = is_query.dtype if isinstance(is_query, Tensor) else type(is_query).__name__
            raise ValueError(f"is_query must be a tensor of booleans, such as torch.as_tensor(flags) == 1, got {kind}")
        if len(is_query) != n_items:
            raise ValueError(f"is_query must have one value for each of {n_items} items, got {len(is_query)}")
        self.queries, self.gallery = is_query.cpu().nonzero()[:, 0], (~is_query.cpu()).nonzero()[:, 0]
        if len(self.queries) == 0 or len(self.gallery) == 0:
            raise ValueError(
                f"there must be queries and a gallery, got {len(self.queries)} queries among {n_items} items"
            )

    @property
    def candidates(self) -> Int[Tensor, " G"]:
        """Indices of the gallery's items."""
        return self.queries if self.gallery is None else self.gallery

    def of_hits(self, hits: Int[Tensor, "Q K"]) -> Bool[Tensor, "Q K"]:
        """Whether each hit, an index into the gallery, matches its query."""
        return self._match(self.queries[:, None], self.candidates[hits.cpu()])

    def labels_of_hits(self, hits: Int[Tensor, "Q K"]) -> Int[Tensor, "Q K"] | None:
        """(Q, K) labels of the hits, given as indices into the gallery; None for places."""
        return None

    def same_answer(self, one: Int[Tensor, "*B Q"], other: Int[Tensor, " Q"]) -> Bool[Tensor, "*B Q"]:
        """Whether two hits match each other, which means that they give the same answer."""
        return self._match(self.candidates[one.cpu()], self.candidates[other.cpu()])

    def of_rows(self, rows: Int[Tensor, " R"]) -> Bool[Tensor, "R G"]:
        """Whether each gallery item matches each query in `queries[rows]`; an item matches itself."""
        return self._match(self.queries[rows.cpu()][:, None], self.candidates[None])

    def count(self) -> Int[Tensor, " Q"]:
        """Number of items in the gallery that match each query, without the query itself."""
        blocks = row_blocks(len(self.queries), len(self.candidates), elements=_BLOCK_ELEMENTS)
        parts = [self.of_rows(torch.arange(block.start, block.stop)).sum(1) for block in blocks]
        return torch.cat(parts) - int(self.gallery is None)

    @abstractmethod
    def _match(self, one: Tensor, other: Tensor) -> Tensor:
        """Whether pairs of items match, from two tensors of indices that broadcast."""


class LabelRelevance(Relevance):
    """Items with the same label match.

    Args:
        labels: (N,) integers.
        is_query: see `Relevance`.

    Example:
        >>> relevance = LabelRelevance(torch.tensor([0, 0, 1]))
        >>> relevance.count().tolist(), relevance.of_hits(torch.tensor([[1], [0], [0]])).flatten().tolist()
        ([1, 1, 0], [True, True, False])
    """

    def __init__(self, labels: Int[Tensor, " N"], is_query: Bool[Tensor, " N"] | None = None) -> None:
        check_label_vector(labels)
        super().__init__(len(labels), is_query)
        self.labels = labels.cpu()

    def labels_of_hits(self, hits: Int[Tensor, "Q K"]) -> Int[Tensor, "Q K"]:
        return self.labels[self.candidates[hits.cpu()]]

    def count(self) -> Int[Tensor, " Q"]:
        labels, classes = self.labels.unique(return_inverse=True)
        sizes = torch.bincount(classes[self.candidates], minlength=len(labels))
        return sizes[classes[self.queries]] - int(self.gallery is None)

    def _match(self, one: Tensor, other: Tensor) -> Tensor:
        return self.labels[one] == self.labels[other]


class PlaceRelevance(Relevance):
    """Places match if they are near each other, whatever their compass angles.

    Args:
        positions: (N, X) coordinates in metres.
        within: greatest distance of a match, in metres.
        is_query: see `Relevance`.

    Raises:
        ValueError: for positions that are not finite, or a distance that is not positive.

    Example:
        >>> PlaceRelevance(torch.tensor([[0.0, 0.0], [3.0, 4.0], [90.0, 0.0]]), 25.0).count().tolist()
        [1, 1, 0]
    """

    def __init__(self, positions: Tensor, within: float, is_query: Bool[Tensor, " N"] | None = None) -> None:
        negative_distance(positions, within, None)
        super().__init__(len(positions), is_query)
        self.positions, self.within = positions.double().cpu(), within

    def _match(self, one: Tensor, other: Tensor) -> Tensor:
        return squared_distance(self.positions[one], self.positions[other]) <= self.within**2


def relevance_of(
    relation: Relation,
    targets: Tensor,
    *,
    is_query: Bool[Tensor, " N"] | None = None,
    relevant_within: float | None = None,
) -> Relevance:
    """`LabelRelevance`, or for a relation of places `PlaceRelevance`.

    Args:
        relation: rule for matching items.
        targets: (N,) labels or (N, X) positions in metres.
        is_query: (N,) True for queries, False for the gallery.
        relevant_within: greatest distance of matching places, in metres; by default `relation.positive_within`.

    Raises:
        ValueError: for positions with a relation of labels.
    """
    if relation.positive_within is None:
        check_label_vector(targets)
        check_not_missing(targets)
        return LabelRelevance(targets, is_query)
    within = relation.positive_within if relevant_within is None else relevant_within
    return PlaceRelevance(relation.positions(targets), within, is_query)
