"""Open-set identification: how well a search separates queries with a match in the gallery from queries without one.

`search_open_set` searches with and without the matching items in one pass, for metrics and for calibration.
A search answers with its first hit if the score of this hit is above a threshold. A mated search has a match in the
gallery, a non-mated search does not. Every metric depends on the gallery's size. Arguments have the same meaning in all
functions:

- score, correct: (Q,) scores of the first hits of mated searches, and whether these hits are matches (or 0 and 1).
- mated: (Q,) the highest score of a match in each mated search.
- non_mated: (O,) scores of the first hits of non-mated searches.
- rate, fpir, far: greatest share of non-mated searches with a first hit above the threshold, in (0, 1).

A rate outside (0, 1), a NaN or different lengths raise a `ValueError`. Without searches, a metric is NaN.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from lam.retrieval.index.exact import check_same_dimension
from lam.retrieval.metrics.scores import N_HITS
from lam.retrieval.metrics.uncertainty import checked_answers, count_at_thresholds
from lam.utils.blocks import row_blocks
from lam.utils.checks import booleans, check_no_nan, check_share, unit_rows
from lam.utils.notes import Note

Matches = Callable[[Int64[Tensor, " R"]], Bool[Tensor, "R N"]]
"""Function from positions of R queries to a mask of the gallery items that match each query."""

SAME = 1e-5
"""Greatest distance between embeddings of one input in batches of different sizes."""

_BLOCK_ELEMENTS = 2**22  # cosines in memory at once


@dataclass(frozen=True)
class Searches:
    """Results of Q queries in a gallery of N items.

    Attributes:
        hits: (Q, K) the items of highest cosine, best first; K is 50, or less for a smaller gallery.
        cosines: (Q, K) cosines of `hits`.
        correct: (Q,) whether the nearest item matches.
        mated: (Q,) the highest cosine of a matching item; −∞ without a match.
        mate: (Q,) the matching item of this cosine; any item without a match.
        other_hits: (Q, K) the items of highest cosine that do not match.
        others: (Q, K) cosines of `other_hits`, padded with −∞ if fewer than K items do not match.
        rank: (Q,) rank of the first match, counted from 1; ties count against the match. 0 without a match.
        gallery_size: number of searched items, without the query itself.
    """

    hits: Int64[Tensor, "Q K"]
    cosines: Float[Tensor, "Q K"]
    correct: Bool[Tensor, " Q"]
    mated: Float[Tensor, " Q"]
    mate: Int64[Tensor, " Q"]
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


def search_open_set(
    queries: Float[Tensor, "Q D"],
    gallery: Float[Tensor, "N D"] | None,
    matches: Matches,
    *,
    own: Int64[Tensor, " Q"] | None = None,
) -> Searches:
    """Exact search for each query's hits, best match, and best items that do not match; results are on the CPU.

    Vectors and cosines are rounded to float32, as in `lam.retrieval.Index`, so that thresholds also hold in an index.

    Args:
        queries: (Q, D) finite, non-zero.
        gallery: (N, D) finite, non-zero; None to search the other queries.
        matches: function from positions of R queries to (R, N) booleans: whether each gallery item matches. Without a
            gallery, a query never matches itself.
        own: (Q,) positions of the queries in the gallery; their searches leave these items out. −1 for other queries.

    Example:
        >>> labels = torch.tensor([0, 0, 1])
        >>> n = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
        >>> found = search_open_set(n, None, lambda rows: labels[rows][:, None] == labels)
        >>> found.correct.tolist(), found.rank.tolist(), found.non_mated.tolist()
        ([True, False, False], [1, 2, 0], [0.6..., 0.96..., 0.96...])
    """
    items = queries if gallery is None else gallery
    check_same_dimension(queries, gallery)
    own = torch.arange(len(queries)) if gallery is None else own
    size = len(items) - (own is not None)
    if size < 1:
        raise ValueError(f"the gallery must hold a candidate for every query, got {size}")
    stored = [unit_rows(name, rows).float().double() for name, rows in (("queries", queries), ("gallery", items))]
    parts = []
    for block in row_blocks(len(queries), len(items), elements=_BLOCK_ELEMENTS):
        rows = torch.arange(len(queries))[block]
        cosines = (stored[0][block] @ stored[1].T).clamp(-1, 1).float()
        parts.append(_search_block(cosines, matches(rows).to(queries.device), None if own is None else own[block]))
    columns = [torch.cat(column).cpu() for column in zip(*parts, strict=True)]
    return Searches(*columns, gallery_size=size)


def _search_block(cosines: Tensor, matching: Tensor, own: Tensor | None) -> tuple[Tensor, ...]:
    """Columns of `Searches` from (R, N) cosines; `own` as in `search_open_set`."""
    if own is not None:
        rows = (own >= 0).nonzero().flatten()
        itself = rows.to(cosines.device), own[rows].to(cosines.device)
        cosines[itself] = -torch.inf
        matching = matching.index_put(itself, torch.tensor(False, device=matching.device))
    scores, hits = cosines.topk(min(N_HITS, cosines.shape[1] - (own is not None)), dim=1)
    correct = matching.gather(1, hits[:, :1])[:, 0]
    mated, mate = cosines.masked_fill(~matching, -torch.inf).max(1)
    others = cosines.masked_fill(matching, -torch.inf)
    rank = (1 + (others >= mated[:, None]).sum(1)) * matching.any(1)
    nearest_others = others.topk(scores.shape[1], dim=1)
    return hits, scores, correct, mated, mate, nearest_others.indices, nearest_others.values, rank


def search_without_self(
    queries: Float[Tensor, "Q D"], gallery: Float[Tensor, "N D"], matches: Matches, *, within: float = SAME
) -> tuple[Searches, Int64[Tensor, " Q"]]:
    """`search_open_set`, where each query that is itself an item is searched without this item.

    Future queries are not items of the gallery. So rates of queries that find themselves would be too good.

    Returns:
        The searches, and (Q,) the position of each query in the gallery, or −1. A query is an item if the nearest item
        that matches is at most `within` away. A `Note` says how many are.
    """
    searches = search_open_set(queries, gallery, matches)
    is_item = searches.has_mate & is_same(queries, gallery[searches.mate], within=within)
    own = searches.mate.where(is_item, -1)
    if not is_item.any():
        return searches, own
    warnings.warn(
        f"{int(is_item.sum())} of {len(own)} queries are items of the gallery: each is searched without itself",
        Note,
        stacklevel=2,
    )
    return search_open_set(queries, gallery, matches, own=own), own


def is_same(one: Float[Tensor, "Q D"], other: Float[Tensor, "Q D"], *, within: float = SAME) -> Bool[Tensor, " Q"]:
    """Whether the embeddings in each row are at most `within` apart, on the CPU."""
    return (one.double() - other.double()).norm(dim=1).cpu() <= within


def open_set_metrics(searches: Searches, *, fpir: float) -> dict[str, float | int]:
    """Metrics from two searches for each query: a mated search, if a match exists, and one that leaves matches out.

    The keys are the size of the gallery, the numbers of searches, the rate `fpir`, and the metrics of this module.
    """
    found = searches[searches.has_mate]
    mated, score, correct = found.mated, found.score, found.correct
    non_mated = searches.non_mated[searches.non_mated.isfinite()]
    of_all = torch.cat([score, non_mated]), torch.cat([correct, torch.zeros(len(non_mated), dtype=torch.bool)])
    return {
        "gallery_size": searches.gallery_size,
        "n_mated": len(mated),
        "n_non_mated": len(non_mated),
        "fpir": fpir,
        "threshold": threshold_at(non_mated, fpir),
        "tpir": tpir_at_fpir(mated, non_mated, fpir=fpir),
        "dir": dir_at_far(score, correct, non_mated, far=fpir),
        "oscr": oscr(score, correct, non_mated),
        "aurc": aurc(correct, -score),
        "recall_at_full_precision": recall_at_full_precision(*of_all, n_answerable=len(mated)),
    }


def threshold_at(non_mated: Float[Tensor, " O"], rate: float) -> float:
    """Least of the non-mated scores with at most a share `rate` of these scores above it.

    The rate holds for these searches; for new searches, see `ConformalScores.threshold`.

    Example:
        >>> threshold_at(torch.tensor([0.1, 0.2, 0.3, 0.4]), 0.25)
        0.30...
    """
    check_share("rate", rate)
    check_no_nan("non_mated", non_mated)
    if len(non_mated) == 0:
        return float("nan")
    allowed = min(int(rate * len(non_mated) + 1e-9), len(non_mated) - 1)  # 0.29 · 100 is 28.999…
    return float(non_mated.sort(descending=True).values[allowed])


def tpir_at_fpir(mated: Float[Tensor, " Q"], non_mated: Float[Tensor, " O"], *, fpir: float) -> float:
    """True-positive identification rate (TPIR) at a false-positive rate (FPIR); higher is better.

    TPIR = share of mated searches with a match of score > T at any rank; FPIR = share of non-mated searches with
    any hit of score > T; T is the least threshold with FPIR ≤ `fpir`.

    Source: ISO/IEC 19795-1; Grother, Ngan and Hanaoka, Face Recognition Vendor Test, part 2, section 3.

    Example:
        >>> tpir_at_fpir(torch.tensor([0.35, 0.9]), torch.tensor([0.1, 0.2, 0.3, 0.8]), fpir=0.25)
        1.0
    """
    everyone = torch.ones(len(mated), dtype=torch.bool, device=mated.device)
    return dir_at_far(mated, everyone, non_mated, far=fpir)


def dir_at_far(
    score: Float[Tensor, " Q"], correct: Bool[Tensor, " Q"], non_mated: Float[Tensor, " O"], *, far: float
) -> float:
    """Detection and identification rate (DIR) of first hits, at a false-accept rate; higher is better.

    DIR = share of mated searches whose first hit is a match of score > T, with T as in `tpir_at_fpir`.

    Source: Phillips, Grother and Micheals (2011), Handbook of Face Recognition, chapter 21.

    Example:
        >>> score, correct = torch.tensor([0.9, 0.9]), torch.tensor([True, False])
        >>> dir_at_far(score, correct, torch.tensor([0.1, 0.2]), far=0.1)
        0.5
    """
    correct, threshold = checked_answers(correct, "score", score), threshold_at(non_mated, far)
    if len(score) == 0 or threshold != threshold:
        return float("nan")
    return float((correct & (score > threshold)).double().mean())


def oscr(score: Float[Tensor, " Q"], correct: Bool[Tensor, " Q"], non_mated: Float[Tensor, " O"]) -> float:
    """Area under the open-set classification rate curve; higher is better.

    For all thresholds T, the curve shows the share of mated searches with a right first hit of score > T against the
    share of non-mated searches with a first hit of score > T. The area is the probability that the first hit of a mated
    search is right and scores above the first hit of a non-mated search; ties count half.

    Source: Dhamija, Günther and Boult (2018), eq. 5 and 6; the area as in Vaze, Han, Vedaldi and Zisserman (2022).

    Example:
        >>> oscr(torch.tensor([0.9, 0.5]), torch.tensor([True, True]), torch.tensor([0.7, 0.1]))
        0.75
    """
    correct = checked_answers(correct, "score", score)
    check_no_nan("non_mated", non_mated)
    if len(score) == 0 or len(non_mated) == 0:
        return float("nan")
    others = non_mated.double().sort().values
    right = score[correct].double()
    below = torch.searchsorted(others, right).double()
    not_above = torch.searchsorted(others, right, right=True).double()
    return float((below + not_above).sum() / (2 * len(score) * len(others)))


def aurc(correct: Bool[Tensor, " Q"], uncertainty: Float[Tensor, " Q"]) -> float:
    """Area under the risk-coverage curve; lower is better.

    The risk at coverage n/Q is the share of wrong hits among the n most certain of Q searches. A threshold keeps or
    drops a tie as a whole, so the curve has one point for each distinct uncertainty. The area is a sum of trapezoids;
    before the first point, the risk is constant. For a constant uncertainty, the area is the error rate.

    Source: El-Yaniv and Wiener (2010) for the curve; Geifman, Uziel and El-Yaniv (2019) for its area, as the code of
        Traub et al. (2024) computes it (`RiskCoverageStats.aurc` in fd-shifts, without its factor of 1000).

    Example:
        >>> aurc(torch.tensor([True, False]), torch.zeros(2))
        0.5
    """
    kept, n_wrong = count_at_thresholds(~booleans("correct", correct), uncertainty)
    if len(correct) == 0:
        return float("nan")
    risk = n_wrong[1:] / kept[1:]
    return float(torch.trapezoid(torch.cat([risk[:1], risk]), kept)) / len(correct)


def recall_at_full_precision(score: Float[Tensor, " Q"], correct: Bool[Tensor, " Q"], *, n_answerable: int) -> float:
    """R@100P: share of mated searches whose first hit is right and scores above every wrong first hit.

    This is the greatest recall without a wrong answer; higher is better. Here, `score` and `correct` cover all
    searches, mated or not; `n_answerable` is the number of mated searches.

    Source: Lowry et al. (2016), Visual Place Recognition: A Survey.

    Example:
        >>> recall_at_full_precision(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([True, False, True]), n_answerable=2)
        0.5
    """
    correct = checked_answers(correct, "score", score)
    n_right = int(correct.sum())
    if not n_right <= n_answerable <= len(score):
        raise ValueError(
            f"n_answerable must be from the {n_right} right hits to the {len(score)} searches, got {n_answerable}"
        )
    if n_answerable == 0:
        return float("nan")
    best_wrong = score.masked_fill(correct, -torch.inf).max()
    return int((correct & (score > best_wrong)).sum()) / n_answerable
