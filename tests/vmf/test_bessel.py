"""Bessel ratio, log normaliser and their inverses against golden values of 60 digits (see make_golden.py)."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from lam.vmf.bessel import (
    bessel_ratio,
    bessel_ratio_complement,
    bessel_ratio_derivative,
    kappa_from_resultant,
    log_normalizer,
)

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
DIMENSIONS = GOLDEN["dimensions"]
KAPPA = torch.tensor(GOLDEN["kappas"], dtype=torch.float64)


def golden(name: str, dimension: int) -> Tensor:
    start = DIMENSIONS.index(dimension) * len(KAPPA)
    return torch.tensor([float(v) for v in GOLDEN[name][start : start + len(KAPPA)]], dtype=torch.float64)


def assert_scaled_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """|actual - expected| at most tolerance * max(1, |expected|)."""
    scale = expected.abs().clamp(min=1)
    assert_close(actual.double() / scale, expected / scale, rtol=0, atol=tolerance)


def test_the_grid_has_all_cells() -> None:
    assert len(DIMENSIONS) * len(KAPPA) == 435
    assert (DIMENSIONS[0], DIMENSIONS[-1], KAPPA[0].item(), KAPPA[-1].item()) == (2, 4096, 1e-6, 1e8)


@pytest.mark.parametrize("dimension", DIMENSIONS)
class TestAgainstGolden:
    def test_ratio(self, dimension: int) -> None:
        assert_close(bessel_ratio(dimension, KAPPA), golden("ratio", dimension), rtol=1e-13, atol=0)

    def test_ratio_complement(self, dimension: int) -> None:
        assert_close(bessel_ratio_complement(dimension, KAPPA), golden("complement", dimension), rtol=1e-12, atol=0)

    def test_ratio_derivative(self, dimension: int) -> None:
        assert_close(bessel_ratio_derivative(dimension, KAPPA), golden("derivative", dimension), rtol=1e-9, atol=0)

    def test_log_normalizer(self, dimension: int) -> None:
        assert_scaled_close(log_normalizer(dimension, KAPPA), golden("log_normalizer", dimension), 1e-12)

    def test_scaled_log_normalizer(self, dimension: int) -> None:
        scaled = log_normalizer(dimension, KAPPA, scaled=True)
        assert_scaled_close(scaled, golden("log_normalizer_scaled", dimension), 1e-12)

    def test_gradients(self, dimension: int) -> None:
        kappa = KAPPA.clone().requires_grad_()
        (slope,) = torch.autograd.grad(log_normalizer(dimension, kappa).sum(), kappa, create_graph=True)
        assert_close(slope, -golden("ratio", dimension), rtol=1e-12, atol=0)
        (curvature,) = torch.autograd.grad(slope.sum(), kappa)
        assert_close(curvature, -golden("derivative", dimension), rtol=1e-9, atol=0)
        (scaled_slope,) = torch.autograd.grad(log_normalizer(dimension, kappa, scaled=True).sum(), kappa)
        assert_close(scaled_slope, golden("complement", dimension), rtol=1e-12, atol=0)
        (complement_slope,) = torch.autograd.grad(bessel_ratio_complement(dimension, kappa).sum(), kappa)
        assert_close(complement_slope, -golden("derivative", dimension), rtol=1e-9, atol=0)

    def test_round_trip(self, dimension: int) -> None:
        kappa = kappa_from_resultant(
            golden("ratio", dimension),
            dimension,
            one_minus_resultant=golden("complement", dimension),
            max_kappa=1e9,
        )
        assert_close(kappa, KAPPA, rtol=1e-10, atol=0)

    def test_float32_is_computed_in_float64(self, dimension: int) -> None:
        kappa = KAPPA.float()
        exact = kappa.double()  # log C near 0 feels the rounding of kappa itself, so golden values do not serve there
        ratio = bessel_ratio(dimension, kappa)
        assert ratio.dtype == torch.float32
        assert_close(ratio.double(), bessel_ratio(dimension, exact), rtol=2e-6, atol=0)
        assert_close(ratio.double(), golden("ratio", dimension), rtol=2e-6, atol=0)
        assert_scaled_close(log_normalizer(dimension, kappa), log_normalizer(dimension, exact), 1e-6)
        assert_scaled_close(
            log_normalizer(dimension, kappa, scaled=True), log_normalizer(dimension, exact) + exact, 1e-5
        )
        assert_close(
            bessel_ratio_derivative(dimension, kappa).double(), golden("derivative", dimension), rtol=1e-5, atol=0
        )
        inverse = kappa_from_resultant(
            golden("ratio", dimension).float(),
            dimension,
            one_minus_resultant=golden("complement", dimension).float(),
            max_kappa=1e9,
        )
        assert inverse.dtype == torch.float32
        assert_close(inverse.double(), KAPPA, rtol=1e-4, atol=0)

    def test_kappa_zero_is_the_uniform_distribution(self, dimension: int) -> None:
        zero = torch.zeros((), dtype=torch.float64)
        half = torch.tensor(dimension / 2, dtype=torch.float64)
        uniform = torch.lgamma(half) - math.log(2) - half * math.log(math.pi)
        assert_scaled_close(log_normalizer(dimension, zero), uniform, 1e-12)
        assert bessel_ratio(dimension, zero) == 0
        assert_close(bessel_ratio_derivative(dimension, zero).item(), 1 / dimension, rtol=1e-15, atol=0)

    def test_no_jump_in_slope(self, dimension: int) -> None:
        """The slope changes between neighbouring steps only as much as its own derivative allows."""
        kappa = torch.logspace(-6, 8, 4001, dtype=torch.float64)
        log_kappa_slope = kappa * bessel_ratio_derivative(dimension, kappa)  # dA / dlog kappa
        ratio = bessel_ratio(dimension, kappa)
        step = kappa.log().diff()
        trapezium = (log_kappa_slope[1:] + log_kappa_slope[:-1]) / 2 * step
        assert ((ratio.diff() - trapezium).abs() <= 1e-6).all()
        below, above = kappa * (1 - 1e-12), kappa * (1 + 1e-12)
        jump = bessel_ratio(dimension, above) - bessel_ratio(dimension, below)
        assert jump.abs().max() <= 1e-10
        jump = bessel_ratio_derivative(dimension, above) - bessel_ratio_derivative(dimension, below)
        assert jump.abs().max() <= 1e-10


def check_laws(dimension: int, log_kappa: float, log_factor: float) -> None:
    """0 < A < 1, rising in kappa, falling in D, between Amos' bounds (1974, equations 9 and 11)."""
    kappa = torch.tensor(10.0, dtype=torch.float64) ** log_kappa
    ratio = bessel_ratio(dimension, kappa).item()
    order, slack = dimension / 2 - 1, 4e-16
    lower = (kappa / (order + 0.5 + torch.hypot(kappa, torch.tensor(order + 1.5, dtype=torch.float64)))).item()
    upper = (kappa / (order + 0.5 + torch.hypot(kappa, torch.tensor(order + 0.5, dtype=torch.float64)))).item()
    assert 0 < ratio < 1
    assert lower * (1 - slack) <= ratio <= upper * (1 + slack)
    above = kappa * 10**log_factor
    assert bessel_ratio_complement(dimension, above) < bessel_ratio_complement(dimension, kappa) or log_kappa < 0
    assert bessel_ratio(dimension, above) > ratio or log_kappa > 0
    assert bessel_ratio(dimension + 1, kappa) < ratio


LAWS = {"dimension": st.integers(2, 4096), "log_kappa": st.floats(-6, 8), "log_factor": st.floats(1e-3, 2)}


@given(**LAWS)
@settings(max_examples=100, deadline=None)
def test_laws(dimension: int, log_kappa: float, log_factor: float) -> None:
    check_laws(dimension, log_kappa, log_factor)


@pytest.mark.slow
@given(**LAWS)
@settings(max_examples=2000, deadline=None)
def test_laws_in_full(dimension: int, log_kappa: float, log_factor: float) -> None:
    check_laws(dimension, log_kappa, log_factor)


@pytest.mark.parametrize("dimension", [2, 3, 512])
def test_large_kappa_stays_finite(dimension: int) -> None:
    kappa = torch.tensor([1e12, 1e100, 1e300], dtype=torch.float64)
    for value in (bessel_ratio(dimension, kappa), log_normalizer(dimension, kappa, scaled=True)):
        assert value.isfinite().all()


def test_third_derivative_is_refused() -> None:
    kappa = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(bessel_ratio(3, kappa), kappa, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative.*Bessel"):
        torch.autograd.grad(slope + kappa**2, kappa)


class TestKappaFromResultant:
    def test_what_is_not_above_zero_gives_zero(self) -> None:
        assert_close(kappa_from_resultant(torch.tensor([-0.2, 0.0]), 8), torch.zeros(2))

    @pytest.mark.parametrize("dimension", [2, 3, 4096])
    def test_cap(self, dimension: int) -> None:
        resultant = torch.tensor([1.0, 1.0 - 1e-15, 0.5], dtype=torch.float64)
        kappa = kappa_from_resultant(resultant, dimension, max_kappa=1e6)
        assert kappa[:2].tolist() == [1e6, 1e6]
        assert kappa[2] < 1e6

    @pytest.mark.parametrize("dimension", [2, 3, 41, 42, 4096])
    @pytest.mark.parametrize("max_kappa", [1e-3, 10.0, 1e16])
    def test_any_kappa_is_found_again_and_what_is_beyond_the_cap_is_the_cap(
        self, dimension: int, max_kappa: float
    ) -> None:
        kappa = torch.logspace(-290, 15, 4001, dtype=torch.float64)
        ratio, complement = bessel_ratio(dimension, kappa), bessel_ratio_complement(dimension, kappa)
        found = kappa_from_resultant(ratio, dimension, one_minus_resultant=complement, max_kappa=max_kappa)
        beyond = kappa > max_kappa * (1 + 1e-9)
        assert found[beyond].eq(max_kappa).all()
        assert_close(found[~beyond], kappa[~beyond], rtol=5e-13, atol=0)

    def test_needs_the_complement_near_one(self) -> None:
        kappa = torch.tensor(1e6, dtype=torch.float64)
        complement = bessel_ratio_complement(2, kappa)
        from_both = kappa_from_resultant((1 - complement).float(), 2, one_minus_resultant=complement)
        assert_close(from_both.double(), kappa, rtol=1e-6, atol=0)
        assert abs(kappa_from_resultant((1 - complement).float(), 2).item() / 1e6 - 1) > 0.01

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_takes_a_precise_complement_of_half_precision(self, dtype: torch.dtype) -> None:
        complement = torch.linspace(0.001, 1, 99, dtype=torch.float64)
        for one_minus in (complement, complement.to(dtype)):
            found = kappa_from_resultant((1 - complement).to(dtype), 8, one_minus_resultant=one_minus)
            expected = kappa_from_resultant(1 - complement, 8)
            assert_close(found.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-9)

    def test_shapes(self) -> None:
        assert kappa_from_resultant(torch.full((2, 3), 0.5), 4).shape == (2, 3)
        assert kappa_from_resultant(torch.full((0,), 0.5), 4).shape == (0,)


class TestErrors:
    def test_dimension(self) -> None:
        with pytest.raises(ValueError, match="dimension.*2.*1"):
            bessel_ratio(1, torch.ones(2))

    @pytest.mark.parametrize(
        "function", [bessel_ratio, bessel_ratio_complement, bessel_ratio_derivative, log_normalizer]
    )
    def test_kappa(self, function) -> None:
        kappa = torch.ones(9)
        kappa[7] = -3
        with pytest.raises(ValueError, match="kappa.*0.*-3.0.*index 7"):
            function(3, kappa)
        with pytest.raises(ValueError, match=r"inf.*index \(1, 0\)"):
            function(3, torch.tensor([[1.0], [torch.inf]]))
        with pytest.raises(ValueError, match=r"got nan$"):
            function(3, torch.tensor(torch.nan))

    @pytest.mark.usefixtures("as_in_production")
    def test_integers(self) -> None:
        with pytest.raises(ValueError, match="kappa.*floating-point.*torch.int64"):
            bessel_ratio(3, torch.tensor([2]))
        with pytest.raises(ValueError, match="resultant.*floating-point.*torch.int64"):
            kappa_from_resultant(torch.tensor([0, 1]), 3)

    def test_resultant(self) -> None:
        with pytest.raises(ValueError, match=r"resultant.*\[-1, 1\].*1.5.*index 1"):
            kappa_from_resultant(torch.tensor([0.5, 1.5]), 3)
        with pytest.raises(ValueError, match="nan.*index 0"):
            kappa_from_resultant(torch.tensor([torch.nan]), 3)

    def test_lengths_that_disagree(self) -> None:
        with pytest.raises(ValueError, match="one_minus_resultant must be 1 - resultant, got 0.25"):
            kappa_from_resultant(torch.tensor(0.5), 3, one_minus_resultant=torch.tensor(0.25))

    def test_the_greatest_kappa_of_half_precision_is_finite(self) -> None:
        one = torch.ones(1, dtype=torch.float16)
        assert kappa_from_resultant(one, 3).item() == torch.finfo(torch.float16).max

    @pytest.mark.parametrize("max_kappa", [0.0, -1.0, float("inf"), float("nan")])
    def test_max_kappa(self, max_kappa: float) -> None:
        with pytest.raises(ValueError, match="max_kappa"):
            kappa_from_resultant(torch.tensor(0.5), 3, max_kappa=max_kappa)


@pytest.mark.parametrize("dimension", [2, 64])
@pytest.mark.parametrize("function", [bessel_ratio, bessel_ratio_complement, log_normalizer])
def test_the_transforms_of_torch_func_give_the_gradients_of_autograd(function, dimension):
    kappa = torch.tensor([0.0, 0.5, 20.0, 1e6], dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(function(dimension, kappa).sum(), kappa)
    assert torch.equal(torch.func.grad(lambda kappa: function(dimension, kappa).sum())(kappa.detach()), expected)
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        assert_close(jacobian(lambda kappa: function(dimension, kappa))(kappa.detach()), expected.diag())
    each = torch.func.vmap(torch.func.grad(lambda kappa: function(dimension, kappa)))(kappa.detach())
    assert torch.equal(each, expected)


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_forward_mode_and_vmap_give_the_golden_values(dimension: int) -> None:
    def value(kappa: Tensor) -> Tensor:
        return log_normalizer(dimension, kappa)

    kappa = KAPPA.reshape(-1, 1)
    assert torch.equal(torch.func.vmap(value)(kappa), value(kappa))
    ratio, derivative = (golden(name, dimension)[:, None] for name in ("ratio", "derivative"))
    _, slope = torch.func.jvp(value, (kappa,), (torch.ones_like(kappa),))
    assert_close(slope, -ratio, rtol=1e-12, atol=0)
    curvature = torch.func.vmap(torch.func.hessian(lambda kappa: value(kappa).sum()))(kappa)
    assert_close(curvature, -derivative[..., None], rtol=1e-9, atol=0)
    inverse = torch.func.vmap(lambda resultant: kappa_from_resultant(resultant, dimension))(ratio)
    assert torch.equal(inverse, kappa_from_resultant(ratio, dimension))


def test_vmap_checks_every_value() -> None:
    with pytest.raises(ValueError, match="got -3.0"):
        torch.func.vmap(lambda kappa: bessel_ratio(3, kappa))(torch.tensor([1.0, -3.0]))
