"""Number of neighbours for each score, chosen on calibration data and bounded by the number of items in a class.

With four photos of each person, a mean over ten hits would include at least six hits of other people.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lam.retrieval.decisions.probability import random_order
from lam.retrieval.metrics.ood import auroc
from lam.retrieval.metrics.scores import SCORES
from lam.utils.checks import check_length

PER_ITEM = {"knn": 1, "mean_cosine": 1, "votes": 1, "weighted_votes": 5}
"""Greatest number of neighbours by score, as a multiple of the class size."""
MIN_QUERIES = 10  # least number of items in each of the two groups that a choice compares
_ROWS = 1000  # at most this many reference items are compared with the whole reference


def nearest_of(labels: Int[Tensor, " N"]) -> int:
    """Typical class size: the lower quartile of the number of items per class; negative labels are missing labels."""
    counts = labels[labels >= 0].unique(return_counts=True)[1]
    if len(counts) == 0:
        raise ValueError(f"at least one item must have a label, got {len(labels)} items without: give labels, or None")
    return int(counts.sort().values[(len(counts) - 1) // 4])


def candidates_of(
    gallery: Int[Tensor, " N"] | None = None, reference: Int[Tensor, " O"] | None = None
) -> dict[str, tuple[int, ...]]:
    """For each score, candidate numbers of neighbours: the greatest number, halved again and again down to 1.

    Example:
        >>> candidates_of(torch.arange(5).repeat(4))
        {'knn': (5, 2, 1), 'mean_cosine': (4, 2, 1), 'votes': (4, 2, 1), 'weighted_votes': (20, 10, 5, 2, 1)}
    """
    candidates = {}
    for name, per_item in PER_ITEM.items():
        labels, most = (reference if "reference" in SCORES[name].needs else gallery), SCORES[name].k or 1
        most = most if labels is None else min(most, per_item * nearest_of(labels))
        candidates[name] = tuple(most >> halvings for halvings in range(most.bit_length()))
    return candidates


def choose_nearest(
    candidates: Mapping[str, Sequence[int]],
    queries: Mapping[str, Any],
    correct: Bool[Tensor, " Q"],
    others: Sequence[Mapping[str, Any]] = (),
) -> dict[str, int]:
    """For each score, the number of neighbours that best separates right first hits from all others.

    The choice maximises the AUROC of right first hits against wrong first hits and `others` together. After the choice,
    the calibration queries are not quite exchangeable with new queries. If a score uses a reference with several
    classes, up to 1,000 reference items replace the queries. Each item counts once as known, compared with all other
    items, and once as a stranger, compared with the items of other classes.

    Args:
        candidates: for each score, the numbers to try. The first is chosen if numbers tie, evidence is missing, or one
            side of the AUROC has fewer than 10 items.
        queries: evidence (inputs of scores) of Q calibration queries, named as in `lam.retrieval.metrics.scores.Score`.
        correct: (Q,) whether the first hits of the queries are right.
        others: evidence of other searches without a right hit, such as strangers; a score ignores searches that lack
            its evidence.

    Example:
        >>> right = torch.arange(40) < 20
        >>> cosines = torch.where(right[:, None], torch.tensor([0.9, 0.1]), torch.tensor([0.6, 0.5]))
        >>> choose_nearest({"mean_cosine": (2, 1)}, {"cosines": cosines}, right)
        {'mean_cosine': 1}
    """
    return {
        name: max(numbers, key=lambda k, name=name: _separation(name, k, queries, correct, others))
        for name, numbers in candidates.items()
    }


def _separation(
    name: str, k: int, queries: Mapping[str, Any], correct: Tensor, others: Sequence[Mapping[str, Any]]
) -> float:
    """AUROC of one score; 0 for too few items, so that all candidates tie."""
    known = queries.get("reference") if "reference" in SCORES[name].needs else None
    if known is not None and known.labels is not None and len(known.labels.unique()) > 1:
        inside, doubted = _own_and_other_neighbours(known.unit, known.labels, k)
    elif (values := _values(name, k, queries)) is None:
        return 0.0
    else:
        check_length("correct", correct, "the queries", len(values))
        correct = correct.to(values.device)
        more = [scores for other in others if (scores := _values(name, k, other)) is not None]
        inside, doubted = values[correct], torch.cat([values[~correct], *more])
    return auroc(inside, doubted) if min(len(inside), len(doubted)) >= MIN_QUERIES else 0.0


def _own_and_other_neighbours(unit: Tensor, labels: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Minus each item's cosine to the k-th nearest other item, and to the k-th nearest item of another class."""
    rows = random_order(len(unit))[:_ROWS]
    cosines = unit[rows] @ unit.T
    cosines[torch.arange(len(rows)), rows] = -torch.inf
    strange = cosines.masked_fill(labels[rows, None] == labels, -torch.inf)
    own, other = (found.topk(k, dim=1).values[:, -1] for found in (cosines, strange))
    return -own[own.isfinite()], -other[other.isfinite()]


def _values(name: str, k: int, evidence: Mapping[str, Any]) -> Tensor | None:
    needs = SCORES[name].needs
    if any(evidence.get(need) is None for need in needs):
        return None
    arguments = (evidence[need].clamp(min=-1) if need == "cosines" else evidence[need] for need in needs)
    return SCORES[name].function(*arguments, k=k)
