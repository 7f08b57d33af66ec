"""Selective retrieval against slow twins, and against torch-uncertainty 0.13.0 and MTEB 2.26.24."""

import math
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from torch import Tensor

from lam.retrieval.metrics.selective import abstention_nauc, augrc, mann_whitney_p, r_auroc, scod_augrc

# What torch-uncertainty's AUGRC and SCODAUGRC and MTEB's nauc give; theirs do not average over ties, so that of the
# tied ones there are means over 8,000 to 20,000 random orders, each with its standard error.
DISTINCT = (
    [2, 11, 25, 21, 10, 4, 29, 16, 23, 6, 18, 26, 3, 30, 8, 0, 19, 12, 20, 13, 7, 5, 17, 14],
    [1, 1, 1, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1],
    [1, 9, 15, 22, 24, 27, 28, 31],
)
TIED = (
    [4, 3, 0, 0, 2, 4, 2, 4, 1, 1, 4, 5, 0, 0, 4, 2, 3, 0, 5, 2, 5, 4, 4, 1],
    [0, 1, 1, 1, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1, 0, 1],
    [6, 2, 5, 4, 7, 3, 7, 2],
)


def tensors(case: tuple[list[int], list[int], list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    doubt, correct, outside = case
    return torch.tensor(doubt).double(), torch.tensor(correct).bool(), torch.tensor(outside).double()


def test_distinct_values_give_what_the_other_libraries_give() -> None:
    doubt, correct, outside = tensors(DISTINCT)
    assert augrc(correct, doubt) == pytest.approx(0.12771739065430918, abs=1e-8)  # theirs sums in float32
    assert scod_augrc(correct, doubt, outside) == pytest.approx(0.10257056451612903, abs=1e-12)
    assert abstention_nauc(correct, doubt) == pytest.approx(0.6605128032702636, abs=1e-12)


def test_ties_count_as_the_mean_over_their_orders() -> None:
    doubt, correct, outside = tensors(TIED)
    assert augrc(correct, doubt) == pytest.approx(0.14952423034982998, abs=4 * 6.2e-5)
    assert scod_augrc(correct, doubt, outside) == pytest.approx(0.10912958669354839, abs=4 * 1.4e-5)
    assert abstention_nauc(correct, doubt) == pytest.approx(0.7257911392867806, abs=1e-12)


def augrc_slowly(costs: list[float]) -> float:
    """Trapezoids between coverages 1/N and 1 under the running sum of costs over N, ranked already."""
    n = len(costs)
    sums = [sum(costs[:kept]) / n for kept in range(1, n + 1)]
    return sum((one + other) / 2 / n for one, other in pairwise(sums)) / (1 - 1 / n)


def test_augrc_is_the_mean_over_every_order_of_the_ties() -> None:
    doubt, wrong = [0.0, 1.0, 1.0, 1.0, 2.0], [0.0, 1.0, 0.0, 0.0, 1.0]
    orders = [[0, *(1 + i for i in order), 4] for order in permutations(range(3))]
    expected = np.mean([augrc_slowly([wrong[i] for i in order]) for order in orders])
    assert augrc(torch.tensor(wrong) == 0, torch.tensor(doubt)) == pytest.approx(expected, abs=1e-12)


def test_scod_is_the_mean_over_every_order_of_the_ties() -> None:
    items = [(0.0, 0.0), (1.0, 0.5), (1.0, 0.5), (1.0, 0.0), (2.0, 0.5)]  # doubt and cost; the second is outside
    orders = [[0, *(1 + i for i in order), 4] for order in permutations(range(3))]
    expected = np.mean([augrc_slowly([items[i][1] for i in order]) for order in orders])
    correct, inside = torch.tensor([True, False, True, False]), torch.tensor([0.0, 1.0, 1.0, 2.0])
    assert scod_augrc(correct, inside, torch.tensor([1.0])) == pytest.approx(expected, abs=1e-12)


def test_r_auroc_counts_pairs_of_a_right_and_a_wrong_answer() -> None:
    doubt, correct, _ = tensors(TIED)
    pairs = [
        1.0 if wrong > right else 0.5 if wrong == right else 0.0
        for wrong in doubt[~correct].tolist()
        for right in doubt[correct].tolist()
    ]
    assert r_auroc(correct, doubt) == pytest.approx(np.mean(pairs), abs=1e-12)


@pytest.mark.long
def test_the_p_value_is_the_share_of_orders_whose_area_is_as_far_from_a_half() -> None:
    doubt, correct, _ = tensors(TIED)
    generator = torch.Generator().manual_seed(0)
    far = abs(r_auroc(correct, doubt) - 0.5)
    orders = (correct[torch.randperm(len(correct), generator=generator)] for _ in range(2000))
    share = np.mean([abs(r_auroc(order, doubt) - 0.5) >= far - 1e-12 for order in orders])
    assert mann_whitney_p(correct, doubt) == pytest.approx(share, abs=0.03)


def test_abstention_is_one_for_the_best_order_and_negative_for_the_worst() -> None:
    correct = torch.arange(40) % 3 > 0
    assert abstention_nauc(correct, (~correct).double()) == pytest.approx(1)
    assert abstention_nauc(correct, correct.double()) < -0.5
    assert abstention_nauc(correct, torch.zeros(40)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("correct", [torch.ones(5).bool(), torch.zeros(5).bool(), torch.zeros(0).bool()])
def test_where_all_answers_are_alike_there_is_no_order_to_judge(correct: Tensor) -> None:
    doubt = torch.rand(len(correct), generator=torch.Generator().manual_seed(0))
    assert math.isnan(r_auroc(correct, doubt))
    assert math.isnan(mann_whitney_p(correct, doubt))
    assert math.isnan(abstention_nauc(correct, doubt))
    assert math.isnan(augrc(correct[:1], doubt[:1]))
    assert math.isnan(scod_augrc(correct, doubt, torch.zeros(0)))


def test_what_they_refuse() -> None:
    correct = torch.tensor([True, False])
    for metric in (augrc, abstention_nauc):
        with pytest.raises(ValueError, match="uncertainty must not hold NaN, got one at index 1"):
            metric(correct, torch.tensor([0.1, math.nan]))
    for metric in (r_auroc, mann_whitney_p):
        with pytest.raises(ValueError, match="uncertainty must be finite, got nan at index 1"):
            metric(correct, torch.tensor([0.1, math.nan]))
