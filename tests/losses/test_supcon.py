"""The supervised contrastive loss against a double loop, pytorch-metric-learning's, and at the edges."""

import math

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning.losses import SupConLoss
from torch import Tensor

from lam.losses import SupCon, build
from lam.pairs import Pairs


def twin(n: Tensor, labels: Tensor, temperature: float) -> float:
    """The loss, anchor by anchor."""
    of_anchors = []
    for a in range(len(n)):
        positive = [p for p in range(len(n)) if p != a and labels[p] == labels[a]]
        if not positive:
            continue
        total = sum(math.exp(float(n[a] @ n[j]) / temperature) for j in range(len(n)) if j != a)
        gains = [float(n[a] @ n[p]) / temperature - math.log(total) for p in positive]
        of_anchors.append(-sum(gains) / len(gains))
    return sum(of_anchors) / len(of_anchors)


@pytest.mark.parametrize("temperature", [0.05, 0.1, 1.0])
def test_against_a_double_loop_and_another_library(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = F.normalize(torch.randn(20, 5, generator=generator, dtype=torch.float64))
    labels = torch.randint(8, (20,), generator=generator)
    value = SupCon(temperature=temperature)(embeddings, Pairs.by_label(labels))
    assert float(value) == pytest.approx(twin(embeddings, labels, temperature), rel=1e-12)
    assert float(value) == pytest.approx(float(SupConLoss(temperature)(embeddings, labels)), rel=1e-6)


def test_a_pair_of_weight_two_is_two_pairs_and_pairs_left_out_do_not_count() -> None:
    embeddings = F.normalize(torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    pairs, loss = Pairs.by_label(torch.tensor([0, 0, 1, 1, 2, 2])), SupCon()
    doubled = Pairs(2.0 * pairs.positive, 2.0 * pairs.negative, pairs.n_positives, pairs.n_negatives)
    torch.testing.assert_close(loss(embeddings, doubled), loss(embeddings, pairs) + math.log(2))
    negative = pairs.negative.clone()
    negative[:2, 4:] = negative[4:, :2] = 0
    without = Pairs(pairs.positive, negative, pairs.n_positives, int(negative.sum()))
    assert loss(embeddings, without) < loss(embeddings, pairs)


def test_the_gradient_is_finite_with_equal_items_and_items_alone() -> None:
    embeddings = F.normalize(torch.ones(4, 3), dim=1).requires_grad_()
    value = SupCon()(embeddings, Pairs.by_label(torch.tensor([0, 0, 1, 2])))
    value.backward()
    assert embeddings.grad is not None
    assert embeddings.grad.isfinite().all()


def test_by_name_and_refused() -> None:
    assert build("supcon", margin=0.5, temperature=0.2) == SupCon(0.5, 0.2)
    with pytest.raises(ValueError, match="temperature must be positive and finite, got 0"):
        build("supcon", margin=0.5, temperature=0.0)
