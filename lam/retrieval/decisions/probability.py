"""P(first hit is right) and P(known): regressions on scores of the query and its hits, kept as plain numbers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lam.retrieval.metrics.uncertainty import ReliabilityBins
from lam.utils.checks import check_finite, check_length

Scores = Mapping[str, Float[Tensor, " N"]]
"""By name, one value for each of N searches."""

FOLDS = 5
"""Parts of a cross-validation."""
MIN_PER_OUTCOME = 10
"""How many right and how many wrong first hits it takes to learn from more than one score."""
SINGLE_SCORE = "cosine"
"""That one, where it is there."""

LOGISTIC_COUNTS = 300
"""As how many searches the logistic curve counts beside the isotonic one; chosen by log score on validation data."""

_PENALTIES = (0.01, 0.1, 1.0)  # scikit-learn's C: variances of the weights before anything is seen
_KNOTS = 65
_BULK = 2.0  # spreads of a score from its median
_BINS = 10


@dataclass(frozen=True)
class RankOdds:
    """log(F/(1 − F)) of a score, F being the share of the calibration data below it; ties count half.

    Whatever the unit of a score, it has so a scale that all scores share, on which no outlier is farther than one in N;
    linear between the knots, constant beyond.

    Attributes:
        values: of the score, rising.
        odds: logarithms of odds, one a value, rising.
        spread: of the score: the range between its quartiles, or else its standard deviation.
    """

    values: tuple[float, ...]
    odds: tuple[float, ...]
    spread: float

    def __post_init__(self) -> None:
        _check_knots("values", self.values, "odds", self.odds)

    @classmethod
    def of(cls, score: Float[Tensor, " N"]) -> "RankOdds":
        """Learn from N values; 65 knots at most, evenly between the odds of the least and of the greatest."""
        values, counts = score.unique(return_counts=True)
        share = (counts.cumsum(0) - counts / 2) / len(score)
        odds = share.double().logit()
        evenly = torch.linspace(float(odds[0]), float(odds[-1]), _KNOTS, dtype=torch.float64)
        kept = torch.searchsorted(odds, evenly).clamp(max=len(odds) - 1).unique()
        low, high = score.double().quantile(score.new_tensor([0.25, 0.75], dtype=torch.float64))
        spread = float(high - low) or float(score.double().std(correction=0)) or 1.0
        return cls(tuple(values[kept].tolist()), tuple(odds[kept].tolist()), spread)

    def __call__(self, score: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Of new values, float64 on the CPU."""
        return torch.from_numpy(np.interp(score.double().numpy(), *self._knots))

    @cached_property
    def _knots(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.values), np.array(self.odds)


@dataclass(frozen=True)
class ExtendedOdds:
    """`RankOdds` of E scores, and beyond the least and the greatest value log(1 + d/spread) more, d being how far."""

    ranks: tuple[RankOdds, ...]

    def __call__(self, scores: Sequence[Float[Tensor, " N"]]) -> Float[Tensor, "E N"]:
        """Of new values, float64 on the CPU."""
        x = torch.stack([score.detach().cpu().double() for score in scores])
        least, greatest, spread = self._ends
        above, below = ((x - greatest) / spread).clamp(min=0), ((least - x) / spread).clamp(min=0)
        inside = torch.stack([rank(values) for rank, values in zip(self.ranks, x, strict=True)])
        return inside + above.log1p() - below.log1p()

    @cached_property
    def _ends(self) -> Float[Tensor, "3 E 1"]:
        ends = [(rank.values[0], rank.values[-1], rank.spread) for rank in self.ranks]
        return torch.tensor(ends, dtype=torch.float64).T[..., None]


@dataclass(frozen=True)
class SoftScale:
    """A score in units of its spread: z = (s − median)/spread within ±2, and ±(2 + log(1 + |z| − 2)) beyond.

    Distances count within the bulk, and no outlier outweighs it.

    Attributes:
        median: of the score.
        spread: the range between its quartiles, or else its standard deviation.
    """

    median: float
    spread: float

    @classmethod
    def of(cls, score: Float[Tensor, " N"]) -> "SoftScale":
        """Learn from N values."""
        low, middle, high = score.double().quantile(score.new_tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
        return cls(middle, (high - low) or float(score.double().std(correction=0)) or 1.0)

    def __call__(self, score: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Of new values, float64 on the CPU."""
        return _soft((score.detach().cpu().double() - self.median) / self.spread)


@dataclass(frozen=True)
class MonotoneRegression:
    """P(known) from several scores, none of which makes a query more known as it rises.

    log(P/(1 − P)) = b − Σ_j w_j x_j with all w_j ≥ 0, x_j the scores on a `SoftScale`: logistic regression with a
    ridge penalty, Σ w²/2 beside the weighted sum of log losses. A score is doubt, so that a weight below 0 could only
    fit chance; without such weights a few dozen queries suffice to learn from.

    Attributes:
        evidence: the scores that it needs, E of them.
        scales: of each.
        weights: of each, not negative.
        intercept: b.
    """

    evidence: tuple[str, ...]
    scales: tuple[SoftScale, ...]
    weights: tuple[float, ...]
    intercept: float

    def __post_init__(self) -> None:
        if not len(self.evidence) == len(self.scales) == len(self.weights) > 0:
            raise ValueError(f"there must be a scale and a weight for each score, got {len(self.weights)} weights")
        if not all(math.isfinite(weight) and weight >= 0 for weight in self.weights):
            raise ValueError(f"weights must be finite and not negative, got {self.weights}")

    @classmethod
    def fit(
        cls, scores: Scores, known: Bool[Tensor, " N"], weight: Float[Tensor, " N"] | None = None
    ) -> "MonotoneRegression":
        """Learn from N queries.

        Args:
            scores: higher meaning more doubt.
            known: (N,) whether each is known.
            weight: (N,) how much each counts, not negative; their sum is of no effect. All alike by default.

        Raises:
            ValueError: for no query or no score, another length, or scores that are not finite.
        """
        if len(known) == 0 or not scores:
            raise ValueError(f"P(known) is learnt from queries and their scores, got {len(known)} and {len(scores)}")
        for name, values in scores.items():
            check_length(name, values, "the queries", len(known))
            check_finite(name, values)
        from scipy.optimize import minimize

        scales = tuple(SoftScale.of(values) for values in scores.values())
        x = torch.stack([scale(values) for scale, values in zip(scales, scores.values(), strict=True)], 1).numpy()
        sign = np.where(known.cpu().numpy(), 1.0, -1.0)
        mass = np.ones(len(sign)) if weight is None else weight.cpu().double().numpy()
        mass = mass * (len(sign) / mass.sum())

        def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
            margin = sign * (theta[-1] - x @ theta[:-1])
            slope = -sign * mass * np.exp(-np.logaddexp(0, margin))
            value = mass @ np.logaddexp(0, -margin) + theta[:-1] @ theta[:-1] / 2
            return value, np.append(theta[:-1] - x.T @ slope, slope.sum())

        bounds = [(0.0, None)] * len(scales) + [(None, None)]
        found: Any = minimize(loss, np.zeros(len(bounds)), jac=True, method="L-BFGS-B", bounds=bounds)
        *weights, intercept = map(float, found.x)
        return cls(tuple(scores), scales, tuple(weights), intercept)

    def __call__(self, scores: Scores) -> Float[Tensor, " N"]:
        """P(known), float64, as often as among the queries that it was learnt from.

        Raises:
            ValueError: for a score that is missing or not finite.
        """
        return (self.intercept - self._weighted(scores)).sigmoid()

    def doubt(self, scores: Scores) -> Float[Tensor, " N"]:
        """Σ_j w_j x_j / Σ_j w_j, float64; zero where no score counts; errors as of a call.

        Of other queries it is in the same order as 1 − P. Unlike log odds it can be compared between regressions that
        were learnt from parts of the same data: the more queries, the larger are all w_j that the penalty holds back.
        """
        total = sum(self.weights)
        return self._weighted(scores) / (total or 1.0)

    def _weighted(self, scores: Scores) -> Float[Tensor, " N"]:
        check_evidence("P(known)", self.evidence, scores)
        x = torch.stack([scores[name].detach().cpu().double() for name in self.evidence])
        median, spread, weight = self._columns
        return (weight * _soft((x - median) / spread)).sum(0)

    @cached_property
    def _columns(self) -> Float[Tensor, "3 E 1"]:
        """Median, spread and weight of each score."""
        scales = zip(self.scales, self.weights, strict=True)
        rows = [(scale.median, scale.spread, weight) for scale, weight in scales]
        return torch.tensor(rows, dtype=torch.float64).T[..., None]


@dataclass(frozen=True)
class Correctness:
    """P(first hit is right) from several scores, by logistic and isotonic regression.

    Each score becomes the log odds of its rank, x (see `RankOdds`); s = b + Σ_j w_j x_j is a logistic regression on
    them. g rises, piecewise linearly between knots, and is learnt by isotonic regression from the s of searches that
    the weights were not learnt from, so that log odds need not be linear in the scores. The probability is
    (N g(s) + m σ(s))/(N + m), m = 300: isotonic regression does better than the logistic curve only where it has
    hundreds of searches to learn from, and the order by s stays where g is level. No level is nearer to 0 or 1 than
    1/(N + 2).

    Attributes:
        evidence: the scores that it needs, E of them.
        ranks: of each.
        weights: one for each.
        intercept: b.
        knots: sums at which g is known, rising.
        levels: g there, rising, from 0 to 1.
        n: how many searches it was learnt from.
    """

    evidence: tuple[str, ...]
    ranks: tuple[RankOdds, ...]
    weights: tuple[float, ...]
    intercept: float
    knots: tuple[float, ...]
    levels: tuple[float, ...]
    n: int

    def __post_init__(self) -> None:
        if not len(self.evidence) == len(self.ranks) == len(self.weights) > 0:
            raise ValueError(f"there must be ranks and a weight for each score, got {len(self.weights)} weights")
        if not all(map(math.isfinite, (*self.weights, self.intercept))):
            raise ValueError(f"weights must be finite numbers, got {self.weights} and {self.intercept}")
        _check_knots("knots", self.knots, "levels", self.levels)

    @classmethod
    def fit(cls, scores: Scores, correct: Bool[Tensor, " N"]) -> "Correctness":
        """Learn with scikit-learn, the penalty of the weights being chosen by cross-validation, by the log score.

        Queries without a match in the gallery do not belong here: no first hit of theirs can be right. To these
        searches two are added, as Laplace adds them: a right one with the least doubt by every score, and a wrong one
        with the greatest; so that where all are right there is still an order, and no certainty. Where fewer than 10
        first hits are right, or wrong, one score is all that can be learnt from: the cosine, or the first that is
        given.

        Source: Platt (1999), Zadrozny and Elkan (2002).

        Args:
            scores: higher meaning more doubt; the regression finds out where that is not so.
            correct: (N,) whether the first hit was right.

        Raises:
            ValueError: for no search, no score, another length, or scores that are not finite.
        """
        if len(correct) == 0:
            raise ValueError("the probability of a right answer needs searches that have a match, got none")
        if not scores:
            raise ValueError("the probability of a right answer needs a score to learn from, got none")
        for name, values in scores.items():
            check_length(name, values, "the searches", len(correct))
            check_finite(name, values)
        from sklearn.isotonic import IsotonicRegression

        right, n = correct.cpu(), len(correct)
        names = tuple(scores)
        if min(int(right.sum()), int((~right).sum())) < MIN_PER_OUTCOME:
            names = (SINGLE_SCORE if SINGLE_SCORE in names else names[0],)
        ranks = tuple(RankOdds.of(scores[name].detach().cpu()) for name in names)
        x = torch.stack([rank(scores[name].detach().cpu()) for rank, name in zip(ranks, names, strict=True)], 1)
        unseen = {penalty: _unseen_sums(x, right, penalty) for penalty in _PENALTIES}
        penalty = min(unseen, key=lambda penalty: _log_score(unseen[penalty], right))
        rising: Any = IsotonicRegression().fit(unseen[penalty].numpy(), right.double().numpy())
        weights, intercept = _regression(x, right, penalty)
        least = 1 / (n + 2)
        levels = torch.from_numpy(rising.y_thresholds_).double().clamp(least, 1 - least)
        return cls(
            evidence=names,
            ranks=ranks,
            weights=tuple(weights.tolist()),
            intercept=intercept,
            knots=tuple(rising.X_thresholds_.tolist()),
            levels=tuple(levels.tolist()),
            n=n,
        )

    def __call__(self, scores: Scores) -> Float[Tensor, " N"]:
        """P(first hit is right), float64.

        Raises:
            ValueError: for a score that is missing or not finite.
        """
        check_evidence("the probability", self.evidence, scores)
        total: Any = self.intercept
        for name, rank, weight in zip(self.evidence, self.ranks, self.weights, strict=True):
            total = total + weight * rank(scores[name])
        level = torch.from_numpy(np.interp(total.numpy(), *self._levels))
        return (self.n * level + LOGISTIC_COUNTS * total.sigmoid()) / (self.n + LOGISTIC_COUNTS)

    @cached_property
    def _levels(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.knots), np.array(self.levels)

    @property
    def worth(self) -> dict[str, float]:
        """The share of each score in the sum of absolute weights, the greatest first; all have one scale."""
        total = sum(map(abs, self.weights)) or 1.0
        shares = {name: abs(weight) / total for name, weight in zip(self.evidence, self.weights, strict=True)}
        return dict(sorted(shares.items(), key=lambda share: -share[1]))


def cross_validated(
    scores: Scores, correct: Bool[Tensor, " N"], *, fit: Callable[[Scores, Tensor], Callable[[Scores], Tensor]]
) -> Float[Tensor, " N"]:
    """The probability of each search, learnt by `fit` from the other four fifths of them."""
    probability = torch.empty(len(correct), dtype=torch.float64)
    for fold, rest in folds(len(correct)):
        probability[fold] = fit(_rows(scores, rest), correct[rest])(_rows(scores, fold))
    return probability


def check_evidence(what: str, evidence: Sequence[str], scores: Scores) -> None:
    """Refuse scores one of which is missing or not finite."""
    if missing := [name for name in evidence if name not in scores]:
        raise ValueError(f"{what} rests on {', '.join(evidence)}: {', '.join(missing)} is missing")
    for name in evidence:
        check_finite(name, scores[name])


def folds(n: int) -> Iterator[tuple[Bool[Tensor, " N"], Bool[Tensor, " N"]]]:
    """For each fifth of N items in random order: which are in it, and which in the rest; a lone item is in both."""
    number = random_order(n) % FOLDS
    for fold in range(min(FOLDS, n)):
        is_in_fold = number == fold
        yield is_in_fold, ~is_in_fold if n > 1 else is_in_fold


def random_order(n: int) -> Int[Tensor, " N"]:
    """One fixed random order of N items: files often list classes by turns."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))


def probability_bins(probability: Float[Tensor, " N"], correct: Bool[Tensor, " N"]) -> ReliabilityBins:
    """Sort answers by their probability into ten equal bins, closed on the right: a reliability diagram and its ECE.

    Args:
        probability: (N,) in [0, 1].
        correct: (N,) whether each answer is right.

    Returns:
        Mean probability, accuracy and count of each bin; its `expected_error` is the ECE, lower is better, NaN for no
        answer.

    Raises:
        ValueError: for another length, or a probability outside [0, 1], NaN included.

    Example:
        >>> probability_bins(torch.tensor([0.75, 0.75]), torch.tensor([True, False])).expected_error
        0.25
    """
    check_length("correct", correct, "the probabilities", len(probability))
    outside = (~((probability >= 0) & (probability <= 1))).nonzero()
    if len(outside):
        index = int(outside[0])
        raise ValueError(f"probability must lie in [0, 1], got {float(probability[index])} at index {index}")
    in_bin = ((probability.double() * _BINS).ceil().long() - 1).clamp(min=0)
    return ReliabilityBins.of(in_bin, probability, correct, bins=_BINS)


def _rows(scores: Scores, rows: Tensor) -> dict[str, Tensor]:
    return {name: values[rows] for name, values in scores.items()}


def _unseen_sums(x: Tensor, correct: Tensor, penalty: float) -> Tensor:
    """s of each search by weights that were learnt from the other folds."""
    sums = torch.empty(len(x), dtype=torch.float64)
    for fold, rest in folds(len(x)):
        weights, intercept = _regression(x[rest], correct[rest], penalty)
        sums[fold] = x[fold] @ weights + intercept
    return sums


def _log_score(sums: Tensor, correct: Tensor) -> float:
    """Minus the mean logarithm of the probability that σ(s) gives to what is the case."""
    return float(-torch.nn.functional.logsigmoid(torch.where(correct, sums, -sums)).mean())


def _regression(x: Tensor, correct: Tensor, penalty: float) -> tuple[Tensor, float]:
    """Weights and intercept, with two searches more: a right one of the least doubt, a wrong one of the greatest."""
    x = torch.cat([x, x.amin(0, keepdim=True), x.amax(0, keepdim=True)])
    correct = torch.cat([correct, torch.tensor([True, False])])
    from sklearn.linear_model import LogisticRegression

    model: Any = LogisticRegression(C=penalty, max_iter=1000).fit(x.numpy(), correct.numpy())
    return torch.from_numpy(model.coef_[0]), float(model.intercept_[0])


def _soft(z: Tensor) -> Tensor:
    """z within ±2, and the logarithm of what is beyond."""
    size = z.abs()
    return z.sign() * torch.where(size > _BULK, _BULK + (size - _BULK).clamp(min=0).log1p(), size)


def _check_knots(name: str, knots: tuple[float, ...], other: str, levels: tuple[float, ...]) -> None:
    if len(knots) != len(levels) or not knots or not all(map(math.isfinite, (*knots, *levels))):
        raise ValueError(f"{name} and {other} must be finite numbers, as many of each, got {knots} and {levels}")
