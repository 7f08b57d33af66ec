"""P(known) from known queries alone: the similarity of a query to the calibration queries, by many scores together.

A query is unusual if its scores lie far above *or* far below the scores of the calibration queries. The lower side
counts too because some strangers are too close: blurred photographs lie near the mean of the training features.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.probability import Scores, check_evidence, folds
from lam.retrieval.decisions.scales import ExtendedOdds, RankOdds
from lam.retrieval.metrics.scores import SCORES

UNUSUAL = 0.02
"""P(known) is below 1 for this share of the calibration queries, the most unusual ones."""

STRANGER_SCORES = "knn", "relative_mahalanobis", "cosine", "mean_cosine"
"""Scores that are higher for some kinds of strangers."""
_COPIES = {"knn": 1e-10, "cosine": -1.0}  # a lower score means a copy of a known item; cosines cannot show copies
_FIRST_HIT_SCORES = "cosine", "cosine_spread"


@dataclass(frozen=True)
class OneClassModel:
    """P(known) = min(1, p/0.02), with p the conformal p-value of a query's strangeness among the calibration queries.

    Strangeness is the greater of two log odds of ranks (`ExtendedOdds`): the rank of a Mahalanobis distance, and the
    rank of the `joint_surprise` of `STRANGER_SCORES`. The distance is two-sided; its coordinates are log odds of the
    scores' ranks. It leaves out scores that need labels, because a query with hits that disagree is ambiguous, but
    known. It also leaves out `cosine` and `cosine_spread`, which depend most on the first hit. Queries like the
    calibration queries have a mean P(known) of about 0.99.

    If a query is stranger than all N calibration queries, p is 1/(N + 1), multiplied by the greatest odds among the
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
        of_distance: function from distances to log odds of ranks, learnt from cross-validated distances.
        of_surprise: function from joint surprises to log odds of ranks, learnt from cross-validated surprises.
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
        if not evidence:
            raise ValueError(f"there must be a score of the query itself, got {', '.join(scores) or 'none'}")
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

    Source: Vovk and Wang (2020), "Combining p-values via averaging", for the family; the exponent by validation.
    """
    return 2 * ((softplus(odds) / 2).logsumexp(0) - math.log(len(odds)))


def is_evidence(name: str) -> bool:
    """Whether the distance of `OneClassModel` includes a score: not `cosine`, `cosine_spread` or scores of labels."""
    return name not in _FIRST_HIT_SCORES and "labels" not in (*SCORES[name].needs, *SCORES[name].uses)


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
