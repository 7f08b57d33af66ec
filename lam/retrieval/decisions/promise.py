"""`Promise`: whether the promises of a calibration still hold for the queries of a service.

Queries that differ from the calibration queries by more than chance put the promises in doubt. Feedback with more
errors than promised breaks the promises. Martingales (`lam.retrieval.decisions.martingale`) test both, so the tests may
be read at any time.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jaxtyping import Float, Int64

from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.decisions.conformal import clopper_pearson
from lam.retrieval.decisions.martingale import Martingale, OnlinePValues, rate_bets, step_bets
from lam.vmf.embeddings import KAPPA_RANGE

State = Literal["holds", "in doubt", "broken"]
DOUBT = 0.05
"""Greatest probability that the state is ever `in doubt` while nothing has changed."""
BROKEN = 0.01
"""Greatest probability that the state is ever `broken` while the promises hold."""

_CELLS = 4096
_LEAST_GAP = 1e-6  # of 1 − cosine
_RANGES = {"kappa": KAPPA_RANGE, "cosine": (_LEAST_GAP, 2.0)}
_LOG_FINITE = 690.0  # its exponential is a float


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
        self._name, self._p_values = name, OnlinePValues(counts)

    def observe(self, value: float, uniform: float) -> None:
        p = self._p_values(int(cells_of(self._name, np.array(value))), uniform)
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
    """Tests of a calibration's promises, with the state `holds`, `in doubt` or `broken`. Not safe for threads.

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

    @property
    def _tests(self) -> dict[str, _Test]:
        return {**self._queries, **self._rates}


def cells_of(name: str, values: Float[np.ndarray, "*N"]) -> Int64[np.ndarray, "*N"]:
    """Cell of each κ or cosine, numbered by rising doubt, on a uniform grid of log κ or log(1 − cosine)."""
    low, high = np.log(_RANGES[name])
    gaps = np.log(np.clip(values if name == "kappa" else 1 - values, *_RANGES[name]))
    places = (high - gaps if name == "kappa" else gaps - low) / (high - low)
    return np.asarray(np.minimum(places * _CELLS, _CELLS - 1), dtype=np.int64)
