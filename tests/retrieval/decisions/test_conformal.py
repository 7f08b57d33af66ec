"""Split conformal thresholds against counting, against their law, and on the embedded digits."""

import math

import pytest
import torch
from scipy.special import betaincinv
from scipy.stats import beta, betabinom, binom, kstest
from torch.testing import assert_close

from lam.retrieval.decisions.conformal import ConformalScores, clopper_pearson, conformal_depth, needed


@pytest.mark.parametrize(("n", "target"), [(19, 0.05), (20, 0.05), (99, 0.1), (999, 0.001), (57, 0.3)])
def test_the_threshold_is_the_least_that_keeps_the_promise(n: int, target: float) -> None:
    scores = torch.randn(n, generator=torch.Generator().manual_seed(n))
    tail = ConformalScores.of(scores)
    threshold = tail.threshold(target)
    assert sum(score > threshold for score in scores.double().tolist()) + 1 <= target * (n + 1) + 1e-9
    lower = [score for score in scores.double().tolist() if score < threshold]
    assert all(sum(score > other for score in scores.double().tolist()) + 1 > target * (n + 1) for other in lower)
    assert tail.rate(threshold) <= target + 1e-12


def test_p_values_equal_counting_and_agree_with_the_threshold() -> None:
    generator = torch.Generator().manual_seed(0)
    known, new = (torch.randint(0, 20, (size,), generator=generator).double() for size in (60, 40))
    tail = ConformalScores.of(known)
    slow = [(1 + sum(k >= q for k in known.tolist())) / 61 for q in new.tolist()]
    assert_close(tail.p_values(new), torch.tensor(slow, dtype=torch.float64))
    assert torch.equal(tail.p_values(new) <= 0.1 + 1e-12, new > tail.threshold(0.1))


@pytest.mark.parametrize("target", [0.02, 0.05, 0.2])
def test_rates_over_calibration_sets_follow_the_beta_law(target: float) -> None:
    generator = torch.Generator().manual_seed(1)
    n, new = 200, 400
    rates = []
    for _ in range(600):
        tail = ConformalScores.of(torch.randn(n, generator=generator))
        rates.append(int((torch.randn(new, generator=generator) > tail.threshold(target)).sum()))
    law = betabinom(new, *ConformalScores.of(torch.arange(float(n))).law(target))
    mean, deviation = sum(rates) / len(rates), torch.tensor(rates).double().std()
    assert mean <= new * target + 4 * float(deviation) / math.sqrt(len(rates))
    assert 0.85 < float(deviation) / law.std() < 1.15
    middles = law.cdf([rate - 1 for rate in rates]) + 0.5 * law.pmf(rates)
    assert kstest(middles, "uniform").statistic < 0.1


@pytest.mark.parametrize("n", [1, 20, 100, 300])
def test_intervals_hold_any_rate_at_least_as_often_as_they_say(n: int) -> None:
    """Exactly, by the binomial law; near 0.2/n, normal approximations fail."""
    counts = range(n + 1)
    low, high = torch.tensor([clopper_pearson(count, n) for count in counts], dtype=torch.float64).T
    for rate in [0.05 / n, 0.2 / n, 0.5 / n, 1 / n, 2.3 / n, *torch.linspace(0.01, 0.99, 50).tolist()]:
        if rate < 1:
            held = (low <= rate) & (rate <= high)
            assert float(torch.from_numpy(binom.pmf(counts, n, rate))[held].sum()) >= 0.95, rate


@pytest.mark.parametrize("level", [0.5, 0.95])
@pytest.mark.parametrize(("n", "target"), [(19, 0.05), (99, 0.01), (500, 0.05), (1000, 0.001)])
def test_intervals_of_a_threshold_that_was_learned_hold_its_rate(n: int, target: float, level: float) -> None:
    """Exactly, by the law of the rate over calibration sets; the upper end misses exactly as often as allowed."""
    tail = ConformalScores.of(torch.arange(float(n)))
    low, high = tail.interval(tail.threshold(target), level=level)
    law = beta(*tail.law(target))
    assert law.cdf(high) - law.cdf(low) >= level - 1e-9
    assert law.sf(high) == pytest.approx((1 - level) / 2)


@pytest.mark.parametrize(("count", "n"), [(0, 10), (10, 10), (1, 1), (7, 50), (3, 100_000)])
def test_intervals_are_quantiles_of_beta_laws(count: int, n: int) -> None:
    low = 0.0 if count == 0 else betaincinv(count, n - count + 1, 0.05)
    high = 1.0 if count == n else betaincinv(count + 1, n - count, 0.95)
    assert clopper_pearson(count, n, level=0.9) == pytest.approx((low, high), rel=1e-9, abs=1e-12)


def test_depth_equals_counting() -> None:
    ranks = torch.tensor([1, 1, 3, 2, 1, 1, 9, 1, 4, 2, 1, 1, 5, 1, 2, 1, 1, 2, 1])
    k = conformal_depth(ranks, target=0.2)
    assert k == next(k for k in range(1, 10) if sum(rank <= k for rank in ranks.tolist()) >= math.ceil(20 * 0.8))


def test_ties_and_infinities_lower_the_rate_and_never_raise_it() -> None:
    tail = ConformalScores.of(torch.tensor([1.0] * 99))
    assert tail.threshold(0.05) == 1.0
    assert tail.rate(1.0) == 0.01
    assert ConformalScores.of(torch.tensor([-math.inf, 0.0, math.inf])).threshold(0.5) == 0.0
    assert (tail.rate(-math.inf), tail.rate(math.inf)) == (1.0, 0.01)
    assert tail.p_values(torch.empty(0)).shape == (0,)


@pytest.mark.parametrize("count", [1, 7, 20, 99, 333, 1234, 1979])
def test_the_target_that_is_advised_is_promised(count: int) -> None:
    tail = ConformalScores.of(torch.zeros(count))
    with pytest.raises(ValueError, match="target of at") as refused:
        tail.threshold(1e-6)
    tail.threshold(min(float(str(refused.value).split()[-1]), 0.999))


def test_too_few_scores_are_refused_with_how_many_it_takes() -> None:
    assert needed(0.05) == 19
    assert len(ConformalScores.of(torch.zeros(19))) == 19
    assert ConformalScores.of(torch.arange(19.0)).threshold(0.05) == 18.0
    with pytest.raises(ValueError, match="999 calibration.*998"):
        ConformalScores.of(torch.zeros(998)).threshold(0.001)
    with pytest.raises(ValueError, match="target.*0.0527"):
        ConformalScores.of(torch.zeros(18)).law(0.01)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="one calibration score"):
        ConformalScores.of(torch.empty(0))
    with pytest.raises(ValueError, match="NaN.*index"):
        ConformalScores.of(torch.tensor([0.0, math.nan]))
    with pytest.raises(ValueError, match="must rise"):
        ConformalScores(torch.tensor([1.0, 0.0]))
    with pytest.raises(ValueError, match=r"target.*\(0, 1\).*1"):
        needed(1.0)
    with pytest.raises(ValueError, match="threshold.*number"):
        ConformalScores.of(torch.zeros(1)).rate(math.nan)
    with pytest.raises(ValueError, match="scores.*hold NaN"):
        ConformalScores.of(torch.zeros(1)).p_values(torch.tensor([math.nan]))
    with pytest.raises(ValueError, match="count.*0.*n"):
        clopper_pearson(3, 2)
    with pytest.raises(ValueError, match="level must lie"):
        clopper_pearson(1, 2, level=0.0)
    with pytest.raises(ValueError, match="ranks.*1.*0"):
        conformal_depth(torch.tensor([0]), target=0.5)
