"""Quality of a ranking: recall@k, precision@k, mAP@k, R-precision and the mean reciprocal rank.

Higher is better for each. Queries without a relevant item are left out; `n_without_relevant` is their number.
"""

from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from lam.retrieval.index.exact import cosines_in_blocks
from lam.retrieval.metrics.open_set import Matches
from lam.utils.checks import booleans, check_length, positive_integer


def recall_at_k(relevance: Bool[Tensor, "Q K"], n_relevant: Int[Tensor, " Q"], *, k: SupportsIndex) -> float:
    """Share of queries with a relevant item among their first k hits.

    Args:
        relevance: (Q, K) whether each hit is relevant, best first. K may be below k only if the hits include every
            relevant item, as for a gallery of fewer than k items.
        n_relevant: (Q,) number of relevant items in the gallery.
        k: number of hits that count, at least 1.

    Returns:
        A share in [0, 1]; NaN if no query has a relevant item.

    Raises:
        ValueError: for k below 1, lists too short for k, or more relevant hits than relevant items.

    Example:
        >>> relevance = torch.tensor([[False, True], [False, False]])
        >>> recall_at_k(relevance, torch.tensor([3, 1]), k=2)
        0.5
    """
    relevance, _, _ = _answerable(relevance, n_relevant, k)
    return float(relevance.any(1).double().mean())


def precision_at_k(relevance: Bool[Tensor, "Q K"], n_relevant: Int[Tensor, " Q"], *, k: SupportsIndex) -> float:
    """Mean over queries of the share of relevant items among the first k hits.

    A query with fewer than k relevant items cannot reach a share of 1. Arguments, NaN and errors as in `recall_at_k`.

    Example:
        >>> precision_at_k(torch.tensor([[True, False, True]]), torch.tensor([2]), k=2)
        0.5
    """
    relevance, _, k = _answerable(relevance, n_relevant, k)
    return float((relevance.sum(1).double() / k).mean())


def map_at_k(relevance: Bool[Tensor, "Q K"], n_relevant: Int[Tensor, " Q"], *, k: SupportsIndex) -> float:
    """Mean over queries of the average precision of the first k hits; arguments, NaN and errors as in `recall_at_k`.

    AP@k = Σ_i precision@i / min(k, n_relevant), over the ranks i ≤ k of relevant hits.

    Source: Musgrave, Belongie and Lim (2020), "A Metric Learning Reality Check", for the normalisation.

    Example:
        >>> map_at_k(torch.tensor([[True, False, True]]), torch.tensor([2]), k=3)
        0.8333333333333333
    """
    relevance, n_relevant, k = _answerable(relevance, n_relevant, k)
    hits = relevance.double()
    precision = hits.cumsum(1) / torch.arange(1, hits.shape[1] + 1, device=hits.device)
    return float(((precision * hits).sum(1) / n_relevant.clamp(max=k)).mean())


@dataclass(frozen=True)
class RelevantRanks:
    """Ranks of the relevant items of Q queries in the ranking of the whole gallery.

    Attributes:
        first: (Q,) rank of the first relevant item, counted from 1; 0 if no item is relevant.
        within_r: (Q,) number of relevant items among the first R hits.
        n_relevant: (Q,) R, the number of relevant items.
    """

    first: Int64[Tensor, " Q"]
    within_r: Int64[Tensor, " Q"]
    n_relevant: Int64[Tensor, " Q"]


def relevant_ranks(
    queries: Float[Tensor, "Q D"], gallery: Float[Tensor, "N D"] | None, matches: Matches
) -> RelevantRanks:
    """Ranks of relevant items in the whole gallery, by falling cosine, and by rising index in a tie.

    Arguments as in `lam.retrieval.metrics.open_set.search_open_set`.

    Example:
        >>> labels = torch.tensor([0, 0, 1, 0])
        >>> n = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [0.0, 1.0]])
        >>> ranks = relevant_ranks(n, None, lambda rows: labels[rows][:, None] == labels)
        >>> ranks.first.tolist(), ranks.within_r.tolist(), ranks.n_relevant.tolist()
        ([1, 2, 0, 2], [1, 1, 0, 1], [2, 2, 0, 2])
    """
    if len(queries if gallery is None else gallery) == 0:
        raise ValueError("the gallery must hold at least one item, got none")
    parts = [
        _relevant_ranks(cosines.detach().cpu(), matches(rows).cpu())
        for rows, cosines in cosines_in_blocks(queries, gallery)
    ]
    return RelevantRanks(*(torch.cat(column) for column in zip(*parts, strict=True)))


def r_precision(ranks: RelevantRanks) -> float:
    """Mean over queries of the precision of the first R hits, with R the number of relevant items; NaN if all R are 0.

    Source: Manning, Raghavan and Schütze (2008), Introduction to Information Retrieval, section 8.4.
    """
    keep = ranks.n_relevant > 0
    return float((ranks.within_r[keep].double() / ranks.n_relevant[keep]).mean())


def mean_reciprocal_rank(ranks: RelevantRanks) -> float:
    """Mean over queries of 1/rank of the first relevant item; NaN if no query has a relevant item.

    Source: Voorhees (1999), The TREC-8 Question Answering Track Report.
    """
    return float((1 / ranks.first[ranks.n_relevant > 0].double()).mean())


def _relevant_ranks(cosines: Tensor, relevant: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ranks by binary search in the sorted cosines; only rows with ambiguous ties are ranked item by item."""
    n, relevant = cosines.shape[1], relevant & (cosines > -torch.inf)  # a query does not match itself
    n_relevant = relevant.sum(1)
    rising = torch.from_numpy(np.sort(cosines.numpy(), axis=1))  # ten times as fast as torch's
    best = cosines.masked_fill(~relevant, -torch.inf).amax(1, keepdim=True)
    above = n - torch.searchsorted(rising, best, right=True)[:, 0]
    as_good = n - torch.searchsorted(rising, best)[:, 0]
    last = rising.gather(1, (n - n_relevant).clamp(max=n - 1)[:, None])  # the cosine at rank R
    reaching = n - torch.searchsorted(rising, last)[:, 0]
    first, within = above + 1, (relevant & (cosines >= last)).sum(1)
    tied = ((n_relevant > 0) & ((as_good > above + 1) | (reaching > n_relevant))).nonzero()[:, 0]
    if len(tied):
        order = cosines[tied].sort(dim=1, descending=True, stable=True).indices
        ranked = relevant[tied].gather(1, order)
        first[tied] = 1 + ranked.int().argmax(1)
        within[tied] = (ranked & (torch.arange(n) < n_relevant[tied, None])).sum(1)
    return first * (n_relevant > 0), within * (n_relevant > 0), n_relevant


def _answerable(relevance: Tensor, n_relevant: Tensor, k: SupportsIndex) -> tuple[Tensor, Tensor, int]:
    """For the queries with a relevant item, the first k hits and the number of relevant items; and k."""
    k = positive_integer("k", k)
    relevance = booleans("relevance", relevance)
    check_length("n_relevant", n_relevant, "the queries", len(relevance))
    found = relevance.sum(1)
    if (found > n_relevant).any():
        row = int((found > n_relevant).nonzero()[0])
        raise ValueError(
            f"n_relevant must count every relevant hit, got {int(n_relevant[row])} for {int(found[row])} "
            f"relevant hits at index {row}"
        )
    if relevance.shape[1] < k and (found < n_relevant).any():
        raise ValueError(f"k must not exceed the length of the ranked lists, got k = {k} for {relevance.shape[1]}")
    keep = n_relevant > 0
    return relevance[keep, :k], n_relevant[keep], k
