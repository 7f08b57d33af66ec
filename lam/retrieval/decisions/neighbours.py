"""How many neighbours scores look at: no more than the items that a class has, chosen on calibration data.

A score that averages ten hits where a person has four photos averages six of other people. What the numbers are used in
is `lam.retrieval.metrics.registry.scores_of`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lam.retrieval.decisions.probability import random_order
from lam.retrieval.metrics.ood import auroc
from lam.retrieval.metrics.reference import Reference
from lam.retrieval.metrics.registry import SCORES
from lam.utils.checks import check_length

PER_ITEM = {"knn": 1, "mean_cosine": 1, "votes": 1, "weighted_votes": 5}
"""By score, how many neighbours it may look at for each item that a class has. Far hits weigh little in
`weighted_votes`, and tell how far the near ones are ahead; the spread of cosines compares near hits with far ones."""
MIN_QUERIES = 10
"""How many items there must be on either side for a number to be chosen by them."""
_ROWS = 1000  # items of a reference that are held against all of it, at most


def nearest_of(labels: Int[Tensor, " N"]) -> int:
    """How many items a class has: the lower quartile over classes, so that three in four have as many or more.

    Args:
        labels: (N,) of the items of a gallery or a reference, negative where an item has none.

    Raises:
        ValueError: where no item has a label.

    Example:
        >>> nearest_of(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]))
        4
    """
    counts = labels[labels >= 0].unique(return_counts=True)[1]
    if len(counts) == 0:
        raise ValueError(f"at least one item must have a label, got {len(labels)} items without: count no neighbours")
    return int(counts.sort().values[(len(counts) - 1) // 4])


def candidates_of(
    gallery: Int[Tensor, " N"] | None = None, reference: Int[Tensor, " O"] | None = None
) -> dict[str, tuple[int, ...]]:
    """By score, the numbers of neighbours to choose from: the most that it may look at, and its halves down to 1.

    Args:
        gallery: (N,) labels of the items that are searched; None where they have none.
        reference: (O,) labels of the items that features are compared with; None where they have none.

    Raises:
        ValueError: where no item of either has a label.

    Example:
        >>> candidates_of(torch.arange(5).repeat(4))
        {'knn': (5, 2, 1), 'mean_cosine': (4, 2, 1), 'votes': (4, 2, 1), 'weighted_votes': (20, 10, 5, 2, 1)}
    """
    found = {}
    for name, per_item in PER_ITEM.items():
        labels, most = (reference if "reference" in SCORES[name].needs else gallery), SCORES[name].k or 1
        most = most if labels is None else min(most, per_item * nearest_of(labels))
        found[name] = tuple(most >> halvings for halvings in range(most.bit_length()))
    return found


def choose_nearest(
    candidates: Mapping[str, Sequence[int]],
    queries: Mapping[str, Any],
    correct: Bool[Tensor, " Q"],
    others: Sequence[Mapping[str, Any]] = (),
) -> dict[str, int]:
    """By score, the number of neighbours for which it best tells right first hits from all that is to be doubted.

    By the AUROC of queries whose first hit is right against those whose first hit is wrong and `others` together. This
    choice looks at the queries: learn a threshold that is promised from different ones, or out of fold. A score that
    compares with a reference of several classes needs no query: each reference item is held against all others, and
    against those of other classes alone, as if its own class were not known.

    Args:
        candidates: by score, numbers of neighbours, of which the first serves where AUROCs are equal, where fewer than
            10 items are known, or fewer than 10 to be doubted, and where the score's evidence is missing.
        queries: evidence of Q calibration queries, by the names of `lam.retrieval.metrics.registry.Score.needs`.
        correct: (Q,) whether their first hits are right.
        others: evidence of searches that cannot be right, such as those of strangers, or of queries whose matches were
            taken out of the gallery; each is used for the scores that it suffices for.

    Raises:
        ValueError: for a score without a candidate, or `correct` of another length.

    Example:
        >>> right = torch.arange(40) < 20
        >>> cosines = torch.where(right[:, None], torch.tensor([0.9, 0.1]), torch.tensor([0.6, 0.5]))
        >>> choose_nearest({"mean_cosine": (2, 1)}, {"cosines": cosines}, right)
        {'mean_cosine': 1}
    """
    chosen = {}
    for name, numbers in candidates.items():
        if not numbers:
            raise ValueError(f"{name} must have at least one number of neighbours to choose from, got none")
        chosen[name] = max(numbers, key=lambda k, name=name: _separation(name, k, queries, correct, others))
    return chosen


def _separation(
    name: str, k: int, queries: Mapping[str, Any], correct: Tensor, others: Sequence[Mapping[str, Any]]
) -> float:
    """AUROC of one score; 0 where too little is known, so that all candidates are equal."""
    known = queries.get("reference") if "reference" in SCORES[name].needs else None
    if known is not None and known.labels is not None and len(known.labels.unique()) > 1:
        inside, doubted = _own_and_other_neighbours(known, k)
    elif (values := _values(name, k, queries)) is None:
        return 0.0
    else:
        check_length("correct", correct, "the queries", len(values))
        correct = correct.to(values.device)
        more = [found for other in others if (found := _values(name, k, other)) is not None]
        inside, doubted = values[correct], torch.cat([values[~correct], *more])
    return auroc(inside, doubted) if min(len(inside), len(doubted)) >= MIN_QUERIES else 0.0


def _own_and_other_neighbours(reference: Reference, k: int) -> tuple[Tensor, Tensor]:
    """−cosine of reference items to the k-th nearest other item, and to the k-th nearest of another class."""
    labels = reference.labels if reference.labels is not None else torch.zeros(len(reference))
    rows = random_order(len(reference))[:_ROWS]
    cosines = reference.unit[rows] @ reference.unit.T
    cosines[torch.arange(len(rows)), rows] = -torch.inf
    strange = cosines.masked_fill(labels[rows, None] == labels, -torch.inf)
    own, other = (found.topk(k, dim=1).values[:, -1] for found in (cosines, strange))
    return -own[own.isfinite()], -other[other.isfinite()]


def _values(name: str, k: int, evidence: Mapping[str, Any]) -> Tensor | None:
    needs = SCORES[name].needs
    if any(evidence.get(need) is None for need in needs):
        return None
    given = (evidence[need].clamp(min=-1) if need == "cosines" else evidence[need] for need in needs)
    return SCORES[name].function(*given, k=k)
