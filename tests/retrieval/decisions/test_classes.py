"""Promises over classes: exact counts with each class as the new one, a slow twin, and dependent items."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lam.retrieval.decisions.conformal import ConformalScores, least_rate, needed


def classes_of(sizes: list[int]) -> Tensor:
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))


def alike(n_classes: int, generator: torch.Generator, *, spread: float = 0.1, most: int = 40) -> tuple[Tensor, Tensor]:
    """Scores of classes of random sizes; scores of one class are close together."""
    sizes = torch.randint(1, most + 1, (n_classes,), generator=generator).tolist()
    classes = classes_of(sizes)
    scores = torch.randn(n_classes, generator=generator)[classes]
    return scores + spread * torch.randn(len(classes), generator=generator), classes


def share_above(scores: Tensor, classes: Tensor, label: int, threshold: float) -> Fraction:
    own = scores[classes == label].double().tolist()
    return Fraction(sum(score > threshold for score in own), len(own))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("target", [Fraction(1, 20), Fraction(1, 10), Fraction(1, 3)])
def test_the_threshold_is_the_least_that_counting_allows(seed: int, target: Fraction) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores, classes = alike(25, generator, spread=(0.0, 0.1, 3.0)[seed % 3])
    if seed > 3:
        scores = scores.round()  # ties within classes and between them
    labels = classes.unique().tolist()

    def rate(threshold: float) -> Fraction:
        return (1 + sum(share_above(scores, classes, label, threshold) for label in labels)) / Fraction(26)

    slow = min(score for score in scores.double().tolist() if rate(score) <= target)
    order = torch.randperm(len(scores), generator=generator)
    known = ConformalScores.of(scores[order], classes[order])
    assert known.threshold(float(target)) == slow
    assert known.rate(slow) == pytest.approx(float(rate(slow)), abs=1e-12)
    p = known.p_values(scores[:5].double())
    above = [
        sum(share_above(scores, classes, label, math.nextafter(s, -9)) for label in labels)
        for s in scores[:5].double().tolist()
    ]
    assert_close(p, torch.tensor([float((1 + count) / 26) for count in above], dtype=torch.float64))


@pytest.mark.long
@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("target", [0.05, 0.09, 0.1, 0.25])
def test_whichever_class_is_new_the_promise_is_kept_on_average_and_that_of_items_is_not(
    spread: float, target: float
) -> None:
    """Each of 21 classes is the new one in turn: the mean share above the threshold is at most the target, exactly."""
    broken = 0
    for seed in range(30):
        scores, classes = alike(21, torch.Generator().manual_seed(seed), spread=spread)
        by_class, by_item = [], []
        for new in range(21):
            rest = classes != new
            for shares, known in (
                (by_class, ConformalScores.of(scores[rest], classes[rest])),
                (by_item, ConformalScores.of(scores[rest])),
            ):
                shares.append(share_above(scores, classes, new, known.threshold(target)))
        assert sum(by_class) / 21 <= target + 1e-12
        broken += sum(by_item) / 21 > target
    assert spread == 1.0 or broken > (3 if target > 0.05 else 0)


def test_where_a_class_has_one_score_classes_change_nothing() -> None:
    scores = torch.randn(99, generator=torch.Generator().manual_seed(0)).double()
    plain, classed = ConformalScores.of(scores), ConformalScores.of(scores, torch.arange(99))
    for target in (0.01, 0.05, 0.3):
        assert plain.threshold(target) == classed.threshold(target)
    for threshold in (-9.0, 0.0, 1.5, 9.0):
        assert plain.rate(threshold) == classed.rate(threshold)
    assert torch.equal(plain.p_values(scores), classed.p_values(scores))


def false_accepts(repetitions: int, target: float) -> tuple[float, float]:
    """Mean rates at which a random item of a new class exceeds the thresholds by items and by classes."""
    generator = torch.Generator().manual_seed(7)
    of_items, of_classes = 0.0, 0.0
    for _ in range(repetitions):
        scores, classes = alike(40, generator, most=30)
        mean = float(torch.randn(1, generator=generator))
        item = mean + 0.1 * float(torch.randn(1, generator=generator))
        of_items += item > ConformalScores.of(scores).threshold(target)
        of_classes += item > ConformalScores.of(scores, classes).threshold(target)
    return of_items / repetitions, of_classes / repetitions


@pytest.mark.parametrize(
    ("repetitions", "above", "below"),
    [pytest.param(3000, 3, 3, marks=pytest.mark.long), pytest.param(60_000, 8, 2, marks=pytest.mark.slow)],
)
def test_similar_items_of_a_class_break_the_promise_of_items_and_not_of_classes(
    repetitions: int, above: int, below: int
) -> None:
    target, error = 0.03, (0.03 / repetitions) ** 0.5
    of_items, of_classes = false_accepts(repetitions, target)
    assert of_items > target + above * error
    assert of_classes <= target + below * error


@pytest.mark.long
def test_intervals_hold_the_rate_of_new_classes() -> None:
    """Intervals by items, which treat scores as independent, miss the rate most of the time."""
    generator, times, held, held_by_items = torch.Generator().manual_seed(3), 200, 0, 0
    population, of = alike(20_000, generator, spread=0.3, most=20)
    n_above = torch.zeros(20_000).index_add_(0, of, (population > 1.0).float())
    truth = float((n_above / of.bincount()).mean())
    for _ in range(times):
        scores, classes = alike(40, generator, spread=0.3, most=20)
        low, high = ConformalScores.of(scores, classes).interval(1.0)
        held += low <= truth <= high
        low, high = ConformalScores.of(scores).interval(1.0)
        held_by_items += low <= truth <= high
    assert held / times >= 0.95
    assert held_by_items / times < 0.7


def test_an_interval_is_not_empty_where_no_class_exceeds() -> None:
    known = ConformalScores.of(torch.zeros(200), classes_of([10] * 20))
    assert known.interval(1.0) == (0.0, pytest.approx(1 - 0.025 ** (1 / 20)))
    assert known.interval(-1.0) == (pytest.approx(0.025 ** (1 / 20)), 1.0)


def test_so_few_classes_promise_no_smaller_rate() -> None:
    known = ConformalScores.of(torch.randn(3000, generator=torch.Generator().manual_seed(0)), classes_of([150] * 20))
    least = least_rate(known.n_units)
    assert (known.n_units, least) == (20, 0.0477)
    assert needed(0.05) <= 20 < needed(least - 0.001)
    known.threshold(least)
    with pytest.raises(ValueError, match="0.04.*24 classes, got 20: .*0.0477"):
        known.threshold(0.04)
    with pytest.raises(ValueError, match="no Beta law"):
        known.law(0.05)
    with pytest.raises(ValueError, match=r"classes.*\(3,\)"):
        ConformalScores.of(torch.zeros(3), torch.zeros(2, dtype=torch.int64))
