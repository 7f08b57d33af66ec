"""Calibration for a part of the gallery, such as the items that pass a filter, with its own bound on false accepts.

The probability is learnt in the whole gallery; in a part, it has another distribution. So a filtered search accepts by
the cosine of the first hit alone. To find the threshold, the calibration's `UnmatchedQueries` search the part, and hits
that match are skipped. The cosines are exchangeable with the cosine of a new query without a match, so the threshold
keeps the target (`lam.retrieval.decisions.conformal`). The choice of the part must not depend on these queries.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Int64
from torch import Tensor

from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.flags import substitute
from lam.retrieval.index.hits import Hits
from lam.vmf.embeddings import Embeddings

_BLOCK = 16  # queries per search; other searches can run in between
_HITS = 64  # first hits of each query; if all of them match, the search is repeated for more hits


def false_accepts(
    calibration: Calibration,
    search: Callable[[Embeddings, int], Hits],
    labels_of: Callable[[Int64[Tensor, "Q K"]], Int64[Tensor, "Q K"]],
    size: int,
) -> ConformalScores | None:
    """For each unmatched query, the cosine of the best hit that does not match; −1 if all items match.

    If an index returns only matches, the last hit's cosine is used: an upper bound, which raises the threshold.

    Args:
        calibration: calibration with unmatched queries; without them, the result is None.
        search: takes queries and k; returns the k nearest items of the part.
        labels_of: takes ids; returns the items' `label_key`, or −1 for an item without a label, which never matches.
        size: number of items in the part.
    """
    unmatched = calibration.unmatched
    if unmatched is None:
        return None
    best = torch.full((len(unmatched.mean),), -torch.inf, dtype=torch.float64)
    left = torch.arange(len(best) if size else 0)
    k = min(_HITS, size)
    while len(left):
        again: list[Tensor] = []
        for rows in left.split(_BLOCK):
            one = torch.ones(len(rows), dtype=torch.float64)
            hits = search(Embeddings(unmatched.mean[rows], one, one, one), k)
            if hits.ids.shape[1] == 0:
                continue
            labels, own = labels_of(hits.ids), unmatched.labels[rows][:, None]
            other = (labels != own) | (own < 0)
            place = other.to(torch.int8).argmax(1)
            cosines = hits.scores.double()
            found, n_hits = other.any(1), hits.ids.shape[1]
            rest = cosines[:, -1] if n_hits < size else torch.full_like(cosines[:, -1], -torch.inf)
            best[rows] = torch.where(found, cosines.gather(1, place[:, None])[:, 0], rest)
            if n_hits == k < size:
                again.append(rows[~found])
        left, k = torch.cat(again) if again else left[:0], min(8 * k, size)
    return ConformalScores.of(best.clamp(min=-1), unmatched.classes)


def of_part(calibration: Calibration, scores: ConformalScores, size: int) -> Calibration:
    """The calibration for a part of the gallery: it accepts by cosine, with thresholds learnt from `scores`.

    The flag uses no hits, so its promise holds. Probabilities, conformal sets and the share of wrong answers have no
    promise, because they are learnt for the whole gallery.
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
    flag = calibration.flag_without("hits")
    if substitute(flag, "input", calibration.detector.components(flag)) != flag:
        flag = "kappa"  # an embedding from a client has no features
    targets, rest = replace(calibration.targets, wrong=None), {"depth": None, "unseen": None}
    return replace(calibration, gallery_size=size, targets=targets, flag=flag, acceptances=(acceptance,), **rest)
