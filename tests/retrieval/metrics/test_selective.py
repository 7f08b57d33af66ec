"""Selective retrieval against slow twins, the code of AUGRC's inventors, and MTEB 2.26.24."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from torch import Tensor

from lam.retrieval.metrics.uncertainty import abstention_nauc, augrc, mann_whitney_p, r_auroc, scod_augrc

# Results of generalized_risk_stats of fd-shifts (commit 8ac4f6d), with trapezoids: for the known queries, and for all,
# with strangers as wrong answers, halved. MTEB's nauc does not average over ties, so its value for the tied case is a
# mean over 8,000 to 20,000 random orders.
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


AT_THE_TOP = ([0, 0, 0, 1, 1, 2, 3, 3, 3, 3], [0, 1, 0, 1, 1, 0, 1, 0, 1, 1], [0, 4])


def tensors(case: tuple[list[int], list[int], list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    doubt, correct, outside = case
    return torch.tensor(doubt).double(), torch.tensor(correct).bool(), torch.tensor(outside).double()


@pytest.mark.parametrize(
    ("case", "area", "with_strangers"),
    [
        (DISTINCT, 0.12239583333333334, 0.099365234375),
        (TIED, 0.14322916666666666, 0.105712890625),
        (AT_THE_TOP, 0.235, 0.13541666666666666),
    ],
)
def test_augrc_is_what_its_inventors_code_gives(
    case: tuple[list[int], list[int], list[int]], area: float, with_strangers: float
) -> None:
    doubt, correct, outside = tensors(case)
    assert augrc(correct, doubt) == pytest.approx(area, abs=1e-14)
    assert scod_augrc(correct, doubt, outside) == pytest.approx(with_strangers, abs=1e-14)


def test_abstention_is_what_mteb_gives() -> None:
    for case, area in ((DISTINCT, 0.6605128032702636), (TIED, 0.7257911392867806)):
        doubt, correct, _ = tensors(case)
        assert abstention_nauc(correct, doubt) == pytest.approx(area, abs=1e-12)


def augrc_slowly(doubts: list[float], costs: list[float]) -> float:
    """Trapezoids between the points of all thresholds: the kept share, and the costs of kept items over N."""
    n, area, before = len(doubts), 0.0, (0.0, 0.0)
    for threshold in sorted(set(doubts)):
        kept = [cost for doubt, cost in zip(doubts, costs, strict=True) if doubt <= threshold]
        point = (len(kept) / n, sum(kept) / n)
        area += (point[0] - before[0]) * (point[1] + before[1]) / 2
        before = point
    return area


@pytest.mark.parametrize("seed", range(5))
def test_augrc_is_the_area_over_every_threshold(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    doubt = torch.randint(8, (40,), generator=generator).double()
    correct, outside = torch.rand(40, generator=generator) < 0.6, torch.randint(12, (9,), generator=generator).double()
    costs = (~correct).double().tolist()
    assert augrc(correct, doubt) == pytest.approx(augrc_slowly(doubt.tolist(), costs), abs=1e-14)
    both = augrc_slowly(doubt.tolist() + outside.tolist(), [cost / 2 for cost in costs] + [0.5] * 9)
    assert scod_augrc(correct, doubt, outside) == pytest.approx(both, abs=1e-14)
    a = float(correct.double().mean())
    identity = a * (1 - a) * (1 - r_auroc(correct, doubt)) + (1 - a) ** 2 / 2
    assert augrc(correct, doubt) == pytest.approx(identity, abs=1e-14)


def test_augrc_is_the_mean_over_every_order_of_the_ties() -> None:
    doubt, wrong = [0.0, 1.0, 1.0, 1.0, 2.0], [0.0, 1.0, 0.0, 0.0, 1.0]
    orders = [[0, *(1 + i for i in order), 4] for order in permutations(range(3))]
    expected = np.mean([augrc_slowly([0.0, 1.0, 2.0, 3.0, 4.0], [wrong[i] for i in order]) for order in orders])
    assert augrc(torch.tensor(wrong) == 0, torch.tensor(doubt)) == pytest.approx(expected, abs=1e-12)


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
    assert math.isnan(augrc(correct[:0], doubt[:0]))
    assert math.isnan(scod_augrc(correct, doubt, torch.zeros(0)))


def test_what_they_refuse() -> None:
    correct = torch.tensor([True, False])
    for metric in (augrc, abstention_nauc):
        with pytest.raises(ValueError, match="uncertainty.*NaN.*index 1"):
            metric(correct, torch.tensor([0.1, math.nan]))
    for metric in (r_auroc, mann_whitney_p):
        with pytest.raises(ValueError, match="uncertainty.*nan.*index 1"):
            metric(correct, torch.tensor([0.1, math.nan]))
