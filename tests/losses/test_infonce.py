"""InfoNCE against pytorch-metric-learning's NTXentLoss, as NT-Xent of two views, and at the edges."""

from typing import Any

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning.losses import NTXentLoss

from lam.losses import InfoNCE, SupCon, build
from lam.pairs import Pairs


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


@pytest.mark.parametrize("temperature", [0.05, 0.1, 1.0])
def test_of_classes_it_equals_another_library(temperature: float) -> None:
    embeddings, labels = unit(20, 5), torch.arange(20) % 6
    value = InfoNCE(temperature=temperature)(embeddings, Pairs.by_label(labels))
    assert float(value) == pytest.approx(float(NTXentLoss(temperature)(embeddings, labels)), rel=1e-6)


def test_of_two_views_it_is_cross_entropy_over_all_others() -> None:
    views, pairs = torch.cat([unit(7, 4), unit(7, 4, seed=1)]), Pairs.by_label(torch.arange(7).repeat(2))
    logits = (views @ views.T / 0.5).masked_fill(torch.eye(14, dtype=torch.bool), -torch.inf)
    expected = F.cross_entropy(logits, torch.arange(14).roll(7))
    torch.testing.assert_close(InfoNCE(temperature=0.5)(views, pairs), expected)


def test_it_is_finite_in_half_precision_and_where_all_items_match() -> None:
    embeddings = torch.ones(4, 3, dtype=torch.float16).requires_grad_()
    for labels in (torch.zeros(4, dtype=torch.long), torch.tensor([0, 0, 1, 1])):
        value = InfoNCE()(embeddings, Pairs.by_label(labels))
        (gradient,) = torch.autograd.grad(value, embeddings)
        assert value.isfinite()
        assert gradient.isfinite().all()


def test_by_name_and_refused() -> None:
    assert build("infonce", margin=0.5, temperature=0.2) == InfoNCE(0.5, 0.2)
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature must be positive"):
            build("infonce", margin=0.5, temperature=temperature)


def test_other_types_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as in production
    wrong: Any = None
    labels: Any = torch.tensor([0, 0, 1])
    for loss in (InfoNCE, SupCon):
        with pytest.raises(ValueError, match=f"{loss.__name__} needs a temperature that is positive, got None"):
            loss(temperature=wrong)
        with pytest.raises(ValueError, match="temperature must be a number, got True"):
            loss(temperature=True)
        with pytest.raises(ValueError, match=r"pairs must be .*, such as Pairs.by_label\(labels\), got Tensor"):
            loss()(torch.eye(3), labels)
