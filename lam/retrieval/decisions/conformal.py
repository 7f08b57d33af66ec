"""Split conformal prediction: thresholds with a promised error rate on new data, by counting calibration scores.

`ConformalScores` bounds rates among all queries of one kind. `control_selective_risk` bounds the share of wrong answers
among the answers.

All promises assume exchangeability: every order of calibration scores and new scores is equally likely, as for draws
from one source. Data used for training or tuning violate the assumption, and so do data that drift.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from lam.utils.checks import check_length, check_no_nan, check_share

LEVEL = 0.95
"""Default confidence of an interval."""

_RESAMPLES = 2000  # bootstrap draws of classes
_STEP = 1.1  # each threshold answers a tenth more queries than the threshold before
_SPARE = 2  # wrong answers that the first threshold allows, if there are enough calibration queries


@dataclass(frozen=True, eq=False)
class ConformalScores:
    """Rates at which a score exceeds thresholds, learned from N calibration scores.

    Scores of one class may depend on each other. With `classes`, the exchangeable units are C classes instead of N
    scores. The promise is then about a random item of a new class; see `threshold`.

    Attributes:
        scores: (N,) calibration scores, rising, float64; high scores are flagged or accepted.
        classes: (N,) the class of each score; None if every score is a unit of its own.

    Raises:
        ValueError: for no score, NaN, or scores that do not rise; `ConformalScores.of` sorts them.

    Example:
        >>> scores = ConformalScores.of(torch.arange(99.0))
        >>> scores.threshold(0.05), scores.rate(94.0), scores.law(0.05)
        (94.0, 0.05, (5, 95))
    """

    scores: Float[Tensor, " N"]
    classes: Int64[Tensor, "..."] | None = None

    def __post_init__(self) -> None:
        if len(self.scores) == 0:
            raise ValueError("there must be at least one calibration score, got none")
        check_no_nan("calibration scores", self.scores)
        if (self.scores[1:] < self.scores[:-1]).any():
            raise ValueError("calibration scores must rise: ConformalScores.of sorts them")

    @classmethod
    def of(cls, scores: Float[Tensor, " N"], classes: Int64[Tensor, "..."] | None = None) -> "ConformalScores":
        """Sort scores, with their classes; infinities are allowed."""
        if classes is not None:
            check_length("classes", classes, "the scores", len(scores))
        rising, order = scores.detach().cpu().double().sort(stable=True)
        return cls(rising, None if classes is None else classes.cpu()[order])

    def __len__(self) -> int:
        return len(self.scores)

    @cached_property
    def _units(self) -> tuple[Int64[Tensor, " N"], Int64[Tensor, "..."]]:
        """Index of each score's unit, and number of scores in each unit."""
        units = torch.arange(len(self)) if self.classes is None else self.classes
        return units.unique(return_inverse=True, return_counts=True)[1:]

    @property
    def n_units(self) -> int:
        """Number of exchangeable units: classes, or scores if there are no classes."""
        return len(self._units[1])

    @cached_property
    def _weights(self) -> Float[Tensor, " N"]:
        position, counts = self._units
        return 1 / counts[position].double()

    def threshold(self, target: float) -> float:
        """The least threshold that a new score exceeds with a probability of at most `target`.

        The threshold t is the r-th smallest of N calibration scores, with r = ⌈(N + 1)(1 − target)⌉. An exchangeable
        new score has each of N + 1 ranks with equal probability. So P(score > t) ≤ (N + 1 − r)/(N + 1) ≤ target for any
        N and any distribution; ties lower the probability. The promise holds in the mean over calibration sets; `law`
        describes the spread.

        With classes, F_c(t) is the share of class c's scores above t, and the threshold t is the least calibration
        score with (1 + Σ_c F_c(t))/(C + 1) ≤ target. Proof: let a new class C + 1 be exchangeable with these C. Let
        G(t) be the mean of F_c(t) over all C + 1 classes. The least t* with G(t*) ≤ target does not depend on the order
        of classes. So a random item of the new class exceeds t* with probability E F_(C+1)(t*) = E G(t*) ≤ target; and
        t ≥ t*, because F_(C+1) ≤ 1. The promise holds for any sizes of classes, in the mean over new classes: some
        classes exceed t far more often than others.

        Source: Lee, Barber and Willett (2023), hierarchical conformal prediction, for classes; Dunn, Wasserman and
            Ramdas (2023) pool distribution functions likewise, with a promise in the limit of many classes. Vovk,
            Gammerman and Shafer (2005); Lei, G'Sell, Rinaldo, Tibshirani and Wasserman (2018), eq. 2.

        Raises:
            ValueError: for a target outside (0, 1), or too few scores for the target; the error says how many it needs.
        """
        self._require_units(target)
        above = self._weights.sum() - self._weights.cumsum(0)  # the next line allows 1e-6 for rounding
        return float(self.scores[(1 + above <= target * (self.n_units + 1) + 1e-6).nonzero()[0, 0]])

    def law(self, target: float) -> tuple[int, int]:
        """Parameters (a, b) of the Beta distribution of the rate at which new scores exceed `threshold(target)`.

        a is N + 1 − r, and b is r, as in `threshold`. The distribution is over calibration sets; ties lower the rate.
        Of O new scores, the number above the threshold is Beta-binomial with the same a and b.

        Source: Vovk (2012), proposition 2.
        """
        if self.classes is not None:
            raise ValueError("law needs scores without classes: with classes, the rate follows no Beta law")
        self._require_units(target)
        rank = min(math.ceil(round((len(self) + 1) * (1 - target), 6)), len(self))
        return len(self) + 1 - rank, rank

    def rate(self, threshold: float) -> float:
        """The promised rate of a threshold: (1 + #{calibration scores > threshold})/(N + 1), at least 1/(N + 1).

        With classes, Σ_c F_c (see `threshold`) replaces the count, and the number of classes replaces N.
        """
        return (1 + self._count_above(threshold)) / (self.n_units + 1)

    def share_above(self, threshold: float) -> tuple[float, float, float]:
        """Share of calibration scores above a threshold (with classes, the mean share), and both ends of `interval`."""
        return self._count_above(threshold) / self.n_units, *self.interval(threshold)

    def _count_above(self, threshold: float) -> float:
        return float(self._weights[self._first_above(threshold) :].sum())

    def _first_above(self, threshold: float) -> int:
        if math.isnan(threshold):
            raise ValueError("threshold must be a number, got nan")
        return int(torch.searchsorted(self.scores, threshold, right=True))

    def interval(self, threshold: float, *, level: float = LEVEL) -> tuple[float, float]:
        """Confidence interval of the rate at which new scores exceed a threshold, fixed or learned by `threshold`.

        Without classes, this is the Clopper-Pearson interval, which covers the rate with probability `level` or more.
        With classes, the classes are resampled, and the ends are percentiles of the mean of F_c (see `threshold`).
        Resampling fails if all scores or no scores exceed the threshold. So the interval is widened to include the
        Clopper-Pearson intervals for Σ_c F_c events in C trials, with the sum rounded down and up.
        """
        first = self._first_above(threshold)
        if self.classes is None:
            return clopper_pearson(len(self) - first, len(self), level=level)
        shares = torch.zeros(self.n_units, dtype=torch.float64)
        shares.index_add_(0, self._units[0][first:], self._weights[first:])
        n, generator = self.n_units, torch.Generator().manual_seed(0)
        means = torch.stack([shares[torch.randint(n, (n,), generator=generator)].mean() for _ in range(_RESAMPLES)])
        ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
        low, high = means.quantile(ends).tolist()
        count = round(float(shares.sum()), 6)
        least, _ = clopper_pearson(math.floor(count), self.n_units, level=level)
        _, most = clopper_pearson(math.ceil(count), self.n_units, level=level)
        return min(low, least), max(high, most)

    def p_values(self, scores: Float[Tensor, " Q"]) -> Float[Tensor, " Q"]:
        """(Q,) conformal p-values of new scores, float64, on the device of the scores; small means unusually high.

        p = (1 + #{calibration scores ≥ score})/(N + 1); with classes, a sum replaces the count as in `rate`. For
        exchangeable scores, P(p ≤ α) ≤ α; p ≤ α means score > threshold(α).
        """
        check_no_nan("scores", scores)
        below, sums = torch.searchsorted(self.scores, scores.detach().cpu().double()), self._cumulative
        return ((1 + sums[-1] - sums[below]) / (self.n_units + 1)).to(scores.device)

    @cached_property
    def _cumulative(self) -> Float[Tensor, "..."]:
        return F.pad(self._weights.cumsum(0), (1, 0))

    def _require_units(self, target: float) -> None:
        least = needed(target)
        if self.n_units < least:
            units = "calibration scores" if self.classes is None else "classes"
            raise ValueError(
                f"a rate of {target:g} needs at least {least} {units}, got {self.n_units}: give more data, or "
                f"a target of at least {least_rate(self.n_units):g}"
            )


def needed(target: float) -> int:
    """The least number of calibration scores that can promise a rate: ⌈1/target⌉ − 1.

    Example:
        >>> needed(0.05), needed(0.001)
        (19, 999)
    """
    check_share("target", target)
    return math.ceil(round(1 / target, 6)) - 1


def least_rate(n: int) -> float:
    """The smallest rate that N calibration scores can promise: 1/(N + 1), rounded up to three digits."""
    rate = 1 / (n + 1)
    scale = 10.0 ** (2 - math.floor(math.log10(rate)))
    return math.ceil(round(rate * scale, 6)) / scale


def clopper_pearson(count: int, n: int, *, level: float = LEVEL) -> tuple[float, float]:
    """Interval of a rate after `count` events in `n` trials; covers the true rate with probability ≥ `level`.

    Source: Clopper and Pearson (1934).

    Example:
        >>> [round(end, 4) for end in clopper_pearson(0, 100)]
        [0.0, 0.0362]
    """
    from scipy.stats import binomtest

    if n < 1 or not 0 <= count <= n:
        raise ValueError(f"count must be from 0 to n with n at least 1, got {count} of {n}")
    check_share("level", level)
    interval = binomtest(count, n).proportion_ci(level, method="exact")
    return float(interval.low), float(interval.high)


def conformal_depth(ranks: Int[Tensor, " N"], *, target: float) -> int:
    """The smallest k such that the first k hits hold a match of a new query with probability 1 − target.

    k is the ⌈(N + 1)(1 − target)⌉-th smallest rank of the first match; see `ConformalScores.threshold`. The promise is
    about queries with a match in the gallery.

    Source: Angelopoulos and Bates (2023), section 1, with the rank of the first match as the score.

    Example:
        >>> conformal_depth(torch.tensor([1, 1, 1, 1, 1, 2, 1, 1, 5]), target=0.2)
        2
    """
    if (ranks < 1).any():
        raise ValueError(f"ranks must be at least 1, got {int(ranks.min())}")
    return int(ConformalScores.of(ranks.double()).threshold(target))


def control_selective_risk(
    scores: Float[Tensor, " N"], wrong: Bool[Tensor, "..."], *, target: float, confidence: float = LEVEL
) -> float:
    """The lowest tested threshold above which, at this confidence, at most a share `target` of the answers is wrong.

    Let R(t) = P(wrong | score > t). Threshold t_j is the (m_j + 1)-th highest score, for numbers m_1 < m_2 < … that do
    not depend on the scores. The n_j queries above t_j have W_j wrong answers. Given t_j, these queries are independent
    draws from the answers above t_j. So P(Bin(n_j, target) ≤ W_j) is a p-value of the hypothesis R(t_j) > target. The
    thresholds are tested from the highest down, until a p-value exceeds 1 − `confidence`. The result is the last
    threshold that passed. This fixed-sequence testing needs no correction for many thresholds.

    m_1 is the least number of answers that passes the test with two wrong answers. If N is less than twice this number,
    m_1 is computed for one wrong answer or, if N is again too small, for no wrong answer. Each next m is a tenth
    larger; the last m is N. With ties, a threshold may have fewer than `answers_needed` answers; the test skips it.

    The promise is P(R(threshold) > target) ≤ 1 − `confidence` over calibration sets, for any N and any distribution of
    scores. It has two assumptions. First, calibration queries and new queries are independent draws from one source,
    with the same share of strangers. Second, answers with a higher score are not wrong more often than answers with a
    lower score. This is needed because the thresholds depend on the calibration data. (Without ties it suffices that R
    exceeds the target below some threshold, and nowhere above it.) In simulations of 1,080 kinds of scores that violate
    the second assumption, at most 4.4 % of 20,000 sets broke the promise, where 5 % is allowed.

    Source: Angelopoulos, Bates, Candès, Jordan and Lei (2021), Learn then Test, sections 2.3 and 3; the exact binomial
        bound as in Geifman and El-Yaniv (2017), SGR.

    Args:
        scores: (N,) accept scores of calibration queries; −∞ for a query that is never answered.
        wrong: (N,) whether the answer would be wrong, as for any stranger.
        target: the allowed share of wrong answers, in (0, 1).
        confidence: in (0, 1).

    Returns:
        The threshold: −∞ if every finite score may be answered, ∞ if too many answers with a high score are wrong.

    Raises:
        ValueError: for NaN, another length, a share outside (0, 1), or fewer queries than `answers_needed`.

    Example:
        >>> scores = torch.arange(100.0)
        >>> control_selective_risk(scores, scores < 20, target=0.1)
        17.0
        >>> control_selective_risk(scores, scores > 80, target=0.1)
        inf
    """
    check_length("wrong", wrong, "the scores", len(scores))
    check_no_nan("scores", scores)
    least = answers_needed(target, confidence=confidence)
    if len(scores) < least:
        raise ValueError(
            f"at most {target:g} wrong with confidence {confidence:g} needs at least {least} calibration queries, all "
            f"answered without an error, got {len(scores)}: give more queries, a larger target or a lower confidence"
        )
    from scipy.special import bdtr

    falling, order = scores.detach().cpu().double().sort(descending=True)
    thresholds = F.pad(falling, (0, 1), value=-math.inf)[torch.tensor(_ranks(len(falling), target, confidence))]
    answered = torch.searchsorted(-falling, -thresholds)
    n_wrong = F.pad(wrong.cpu()[order].cumsum(0), (1, 0))[answered]
    p_values = torch.from_numpy(bdtr(n_wrong.double().numpy(), answered.numpy(), target))
    can_hold = answered >= least
    holds = ((p_values <= 1 - confidence) | ~can_hold).long().cumprod(0).bool() & can_hold
    return float(thresholds[holds][-1]) if holds.any() else math.inf


def answers_needed(target: float, *, n_wrong: int = 0, confidence: float = LEVEL) -> int:
    """The least number of answers that bounds the share of wrong answers by `target` if `n_wrong` of them are wrong.

    This is the least n with P(Bin(n, target) ≤ n_wrong) ≤ 1 − confidence.

    Example:
        >>> answers_needed(0.05), answers_needed(0.05, n_wrong=1), answers_needed(0.01)
        (59, 93, 299)
    """
    check_share("target", target)
    check_share("confidence", confidence)
    from scipy.special import bdtr

    n = max(math.ceil(round(math.log(1 - confidence) / math.log(1 - target), 9)), n_wrong + 1)
    while bdtr(n_wrong, n, target) > 1 - confidence:
        n += 1
    return n


def _ranks(count: int, target: float, confidence: float) -> list[int]:
    """The numbers m_j of `control_selective_risk`."""
    starts = [answers_needed(target, n_wrong=spare, confidence=confidence) for spare in range(_SPARE + 1)]
    ranks = [max([starts[0], *(start for start in starts if 2 * start <= count)])]
    while ranks[-1] < count:
        ranks.append(min(max(round(ranks[-1] * _STEP), ranks[-1] + 1), count))
    return ranks
