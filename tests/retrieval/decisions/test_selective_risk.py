"""Selective risk control against a slow twin, and its promise over calibration sets of known distributions."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import beta, binom
from torch import Tensor

from lam.retrieval.decisions.conformal import answers_needed, control_selective_risk

POPULATION = 100_000
GRID = torch.linspace(0, 1, POPULATION, dtype=torch.float64)

# Calibration sets are drawn with replacement from a population, so the share of wrong answers above a threshold is
# known. A population has the scores of POPULATION items, and the probability of a wrong answer to each.
LAWS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "continuous": lambda: (GRID, 0.5 * (1 - GRID) ** 2),
    "just above the target": lambda: (GRID, 0.13 - 0.05 * GRID),
    "steep at the target": lambda: (GRID, (GRID < 0.5).double() * 0.4 + 0.06),
    "ties": lambda: ((GRID * 6).floor(), 0.3 - 0.05 * (GRID * 6).floor().clamp(max=5)),
    "two scores": lambda: ((GRID > 0.6).double(), torch.where(GRID > 0.6, 0.09, 0.2)),
    "constant score": lambda: (torch.zeros_like(GRID), torch.full_like(GRID, 0.12)),
    "useless": lambda: (GRID, torch.full_like(GRID, 0.105)),
    "perfect": lambda: (GRID, (GRID < 0.3).double()),
    "upside down": lambda: (GRID, 0.25 * GRID),
    "bad at the top": lambda: (GRID, torch.where(GRID > 0.97, 0.6, torch.where(GRID > 0.4, 0.05, 0.3))),
    "heavy tails and no hits": lambda: (
        torch.where(GRID < 0.1, -torch.inf, torch.tan(3.1 * (GRID - 0.5))),
        torch.where(GRID < 0.1, 1.0, 0.25 * (1 - GRID)),
    ),
}


def risk_above(law: tuple[Tensor, Tensor], threshold: float) -> float:
    answered = law[0] > threshold
    return float(law[1][answered].mean()) if answered.any() else 0.0


def draws(law: tuple[Tensor, Tensor], n: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(POPULATION, (count, n), generator=generator)
    return law[0][chosen], torch.rand((count, n), generator=generator, dtype=torch.float64) < law[1][chosen]


def violations(name: str, *, n: int, target: float, count: int, confidence: float = 0.95) -> tuple[int, float]:
    """Number of calibration sets whose threshold breaks the promise, and the mean share of answered queries."""
    law, broken, coverage, risks = LAWS[name](), 0, 0.0, {}
    for scores, wrong in zip(*draws(law, n, count, seed=n), strict=True):
        threshold = control_selective_risk(scores, wrong, target=target, confidence=confidence)
        risks[threshold] = risks.get(threshold, risk_above(law, threshold))
        broken += risks[threshold] > target + 1e-9
        coverage += float((law[0] > threshold).double().mean()) / count
    return broken, coverage


@pytest.mark.parametrize("name", LAWS)
def test_the_promise_holds_over_calibration_sets(name: str) -> None:
    broken, _ = violations(name, n=130, target=0.1, count=400)
    assert broken <= binom.ppf(0.9999, 400, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("n", [35, 130, 400])
@pytest.mark.parametrize("name", LAWS)
def test_the_promise_holds_over_2000_calibration_sets(name: str, n: int) -> None:
    broken, coverage = violations(name, n=n, target=0.1, count=2000)
    print(f"{name}, {n} queries: {broken / 2000:.4f} broken, {coverage:.3f} answered")
    assert broken <= binom.ppf(0.9999, 2000, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "confidence"), [(0.05, 0.9), (0.2, 0.99)])
@pytest.mark.parametrize("name", LAWS)
def test_the_promise_holds_at_other_levels(name: str, target: float, confidence: float) -> None:
    broken, coverage = violations(name, n=150, target=target, count=2000, confidence=confidence)
    print(f"{name}, {target}, {confidence}: {broken / 2000:.4f} broken, {coverage:.3f} answered")
    assert broken <= binom.ppf(0.9999, 2000, 1 - confidence)


def test_a_good_score_is_answered_and_a_useless_one_is_not() -> None:
    _, good = violations("perfect", n=130, target=0.1, count=100)
    _, useless = violations("useless", n=130, target=0.1, count=100)
    assert good > 0.6  # of the 0.7 / 0.9 that a share of 0.1 wrong allows
    assert useless < 0.1


def slowly(scores: list[float], wrong: list[bool], target: float, confidence: float) -> float:
    """The threshold by a loop, as in the docstring of `control_selective_risk`."""
    n = len(scores)
    starts = [next(m for m in range(1, 10_000) if binom.cdf(spare, m, target) <= 1 - confidence) for spare in range(3)]
    m = max([starts[0], *(start for start in starts if 2 * start <= n)])
    best = math.inf
    while True:
        threshold = sorted(scores, reverse=True)[m] if m < n else -math.inf
        above = [error for score, error in zip(scores, wrong, strict=True) if score > threshold]
        if len(above) >= starts[0]:
            if beta.ppf(confidence, sum(above) + 1, len(above) - sum(above)) > target:
                return best
            best = threshold
        if m == n:
            return best
        m = min(max(round(m * 1.1), m + 1), n)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("levels", [4, 25, 10**6])
def test_it_equals_testing_one_threshold_after_another(seed: int, levels: int) -> None:
    generator = np.random.default_rng(seed)
    n, target = int(generator.integers(30, 300)), float(generator.choice([0.1, 0.2]))
    scores = generator.integers(levels, size=n) / levels
    wrong = generator.random(n) < 0.3 * (1 - scores)
    found = control_selective_risk(torch.from_numpy(scores), torch.from_numpy(wrong), target=target)
    assert found == slowly(scores.tolist(), wrong.tolist(), target, 0.95)


def test_where_nothing_is_wrong_all_are_answered_but_those_without_a_hit() -> None:
    scores = torch.arange(60.0)
    assert control_selective_risk(scores, scores < 0, target=0.05) == -math.inf
    scores[0] = -math.inf
    threshold = control_selective_risk(scores, scores < 0, target=0.05)
    assert int((scores > threshold).sum()) == 59


def test_a_tie_is_answered_as_a_whole_or_not_at_all() -> None:
    assert control_selective_risk(torch.zeros(30), torch.zeros(30) > 0, target=0.1) == -math.inf
    scores = torch.cat([torch.ones(28), torch.zeros(2)])  # 28 answers without an error are one too few
    assert control_selective_risk(scores, torch.arange(30) >= 28, target=0.1) == math.inf
    scores = torch.cat([torch.ones(29), torch.zeros(2)])
    assert control_selective_risk(scores, torch.arange(31) >= 29, target=0.1) == 0


@pytest.mark.parametrize("target", [0.01, 0.05, 0.1, 0.3, 0.95])
def test_so_many_answers_are_needed(target: float) -> None:
    for n_wrong in range(4):
        n = answers_needed(target, n_wrong=n_wrong)
        assert binom.cdf(n_wrong, n, target) <= 0.05 + 1e-12
        assert n == n_wrong + 1 or binom.cdf(n_wrong, n - 1, target) > 0.05
    assert answers_needed(target) == math.ceil(round(math.log(0.05) / math.log(1 - target), 9))


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="59 calibration queries.*58"):
        control_selective_risk(torch.rand(58), torch.zeros(58) > 0, target=0.05)
    with pytest.raises(ValueError, match="scores.*NaN.*index 3"):
        control_selective_risk(torch.tensor([0.0, 1.0, 2.0, math.nan]), torch.zeros(4) > 0, target=0.05)
    with pytest.raises(ValueError, match=r"wrong.*\(3,\)"):
        control_selective_risk(torch.rand(3), torch.zeros(2) > 0, target=0.05)
    with pytest.raises(ValueError, match=r"target.*\(0, 1\), got 0"):
        control_selective_risk(torch.rand(99), torch.zeros(99) > 0, target=0.0)
    with pytest.raises(ValueError, match=r"confidence.*\(0, 1\).*1"):
        answers_needed(0.05, confidence=1.0)
