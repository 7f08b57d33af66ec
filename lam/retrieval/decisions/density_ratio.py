"""P(known) from a density ratio: known queries against strangers, or against an unlabelled mixture of both.

Unlike `lam.retrieval.decisions.one_class`, the ratio is learnt from examples of strangers. An unlabelled mixture, such
as the queries of a service, suffices: a ratio to the mixture ranks queries in the same order as a ratio to strangers.

Source: Franc, Paplham and Průša (2024), arXiv 2403.16916, section 4.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lam.retrieval.decisions.conformal import LEVEL, clopper_pearson
from lam.retrieval.decisions.one_class import is_evidence
from lam.retrieval.decisions.probability import Correctness, MonotoneRegression, Scores, cross_validated, random_order
from lam.utils.checks import check_share

OtherScores = Mapping[str, Float[Tensor, "..."]]
"""Scores by name, one value for each of O strangers or unlabelled queries."""

SHARE = 0.5
"""Default share of queries without a match."""

MONOTONE_SCORES = "kappa", "knn", "mahalanobis", "relative_mahalanobis", "cosine", "mean_cosine", "margin", "votes"
"""Scores that are higher for strangers, chosen on validation data of photographs, faces, characters and texts."""

_TOPS = (0.25, 0.5, 0.75)  # shares of known queries in the sets A of `from_mixture`


@dataclass(frozen=True)
class DensityRatio:
    """P(known) of a query, by a regression that separates queries with a match in the gallery from others.

    Let r be the density of known queries over the density of the others, and π the share of strangers. P(known) is
    (1 − π)r/((1 − π)r + π) if the others are strangers, and min(1, (1 − π)r) if the others are a mixture.

    Attributes:
        regression: P(known | scores) among the training queries.
        odds: total weight of the others over total weight of the known queries, in training.
        share: π.
        is_mixture: whether the others are an unlabelled mixture.
        interval: confidence interval of π at 0.95, if π was estimated.
    """

    regression: MonotoneRegression | Correctness
    odds: float
    share: float
    is_mixture: bool = False
    interval: tuple[float, float] | None = None

    @classmethod
    def from_strangers(cls, known: Scores, others: Sequence[OtherScores], *, share: float = SHARE) -> "DensityRatio":
        """Learn from known queries and one or more kinds of strangers; `share` is π for future queries."""
        check_share("the share of queries without a match", share)
        return cls(monotone_regression(known, others), 1.0, share)

    @classmethod
    def from_mixture(cls, known: Scores, mixture: OtherScores) -> "DensityRatio":
        """Learn from known queries and O unlabelled queries; estimate the share of strangers among the unlabelled.

        For any set A of queries, P(A | mixture) ≥ (1 − π) P(A | known). So π ≥ 1 − P(A | mixture)/P(A | known), with
        equality if A holds no stranger. The estimate is the greatest of these bounds for three sets: the queries whose
        cross-validated P(known) is as high as in the top 25, 50 or 75 % of known queries. The lower end of the interval
        is a Clopper-Pearson bound, with the error rate divided among the sets. The upper end is valid if one of the
        sets holds no stranger.

        Source: Blanchard, Lee and Scott (2010), section 5.
        """
        names = [name for name in known if is_evidence(name)]
        n, m = len(known[names[0]]), len(mixture[names[0]])
        if m == 0:
            raise ValueError("a mixture must hold at least one unlabelled query, got none")
        order = random_order(n + m)
        both = {name: torch.cat([known[name].cpu(), mixture[name].cpu()])[order] for name in names}
        is_known = (torch.arange(n + m) < n)[order]
        share, interval = _share_of_strangers(cross_validated(both, is_known, fit=Correctness.fit), is_known)
        odds = float((~is_known).sum() / is_known.sum())
        return cls(Correctness.fit(both, is_known), odds, share, is_mixture=True, interval=interval)

    @property
    def holds_both(self) -> bool:
        """Whether the interval of π excludes 0 and 1; true if π was not estimated."""
        return self.interval is None or (self.interval[0] > 0 and self.interval[1] < 1)

    def __call__(self, scores: Scores) -> Float[Tensor, " N"]:
        """P(known) of new queries, float64 on the CPU."""
        p = self.regression(scores)
        ratio = (1 - self.share) * self.odds * p / (1 - p).clamp(min=torch.finfo(p.dtype).tiny)
        return ratio.clamp(max=1) if self.is_mixture else ratio / (ratio + self.share)


def monotone_regression(known: Scores, others: Sequence[OtherScores]) -> MonotoneRegression:
    """Regression of P(known) on `MONOTONE_SCORES`.

    Each kind of `others` has the same total weight; all kinds together weigh as much as the known queries. The margin
    is left out without labels, because an item that is stored twice would have a margin of zero.
    """
    groups = [known, *(kind for kind in others if len(next(iter(kind.values()), ())))]
    if len(groups) == 1:
        raise ValueError("P(known) needs queries without a match to learn from, got none")
    sizes = [len(next(iter(group.values()))) for group in groups]
    share = [1.0] + [1 / (len(groups) - 1)] * (len(groups) - 1)
    weight = torch.cat([torch.full((size,), part / size) for size, part in zip(sizes, share, strict=True)])
    names = [name for name in MONOTONE_SCORES if name in known and (name != "margin" or "votes" in known)]
    both = {name: torch.cat([group[name].cpu() for group in groups]) for name in names}
    return MonotoneRegression.fit(both, torch.arange(sum(sizes)) < sizes[0], weight)


def _share_of_strangers(looks_known: Tensor, is_known: Tensor) -> tuple[float, tuple[float, float]]:
    """π and its interval, from the cross-validated P(known) of each query."""
    level = 1 - (1 - LEVEL) / (2 * len(_TOPS))
    least = looks_known[is_known].quantile(1 - torch.tensor(_TOPS, dtype=torch.float64))
    known, low_known, high_known = _shares_above(least, looks_known[is_known], level)
    mixture, low_mixture, high_mixture = _shares_above(least, looks_known[~is_known], level)
    ratios = torch.stack([mixture / known, high_mixture / low_known, low_mixture / high_known])
    share, low, high = (1 - ratios).amax(1).clamp(min=0).tolist()
    return share, (low, high)


def _shares_above(least: Float[Tensor, " T"], values: Tensor, level: float) -> Float[Tensor, "3 T"]:
    """Share of values at or above each bound, and both ends of the share's interval."""
    counts = [int((values >= bound).sum()) for bound in least]
    rows = [(count / len(values), *clopper_pearson(count, len(values), level=level)) for count in counts]
    return torch.tensor(rows, dtype=torch.float64).T
