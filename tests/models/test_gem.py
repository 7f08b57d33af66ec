"""Generalised-mean pooling against its formula in slow float64, and where that formula breaks down."""

import pytest
import torch
from torch import Tensor

from lam.models.networks import GeM
from tests.helpers import unchecked


def _slow(maps: Tensor, p: Tensor, eps: float) -> Tensor:
    rows = []
    for item in maps:
        channels = []
        for channel in item:
            powers = [value.clamp(min=eps) ** p for value in channel.flatten()]
            channels.append((torch.stack(powers).sum() / len(powers)) ** (1 / p))
        rows.append(torch.stack(channels))
    return torch.stack(rows)


@pytest.mark.parametrize("p", [0.5, 1.0, 3.0, 7.5])
def test_value_and_gradients_are_those_of_the_formula(p: float) -> None:
    maps = torch.randn(2, 3, 4, 5, dtype=torch.float64).requires_grad_()
    pooling = GeM(p=p, eps=1e-2).double()
    exponent = torch.tensor(p, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 3, dtype=torch.float64)
    fast, slow = pooling(maps), _slow(maps, exponent, 1e-2)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=0)
    gradients = torch.autograd.grad((fast * weights).sum(), [maps, pooling.p])
    expected = torch.autograd.grad((slow * weights).sum(), [maps, exponent])
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-14)
    assert gradients[1] != 0


def test_exponent_one_is_the_mean_and_a_large_one_the_maximum() -> None:
    maps = torch.rand(2, 3, 6, 7, dtype=torch.float64) + 0.1
    torch.testing.assert_close(GeM(p=1.0).double()(maps), maps.mean(dim=(2, 3)))
    torch.testing.assert_close(GeM(p=1e6).double()(maps), maps.amax(dim=(2, 3)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("p", [3.0, 30.0])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1e4])
def test_dead_and_strong_channels_have_finite_values_and_gradients(p: float, scale: float) -> None:
    maps = (scale * torch.rand(2, 3, 4, 4)).requires_grad_()
    pooling = GeM(p=p)
    pooled = pooling(maps)
    pooled.sum().backward()
    assert pooled.isfinite().all()
    assert maps.grad is not None
    assert maps.grad.isfinite().all()
    assert pooling.p.grad is not None
    assert pooling.p.grad.isfinite()
    torch.testing.assert_close(pooled.detach(), pooling.double()(maps.detach().double()).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_pooled_in_float32(dtype: torch.dtype) -> None:
    maps = (200 * torch.rand(2, 3, 4, 4)).to(dtype)  # 200³ is beyond float16
    pooling = GeM()
    expected = pooling(maps.float()).to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        torch.testing.assert_close(pooling(maps), expected)
    torch.testing.assert_close(pooling.to(dtype)(maps), expected)


@pytest.mark.parametrize(("options", "message"), [({"p": 0.0}, "p.*GeM.*0.0"), ({"eps": -1.0}, "eps .* -1.0")])
def test_options_must_be_positive(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unchecked(GeM)(**options)
