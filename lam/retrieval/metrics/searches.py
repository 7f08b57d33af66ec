"""Searches of a gallery with and without the matching items, for open-set metrics and calibration.

A mated search has a match in the gallery, a non-mated search does not. One pass gives the results of both.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from lam.retrieval.index.exact import check_same_dimension
from lam.retrieval.metrics.hit_scores import N_HITS
from lam.utils.blocks import row_blocks
from lam.utils.checks import unit_rows

Matches = Callable[[Int64[Tensor, " R"]], Bool[Tensor, "R N"]]
"""Function from positions of R queries to a mask of the gallery items that match each query."""

_BLOCK_ELEMENTS = 2**22  # cosines in memory at once


@dataclass(frozen=True)
class Searches:
    """Results of Q queries in a gallery of N items.

    Attributes:
        hits: (Q, K) the items of highest cosine, best first; K is 50, or less for a smaller gallery.
        cosines: (Q, K) cosines of `hits`.
        correct: (Q,) whether the nearest item matches.
        mated: (Q,) the highest cosine of a matching item; −∞ without a match.
        other_hits: (Q, K) the items of highest cosine that do not match.
        others: (Q, K) cosines of `other_hits`, padded with −∞ if fewer than K items do not match.
        rank: (Q,) rank of the first match, counted from 1; ties count against the match. 0 without a match.
        gallery_size: number of searched items, without the query itself.
    """

    hits: Int64[Tensor, "Q K"]
    cosines: Float[Tensor, "Q K"]
    correct: Bool[Tensor, " Q"]
    mated: Float[Tensor, " Q"]
    other_hits: Int64[Tensor, "Q K"]
    others: Float[Tensor, "Q K"]
    rank: Int64[Tensor, " Q"]
    gallery_size: int

    def __len__(self) -> int:
        return len(self.hits)

    def __getitem__(self, index: slice | Tensor) -> "Searches":
        columns = {name: value[index] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Searches(**columns, gallery_size=self.gallery_size)

    @property
    def nearest(self) -> Int64[Tensor, " Q"]:
        """(Q,) the item of highest cosine."""
        return self.hits[:, 0]

    @property
    def score(self) -> Float[Tensor, " Q"]:
        """(Q,) cosine of the nearest item."""
        return self.cosines[:, 0]

    @property
    def non_mated(self) -> Float[Tensor, " Q"]:
        """(Q,) the highest cosine of an item that does not match; −∞ without such an item."""
        return self.others[:, 0]

    @property
    def has_mate(self) -> Bool[Tensor, " Q"]:
        """(Q,) whether any gallery item matches."""
        return self.rank > 0


def search_open_set(queries: Float[Tensor, "Q D"], gallery: Float[Tensor, "N D"] | None, matches: Matches) -> Searches:
    """Exact search for each query's hits, best match, and best items that do not match; results are on the CPU.

    Vectors and cosines are rounded to float32, as in `lam.retrieval.Index`, so that thresholds also hold in an index.

    Args:
        queries: (Q, D) finite, non-zero.
        gallery: (N, D) finite, non-zero; None to search the other queries.
        matches: takes positions of queries; returns which gallery items match each. Without a gallery, a query never
            matches itself.

    Example:
        >>> labels = torch.tensor([0, 0, 1])
        >>> n = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> found = search_open_set(n, None, lambda rows: labels[rows][:, None] == labels)
        >>> found.correct.tolist(), found.rank.tolist(), found.non_mated.tolist()
        ([True, False, False], [1, 2, 0], [0.6..., 0.96..., 0.96...])
    """
    items = queries if gallery is None else gallery
    check_same_dimension(queries, gallery)
    size = len(items) - (gallery is None)
    if size < 1:
        raise ValueError(f"the gallery must hold a candidate for every query, got {size}")
    stored = [unit_rows(name, rows).float().double() for name, rows in (("queries", queries), ("gallery", items))]
    parts = []
    for block in row_blocks(len(queries), len(items), elements=_BLOCK_ELEMENTS):
        rows = torch.arange(len(queries))[block]
        cosines = (stored[0][block] @ stored[1].T).clamp(-1, 1).float()
        parts.append(_search_block(cosines, matches(rows).to(queries.device), rows if gallery is None else None))
    columns = [torch.cat(column).cpu() for column in zip(*parts, strict=True)]
    return Searches(*columns, gallery_size=size)


def _search_block(cosines: Tensor, matching: Tensor, own: Tensor | None) -> tuple[Tensor, ...]:
    """Columns of `Searches` from (R, N) cosines; `own` are the positions of the queries among the items."""
    if own is not None:
        itself = torch.arange(len(own), device=cosines.device), own.to(cosines.device)
        cosines[itself] = -torch.inf
        matching = matching.index_put(itself, torch.tensor(False, device=matching.device))
    scores, hits = cosines.topk(min(N_HITS, cosines.shape[1] - (own is not None)), dim=1)
    correct = matching.gather(1, hits[:, :1])[:, 0]
    mated = cosines.masked_fill(~matching, -torch.inf).amax(1)
    others = cosines.masked_fill(matching, -torch.inf)
    rank = (1 + (others >= mated[:, None]).sum(1)) * matching.any(1)
    nearest_others = others.topk(scores.shape[1], dim=1)
    return hits, scores, correct, mated, nearest_others.indices, nearest_others.values, rank
