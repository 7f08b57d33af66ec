"""Calibration for a part of the gallery, such as the items that pass a filter, with its own bound on false accepts.

The probability is learned in the whole gallery; in a part, it has another distribution. So a filtered search accepts by
the cosine of the first hit alone. To find the threshold, the part is searched for the `UnmatchedQueries` without a
match there. Their cosines are exchangeable with the cosine of a new query without a match, so the threshold keeps the
target (`lam.retrieval.decisions.conformal`). The choice of the part must not depend on these queries.

If too few queries lack a match, as in a part with items of most classes, all queries are searched for, and hits that
match are skipped. Then the promise is about new queries whose matches are also skipped.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Int64
from torch import Tensor

from lam.retrieval.decisions.calibration import Calibration, UnmatchedQueries
from lam.retrieval.decisions.conformal import ConformalScores, needed
from lam.retrieval.index.hits import Hits
from lam.vmf.embeddings import Embeddings

_BLOCK = 16  # queries per search; other searches can run in between
_HITS = 64  # first hits of each query; if all of them match, the search is repeated for more hits


def false_accepts(
    calibration: Calibration,
    search: Callable[[Embeddings, int], Hits],
    keys: Int64[Tensor, " G"],
    labels: Int64[Tensor, " G"],
) -> ConformalScores | None:
    """For each query that bounds false accepts in the part, the cosine of the best hit that does not match.

    A query that matches all items of the part is left out. In an empty part, the value of each query is −1. If an index
    returns only matches, the last hit's cosine is used: an upper bound, which raises the threshold. The result is None
    for a calibration without unmatched queries, or if no query is left.

    Args:
        calibration: calibration with unmatched queries.
        search: takes queries and k; returns the k nearest items of the part.
        keys: (G,) ids of the items in the part, rising.
        labels: (G,) the items' `label_key`, or −1 for an item without a label, which never matches.
    """
    unmatched, size = calibration.unmatched, len(keys)
    if unmatched is None:
        return None
    rows = _rows_for_bound(unmatched, labels, calibration.targets.far)
    best = torch.full((len(unmatched.mean),), -torch.inf, dtype=torch.float64)
    left, k = rows if size else rows[:0], min(_HITS, size)
    while len(left):
        again: list[Tensor] = []
        for asking in left.split(_BLOCK):
            one = torch.ones(len(asking), dtype=torch.float64)
            hits = search(Embeddings(unmatched.mean[asking], one, one, one), k)
            if hits.ids.shape[1] == 0:
                continue
            own = unmatched.labels[asking][:, None]
            other = (labels[torch.searchsorted(keys, hits.ids)] != own) | (own < 0)
            place = other.to(torch.int8).argmax(1)
            cosines = hits.scores.double()
            found, n_hits = other.any(1), hits.ids.shape[1]
            rest = cosines[:, -1] if n_hits < size else torch.full_like(cosines[:, -1], -torch.inf)
            best[asking] = torch.where(found, cosines.gather(1, place[:, None])[:, 0], rest)
            if n_hits == k < size:
                again.append(asking[~found])
        left, k = torch.cat(again) if again else left[:0], min(8 * k, size)
    rows = rows[best[rows].isfinite()] if size else rows
    if len(rows) == 0:
        return None
    return ConformalScores.of(best[rows].clamp(min=-1), None if unmatched.classes is None else unmatched.classes[rows])


def _rows_for_bound(unmatched: UnmatchedQueries, labels: Int64[Tensor, " G"], far: float) -> Int64[Tensor, " R"]:
    """Rows of the queries without a match among these labels or, if they are too few for the rate, of all queries."""
    rows = ((unmatched.labels < 0) | ~torch.isin(unmatched.labels, labels)).nonzero().flatten()
    units = rows if unmatched.classes is None else unmatched.classes[rows].unique()
    return rows if len(units) >= needed(far) else torch.arange(len(unmatched.labels))


def of_part(calibration: Calibration, scores: ConformalScores, size: int) -> Calibration:
    """The calibration for a part of the gallery: it accepts by cosine, with thresholds learned from `scores`.

    The flag uses no hits, so its error rate also holds for the part. Probabilities, conformal sets and the limit on
    wrong answers hold only for the whole gallery, for which they are learned.
    """
    last = calibration.acceptances[-1]  # it needs the least evidence of a query
    acceptance = replace(
        last,
        accept="cosine",
        false_accepts=scores,
        right_hits=last.right_hits[:0],
        statistics=last.statistics[:0],
        is_right=last.is_right[:0],
    )
    flag = calibration.detector.substitute(calibration.flag, "hits")
    if calibration.detector.substitute(flag, "input") != flag:
        flag = "kappa"  # an embedding from a client has no features
    targets, rest = replace(calibration.targets, wrong=None), {"depth": None, "unseen": None}
    return replace(calibration, gallery_size=size, targets=targets, flag=flag, acceptances=(acceptance,), **rest)
