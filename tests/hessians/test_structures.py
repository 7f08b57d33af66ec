"""Laws that every structure of a curvature keeps, for every curvature."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lam.hessians import (
    FIXES,
    ContrastiveCurvature,
    Diagonal,
    InfoNCECurvature,
    SupConCurvature,
    diagonal_ggn,
    register,
)
from lam.hessians.losses import CURVATURES
from lam.pairs import Pairs
from tests.hessians.softmax import SoftmaxCurvature
from tests.hessians.test_last_layer import make

STRUCTURES: list[Any] = [Diagonal]
EVERY_FIX: Any = FIXES
CURVATURES_OF_ALL: list[Any] = [
    *(ContrastiveCurvature(0.9, fix=fix, negative_weight=0.4) for fix in EVERY_FIX),
    ContrastiveCurvature(0.9, average=False),
    InfoNCECurvature(0.3, fix="full"),
    SupConCurvature(0.1),
    SupConCurvature(0.1, split="outputs", average=False),
    SoftmaxCurvature(0.3),
]


@pytest.fixture(params=STRUCTURES)
def structure(request: pytest.FixtureRequest) -> Any:
    register("softmax", SoftmaxCurvature)
    yield request.param
    del CURVATURES["softmax"]


@pytest.fixture(params=CURVATURES_OF_ALL, ids=str)
def parts(request: pytest.FixtureRequest, structure: Any) -> list[Any]:
    """The structure of three batches."""
    _, weight, bias, _ = make()
    batches = [make(N=9, seed=seed) for seed in range(3)]
    parts = [diagonal_ggn(batch[0], weight, bias, Pairs.by_label(batch[3]), request.param) for batch in batches]
    assert all(isinstance(part, structure) for part in parts)
    return parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_adds_up_in_any_order_and_forgets(parts: list[Any], dtype: torch.dtype) -> None:
    a, b, c = (replace(part, sums=part.sums.to(dtype)) for part in parts)
    one, other = (a + b) + c, c + (b + a)
    torch.testing.assert_close(one.sums, other.sums, rtol=1e-12, atol=1e-12)
    assert one.counts == other.counts == tuple(map(sum, zip(a.counts, b.counts, c.counts, strict=True)))
    rest = one - b
    torch.testing.assert_close(rest.h, (a + c).h, rtol=1e-10, atol=1e-12)
    assert rest.counts == (a + c).counts
    with pytest.raises(ValueError, match="cannot take away .* from .*: they were never added"):
        _ = a - one


def test_zeros_are_the_zero_of_addition(parts: list[Any], structure: Any) -> None:
    _, weight, _, _ = make()
    zeros = structure.zeros(weight, parts[0].curvature, has_bias=True)
    assert torch.equal((zeros + parts[0]).sums, parts[0].sums)
    assert (zeros + parts[0]).counts == parts[0].counts
    with pytest.raises(ValueError, match="there is no (positive pair|matched item|item)"):
        _ = zeros.h


def test_h_is_the_weighted_sum_of_its_terms(parts: list[Any]) -> None:
    part = parts[0]
    assert len(part.sums) == len(part.counts) == len(part.weights) == len(part.curvature.terms)
    counts = part.counts if part.curvature.average else [1] * len(part.counts)
    expected = sum(w * S / n for S, n, w in zip(part.sums, counts, part.weights, strict=True))
    torch.testing.assert_close(part.h, expected, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(torch.cat([part.weight, part.bias[:, None]], 1), part.h)


def test_it_is_restored_from_its_tensors_and_settings(parts: list[Any], structure: Any) -> None:
    for part in (parts[0], structure(parts[0].h[None], None, parts[0].curvature, has_bias=True)):
        again = structure.restored(part.tensors(), part.settings())
        assert torch.equal(again.h, part.h)
        assert again.to("cpu").settings() == part.settings()
        assert (again.counts, again.curvature) == (part.counts, part.curvature)


def test_of_one_process_the_sum_over_processes_is_its_own(parts: list[Any]) -> None:
    total = parts[0].all_reduce()
    assert torch.equal(total.sums, parts[0].sums)
    assert total.counts == parts[0].counts


def test_a_running_mean_neither_adds_up_nor_forgets(parts: list[Any], structure: Any) -> None:
    h = parts[0].h
    mean = structure(h[None], None, parts[0].curvature, has_bias=True)
    assert (parts[0].adds_up, mean.adds_up) == (True, False)
    assert torch.equal(mean.h, h)
    for combine in (lambda: mean + mean, lambda: parts[0] + mean, lambda: mean - parts[0], lambda: mean.all_reduce()):
        with pytest.raises(ValueError, match="a running mean is no sum over batches"):
            combine()


def test_other_settings_do_not_add_up(parts: list[Any]) -> None:
    other = diagonal_ggn(*make()[:3], Pairs.by_label(make()[3]), ContrastiveCurvature(0.1))
    with pytest.raises(ValueError, match="same layer and settings"):
        _ = parts[0] + other
