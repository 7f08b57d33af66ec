"""Test martingales: tests of a data stream, whose results may be read at any time.

A gambler bets against a hypothesis. If the hypothesis is true, no system of bets raises the expected wealth. Then, by
Ville's inequality, the probability that a wealth of 1 ever reaches 1/α is at most α. In contrast, an ordinary test that
is repeated on a growing stream raises a false alarm sooner or later.

`OnlinePValues` turns scores into p-values that are independent and uniform while the data stay exchangeable. To this
end, each score is compared with *all* earlier scores. A fixed calibration set has random errors that affect all queries
alike, so that some bets would win without end.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float, Int64

_ODDS = (1.2, 1.8, 3.0, 8.0)
_LEVELS = np.repeat([0.01, 0.03, 0.1, 0.3], len(_ODDS))
_RATE_ODDS = np.array([1.5, 2.0, 4.0, 10.0, 30.0, 100.0])
_SCALE = 100.0  # unit of n in `asleep`


def asleep(n: int) -> float:
    """Share of the wealth that sleeps (has not bet) after n rounds: 1 for n = 0, else 1/(2 + 2 log(1 + n/100)).

    Half of the wealth wakes in the first round, because the data may have changed before. In a late round n, about
    1/(n log² n) wakes. So after a change in round n, an alarm needs only log n + 2 log log n more log wealth.
    """
    return 1.0 if n == 0 else 0.5 / (1 + float(np.log1p(n / _SCALE)))


class Martingale:
    """Wealth of a gambler, 1 at first. In each round, a part of the sleeping wealth wakes; all awake wealth bets.

    In round n, bet j of J multiplies its stake by b_nj. The awake wealth in bet j is then
    W_nj = (W_(n−1)j + (asleep(n−1) − asleep(n))/J) · b_nj, and the whole wealth is M_n = asleep(n) + Σ_j W_nj. Under
    the hypothesis, b_nj and M_n/M_(n−1) have means of at most 1, given the past. Wealth that wakes late has lost no
    earlier bets, so a long past without change does not hide a change. M_n is a Shiryaev-Roberts statistic: a sum over
    waking times, with weights that sum to 1.

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
    odds = np.tile(_ODDS, 4) * _LEVELS / (1 - _LEVELS)
    return _two_valued(p[..., None] <= _LEVELS, _LEVELS, odds)


def rate_bets(error: Bool[np.ndarray, "..."], rate: float) -> Float[np.ndarray, "... J"]:
    """Logarithms of the factors of 6 bets on errors above `rate`: b/rate for an error, else (1 − b)/(1 − rate).

    b has 1.5 to 100 times the odds of `rate`. If the error rate is at most `rate`, each factor has a mean of at most 1.

    Source: Waudby-Smith and Ramdas (2024), section 4, for one-sided bets.
    """
    return _two_valued(error[..., None], rate, _RATE_ODDS * rate / (1 - rate))


def _two_valued(won: np.ndarray, level: float | np.ndarray, odds: np.ndarray) -> np.ndarray:
    share = odds / (1 + odds)
    return np.where(won, np.log(share / level), np.log((1 - share) / (1 - level)))


class OnlinePValues:
    """Smoothed p-value of each score among all scores so far, in cells of a fixed grid.

    p = (#{earlier above} + U · (1 + #{earlier equal}))/(n + 1) for n earlier scores and a uniform U. For exchangeable
    scores of any distribution, even with ties, the p-values are independent and uniform. So scores in one cell of the
    grid may count as equal, which bounds the memory. The cells must not depend on the scores.

    Source: Vovk, Gammerman and Shafer (2005), proposition 2.8.

    Args:
        counts: number of earlier scores in each cell, by rising doubt; updated in place.
    """

    def __init__(self, counts: Int64[np.ndarray, " B"]) -> None:
        self.counts = counts

    def __call__(self, cell: int, uniform: float) -> float:
        """p-value of a score; the score then joins the earlier scores."""
        above = int(self.counts[cell + 1 :].sum())
        p = (above + uniform * (1 + int(self.counts[cell]))) / (int(self.counts.sum()) + 1)
        self.counts[cell] += 1
        return p
