"""P(known): whether a query is of a kind that the calibration has seen, from many scores and both ways.

A score that looks one way calls some of what is foreign more known than known: blur brings photographs near the mean of
the training features. So unusual is what lies far from the calibration queries, in whichever direction, in all scores
together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.probability import RankOdds, Scores, folds
from lam.retrieval.metrics.registry import SCORES

UNUSUAL = 0.02
"""Where P(known) begins to fall: at the most unusual share of the calibration queries."""

_OF_THE_FIRST = "cosine", "cosine_spread"


@dataclass(frozen=True)
class Known:
    """P(known) = min(1, p/0.02), p the conformal p-value of how far a query is from the calibration queries.

    Each score becomes the log odds of its rank, and beyond all that was seen log(1 + d/spread) more, d the distance
    from the extreme; the distance is Mahalanobis's between these. Nothing foreign is needed to learn it, and of queries
    like those calibrated on the mean is at least 0.99. Fewer than 50 queries cannot call anything unknown. What labels
    say is no evidence: a query whose hits disagree is ambiguous, and known. Nor is what the first hit alone decides: a
    query that is in the gallery finds itself, as no calibration query does.

    Source: Ledoit and Wolf (2004) for the covariance; Vovk, Gammerman and Shafer (2005) for the p-value.

    Attributes:
        evidence: the scores that it needs, E of them.
        ranks: of each.
        mean: (E,) of their log odds.
        precision: (E, E) inverse of their covariance, shrunk.
        distances: of calibration queries from others, rising.
    """

    evidence: tuple[str, ...]
    ranks: tuple[RankOdds, ...]
    mean: tuple[float, ...]
    precision: tuple[tuple[float, ...], ...]
    distances: tuple[float, ...]

    @classmethod
    def fit(cls, scores: Scores) -> "Known":
        """Learn from the scores of N known queries: each is held against what was learnt of the other folds.

        Raises:
            ValueError: where no score is evidence.
        """
        names = tuple(name for name in scores if is_evidence(name))
        if not names:
            raise ValueError(f"there must be a score of the query itself, got {', '.join(scores) or 'none'}")
        ranks = tuple(RankOdds.of(scores[name].detach().cpu()) for name in names)
        x = _odds(ranks, names, scores)
        distances = torch.empty(len(x), dtype=torch.float64)
        for fold, rest in folds(len(x)):
            distances[fold] = _distance(x[fold], *_gaussian(x[rest]))
        mean, precision = _gaussian(x)
        rows = tuple(map(tuple, precision.tolist()))
        return cls(names, ranks, tuple(mean.tolist()), rows, tuple(distances.sort().values.tolist()))

    def __call__(self, scores: Scores) -> Float[Tensor, " N"]:
        """P(known) of new queries, float64 on the CPU.

        Raises:
            ValueError: for a score that is missing.
        """
        if missing := [name for name in self.evidence if name not in scores]:
            raise ValueError(f"P(known) rests on {', '.join(self.evidence)}: {', '.join(missing)} is missing")
        mean, precision, known = self._learnt
        distance = _distance(_odds(self.ranks, self.evidence, scores), mean, precision)
        return (known.p_values(distance) / UNUSUAL).clamp(max=1)

    @cached_property
    def _learnt(self) -> tuple[Tensor, Tensor, ConformalScores]:
        mean, precision, distances = (
            torch.tensor(values, dtype=torch.float64) for values in (self.mean, self.precision, self.distances)
        )
        return mean, precision, ConformalScores(distances)

    @classmethod
    def from_json(cls, numbers: Mapping[str, Any]) -> "Known":
        """Of numbers by name."""
        return cls(
            evidence=tuple(numbers["evidence"]),
            ranks=tuple(RankOdds.from_json(one) for one in numbers["ranks"]),
            mean=tuple(numbers["mean"]),
            precision=tuple(map(tuple, numbers["precision"])),
            distances=tuple(numbers["distances"]),
        )


def is_evidence(name: str) -> bool:
    """Whether a score says how unusual a query is, and not how ambiguous, or whether it is in the gallery."""
    return name not in _OF_THE_FIRST and "labels" not in (*SCORES[name].needs, *SCORES[name].uses)


def _odds(ranks: tuple[RankOdds, ...], names: tuple[str, ...], scores: Scores) -> Tensor:
    return torch.stack([rank.extended(scores[name].detach().cpu()) for rank, name in zip(ranks, names, strict=True)], 1)


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
