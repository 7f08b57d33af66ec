"""Test martingales against another library and a double loop; few false alarms, and an alarm after a change."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from lam.retrieval.decisions.promise import Martingale, asleep, online_p_value, rate_bets, step_bets

LEVELS, ODDS = (0.01, 0.03, 0.1, 0.3), (1.2, 1.8, 3.0, 8.0)


def played(log_bets: np.ndarray, asleep: Callable[[int], float] = asleep) -> np.ndarray:
    """The log wealth after each round, of one stream."""
    martingale, values = Martingale(log_bets.shape[1:], asleep=asleep), []
    for bets in log_bets:
        martingale.bet(bets)
        values.append(float(martingale.log_value))
    assert martingale.log_peak == max(0.0, *values)
    return np.array(values)


def better(level: float) -> list[float]:
    return [odds * level / (1 - level + odds * level) for odds in ODDS]


@pytest.mark.parametrize("rate", [0.001, 0.05])
@pytest.mark.parametrize("power", [1.0, 1.5])
def test_the_wealth_is_that_of_crepes(rate: float, power: float) -> None:
    martingales = pytest.importorskip("crepes.martingales")
    p = np.random.default_rng(0).random(2000) ** power  # a power of 1.5 makes small ones frequent
    sleepers = [
        martingales.SleeperStayer(rate, martingales.StepBettingFunction(Gs=better(level), A=level)) for level in LEVELS
    ]
    theirs = martingales.CompositeMartingale(sleepers).apply(p)
    ours = played(step_bets(p), lambda n: (1 - rate) ** n)
    np.testing.assert_allclose(ours, np.log(theirs), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cells", [3, 50, 4000])
def test_the_p_values_are_those_of_crepes(cells: int) -> None:
    martingales = pytest.importorskip("crepes.martingales")
    scores = np.random.default_rng(1).integers(0, cells, 400)
    uniform = np.random.RandomState(5).rand(len(scores))  # as crepes draws them
    counts = np.zeros(cells, dtype=np.int64)
    p = [online_p_value(counts, int(score), u) for score, u in zip(scores, uniform, strict=True)]
    np.testing.assert_allclose(p, martingales.semi_online_p_values(scores, seed=5), rtol=1e-12)


def slow(factors: list[list[float]]) -> float:
    """The log wealth as a sum over bets and waking times; `factors` has a list of factors for each bet."""
    rounds = len(factors[0])
    woken = [(asleep(n) - asleep(n + 1)) / len(factors) for n in range(rounds)]
    return math.log(asleep(rounds) + sum(woken[n] * math.prod(bet[n:]) for bet in factors for n in range(rounds)))


def test_the_wealth_is_the_sum_over_waking_times() -> None:
    p = np.random.default_rng(2).random(60) ** 2
    factors = [
        [share / level if each <= level else (1 - share) / (1 - level) for each in p]
        for level in LEVELS
        for share in better(level)
    ]
    assert played(step_bets(p))[-1] == pytest.approx(slow(factors), abs=1e-12)


@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_the_wealth_of_bets_on_errors_is_the_sum_over_waking_times(rate: float) -> None:
    errors = np.random.default_rng(3).random(80) < 0.2
    shares = [odds * rate / (1 - rate + odds * rate) for odds in (1.5, 2, 4, 10, 30, 100)]
    factors = [[share / rate if error else (1 - share) / (1 - rate) for error in errors] for share in shares]
    assert played(rate_bets(errors, rate))[-1] == pytest.approx(slow(factors), abs=1e-12)


@pytest.mark.parametrize("level", [0.01, 0.03, 0.1, 0.3])
def test_no_bet_on_uniform_p_values_is_favourable(level: float) -> None:
    won, lost = np.exp(step_bets(np.array(level))), np.exp(step_bets(np.array(np.nextafter(level, 1))))
    changed = won != lost
    assert changed.sum() == len(ODDS)  # equal to a level wins
    np.testing.assert_allclose(level * won[changed] + (1 - level) * lost[changed], 1)


@pytest.mark.parametrize("rate", [0.001, 0.05, 0.5])
def test_no_bet_on_a_lower_rate_of_errors_is_favourable(rate: float) -> None:
    error, right = np.exp(rate_bets(np.array([True, False]), rate))
    for frequency in (0.0, rate / 2, rate):
        mean = frequency * error + (1 - frequency) * right
        assert (mean <= 1 + 1e-12).all()
    np.testing.assert_allclose(rate * error + (1 - rate) * right, 1)


def test_wealth_that_no_float_holds_stays_finite() -> None:
    assert 5000 < played(step_bets(np.full(5000, 1e-9)))[-1] < math.inf


def test_shares_asleep_fall_from_one() -> None:
    shares = np.array([asleep(n) for n in (*range(1000), 10**6, 10**9)])
    assert shares[0] == 1
    assert (np.diff(shares) < 0).all()
    assert shares[-1] > 0


def uniform_wealth(streams: int, rounds: int, seed: int, later: float = 1.0, change: int = 0) -> Martingale:
    """Streams of online p-values of exchangeable scores; from `change` on, the scores grow by a power of `later`."""
    generator, martingale = np.random.default_rng(seed), Martingale((streams, 16))
    earlier = [np.bincount(generator.integers(0, 500, 100), minlength=500) for _ in range(streams)]
    for n in range(rounds):
        scores = (500 * generator.random(streams) ** (later if n >= change else 1.0)).astype(int)
        rows = zip(earlier, scores, generator.random(streams), strict=True)
        martingale.bet(step_bets(np.array([online_p_value(counts, int(score), u) for counts, score, u in rows])))
    return martingale


def test_false_alarms_are_as_rare_as_promised() -> None:
    peaks = uniform_wealth(200, 300, seed=3).log_peak
    for alpha in (0.5, 0.2, 0.1):
        assert (peaks >= -math.log(alpha)).mean() <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / 200)


def test_a_late_change_is_noticed() -> None:
    before = uniform_wealth(50, 200, seed=4).log_peak
    after = uniform_wealth(50, 300, seed=4, later=0.2, change=200).log_peak
    assert (before < math.log(40)).mean() > 0.9
    assert (after > math.log(40)).mean() > 0.9
