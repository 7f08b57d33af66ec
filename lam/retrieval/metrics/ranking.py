"""How good a ranking is: recall@k and mAP@k.

Here live metrics of ranked lists. Which items are relevant is the caller's to say; the lists come from
`lam.retrieval.rank`.
"""

from typing import SupportsIndex

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lam.utils.checks import positive_integer, refuse_other_length


def recall_at_k(relevance: Bool[Tensor, "Q K"], n_relevant: Int[Tensor, " Q"], *, k: SupportsIndex) -> float:
    """Give the share of queries with a relevant item among their first k hits; higher is better.

    Queries without any relevant item are left out; `count_without_relevant` counts them.

    Args:
        relevance: (Q, K) whether each ranked item is relevant, best rank first. K below k is accepted only where the
            lists hold every relevant item, as those of a gallery with fewer than k items do.
        n_relevant: (Q,) how many items of the gallery are relevant to each query.
        k: how many hits count, at least 1.

    Returns:
        A share in [0, 1]; NaN where no query has a relevant item.

    Raises:
        ValueError: for k below 1, lists too short for k, or more relevant hits than there are relevant items.

    Example:
        >>> relevance = torch.tensor([[False, True], [False, False]])
        >>> recall_at_k(relevance, torch.tensor([3, 1]), k=2)
        0.5
    """
    relevance, _ = _answerable(relevance, n_relevant, positive_integer("k", k))
    return float(relevance.any(1).double().mean())


def map_at_k(relevance: Bool[Tensor, "Q K"], n_relevant: Int[Tensor, " Q"], *, k: SupportsIndex) -> float:
    """Give the mean over queries of the average precision of the first k hits; higher is better.

    AP@k = Σ_(hits i ≤ k) precision@i / min(k, n_relevant). Queries without any relevant item are left out;
    `count_without_relevant` counts them.

    Source: Musgrave, Belongie and Lim (2020), "A Metric Learning Reality Check", for the normalisation by what can be
    reached; with k = n_relevant it is their MAP@R.

    Args:
        relevance: (Q, K) whether each ranked item is relevant, best rank first; see `recall_at_k`.
        n_relevant: (Q,) how many items of the gallery are relevant to each query.
        k: how many hits count, at least 1.

    Returns:
        A mean in [0, 1]; NaN where no query has a relevant item.

    Raises:
        ValueError: as `recall_at_k`.

    Example:
        >>> map_at_k(torch.tensor([[True, False, True]]), torch.tensor([2]), k=3)
        0.8333333333333333
    """
    k = positive_integer("k", k)
    relevance, n_relevant = _answerable(relevance, n_relevant, k)
    hits = relevance.double()
    precision = hits.cumsum(1) / torch.arange(1, hits.shape[1] + 1, device=hits.device)
    return float(((precision * hits).sum(1) / n_relevant.clamp(max=k)).mean())


def count_without_relevant(n_relevant: Int[Tensor, " Q"]) -> int:
    """Count the queries to which nothing in the gallery is relevant, which recall and mAP leave out.

    Args:
        n_relevant: (Q,) how many items of the gallery are relevant to each query.

    Returns:
        A count in [0, Q].

    Example:
        >>> count_without_relevant(torch.tensor([3, 0]))
        1
    """
    return int((n_relevant == 0).sum())


def _answerable(relevance: Tensor, n_relevant: Tensor, k: int) -> tuple[Tensor, Tensor]:
    refuse_other_length("n_relevant", n_relevant, "the queries", len(relevance))
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
    return relevance[keep, :k], n_relevant[keep]
