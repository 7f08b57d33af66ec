"""Open-set metrics against counting in double loops, and at their edges."""

import math
from typing import Any

import pytest
import torch

from lam.retrieval.metrics.open_set import (
    aurc,
    dir_at_far,
    open_set_metrics,
    oscr,
    recall_at_full_precision,
    search_open_set,
    threshold_at,
    tpir_at_fpir,
)
from lam.retrieval.metrics.ranking import recall_at_k
from lam.retrieval.metrics.uncertainty import abstention_nauc, augrc, ausc, mann_whitney_p, r_auroc, scod_augrc

NONE = torch.empty(0)
NOBODY = torch.empty(0, dtype=torch.bool)


def _scores(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores with many ties, of mated searches, with correctness, and of non-mated searches."""
    generator = torch.Generator().manual_seed(seed)
    score = torch.randint(2, 12, (40,), generator=generator).double()
    return score, torch.rand(40, generator=generator) < 0.7, torch.randint(0, 10, (30,), generator=generator).double()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("rate", [0.01, 0.1, 0.2, 0.5, 1 - 1e-11])
def test_rates_equal_counting(seed: int, rate: float) -> None:
    score, correct, non_mated = _scores(seed)
    allowed = [t for t in sorted(set(non_mated.tolist())) if sum(s > t for s in non_mated.tolist()) <= rate * 30 + 1e-9]
    assert threshold_at(non_mated, rate) == allowed[0]
    pairs = list(zip(score.tolist(), correct.tolist(), strict=True))
    assert tpir_at_fpir(score, non_mated, fpir=rate) == pytest.approx(sum(s > allowed[0] for s, _ in pairs) / 40)
    assert dir_at_far(score, correct, non_mated, far=rate) == pytest.approx(
        sum(s > allowed[0] and c for s, c in pairs) / 40
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_oscr_equals_a_double_loop(seed: int) -> None:
    score, correct, non_mated = _scores(seed)
    wins = sum(
        c * ((s > other) + 0.5 * (s == other))
        for s, c in zip(score.tolist(), correct.tolist(), strict=True)
        for other in non_mated.tolist()
    )
    assert oscr(score, correct, non_mated) == pytest.approx(wins / (40 * 30), abs=1e-12)
    everyone = torch.ones_like(correct)
    assert oscr(score, everyone, score - 100) == 1.0
    assert oscr(score, ~everyone, non_mated) == 0.0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_aurc_is_the_area_over_every_threshold(seed: int) -> None:
    score, correct, _ = _scores(seed)
    area, covered, risk = 0.0, 0.0, None
    for threshold in sorted(set(score.tolist()), reverse=True):
        wrong = [not right for right, one in zip(correct.tolist(), score.tolist(), strict=True) if one >= threshold]
        now = sum(wrong) / len(wrong)
        area += (len(wrong) / 40 - covered) * (now + (now if risk is None else risk)) / 2
        covered, risk = len(wrong) / 40, now
    assert aurc(correct, -score) == pytest.approx(area, abs=1e-14)


@pytest.mark.parametrize(
    ("doubt", "correct", "area"),
    [  # what selective_risk_stats of fd-shifts (commit 8ac4f6d) and trapezoids give
        (
            [2, 11, 25, 21, 10, 4, 29, 16, 23, 6, 18, 26, 3, 30, 8, 0, 19, 12, 20, 13, 7, 5, 17, 14],
            [1, 1, 1, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1],
            0.1737463622866268,
        ),
        (
            [4, 3, 0, 0, 2, 4, 2, 4, 1, 1, 4, 5, 0, 0, 4, 2, 3, 0, 5, 2, 5, 4, 4, 1],
            [0, 1, 1, 1, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1, 0, 1],
            0.19766865079365079,
        ),
        ([0, 0, 0, 1, 1, 2, 3, 3, 3, 3], [0, 1, 0, 1, 1, 0, 1, 0, 1, 1], 0.5316666666666666),
    ],
)
def test_aurc_is_what_the_code_of_fd_shifts_gives(doubt: list[int], correct: list[int], area: float) -> None:
    assert aurc(torch.tensor(correct).bool(), torch.tensor(doubt).double()) == pytest.approx(area, abs=1e-14)


def test_a_better_uncertainty_has_less_risk() -> None:
    correct = torch.tensor([True, True, False, True])
    assert aurc(correct, (~correct).double()) < aurc(correct, torch.zeros(4)) < aurc(correct, correct.double())
    assert aurc(correct, torch.zeros(4)) == 0.25
    assert aurc(correct, torch.tensor([0.0, 1.0, 2.0, math.inf])) == pytest.approx(
        (0 + 0 + (0 + 1 / 3) / 2 + (1 / 3 + 1 / 4) / 2) / 4
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_recall_at_full_precision_equals_counting_at_every_threshold(seed: int) -> None:
    score, correct, _ = _scores(seed)
    correct |= score > 9
    answers = [score >= threshold for threshold in set(score.tolist())]
    full = [int(answered.sum()) / 38 for answered in answers if bool(correct[answered].all())]
    assert full
    assert recall_at_full_precision(score, correct, n_answerable=38) == max(full)
    assert recall_at_full_precision(score, torch.ones_like(correct), n_answerable=40) == 1.0


def test_a_wrong_answer_at_the_top_leaves_no_recall_at_full_precision() -> None:
    score = torch.tensor([0.9, 0.9, 0.8])
    assert recall_at_full_precision(score, torch.tensor([False, True, True]), n_answerable=2) == 0.0


def test_scores_of_different_precision_are_compared_exactly() -> None:
    assert oscr(torch.tensor([0.50001], dtype=torch.float64), torch.tensor([True]), torch.tensor([0.5]).half()) == 1


def test_what_is_undefined_is_nan() -> None:
    score, correct, non_mated = _scores(0)
    assert math.isnan(threshold_at(NONE, 0.1))
    assert math.isnan(tpir_at_fpir(NONE, non_mated, fpir=0.1))
    assert math.isnan(tpir_at_fpir(score, NONE, fpir=0.1))
    assert math.isnan(dir_at_far(score, correct, NONE, far=0.1))
    assert math.isnan(oscr(NONE, NOBODY, non_mated))
    assert math.isnan(oscr(score, correct, NONE))
    assert math.isnan(aurc(NOBODY, NONE))
    assert math.isnan(recall_at_full_precision(score, torch.zeros(40, dtype=torch.bool), n_answerable=0))


def test_what_is_refused() -> None:
    score, correct, non_mated = _scores(0)
    bad = score.clone()
    bad[3] = math.nan
    with pytest.raises(ValueError, match="score.*NaN.*index 3"):
        oscr(bad, correct, non_mated)
    with pytest.raises(ValueError, match="non_mated.*hold NaN"):
        tpir_at_fpir(score, bad, fpir=0.1)
    with pytest.raises(ValueError, match="uncertainty.*hold NaN"):
        aurc(correct, bad)
    with pytest.raises(ValueError, match=r"rate.*\(0, 1\).*0"):
        dir_at_far(score, correct, non_mated, far=0.0)
    with pytest.raises(ValueError, match="n_answerable must"):
        recall_at_full_precision(score, correct, n_answerable=3)


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
@pytest.mark.parametrize(
    "metric",
    [
        aurc,
        ausc,
        augrc,
        r_auroc,
        mann_whitney_p,
        abstention_nauc,
        lambda correct, score: oscr(score, correct, score / 2),
        lambda correct, score: dir_at_far(score, correct, score / 2, far=0.1),
        lambda correct, score: scod_augrc(correct, score, score / 2),
        lambda correct, score: recall_at_full_precision(score, correct, n_answerable=len(score)),
        lambda correct, score: recall_at_k(correct[:, None], correct, k=1),
    ],
)
def test_zeros_and_ones_count_as_booleans_and_other_numbers_are_refused(metric: Any, dtype: torch.dtype) -> None:
    score, correct, _ = _scores(0)
    assert metric(correct.to(dtype), score) == metric(correct, score)
    with pytest.raises(ValueError, match="booleans.*0 and 1.*[23]"):
        metric(correct.to(dtype) + 2, score)


def test_all_metrics_say_how_large_the_gallery_was() -> None:
    labels = torch.tensor([0, 0, 1, 1, 2])
    n = torch.nn.functional.normalize(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    found = open_set_metrics(search_open_set(n, None, lambda rows: labels[rows][:, None] == labels), fpir=0.25)
    assert [found[name] for name in ("gallery_size", "n_mated", "n_non_mated", "fpir")] == [4, 4, 5, 0.25]
    assert 0 <= found["dir"] <= found["tpir"] <= 1
    assert 0 <= found["oscr"] <= 1
