"""Sparsification and calibration against double loops, with ties and at the edges."""

import math
from collections import Counter
from inspect import unwrap  # without the shape checks of test runs, as for users
from itertools import pairwise, permutations
from typing import Literal

import pytest
import torch

from lam.retrieval.metrics.uncertainty import ausc, sparsification
from lam.retrieval.metrics.votes import Votes, majority_votes


def _accuracy_slowly(correct: list[bool], order: list[int], kept: float) -> float:
    """Mean over the first `kept` items of an order; a fraction of an item counts partly."""
    total, left = 0.0, kept
    for item in order:
        share = min(1.0, left)
        total, left = total + share * correct[item], left - share
        if left <= 0:
            break
    return total / kept


def _sparsification_slowly(correct: list[bool], uncertainty: list[float]) -> list[float]:
    """The mean over all orders that the uncertainties allow, by brute force."""
    curves = []
    for order in permutations(range(len(correct))):
        if all(uncertainty[a] <= uncertainty[b] for a, b in pairwise(order)):
            kept = [(100 - f) * len(correct) / 100 for f in range(99)]
            curves.append([_accuracy_slowly(correct, list(order), m) for m in kept])
    return [sum(values) / len(curves) for values in zip(*curves, strict=True)]


@pytest.mark.parametrize(
    "uncertainty",
    [[5.0, 1.0, 3.0, 2.0, 4.0, 0.0], [1.0, 1.0, 0.0, 2.0, 1.0, 2.0], [0.0] * 6, [1.0, -math.inf, math.inf, 0, 0, 2.0]],
)
def test_sparsification_is_the_expectation_over_orders(uncertainty: list[float]) -> None:
    correct = [True, False, True, True, False, False]
    shares, accuracy = sparsification(torch.tensor(correct), torch.tensor(uncertainty))
    assert shares.tolist() == [f / 100 for f in range(99)]
    torch.testing.assert_close(accuracy, torch.tensor(_sparsification_slowly(correct, uncertainty)).double())
    assert ausc(torch.tensor(correct), torch.tensor(uncertainty)) == pytest.approx(float(accuracy.mean()))


def test_sparsification_does_not_depend_on_the_order_of_queries() -> None:
    generator = torch.Generator().manual_seed(0)
    correct = torch.rand(200, generator=generator) < 0.7
    uncertainty = torch.randint(0, 9, (200,), generator=generator).float()
    order = torch.randperm(200, generator=generator)
    assert ausc(correct, uncertainty) == pytest.approx(ausc(correct[order], uncertainty[order]), abs=1e-12)


def test_ausc_orders_a_perfect_a_useless_and_a_wrong_uncertainty() -> None:
    correct = torch.arange(100) < 70
    perfect = torch.arange(100).float()
    assert ausc(correct, perfect) > ausc(correct, torch.zeros(100)) > ausc(correct, -perfect)
    assert ausc(correct, torch.zeros(100)) == pytest.approx(0.7)


def test_sparsification_of_none_one_and_two() -> None:
    assert math.isnan(ausc(torch.empty(0, dtype=torch.bool), torch.empty(0)))
    assert ausc(torch.tensor([True]), torch.tensor([3.0])) == 1
    _, accuracy = sparsification(torch.tensor([False, True]), torch.tensor([1.0, 0.0]))
    assert accuracy[0] == 0.5
    torch.testing.assert_close(accuracy[50:], torch.ones(49).double())


def test_sparsification_refuses() -> None:
    with pytest.raises(ValueError, match="uncertainty.*NaN.*index 1"):
        sparsification(torch.tensor([True, False]), torch.tensor([0.0, math.nan]))
    with pytest.raises(ValueError, match=r"uncertainty.*\(2,\).*queries"):
        unwrap(sparsification)(torch.tensor([True, False]), torch.tensor([0.0]))


def _ece_slowly(
    predictions: list[list[int]], labels: list[int], ranked: list[list[int]], bins: int, closed: str
) -> tuple[float, list[int]]:
    n_samples, n_queries = len(predictions), len(labels)
    members: list[list[tuple[int, bool]]] = [[] for _ in range(bins)]
    for q in range(n_queries):
        votes = Counter(row[q] for row in predictions)
        tied = sorted(label for label in votes if votes[label] == max(votes.values()))
        in_order = [label for label in ranked[q] if label in tied]
        mode = in_order[0] if in_order else tied[0]
        for b in range(bins):  # between b/bins and (b + 1)/bins, without a division
            low, value, high = b * n_samples, votes[mode] * bins, (b + 1) * n_samples
            if low < value <= high if closed == "right" else low <= value < high:
                members[b].append((votes[mode], mode == labels[q]))
    error, n_inside = 0.0, sum(map(len, members))
    for group in filter(None, members):
        confidence = sum(v for v, _ in group) / n_samples / len(group)
        accuracy = sum(right for _, right in group) / len(group)
        error += len(group) / n_inside * abs(accuracy - confidence)
    return error, [len(group) for group in members]


@pytest.mark.parametrize("closed", ["right", "left"])
@pytest.mark.parametrize(("n_samples", "bins"), [(2, 10), (7, 10), (10, 10), (100, 10), (30, 7)])
def test_ece_equals_double_loop(n_samples: int, bins: int, closed: Literal["right", "left"]) -> None:
    generator = torch.Generator().manual_seed(n_samples)
    labels = torch.randint(0, 4, (60,), generator=generator)
    wrong = torch.randint(0, 4, (n_samples, 60), generator=generator)
    keep = torch.rand(n_samples, 60, generator=generator) < torch.rand(60, generator=generator)
    predictions = torch.where(keep, labels, wrong)
    ranked = torch.randint(0, 4, (60, 2), generator=generator)
    expected, counts = _ece_slowly(predictions.tolist(), labels.tolist(), ranked.tolist(), bins, closed)
    found = majority_votes(predictions, labels, ranked).binned(bins, closed=closed)
    assert found.expected_error == pytest.approx(expected, abs=1e-12)
    assert found.count.tolist() == counts


def test_queries_of_confidence_one_are_left_out_where_bins_are_closed_on_the_left() -> None:
    """The authors' definition: only the last two of the confidences 1, 1, 0.75 and 0.5 count; the first is wrong."""
    votes = Votes(torch.tensor([4, 4, 3, 2]), torch.tensor([False, True, True, True]), 4)
    assert votes.binned(closed="left").expected_error == pytest.approx((0.25 + 0.5) / 2)
    assert votes.binned().expected_error == pytest.approx((2 * 0.5 + 0.25 + 0.5) / 4)
    assert votes.binned(closed="left").count.tolist() == [0, 0, 0, 0, 0, 1, 0, 1, 0, 0]
    sure = Votes(torch.tensor([4]), torch.tensor([True]), 4)
    assert math.isnan(sure.binned(closed="left").expected_error)


@pytest.mark.parametrize("tenths", range(1, 11))
def test_bins_are_closed_on_the_right(tenths: int) -> None:
    """Also for tenths that floats round: 0.1 is in the first bin, 0.3 in the third, 1 in the last."""
    predictions = torch.arange(100)[:, None] + 1
    predictions[: 10 * tenths] = 0
    votes = majority_votes(predictions, torch.tensor([0]), torch.tensor([[0]]))
    found = votes.binned()
    assert found.count.tolist() == [int(b == tenths - 1) for b in range(10)]
    assert found.confidence[tenths - 1] == pytest.approx(tenths / 10)
    assert votes.binned(closed="left").count.tolist() == [int(b == tenths) for b in range(10)]


def test_confidence_one_counts() -> None:
    few_bits = Votes(torch.tensor([100, 50, 0], dtype=torch.int8), torch.tensor([True, True, False]), 100)
    assert few_bits.binned().count.tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    sure_and_wrong = Votes(torch.full((4,), 5), torch.zeros(4, dtype=torch.bool), 5)
    assert sure_and_wrong.binned().expected_error == 1


def test_ties_go_to_the_label_nearest_the_mean_embedding() -> None:
    predictions = torch.tensor([[1, 1, 1], [2, 2, 2]])
    ranked = torch.tensor([[7, 2, 1], [1, 2, 7], [7, 7, 7]])
    found = majority_votes(predictions, torch.tensor([2, 1, 1]), ranked).binned()
    assert found.accuracy[4] == 1
    assert found.count[4] == 3


def test_bins_without_queries_are_nan_and_no_query_is_nan() -> None:
    found = majority_votes(torch.tensor([[0], [0]]), torch.tensor([0]), torch.tensor([[0]])).binned()
    assert found.confidence[:9].isnan().all()
    assert found.expected_error == 0
    empty = torch.empty(3, 0, dtype=torch.long), torch.empty(0, dtype=torch.long), torch.empty(0, 2, dtype=torch.long)
    assert math.isnan(majority_votes(*empty).binned().expected_error)


@pytest.mark.parametrize("n", [30, 1000])
def test_a_perfect_predictor_is_above_the_error_by_chance_five_times_in_a_hundred(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    agree = torch.randint(3, 11, (n,), generator=generator)
    errors, limit = [], Votes(agree, agree > 0, 10).binned().error_by_chance
    for _ in range(500):
        correct = torch.rand(n, generator=generator) < agree / 10
        errors.append(Votes(agree, correct, 10).binned().expected_error)
    above = sum(error > limit for error in errors) / len(errors)
    assert 0.02 <= above <= 0.09  # three standard errors about 0.05, and ties


def test_error_by_chance_of_the_sure_and_of_none() -> None:
    sure = Votes(torch.full((4,), 5), torch.zeros(4, dtype=torch.bool), 5).binned()
    assert sure.error_by_chance == 0
    nothing = Votes(torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.bool), 5).binned()
    assert math.isnan(nothing.error_by_chance)


def test_calibration_refuses() -> None:
    labels, ranked = torch.tensor([0]), torch.tensor([[0]])
    with pytest.raises(ValueError, match="predictions.*sampled network"):
        majority_votes(torch.empty(0, 1, dtype=torch.long), labels, ranked)
    with pytest.raises(ValueError, match="bins.*1.*0"):
        majority_votes(torch.tensor([[0]]), labels, ranked).binned(0)
    with pytest.raises(ValueError, match=r"labels.*\(2,\).*queries"):
        unwrap(majority_votes)(torch.tensor([[0, 1]]), labels, ranked)
    with pytest.raises(ValueError, match="ranked_labels.*row.*1 queries.*2"):
        unwrap(majority_votes)(torch.tensor([[0]]), labels, ranked.repeat(2, 1))
    with pytest.raises(ValueError, match="closed.*right, left.*'both'"):
        unwrap(Votes.binned)(Votes(labels, labels == 0, 1), closed="both")
    with pytest.raises(ValueError, match="n_samples.*1.*0"):
        Votes(torch.tensor([0]), torch.tensor([True]), 0)
    with pytest.raises(ValueError, match="votes.*0 to 4, got 5"):
        Votes(torch.tensor([3, 5]), torch.tensor([True, True]), 4)
