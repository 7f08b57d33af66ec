"""AUROC and AUPRC against counting, with OOD as the positive class."""

import math

import pytest
import torch

from lam.retrieval.metrics.ood import auprc, auroc, precision_recall_curve, prevalence, roc_curve


def _scores(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 9, (30,), generator=generator).float(), torch.randint(
        3, 12, (12,), generator=generator
    ) / 1.0


def _auroc_slowly(inside: list[float], outside: list[float]) -> float:
    wins = sum((o > i) + 0.5 * (o == i) for o in outside for i in inside)
    return wins / (len(inside) * len(outside))


def _auprc_slowly(inside: list[float], outside: list[float]) -> float:
    total, recall_before = 0.0, 0.0
    for threshold in sorted({*inside, *outside}, reverse=True):
        found = sum(o >= threshold for o in outside)
        recall = found / len(outside)
        total += (recall - recall_before) * found / (found + sum(i >= threshold for i in inside))
        recall_before = recall
    return total


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_areas_equal_counting(seed: int) -> None:
    inside, outside = _scores(seed)
    assert auroc(inside, outside) == pytest.approx(_auroc_slowly(inside.tolist(), outside.tolist()), abs=1e-12)
    assert auprc(inside, outside) == pytest.approx(_auprc_slowly(inside.tolist(), outside.tolist()), abs=1e-12)


def test_direction_and_useless_scores() -> None:
    inside, outside = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([3.0])
    assert auroc(inside, outside) == auprc(inside, outside) == 1
    assert auroc(-inside, -outside) == 0
    assert auroc(torch.zeros(3), torch.zeros(1)) == 0.5
    assert auprc(torch.zeros(3), torch.zeros(1)) == prevalence(inside, outside) == 0.25


def test_curves_enclose_their_areas() -> None:
    inside, outside = _scores(3)
    false_positives, true_positives = roc_curve(inside, outside)
    assert float(torch.trapezoid(true_positives, false_positives)) == pytest.approx(auroc(inside, outside))
    recall, precision = precision_recall_curve(inside, outside)
    assert (recall[0], recall[-1]) == (0, 1)
    assert float((recall.diff() * precision[1:]).sum()) == pytest.approx(auprc(inside, outside))


def test_areas_of_an_empty_set_are_nan() -> None:
    for pair in [(torch.empty(0), torch.ones(2)), (torch.ones(2), torch.empty(0)), (torch.empty(0), torch.empty(0))]:
        assert math.isnan(auroc(*pair))
        assert math.isnan(auprc(*pair))
    assert math.isnan(prevalence(torch.empty(0), torch.empty(0)))


@pytest.mark.parametrize("metric", [auroc, auprc, roc_curve, precision_recall_curve])
def test_non_finite_scores_are_refused(metric) -> None:
    with pytest.raises(ValueError, match="in_distribution.*nan.*index 1"):
        metric(torch.tensor([0.0, math.nan]), torch.ones(1))
    with pytest.raises(ValueError, match="out_of_distribution.*inf.*index 0"):
        metric(torch.zeros(1), torch.tensor([math.inf]))
    with pytest.raises(ValueError, match=r"in_distribution.*\(4,\).*\(2, 2\)"):
        getattr(metric, "__wrapped__", metric)(torch.zeros(2, 2), torch.ones(1))


@pytest.mark.parametrize("curve", [roc_curve, precision_recall_curve])
def test_curves_refuse_an_empty_set(curve) -> None:
    with pytest.raises(ValueError, match="both classes.*0 in.*1 out"):
        curve(torch.empty(0), torch.ones(1))
