"""SimSiam, BYOL and SwAV, with and without an explicit concentration, against slow loops in float64."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lam.losses import BYOL, Explicit, SimSiam, SwAV
from lam.losses.views import sinkhorn
from lam.pairs import Pairs
from tests.losses.test_losses import unit

N, D = 4, 3
PAIRS = Pairs.by_label(torch.arange(N).repeat(2))
KAPPA = torch.tensor([0.5, 3.0, 20.0, 8.0, 90.0, 1.5, 2.0, 7.0], dtype=torch.float64)
EXPLICIT: dict[str, Explicit | None] = {
    "none": None,
    "square": Explicit(0.3, "square", 0.02),
    "likelihood": Explicit(0.3, "likelihood"),
}


def added(explicit: Explicit | None, first: Tensor, second: Tensor, cosine: Tensor) -> Tensor:
    """The term of an explicit concentration for one pair, equations 5, 6 and 10."""
    if explicit is None:
        return 0 * cosine
    total = -explicit.weight * (first + second) * cosine
    for kappa in (first, second):
        square = explicit.regulariser == "square"
        total = total + (explicit.decay * kappa**2 if square else kappa - (D - 1) / 2 * kappa.log())
    return total


def same(value: Tensor, slow: Tensor, inputs: list[Tensor]) -> None:
    """Check that two losses have the same value and the same gradients."""
    torch.testing.assert_close(value, slow, rtol=1e-10, atol=1e-12)
    options: Any = {"allow_unused": True, "retain_graph": True, "materialize_grads": True}
    for one, other in zip(*(torch.autograd.grad(each, inputs, **options) for each in (value, slow)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("second_network", [False, True])
@pytest.mark.parametrize("kind", EXPLICIT)
@pytest.mark.parametrize("cls", [SimSiam, BYOL])
def test_one_view_predicts_the_other(cls: Any, kind: str, second_network: bool) -> None:
    explicit = EXPLICIT[kind]
    loss = cls(D, 5, explicit, seed=3).double()
    raw, kappa = (3 * unit(2 * N, D)).requires_grad_(), KAPPA.clone().requires_grad_()
    mean = F.normalize(raw)
    targets = unit(2 * N, D, seed=9) if second_network else None
    value = loss(mean, kappa, PAIRS, targets=targets)
    predictions = loss.predictor(mean)
    total = 0 * mean.sum()
    for i in range(N):
        j = i + N
        cosines = []
        for a, b in ((i, j), (j, i)):
            target = mean[b].detach() if targets is None else targets[b]
            cosines.append(predictions[a] @ target / predictions[a].norm())
        base = (4 - 2 * sum(cosines) * 1) if cls is BYOL else -sum(cosines) / 2
        total = total + base + added(explicit, kappa[i], kappa[j], sum(cosines) / 2)
    same(value, total / N, [raw, kappa, *loss.parameters()])


@pytest.mark.parametrize("kind", EXPLICIT)
def test_swav_predicts_the_assignment_of_the_other_view(kind: str) -> None:
    explicit = EXPLICIT[kind]
    loss = SwAV(D, 5, 0.3, 0.1, 3, explicit, seed=3).double()
    raw, kappa = (3 * unit(2 * N, D)).requires_grad_(), KAPPA.clone().requires_grad_()
    mean = F.normalize(raw)
    prototypes = [c / c.norm() for c in loss.prototypes]
    cosines = torch.stack([torch.stack([z @ c for c in prototypes]) for z in mean])
    assigned = torch.cat([slow_sinkhorn(view.detach() / 0.1, 3) for view in (cosines[:N], cosines[N:])])
    total = 0 * mean.sum()
    for i in range(N):
        j = i + N
        for a, b in ((i, j), (j, i)):
            p = (cosines[b] / 0.3).exp() / (cosines[b] / 0.3).exp().sum()
            total = total - (assigned[a] * p.log()).sum() / 2
        total = total + added(explicit, kappa[i], kappa[j], mean[i] @ mean[j])
    same(loss(mean, kappa, PAIRS), total / N, [raw, kappa, loss.prototypes])


def slow_sinkhorn(scores: Tensor, n_iterations: int) -> Tensor:
    """Sinkhorn as in the paper: a matrix of sum 1, with columns and rows scaled in turn, in float64."""
    rows, columns = scores.shape
    q = [[math.exp(float(score)) for score in row] for row in scores.double()]
    for _ in range(n_iterations):
        for k in range(columns):
            total = sum(q[i][k] for i in range(rows))
            for i in range(rows):
                q[i][k] /= total * columns
        for i in range(rows):
            total = sum(q[i])
            q[i] = [value / (total * rows) for value in q[i]]
    return rows * torch.tensor(q, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(6, 4), (2, 9), (1, 3), (30, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sinkhorn_equals_its_twin_and_shares_columns_evenly(shape: tuple[int, int], dtype: torch.dtype) -> None:
    scores = 5 * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    actual = sinkhorn(scores.to(dtype), 3)
    torch.testing.assert_close(actual.double(), slow_sinkhorn(scores, 3), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(actual.sum(1), torch.ones(shape[0], dtype=dtype))
    even = sinkhorn(scores, 2000).sum(0)
    torch.testing.assert_close(even, torch.full_like(even, shape[0] / shape[1]), rtol=1e-3, atol=1e-3)
    assert sinkhorn(1e6 * scores.to(dtype), 3).isfinite().all()


def test_nothing_draws_from_the_global_state_and_a_seed_decides() -> None:
    state = torch.get_rng_state()
    for cls in (SimSiam, BYOL, SwAV):
        one, again, other = cls(D, seed=1), cls(D, seed=1), cls(D, seed=2)
        weights = [next(loss.parameters()) for loss in (one, again, other)]
        assert torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[0], weights[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_what_cannot_be_is_refused() -> None:
    for make, message in (
        (lambda: SimSiam(0), "dimension.*1.*0"),
        (lambda: BYOL(3, 0), "predictor.*1.*0"),
        (lambda: SwAV(3, 1), "n_prototypes.*2.*1"),
        (lambda: SwAV(3, temperature=0.0), "temperature.*positive.*0"),
        (lambda: SwAV(3, smoothness=-1.0), "smoothness.*-1"),
        (lambda: SwAV(3, n_iterations=0), "n_iterations.*1.*0"),
        (lambda: BYOL(3)(unit(8, 4), KAPPA, PAIRS), "loss.*3.*means.*4"),
        (lambda: SwAV(3)(unit(8, 4), KAPPA, PAIRS), "loss.*3.*means.*4"),
        (lambda: SimSiam(3)(unit(4, 3), KAPPA[:4], Pairs.by_label(torch.arange(4))), "no pair.*4.*positive"),
        (lambda: BYOL(3)(unit(4, 3), KAPPA[:4], PAIRS), "pairs.*4.*pairs.*8"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
