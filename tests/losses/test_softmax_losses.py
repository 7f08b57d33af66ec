"""SupCon and InfoNCE against pytorch-metric-learning, and at the edges; `test_losses` has their loops."""

import math
from typing import Any

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning.losses import NTXentLoss, SupConLoss

from lam.losses import InfoNCE, SupCon, build
from lam.pairs import Pairs
from tests.losses.test_losses import unit

LOSSES: Any = pytest.mark.parametrize("loss", [InfoNCE, SupCon])


@pytest.mark.parametrize("temperature", [0.05, 0.1, 1.0])
@pytest.mark.parametrize(("loss", "library"), [(InfoNCE, NTXentLoss), (SupCon, SupConLoss)])
def test_of_classes_it_equals_another_library(loss: Any, library: Any, temperature: float) -> None:
    embeddings, labels = unit(20, 5), torch.arange(20) % 6
    value = loss(temperature=temperature)(embeddings, Pairs.by_label(labels))
    assert float(value) == pytest.approx(float(library(temperature)(embeddings, labels)), rel=1e-6)


def test_a_pair_of_weight_two_is_two_pairs_and_pairs_left_out_do_not_count() -> None:
    embeddings, pairs, loss = unit(6, 4, seed=1), Pairs.by_label(torch.tensor([0, 0, 1, 1, 2, 2])), SupCon()
    doubled = Pairs(2.0 * pairs.positive, 2.0 * pairs.negative, pairs.n_positives, pairs.n_negatives)
    torch.testing.assert_close(loss(embeddings, doubled), loss(embeddings, pairs) + math.log(2))
    negative = pairs.negative.clone()
    negative[:2, 4:] = negative[4:, :2] = 0
    without = Pairs(pairs.positive, negative, pairs.n_positives, int(negative.sum()))
    assert loss(embeddings, without) < loss(embeddings, pairs)


@LOSSES
@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 2]])
def test_it_is_finite_in_half_precision_and_with_equal_items(loss: Any, labels: list[int]) -> None:
    for embeddings in (torch.ones(4, 3, dtype=torch.float16), F.normalize(torch.ones(4, 3))):
        value = loss()(embeddings.requires_grad_(), Pairs.by_label(torch.tensor(labels)))
        assert value.isfinite()
        assert torch.autograd.grad(value, embeddings)[0].isfinite().all()


@LOSSES
def test_it_has_a_name_and_refuses_other_settings(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as in production
    name = loss.curvature
    assert build(name, margin=0.5, temperature=0.2) == loss(0.5, 0.2)
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature.*positive"):
            build(name, margin=0.5, temperature=temperature)
    with pytest.raises(ValueError, match=f"{loss.__name__}.*temperature.*None"):
        loss(temperature=None)
    with pytest.raises(ValueError, match="temperature.*number.*True"):
        loss(temperature=True)
    labels: Any = torch.tensor([0, 0, 1])
    with pytest.raises(ValueError, match=r"pairs.*Pairs.by_label\(labels\).*Tensor"):
        loss()(torch.eye(3), labels)
