"""P(known): whether a query is of a kind that the calibration has seen, from many scores and both ways.

A score that looks one way calls some of what is foreign more known than known: blur brings photographs near the mean of
the training features. So unusual is what lies far from the calibration queries, in whichever direction, in all scores
together.
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
from lam.retrieval.decisions.probability import ExtendedOdds, RankOdds, Scores, check_evidence, folds
from lam.retrieval.metrics.registry import SCORES

UNUSUAL = 0.02
"""Where P(known) begins to fall: at the most unusual share of the calibration queries."""

STRANGER_SCORES = "knn", "relative_mahalanobis", "cosine", "mean_cosine"
"""Scores that outsiders of some kind raise: what features say, and what was found."""
_OF_THE_FIRST = "cosine", "cosine_spread"


@dataclass(frozen=True)
class OneClassModel:
    """P(known) = min(1, p/0.02), p the conformal p-value of how unusual a query is beside the calibration queries.

    Beyond the most unusual of N of them, where it is 1/(N + 1), p falls on as the odds do, so that what is far from
    everything is called unknown however few they are.

    Two statistics look for it, and the greater rank counts. One looks both ways: each score becomes the log odds of its
    rank, and beyond all that was seen log(1 + d/spread) more, d the distance from the extreme, and Mahalanobis's
    distance is taken between these. The other is `joint_surprise` of the scores that outsiders of some kind raise.
    Nothing foreign is needed to learn it, and of queries like those calibrated on the mean is about 0.99. What labels
    say is no evidence: a query whose hits disagree is ambiguous, and known. Nor is, both ways, what the first hit alone
    decides: a query that is in the gallery finds itself, as no calibration query does.

    Source: Ledoit and Wolf (2004) for the covariance; Vovk, Gammerman and Shafer (2005) for the p-value.

    Attributes:
        evidence: the scores that are looked at both ways, E of them.
        together: those that outsiders of some kind raise.
        ranks: of all these.
        mean: (E,) of the log odds of the evidence.
        precision: (E, E) inverse of their covariance, shrunk.
        of_distance: ranks of calibration queries' distances from others.
        of_surprise: likewise of what these scores say.
        unusual: the greater log odds of the two, rising.
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
        """Learn from the scores of N known queries: each is held against what was learnt of the other folds.

        Raises:
            ValueError: where no score is evidence.
        """
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
        """P(known) of new queries, float64 on the CPU.

        Raises:
            ValueError: for a score that is missing.
        """
        check_evidence("P(known)", tuple(self.ranks), scores)
        mean, precision, known = self._learnt
        both = (*self.evidence, *self.together)
        odds = self._of_both([scores[name] for name in both])
        distance = _distance(odds[: len(self.evidence)].T, mean, precision)
        surprises = joint_surprise(odds[len(self.evidence) :])
        unusual = self._of_statistics((distance, surprises)).amax(0)
        beyond = (unusual - self.unusual[-1]).clamp(min=0)
        return (known.p_values(unusual) * (-beyond).exp() / UNUSUAL).clamp(max=1)

    @cached_property
    def _of_both(self) -> ExtendedOdds:
        return ExtendedOdds(tuple(self.ranks[name] for name in (*self.evidence, *self.together)))

    @cached_property
    def _of_statistics(self) -> ExtendedOdds:
        return ExtendedOdds((self.of_distance, self.of_surprise))

    @cached_property
    def _learnt(self) -> tuple[Tensor, Tensor, ConformalScores]:
        mean, precision, unusual = (
            torch.tensor(values, dtype=torch.float64) for values in (self.mean, self.precision, self.unusual)
        )
        return mean, precision, ConformalScores(unusual)


def joint_surprise(odds: Float[Tensor, "E N"]) -> Float[Tensor, " N"]:
    """−log of the mean (1/E Σ p^(−1/2))^(−2) of p over E scores, p = 1 − F being the share above.

    It lies between the geometric mean, by which many scores that doubt a little count, and the harmonic one, by which
    one that doubts much suffices. −log p = log(1 + e^x) of the log odds x of F, which go on beyond all that was seen.

    Source: Vovk and Wang (2020), "Combining p-values via averaging", for the family; the exponent by validation.
    """
    return 2 * ((softplus(odds) / 2).logsumexp(0) - math.log(len(odds)))


def is_evidence(name: str) -> bool:
    """Whether a score says how unusual a query is, and not how ambiguous, or whether it is in the gallery."""
    return name not in _OF_THE_FIRST and "labels" not in (*SCORES[name].needs, *SCORES[name].uses)


def _gaussian(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and precision of rows, of one row those of a Gaussian of variance 1."""
    if len(x) == 1:
        return x[0], torch.eye(x.shape[1], dtype=x.dtype)
    from sklearn.covariance import LedoitWolf

    fitted = LedoitWolf().fit(x.numpy())
    return torch.from_numpy(fitted.location_), torch.from_numpy(fitted.precision_)


def _distance(x: Tensor, mean: Tensor, precision: Tensor) -> Tensor:
    apart = x - mean
    return ((apart @ precision) * apart).sum(1).clamp(min=0).sqrt()
