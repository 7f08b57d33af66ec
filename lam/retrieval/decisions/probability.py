"""Regressions of P(first hit is right) and P(known) on scores of the query and its hits.

Two scales make scores comparable: log odds of ranks (`RankOdds`), and units of the spread (`soften`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from lam.retrieval.metrics.uncertainty import ReliabilityBins
from lam.utils.checks import check_finite, check_length

Scores = Mapping[str, Float[Tensor, " N"]]
"""Scores by name, one value for each of N searches."""

FOLDS = 5  # number of folds of a cross-validation
MIN_PER_OUTCOME = 10
"""Least number of right and of wrong first hits for a regression on more than one score."""

SINGLE_SCORE = "cosine"  # the only score of a regression with too few right or wrong first hits
LOGISTIC_COUNTS = 300
"""Weight m of the logistic curve in `Correctness`, chosen by log score on validation data."""

_PENALTIES = (0.01, 0.1, 1.0)  # scikit-learn's C: prior variances of the weights
_BINS = 10
_KNOTS = 65
_BULK = 2.0  # spreads of a score from its median


@dataclass(frozen=True)
class RankOdds:
    """log(F/(1 − F)) of a score, with F the share of calibration scores below it; ties count half.

    The function is linear between knots and constant beyond them.

    Attributes:
        values: values of the score at the knots, rising.
        odds: log odds at the knots, rising.
        spread: interquartile range of the score; if 0, the standard deviation; 1 if both are 0.
    """

    values: tuple[float, ...]
    odds: tuple[float, ...]
    spread: float

    @classmethod
    def of(cls, score: Float[Tensor, " N"]) -> "RankOdds":
        """Learn from N values, with up to 65 knots at evenly spaced log odds."""
        values, counts = score.unique(return_counts=True)
        share = (counts.cumsum(0) - counts.double() / 2) / len(score)
        odds = share.logit()
        evenly = torch.linspace(float(odds[0]), float(odds[-1]), _KNOTS, dtype=torch.float64)
        kept = torch.searchsorted(odds, evenly).clamp(max=len(odds) - 1).unique()
        return cls(tuple(values[kept].tolist()), tuple(odds[kept].tolist()), _median_and_spread(score)[1])

    def __call__(self, score: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Log odds of new values, float64 on the CPU."""
        return torch.from_numpy(np.interp(score.double().numpy(), *self._knots))

    @cached_property
    def _knots(self) -> np.ndarray:
        return np.array([self.values, self.odds])


@dataclass(frozen=True)
class ExtendedOdds:
    """`RankOdds` of E scores; ± log(1 + d/spread) is added at a distance d above (+) or below (−) all knots."""

    ranks: tuple[RankOdds, ...]

    def __call__(self, scores: Sequence[Float[Tensor, " N"]]) -> Float[Tensor, "E N"]:
        """Extended log odds of new values, float64 on the CPU."""
        x = torch.stack([score.detach().cpu().double() for score in scores])
        least, greatest, spread = self._ends
        above, below = ((x - greatest) / spread).clamp(min=0), ((least - x) / spread).clamp(min=0)
        inside = torch.stack([rank(values) for rank, values in zip(self.ranks, x, strict=True)])
        return inside + above.log1p() - below.log1p()

    @cached_property
    def _ends(self) -> Float[Tensor, "3 E 1"]:
        ends = [(rank.values[0], rank.values[-1], rank.spread) for rank in self.ranks]
        return torch.tensor(ends, dtype=torch.float64).T[..., None]


def _median_and_spread(score: Tensor) -> tuple[float, float]:
    low, middle, high = score.double().quantile(score.new_tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return middle, (high - low) or float(score.double().std(correction=0)) or 1.0


def soften(z: Float[Tensor, "*B N"]) -> Float[Tensor, "*B N"]:
    """z within ±2, and ±(2 + log(1 + |z| − 2)) beyond."""
    size = z.abs()
    return z.sign() * torch.where(size > _BULK, _BULK + (size - _BULK).clamp(min=0).log1p(), size)


@dataclass(frozen=True)
class MonotoneRegression:
    """P(known) from several scores, decreasing in each.

    log(P/(1 − P)) = b − Σ_j w_j x_j, where all w_j ≥ 0 and x_j is (score j − its median)/spread after `soften`. The fit
    minimises weighted log losses plus the ridge penalty Σ w²/2. A score measures doubt, so a negative weight would fit
    noise.

    Attributes:
        evidence: names of the E scores.
        medians: median of each score.
        spreads: spread of each score, as in `RankOdds`.
        weights: w_j of each score, not negative.
        intercept: b.
    """

    evidence: tuple[str, ...]
    medians: tuple[float, ...]
    spreads: tuple[float, ...]
    weights: tuple[float, ...]
    intercept: float

    @classmethod
    def fit(
        cls, scores: Scores, known: Bool[Tensor, " N"], weight: Float[Tensor, " N"] | None = None
    ) -> "MonotoneRegression":
        """Learn from scores of N queries, whether each is known, and the weights of the queries (equal by default)."""
        _check_scores(scores, "the queries", len(known))
        from scipy.optimize import minimize

        columns = torch.stack([values.detach().cpu().double() for values in scores.values()], 1)
        scales = torch.tensor([_median_and_spread(column) for column in columns.T], dtype=torch.float64)
        medians, spreads = scales.T
        x = soften((columns - medians) / spreads).numpy()
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
        weights = (max(weight, 0.0) for weight in weights)  # rounding may violate the bound by 1e-19
        return cls(tuple(scores), tuple(medians.tolist()), tuple(spreads.tolist()), tuple(weights), intercept)

    def __call__(self, scores: Scores) -> Float[Tensor, " N"]:
        """P(known), float64, if known queries are as frequent as in training."""
        return (self.intercept - self._weighted(scores)).sigmoid()

    def doubt(self, scores: Scores) -> Float[Tensor, " N"]:
        """Weighted mean Σ_j w_j x_j / Σ_j w_j, float64, which rises with 1 − P; 0 if all weights are 0.

        Doubts of regressions on different parts of the data are comparable. Log odds are not, because the penalty
        shrinks the weights more if there are fewer queries.
        """
        total = sum(self.weights)
        return self._weighted(scores) / (total or 1.0)

    def _weighted(self, scores: Scores) -> Float[Tensor, " N"]:
        check_evidence("P(known)", self.evidence, scores)
        x = torch.stack([scores[name].detach().cpu().double() for name in self.evidence])
        median, spread, weight = self._columns
        return (weight * soften((x - median) / spread)).sum(0)

    @cached_property
    def _columns(self) -> Float[Tensor, "3 E 1"]:
        return torch.tensor([self.medians, self.spreads, self.weights], dtype=torch.float64)[..., None]


@dataclass(frozen=True)
class Correctness:
    """P(first hit is right) from several scores, by logistic and isotonic regression.

    Logistic regression on N searches gives σ(s) with s = b + Σ_j w_j x_j, where x_j is the log odds of score j's rank
    (`RankOdds`). Isotonic regression on cross-validated values of s gives g(s). The probability is a weighted mean,
    (N g(s) + m σ(s))/(N + m) with m = 300, because g is better than σ only with hundreds of searches. Where g is
    constant, σ still orders searches.

    Attributes:
        evidence: names of the E scores.
        ranks: function from each score to x_j.
        weights: w_j of each score.
        intercept: b.
        knots: values of s, rising; between knots, g is linear.
        levels: values of g at the knots, rising, clamped to [1/(N + 2), 1 − 1/(N + 2)].
        n: number of searches N.
    """

    evidence: tuple[str, ...]
    ranks: tuple[RankOdds, ...]
    weights: tuple[float, ...]
    intercept: float
    knots: tuple[float, ...]
    levels: tuple[float, ...]
    n: int

    @classmethod
    def fit(cls, scores: Scores, correct: Bool[Tensor, " N"]) -> "Correctness":
        """Learn from N searches with a match; cross-validated log score chooses the penalty of the weights.

        As in Laplace's rule, two searches are added: a right one with the least doubt by every score, and a wrong one
        with the greatest doubt. So P falls with doubt, even if all searches are right. With fewer than 10 right or 10
        wrong first hits, only the cosine is used or, without a cosine, the first score.

        Source: Platt (1999), Zadrozny and Elkan (2002).
        """
        _check_scores(scores, "the searches", len(correct))
        from sklearn.isotonic import IsotonicRegression

        right, n = correct.cpu(), len(correct)
        names = tuple(scores)
        if min(int(right.sum()), int((~right).sum())) < MIN_PER_OUTCOME:
            names = (SINGLE_SCORE if SINGLE_SCORE in names else names[0],)
        ranks = tuple(RankOdds.of(scores[name].detach().cpu()) for name in names)
        x = torch.stack([rank(scores[name].detach().cpu()) for rank, name in zip(ranks, names, strict=True)], 1)
        unseen = {penalty: _out_of_fold_sums(x, right, penalty) for penalty in _PENALTIES}
        losses = {penalty: -logsigmoid(torch.where(right, sums, -sums)).mean() for penalty, sums in unseen.items()}
        penalty = min(losses, key=lambda penalty: float(losses[penalty]))
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
        """P(first hit is right), float64."""
        check_evidence("the probability", self.evidence, scores)
        parts = zip(self.evidence, self.ranks, self.weights, strict=True)
        total: Any = sum((weight * rank(scores[name]) for name, rank, weight in parts), self.intercept)
        level = torch.from_numpy(np.interp(total.numpy(), *self._levels))
        return (self.n * level + LOGISTIC_COUNTS * total.sigmoid()) / (self.n + LOGISTIC_COUNTS)

    @cached_property
    def _levels(self) -> np.ndarray:
        return np.array([self.knots, self.levels])

    @property
    def worth(self) -> dict[str, float]:
        """Share of each score in the sum of absolute weights, the greatest first."""
        total = sum(map(abs, self.weights)) or 1.0
        shares = {name: abs(weight) / total for name, weight in zip(self.evidence, self.weights, strict=True)}
        return dict(sorted(shares.items(), key=lambda share: -share[1]))


def cross_validated(scores: Scores, correct: Bool[Tensor, " N"]) -> Float[Tensor, " N"]:
    """The probability of each search, from a `Correctness` learned on the other folds."""
    probability = torch.empty(len(correct), dtype=torch.float64)
    for fold, rest in folds(len(correct)):
        probability[fold] = Correctness.fit(rows_of(scores, rest), correct[rest])(rows_of(scores, fold))
    return probability


def check_evidence(what: str, evidence: Sequence[str], scores: Scores) -> None:
    """Reject scores that lack one of `evidence`, or are not finite."""
    if missing := [name for name in evidence if name not in scores]:
        raise ValueError(f"{what} needs the scores {', '.join(evidence)}; missing: {', '.join(missing)}")
    for name in evidence:
        check_finite(name, scores[name])


def folds(n: int) -> Iterator[tuple[Bool[Tensor, " N"], Bool[Tensor, " N"]]]:
    """Masks of each of five random folds of N items, and of the fold's complement; a single item is in both."""
    number = random_order(n) % FOLDS
    for fold in range(min(FOLDS, n)):
        is_in_fold = number == fold
        yield is_in_fold, ~is_in_fold if n > 1 else is_in_fold


def random_order(n: int) -> Int[Tensor, " N"]:
    """A fixed random order of N items, because the order of files often follows the classes."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))


def rows_of(scores: Scores, rows: Tensor) -> dict[str, Tensor]:
    """Scores of some of the searches."""
    return {name: values[rows] for name, values in scores.items()}


def probability_bins(probability: Float[Tensor, " N"], correct: Bool[Tensor, " N"]) -> ReliabilityBins:
    """Reliability of N answers in ten bins of probability, of equal width and closed on the right.

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


def _out_of_fold_sums(x: Tensor, correct: Tensor, penalty: float) -> Tensor:
    """s of each search, with weights and intercept fitted on the other folds."""
    sums = torch.empty(len(x), dtype=torch.float64)
    for fold, rest in folds(len(x)):
        weights, intercept = _regression(x[rest], correct[rest], penalty)
        sums[fold] = x[fold] @ weights + intercept
    return sums


def _regression(x: Tensor, correct: Tensor, penalty: float) -> tuple[Tensor, float]:
    """Weights and intercept, with two added searches; see `Correctness.fit`."""
    x = torch.cat([x, x.amin(0, keepdim=True), x.amax(0, keepdim=True)])
    correct = torch.cat([correct, torch.tensor([True, False])])
    from sklearn.linear_model import LogisticRegression

    model: Any = LogisticRegression(C=penalty, solver="newton-cholesky").fit(x.numpy(), correct.numpy())
    return torch.from_numpy(model.coef_[0]), float(model.intercept_[0])


def _check_scores(scores: Scores, items: str, count: int) -> None:
    for name, values in scores.items():
        check_length(name, values, items, count)
        check_finite(name, values)
