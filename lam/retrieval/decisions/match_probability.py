"""`MatchProbability`: P(the first hit is right) of a query that may have no match in the gallery.

A query is known if the gallery holds a match. `OneClassModel` learns P(known) from known queries alone; `DensityRatio`
also learns from strangers or from an unlabelled mixture, such as the queries of a service.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

from lam.retrieval.decisions.conformal import LEVEL, ConformalScores, clopper_pearson
from lam.retrieval.decisions.evidence import Evidence
from lam.retrieval.decisions.probability import (
    Correctness,
    ExtendedOdds,
    MonotoneRegression,
    RankOdds,
    Scores,
    check_evidence,
    cross_validated,
    folds,
    random_order,
)
from lam.retrieval.metrics.scores import SCORES
from lam.utils.checks import check_share

UNUSUAL = 0.02  # P(known) is below 1 for this share of the calibration queries, the most unusual ones
STRANGER_SCORES = "knn", "relative_mahalanobis", "cosine", "mean_cosine"
"""Scores that are higher for some kinds of strangers."""

_COPIES = {"knn": 1e-10, "cosine": -1.0}  # a lower score means a copy of a known item; cosines cannot show copies
_FIRST_HIT_SCORES = "cosine", "cosine_spread"
OtherScores = Mapping[str, Float[Tensor, "..."]]
"""Scores by name, one value for each of O strangers or unlabelled queries."""

SHARE = 0.5  # default share of queries without a match
MONOTONE_SCORES = "kappa", "knn", "mahalanobis", "relative_mahalanobis", "cosine", "mean_cosine", "margin", "votes"
"""Scores that are higher for strangers, chosen on validation data of photographs, faces, characters and texts."""

_TOPS = (0.25, 0.5, 0.75)  # shares of known queries in the sets A of `from_mixture`


@dataclass(frozen=True)
class OneClassModel:
    """P(known) = min(1, p/0.02), with p the conformal p-value of a query's strangeness among the calibration queries.

    A query is unusual if its scores lie far above *or* far below the scores of the calibration queries. Low scores
    count because some strangers are unusually close: blurred photographs lie near the mean of the training features.

    Strangeness is the greater of two log odds of ranks (`ExtendedOdds`): the rank of a Mahalanobis distance, and the
    rank of the `joint_surprise` of `STRANGER_SCORES`. The distance is two-sided; its coordinates are log odds of the
    scores' ranks. It leaves out scores that need labels, because a query with hits that disagree is ambiguous, but
    known. It also leaves out `cosine` and `cosine_spread`, which depend most on the first hit. Queries like the
    calibration queries have a mean P(known) of about 0.99.

    If a query is more unusual than all N calibration queries, p is 1/(N + 1), multiplied by the greatest odds among the
    calibration queries and divided by the query's odds. So P(known) of very unusual queries is near 0 for any N.

    A query that is itself a training or gallery item differs from the calibration queries in most scores. So P(known)
    is 1 for a copy of a known item, and for a query that is nearer to a known item (`knn`) or to its first hit
    (`cosine`) than every calibration query.

    Source: Ledoit and Wolf (2004) for the covariance; Vovk, Gammerman and Shafer (2005) for the p-value.

    Attributes:
        evidence: names of the E scores of the Mahalanobis distance.
        together: names of the scores of `joint_surprise`.
        ranks: function from each of these scores to log odds of ranks.
        mean: (E,) mean log odds of the evidence.
        precision: (E, E) inverse of the shrunk covariance of these log odds.
        of_distance: function from distances to log odds of ranks, learned from cross-validated distances.
        of_surprise: function from joint surprises to log odds of ranks, learned from cross-validated surprises.
        unusual: sorted strangeness of the calibration queries.
    """

    evidence: tuple[str, ...]
    together: tuple[str, ...]
    ranks: Mapping[str, RankOdds]
    mean: tuple[float, ...]
    precision: tuple[tuple[float, ...], ...]
    of_distance: RankOdds
    of_surprise: RankOdds
    unusual: tuple[float, ...]

    @classmethod
    def fit(cls, scores: Scores) -> "OneClassModel":
        """Learn from the scores of N known queries; each is compared with queries of the other folds."""
        evidence = tuple(name for name in scores if is_evidence(name))
        together = tuple(name for name in STRANGER_SCORES if name in scores) or evidence
        columns = {name: scores[name].detach().cpu() for name in (*evidence, *together)}
        ranks = {name: RankOdds.of(values) for name, values in columns.items()}
        x = ExtendedOdds(tuple(ranks[name] for name in evidence))([columns[name] for name in evidence]).T
        distances, surprises = torch.empty(2, len(x), dtype=torch.float64)
        for fold, rest in folds(len(x)):
            distances[fold] = _distance(x[fold], *_gaussian(x[rest]))
            of_rest = ExtendedOdds(tuple(RankOdds.of(columns[name][rest]) for name in together))
            surprises[fold] = joint_surprise(of_rest([columns[name][fold] for name in together]))
        of_distance, of_surprise = RankOdds.of(distances), RankOdds.of(surprises)
        unusual = ExtendedOdds((of_distance, of_surprise))((distances, surprises)).amax(0).sort().values
        mean, precision = _gaussian(x)
        gaussian = tuple(mean.tolist()), tuple(map(tuple, precision.tolist()))
        return cls(evidence, together, ranks, *gaussian, of_distance, of_surprise, tuple(unusual.tolist()))

    def __call__(self, scores: Scores) -> Float[Tensor, " N"]:
        """P(known) of new queries, float64 on the CPU."""
        check_evidence("P(known)", tuple(self.ranks), scores)
        mean, precision, unusual, score_odds, statistic_odds = self._tensors
        odds = score_odds([scores[name] for name in (*self.evidence, *self.together)])
        distance = _distance(odds[: len(self.evidence)].T, mean, precision)
        surprises = joint_surprise(odds[len(self.evidence) :])
        strangeness = statistic_odds((distance, surprises)).amax(0)
        beyond = (strangeness - self.unusual[-1]).clamp(min=0)
        p_known = (unusual.p_values(strangeness) * (-beyond).exp() / UNUSUAL).clamp(max=1)
        for name in self.ranks.keys() & _COPIES:
            is_near = scores[name].detach().cpu() < max(self.ranks[name].values[0], _COPIES[name])
            p_known = p_known.masked_fill(is_near, 1.0)
        return p_known

    @cached_property
    def _tensors(self) -> tuple[Tensor, Tensor, ConformalScores, ExtendedOdds, ExtendedOdds]:
        """The model as tensors, cached because a service scores one query at a time."""
        columns = self.mean, self.precision, self.unusual
        mean, precision, unusual = (torch.tensor(values, dtype=torch.float64) for values in columns)
        of_scores = ExtendedOdds(tuple(self.ranks[name] for name in (*self.evidence, *self.together)))
        return mean, precision, ConformalScores(unusual), of_scores, ExtendedOdds((self.of_distance, self.of_surprise))


def joint_surprise(odds: Float[Tensor, "E N"]) -> Float[Tensor, " N"]:
    """−log of a mean of p over E scores, (Σ p^(−1/2)/E)^(−2), where p is the share of calibration scores above a score.

    This mean lies between the geometric mean, which is small for several small p, and the harmonic mean, which is small
    for one small p. `odds` are the extended log odds x of 1 − p, so −log p = log(1 + e^x).

    Source: Vovk and Wang (2020), "Combining p-values via averaging", for the family. Validation chose the exponent.
    """
    return 2 * ((softplus(odds) / 2).logsumexp(0) - math.log(len(odds)))


def is_evidence(name: str) -> bool:
    """Whether the distance of `OneClassModel` includes a score: not `cosine`, `cosine_spread` or scores of labels."""
    return name not in _FIRST_HIT_SCORES and not reads_labels(name)


def reads_labels(name: str) -> bool:
    """Whether a score uses labels of the hits."""
    return "labels" in (*SCORES[name].needs, *SCORES[name].uses)


def _gaussian(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and precision of rows; the identity for a single row."""
    if len(x) == 1:
        return x[0], torch.eye(x.shape[1], dtype=x.dtype)
    from sklearn.covariance import LedoitWolf

    fitted = LedoitWolf().fit(x.numpy())
    return torch.from_numpy(fitted.location_), torch.from_numpy(fitted.precision_)


def _distance(x: Tensor, mean: Tensor, precision: Tensor) -> Tensor:
    apart = x - mean
    return ((apart @ precision) * apart).sum(1).clamp(min=0).sqrt()


@dataclass(frozen=True)
class DensityRatio:
    """P(known) of a query, by a regression that separates known queries from strangers, or from an unlabelled mixture.

    Let r be the density of known queries over the density of the strangers or the mixture, and π the share of
    strangers. P(known) is (1 − π)r/((1 − π)r + π) for strangers, and min(1, (1 − π)r) for a mixture. A ratio to a
    mixture ranks queries in the same order as a ratio to strangers.

    Source: Franc, Paplham and Průša (2024), arXiv 2403.16916, section 4.

    Attributes:
        regression: P(known | scores) among the training queries.
        odds: total weight of the strangers or the mixture over total weight of the known queries, in training.
        share: π.
        is_mixture: whether the regression was learned from a mixture, not from strangers.
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
        """Learn from known queries and a mixture of O unlabelled queries; estimate the mixture's share π of strangers.

        For any set A of queries, P(A | mixture) ≥ (1 − π) P(A | known). So π ≥ 1 − P(A | mixture)/P(A | known), with
        equality if A holds no stranger. The estimate is the greatest of these bounds for three sets: queries whose
        cross-validated P(known) reaches the 0.75, 0.5 or 0.25 quantile of the known queries. The lower end of the
        interval is a Clopper-Pearson bound, with the error rate divided among the sets. The upper end is valid if one
        of the sets holds no stranger.

        Source: Blanchard, Lee and Scott (2010), section 5.
        """
        names = [name for name in known if is_evidence(name)]
        n, m = len(known[names[0]]), len(mixture[names[0]])
        if m == 0:
            raise ValueError("a mixture must hold at least one unlabelled query, got none")
        order = random_order(n + m)
        both = {name: torch.cat([known[name].cpu(), mixture[name].cpu()])[order] for name in names}
        is_known = (torch.arange(n + m) < n)[order]
        share, interval = _share_of_strangers(cross_validated(both, is_known), is_known)
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


@dataclass(frozen=True)
class MatchProbability:
    """P(the first hit is right) = P(known) · P(right | known).

    Attributes:
        usual: P(known) from the similarity of the query to the calibration queries.
        right: P(right | known).
        contrast: P(known) by contrast with queries without a match, or with unlabelled queries; None without either.
    """

    usual: OneClassModel
    right: Correctness
    contrast: DensityRatio | None = None

    @classmethod
    def fit(cls, evidence: Evidence, *, share: float = SHARE, mixture: Scores | None = None) -> "MatchProbability":
        """Learn both factors.

        Args:
            evidence: scores of the calibration queries and strangers.
            share: expected share of queries without a match among future queries, in (0, 1).
            mixture: scores of unlabelled queries; used if the interval of their share of strangers excludes 0 and 1.
        """
        right = Correctness.fit(evidence.known, evidence.right[evidence.has_match])
        contrast = None if mixture is None else DensityRatio.from_mixture(evidence.known, mixture)
        if contrast is None or not contrast.holds_both:
            contrast = None
            if len(evidence.no_match) or evidence.stranger_kinds:
                others = [evidence.no_match.scores, *evidence.stranger_kinds]
                contrast = DensityRatio.from_strangers(evidence.known, others, share=share)
        return cls(OneClassModel.fit(evidence.known), right, contrast)

    def p_known(self, scores: Scores) -> Float[Tensor, " N"]:
        """P(known): the smaller of `usual` and `contrast`."""
        usual = self.usual(scores)
        return usual if self.contrast is None else torch.minimum(usual, self.contrast(scores))

    def __call__(self, scores: Scores) -> Float[Tensor, " N"]:
        """P(known) · P(right | known), float64."""
        return self.p_known(scores) * self.right(scores)

    def cost(self, scores: Scores, *, wrong: float, stranger: float) -> Float[Tensor, " N"]:
        """Expected cost of answering: wrong · P(known and wrong) + stranger · P(not known).

        The best rule answers if this cost is below the cost of not answering.

        Source: Franc, Paplham and Průša (2024), arXiv 2403.16916, theorem 1.
        """
        if not (wrong >= 0 and stranger >= 0):
            raise ValueError(f"costs must not be negative, got wrong={wrong} and stranger={stranger}")
        known = self.p_known(scores)
        return wrong * known * (1 - self.right(scores)) + stranger * (1 - known)

    @property
    def evidence(self) -> frozenset[str]:
        """Names of the scores that the two factors need."""
        contrast = () if self.contrast is None else self.contrast.regression.evidence
        return frozenset((*self.usual.ranks, *self.right.evidence, *contrast))
