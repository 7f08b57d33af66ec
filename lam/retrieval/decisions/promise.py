"""`Promise`: whether the promises of a calibration still hold for the queries of a service.

Queries that differ from the calibration queries by more than chance put the promises in doubt. Feedback with more
errors than promised breaks the promises. Both are tested by martingales, which may be read at any time.

A test martingale is the wealth of a gambler who begins with 1 and bets against a hypothesis. If the hypothesis is true,
no bets raise the expected wealth. Then, by Ville's inequality, the probability that the wealth ever reaches 1/α is at
most α. In contrast, an ordinary test that is repeated on a growing stream raises a false alarm sooner or later.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int64

from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.decisions.conformal import clopper_pearson
from lam.vmf.embeddings import KAPPA_RANGE

State = Literal["holds", "in doubt", "broken"]
DOUBT = 0.05  # greatest probability that the state is ever `in doubt` while nothing has changed
BROKEN = 0.01  # greatest probability that the state is ever `broken` while the promises hold
_CELLS = 4096
_LEAST_GAP = 1e-6  # of 1 − cosine
_RANGES = {"kappa": KAPPA_RANGE, "cosine": (_LEAST_GAP, 2.0)}
_LOG_FINITE = 690.0  # its exponential is a float
_ODDS = (1.2, 1.8, 3.0, 8.0)
_LEVELS = np.repeat([0.01, 0.03, 0.1, 0.3], len(_ODDS))
_RATE_ODDS = np.array([1.5, 2.0, 4.0, 10.0, 30.0, 100.0])
_SCALE = 100.0  # unit of n in `asleep`


@dataclass(frozen=True)
class Reading:
    """The state of one test.

    Attributes:
        name: `kappa` or `cosine` for a test of the queries; `far` or `wrong` for a test of the feedback.
        evidence: value of the martingale now; it starts at 1.
        peak: greatest value so far.
        needed: value at which the test raises a permanent alarm.
        n: number of queries, or of judged answers.
        errors: number of errors among the judged answers; None for queries.
        limit: error rate above which evidence grows: the promised rate or, if higher, the upper confidence limit
            of the rate in the calibration. None for queries.
    """

    name: str
    evidence: float
    peak: float
    needed: float
    n: int
    errors: int | None = None
    limit: float | None = None


def asleep(n: int) -> float:
    """Share of the wealth that sleeps (has not bet) after n rounds: 1 for n = 0, else 1/(2 + 2 log(1 + n/100)).

    Half of the wealth wakes in the first round, because the data may have changed before. In a late round n, about
    1/(n log² n) wakes. So after a change in round n, an alarm needs a gain that is only about n log² n times greater.
    """
    return 1.0 if n == 0 else 0.5 / (1 + float(np.log1p(n / _SCALE)))


class Martingale:
    """Wealth of a gambler, 1 at first, none of it bet yet. In each round, a part wakes, and all awake wealth bets.

    In round n, bet j of J multiplies its stake by b_nj. Then the awake wealth in bet j is
    W_nj = (W_(n−1)j + (asleep(n−1) − asleep(n))/J) · b_nj, and the whole wealth is M_n = asleep(n) + Σ_j W_nj. If the
    tested hypothesis is true, b_nj and M_n/M_(n−1) have means of at most 1, given the past. Wealth that wakes late has
    lost no earlier bets, so a long past without change does not hide a change. M_n is a Shiryaev-Roberts statistic: a
    sum over waking times, with weights that sum to 1.

    Source: Vovk, Gammerman and Shafer (2022), Algorithmic Learning in a Random World, algorithm 9.4, with another
        rate of waking.

    Args:
        shape: (..., J) for J bets on each stream.
        asleep: share of the wealth that sleeps after n rounds: a function of n that falls from 1.

    Attributes:
        n: number of rounds.
        log_accounts: (..., J) logarithms of W_nj, the awake wealth in each bet.
        log_peak: the greatest log wealth so far.

    Example:
        >>> martingale = Martingale((16,))
        >>> for p in (0.002, 0.004, 0.001, 0.003):
        ...     martingale.bet(step_bets(np.array(p)))
        >>> round(float(martingale.log_value), 2)
        5.21
    """

    def __init__(self, shape: tuple[int, ...], *, asleep: Callable[[int], float] = asleep) -> None:
        self.n = 0
        self.log_accounts = np.full(shape, -np.inf)
        self.log_peak = np.zeros(shape[:-1])
        self._asleep = asleep

    def bet(self, log_bets: Float[np.ndarray, "... J"]) -> None:
        """Play a round in which the bets multiply their stakes by these factors, given as logarithms."""
        woken = (self._asleep(self.n) - self._asleep(self.n + 1)) / log_bets.shape[-1]
        self.n += 1
        self.log_accounts = np.logaddexp(self.log_accounts, np.log(woken)) + log_bets
        self.log_peak = np.asarray(np.maximum(self.log_peak, self.log_value))

    @property
    def log_value(self) -> Float[np.ndarray, "..."]:
        """Logarithm of the wealth."""
        return np.asarray(np.logaddexp(np.logaddexp.reduce(self.log_accounts, axis=-1), np.log(self._asleep(self.n))))


def step_bets(p: Float[np.ndarray, "..."]) -> Float[np.ndarray, "... J"]:
    """Logarithms of the factors of 16 bets on small p-values: b/a for p ≤ a, else (1 − b)/(1 − a).

    The levels a are 0.01, 0.03, 0.1 and 0.3; the odds of b are 1.2, 1.8, 3 and 8 times the odds of a. For a level a,
    the best b is the share of p-values that are at most a.
    """
    return np.where(p[..., None] <= _LEVELS, *_STEPS)


def rate_bets(error: Bool[np.ndarray, "..."], rate: float) -> Float[np.ndarray, "... J"]:
    """Logarithms of the factors of 6 bets on errors above `rate`: b/rate for an error, else (1 − b)/(1 − rate).

    b has 1.5 to 100 times the odds of `rate`. If the error rate is at most `rate`, each factor has a mean of at most 1.

    Source: Waudby-Smith and Ramdas (2024), section 4, for one-sided bets.
    """
    return np.where(error[..., None], *_factors(rate, _RATE_ODDS))


def _factors(level: float | np.ndarray, ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the factors of won and of lost bets that expect `ratios` times the odds of `level`."""
    odds = ratios * level / (1 - level)
    share = odds / (1 + odds)
    return np.log(share / level), np.log((1 - share) / (1 - level))


_STEPS = _factors(_LEVELS, np.tile(_ODDS, 4))


def online_p_value(counts: Int64[np.ndarray, " B"], cell: int, uniform: float) -> float:
    """Smoothed p-value of a score among all earlier scores, in cells of a fixed grid; the score is then counted, too.

    p = (#{earlier above} + U · (1 + #{earlier equal}))/(n + 1) for n earlier scores and a uniform U. For exchangeable
    scores of any distribution, even with ties, the p-values are independent and uniform. So scores in one cell of the
    grid may count as equal, which bounds the memory. The cells must not depend on the scores.

    Source: Vovk, Gammerman and Shafer (2005), proposition 2.8.

    Args:
        counts: number of earlier scores in each cell, by rising doubt; updated in place.
        cell: cell of the score.
        uniform: U, drawn from [0, 1).
    """
    above = int(counts[cell + 1 :].sum())
    p = (above + uniform * (1 + int(counts[cell]))) / (int(counts.sum()) + 1)
    counts[cell] += 1
    return p


class _Test:
    """A martingale that raises an alarm once its value reaches 1/alpha; `counts` are its further state."""

    def __init__(self, n_bets: int, alpha: float, *, breaks: bool = False, **counts: np.ndarray) -> None:
        self.martingale, self.breaks, self.counts = Martingale((n_bets,)), breaks, counts
        self._log_needed = -math.log(alpha)

    @property
    def alarms(self) -> bool:
        return float(self.martingale.log_peak) >= self._log_needed

    def reading(self, name: str) -> Reading:
        logs = self.martingale.log_value, self.martingale.log_peak, self._log_needed
        evidence, peak, needed = (math.exp(min(float(log), _LOG_FINITE)) for log in logs)
        return Reading(name, evidence, peak, needed, self.martingale.n)

    def arrays(self) -> dict[str, np.ndarray]:
        past = np.array([self.martingale.n, float(self.martingale.log_peak)])
        counts = {name: count.copy() for name, count in self.counts.items()}
        return {"accounts": self.martingale.log_accounts, "past": past, **counts}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        n, peak = arrays["past"].tolist()
        self.martingale.n, self.martingale.log_peak = int(n), np.array(peak)
        self.martingale.log_accounts = arrays["accounts"].copy()
        for name, count in self.counts.items():
            count[...] = arrays[name]


class _QueryTest(_Test):
    """Tests whether a score of the queries is exchangeable with the score of the calibration queries."""

    def __init__(self, name: str, calibrated: Float[np.ndarray, " N"], alpha: float) -> None:
        counts = np.bincount(cells_of(name, calibrated), minlength=_CELLS)
        super().__init__(len(step_bets(np.array(0.5))), alpha, counts=counts)
        self._name = name

    def observe(self, value: float, uniform: float) -> None:
        p = online_p_value(self.counts["counts"], int(cells_of(self._name, np.array(value))), uniform)
        self.martingale.bet(step_bets(np.array(p)))


class _RateTest(_Test):
    """Tests whether judged answers have a greater error rate than a limit."""

    def __init__(self, limit: float, alpha: float, *, breaks: bool) -> None:
        super().__init__(len(rate_bets(np.array(True), limit)), alpha, breaks=breaks, errors=np.array(0))
        self._limit = limit

    def judge(self, error: bool) -> None:
        self.counts["errors"] += error
        self.martingale.bet(rate_bets(np.array(error), self._limit))

    def reading(self, name: str) -> Reading:
        return replace(super().reading(name), errors=int(self.counts["errors"]), limit=self._limit)


class Promise:
    """Tests of a calibration's promises, with the state `holds`, `in doubt` or `broken`. Not thread-safe.

    *In doubt*: queries are no longer like the calibration queries. Each κ and each cosine of a first hit gets a p-value
    among the calibration queries and all earlier queries; bets win on small p-values. While queries are exchangeable
    with the calibration queries, the probability of ever reaching this state is at most `DOUBT`.

    *Broken*: among judged answers to strangers, the share of false accepts exceeds `far`. The promise is about the mean
    over calibration sets; a single set may exceed the promised rate by chance. So the test's limit is the upper end of
    the rate's confidence interval, if this end is above `far`. While the promise holds, the probability of ever
    reaching this state is at most `BROKEN`, if feedback does not depend on whether an answer is right.

    A further test is about the share of wrong answers among the judged matches. If `wrong` is promised, a greater share
    breaks the promises. Otherwise, a greater share than in the calibration puts the promises in doubt.

    Args:
        calibration: makes the promises.
        seed: seed of the uniform draws that break ties; None for a random seed.

    Attributes:
        key: hash of the promises and of the calibration queries.
    """

    def __init__(self, calibration: Calibration, *, seed: int | None = None) -> None:
        self._generator = np.random.default_rng(seed)
        targets, above, acceptance = calibration.targets, calibration.accept_above, calibration.acceptances[0]
        scores = {name: -calibration.detector.conformal_scores(name).scores.numpy() for name in _RANGES}
        terms = repr((above, targets.far, targets.wrong)).encode()
        self.key = hashlib.sha256(terms + b"".join(values.tobytes() for values in scores.values())).digest()
        promised = targets.wrong is not None
        in_doubt, broken = DOUBT / (len(scores) + (not promised)), BROKEN / (1 + promised)
        self._queries = {name: _QueryTest(name, values, in_doubt) for name, values in scores.items()}
        # half of each probability covers an unlucky calibration set, half covers lucky bets
        far = max(targets.far, calibration.false_accepts.interval(above, level=1 - broken)[1])
        self._rates = {"far": _RateTest(far, broken / 2, breaks=True)} if far < 1 else {}
        answered = acceptance.statistics > above
        n_answered, n_wrong = int(answered.sum()), int((answered & ~acceptance.is_right).sum())
        if n_wrong < n_answered:
            alpha = broken if promised else in_doubt
            wrong = max(targets.wrong or 0.0, clopper_pearson(n_wrong, n_answered, level=1 - alpha)[1])
            self._rates["wrong"] = _RateTest(wrong, alpha / 2, breaks=promised)
        self._tests: dict[str, _Test] = {**self._queries, **self._rates}

    def observe(self, kappa: float, cosine: float) -> None:
        """Count a search of the whole gallery: the query's κ and the cosine of its first hit, −1 without a hit."""
        for name, value in (("kappa", kappa), ("cosine", cosine)):
            self._queries[name].observe(value, self._generator.random())

    def judge(self, *, matched: bool, stranger: bool | None, right: bool | None) -> list[str]:
        """Count feedback on an answer.

        Args:
            matched: whether the answer was a match.
            stranger: whether the gallery held no match; None if unknown.
            right: whether the match was right; None if unknown, or if the answer was not a match.

        Returns:
            Names of the tests that use this feedback: `far`, `wrong`, both or neither.
        """
        errors = {"far": matched} if stranger else dict[str, bool]()
        if matched and right is not None:
            errors["wrong"] = not right
        counted = [name for name in errors if name in self._rates]
        for name in counted:
            self._rates[name].judge(errors[name])
        return counted

    @property
    def state(self) -> State:
        """`holds`, `in doubt` or `broken`; alarms are permanent."""
        alarms = {test.breaks for test in self._tests.values() if test.alarms}
        return "broken" if True in alarms else "in doubt" if alarms else "holds"

    @property
    def readings(self) -> list[Reading]:
        """The state of each test."""
        return [test.reading(name) for name, test in self._tests.items()]

    def arrays(self, *, only_feedback: bool = False) -> dict[str, np.ndarray]:
        """Arrays for `restore`, from all tests or only from the tests of feedback."""
        tests = self._rates if only_feedback else self._tests
        return {f"{name}.{part}": values for name, test in tests.items() for part, values in test.arrays().items()}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Continue from the `arrays` of a promise with the same key; tests without arrays do not change."""
        for name, test in self._tests.items():
            start = f"{name}."
            own = {key.removeprefix(start): value for key, value in arrays.items() if key.startswith(start)}
            if own:
                test.restore(own)


def cells_of(name: str, values: Float[np.ndarray, "*N"]) -> Int64[np.ndarray, "*N"]:
    """Cell of each κ or cosine, numbered by rising doubt, on a uniform grid of log κ or log(1 − cosine)."""
    low, high = np.log(_RANGES[name])
    gaps = np.log(np.clip(values if name == "kappa" else 1 - values, *_RANGES[name]))
    places = (high - gaps if name == "kappa" else gaps - low) / (high - low)
    return np.asarray(np.minimum(places * _CELLS, _CELLS - 1), dtype=np.int64)
