"""The von Mises-Fisher distribution: golden values, laws of its sampler, and errors."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from torch import Tensor
from torch.testing import assert_close

from lam.vmf import angles
from lam.vmf.bessel import bessel_ratio, bessel_ratio_complement, bessel_ratio_derivative, log_normalizer
from lam.vmf.distribution import VonMisesFisher, fuse
from tests.vmf.test_bessel import DIMENSIONS, GOLDEN, KAPPA, assert_scaled_close, golden


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def directions(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    points = torch.randn(*shape, dtype=torch.float64, generator=generator(seed))
    return torch.nn.functional.normalize(points, dim=-1).to(dtype)


def on_one_axis(dimension: int, kappa: Tensor) -> VonMisesFisher:
    mean = torch.zeros(*kappa.shape, dimension, dtype=kappa.dtype)
    mean[..., 0] = 1
    return VonMisesFisher(mean, kappa)


@pytest.mark.parametrize("dimension", DIMENSIONS)
class TestAgainstGolden:
    def test_entropy(self, dimension: int) -> None:
        assert_scaled_close(on_one_axis(dimension, KAPPA).entropy(), golden("entropy", dimension), 1e-10)
        single = on_one_axis(dimension, KAPPA.float()).entropy()
        assert single.dtype == torch.float32
        assert_scaled_close(single, golden("entropy", dimension), 1e-5)

    def test_log_prob_at_the_mean_and_opposite(self, dimension: int) -> None:
        vmf = on_one_axis(dimension, KAPPA)
        assert_scaled_close(vmf.log_prob(vmf.loc), golden("log_normalizer_scaled", dimension), 1e-12)
        assert_scaled_close(vmf.log_prob(-vmf.loc), golden("log_normalizer", dimension) - KAPPA, 1e-12)

    @pytest.mark.long
    def test_credible_cap(self, dimension: int) -> None:
        kappa = torch.tensor(GOLDEN["cap_kappas"], dtype=torch.float64)
        n_levels, n_kappas = len(GOLDEN["cap_levels"]), len(kappa)
        start = DIMENSIONS.index(dimension) * n_levels * n_kappas
        for i, level in enumerate(GOLDEN["cap_levels"]):
            cells = GOLDEN["cap"][start + i : start + n_levels * n_kappas : n_levels]
            one_minus_cosine = torch.tensor([float(cell) for cell in cells], dtype=torch.float64)
            cosine = on_one_axis(dimension, kappa).credible_cap(level)
            assert_close(cosine, 1 - one_minus_cosine, rtol=0, atol=1e-11)
            assert_close(1 - cosine, one_minus_cosine, rtol=1e-7, atol=1e-15)
            single = on_one_axis(dimension, kappa.float()).credible_cap(level)
            assert_close(single.double(), 1 - one_minus_cosine, rtol=0, atol=1e-5)


class TestCredibleCap:
    @pytest.mark.parametrize("level", [1e-9, 1e-3, 0.3, 1 - 1e-6])
    def test_in_three_dimensions_it_has_a_closed_form(self, level: float) -> None:
        kappa = torch.tensor([1e-3, 1.0, 30.0, 700.0], dtype=torch.float64)
        closed = 1 + torch.log1p(level * torch.expm1(-2 * kappa)) / kappa
        assert_close(on_one_axis(3, kappa).credible_cap(level), closed, rtol=0, atol=1e-9)

    def test_uniform(self) -> None:
        zero = torch.zeros(1, dtype=torch.float64)
        assert_close(on_one_axis(2, zero).credible_cap(0.25), torch.full_like(zero, math.cos(math.pi / 4)))
        assert_close(on_one_axis(512, zero).credible_cap(0.5), zero)

    @pytest.mark.parametrize("level", [0.0, 1.0, -0.5, float("nan")])
    def test_level(self, level: float) -> None:
        with pytest.raises(ValueError, match=r"level.*\(0, 1\)"):
            on_one_axis(3, torch.ones(1)).credible_cap(level)


class TestDensity:
    def test_batches_broadcast(self) -> None:
        vmf = VonMisesFisher(directions(4, 3), torch.arange(4, dtype=torch.float64))
        x = directions(5, 1, 3, seed=1)
        assert_close(vmf.log_prob(x)[2, 3], VonMisesFisher(vmf.loc[3], vmf.concentration[3]).log_prob(x[2, 0]))

    def test_gradients(self) -> None:
        mean = directions(3).requires_grad_()
        kappa = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
        x = directions(3, seed=1)
        VonMisesFisher(mean, kappa).log_prob(x).backward()
        assert kappa.grad is not None
        assert mean.grad is not None
        assert_close(kappa.grad, mean.detach() @ x - bessel_ratio(3, kappa.detach()))
        tangential = x - (x @ mean.detach()) * mean.detach()
        assert_close(mean.grad, 5 * tangential)

    def test_zero_kappa_is_uniform(self) -> None:
        vmf = on_one_axis(5, torch.zeros(1, dtype=torch.float64))
        assert_close(vmf.log_prob(directions(5)), log_normalizer(5, vmf.concentration))
        assert_close(vmf.entropy(), -log_normalizer(5, vmf.concentration))

    def test_gradient_of_entropy(self) -> None:
        kappa = KAPPA.clone().requires_grad_()
        (slope,) = torch.autograd.grad(on_one_axis(16, kappa).entropy().sum(), kappa)
        assert_close(slope, -KAPPA * golden("derivative", 16), rtol=1e-9, atol=0)


def angle_distribution(dimension: int, kappa: float) -> tuple[Tensor, Tensor]:
    """Polar angles and their distribution function by Simpson's rule, a slow twin of the quadrature."""
    mode = math.acos(2 * kappa / (dimension - 2 + math.hypot(dimension - 2, 2 * kappa))) if dimension > 2 else 0.0
    width = 1 / math.sqrt(kappa * math.cos(mode) + ((dimension - 2) / math.sin(mode) ** 2 if dimension > 2 else 0))
    angle = torch.linspace(max(0.0, mode - 12 * width), min(math.pi, mode + 12 * width), 20_001, dtype=torch.float64)
    log_density = torch.xlogy(torch.tensor(dimension - 2.0), angle.sin()) - 2 * kappa * (angle / 2).sin() ** 2
    density = (log_density - log_density.max()).exp()
    cumulative = torch.from_numpy(scipy.integrate.cumulative_simpson(density.numpy(), x=angle.numpy(), initial=0))
    return angle, cumulative / cumulative[-1]


def check_sampler(dimension: int, kappa: float, n_draws: int, dtype: torch.dtype = torch.float64) -> None:
    mean = directions(dimension, seed=7, dtype=dtype)
    draws = VonMisesFisher(mean, torch.tensor(kappa, dtype=dtype)).sample((n_draws,), generator=generator()).double()
    mean = mean.double()
    assert_close(draws.norm(dim=-1), torch.ones(n_draws, dtype=torch.float64), rtol=0, atol=1e-6)
    exact = torch.tensor(kappa, dtype=torch.float64)
    error = (bessel_ratio_complement(dimension, exact) - (draws - mean).square().sum(-1) / 2).mean().abs()
    assert error <= 4 * (bessel_ratio_derivative(dimension, exact) / n_draws).sqrt()
    other = directions(dimension, seed=8)
    other = torch.nn.functional.normalize(other - (other @ mean) * mean, dim=-1)
    variance = bessel_ratio(dimension, exact) / exact
    assert (draws @ other).mean().abs() <= 4 * (variance / n_draws).sqrt()
    angles, cumulative = angle_distribution(dimension, kappa)
    drawn = 2 * ((draws - mean).norm(dim=-1) / 2).clamp(max=1).asin()
    uniform = torch.from_numpy(np.interp(drawn, angles, cumulative))
    assert scipy.stats.kstest(uniform, "uniform").pvalue > 1e-4


CELLS = [(2, 1e-6), (2, 3.0), (2, 1e8), (3, 1.0), (3, 1e8), (8, 20.0), (64, 1e-3), (64, 1e5), (512, 300.0)]


class TestSampler:
    @pytest.mark.parametrize(("dimension", "kappa"), CELLS)
    def test_light(self, dimension: int, kappa: float) -> None:
        check_sampler(dimension, kappa, 4_000)

    @pytest.mark.slow
    @pytest.mark.parametrize("kappa", [1e-6, 1e-2, 1.0, 30.0, 1e3, 1e5, 1e8])
    @pytest.mark.parametrize("dimension", [2, 3, 4, 8, 64, 512, 4096])
    def test_in_full(self, dimension: int, kappa: float) -> None:
        check_sampler(dimension, kappa, min(100_000, 80_000_000 // dimension))

    def test_float32(self) -> None:
        check_sampler(16, 50.0, 4_000, torch.float32)

    def test_shapes_and_seeds(self) -> None:
        vmf = VonMisesFisher(directions(2, 5, 3), torch.full((2, 5), 10.0, dtype=torch.float64))
        draws = vmf.sample((4,), generator=generator(3))
        assert draws.shape == (4, 2, 5, 3)
        assert torch.equal(draws, vmf.sample((4,), generator=generator(3)))
        assert vmf.sample(generator=generator()).shape == (2, 5, 3)
        assert vmf.sample((0,), generator=generator()).shape == (0, 2, 5, 3)

    @pytest.mark.timeout(20)
    @pytest.mark.parametrize(("loc", "kappa"), [(math.nan, 1.0), (1.0, math.nan)])
    def test_what_has_no_draw_is_nan_and_ends(self, loc: float, kappa: float) -> None:
        vmf = VonMisesFisher(torch.tensor([[1.0, 0.0], [loc, 0.0]]), torch.tensor([1.0, kappa]), validate_args=False)
        assert vmf.sample((3,)).isnan().all(-1).tolist() == [[False, True]] * 3
        assert not on_one_axis(3, torch.ones(1, requires_grad=True)).sample(generator=generator()).requires_grad

    def test_leaves_the_global_generator_alone(self) -> None:
        before = torch.get_rng_state()
        on_one_axis(3, torch.ones(5)).sample((5,), generator=generator())
        assert torch.equal(before, torch.get_rng_state())

    def test_mixed_kappas_do_not_mix(self) -> None:
        draws = on_one_axis(3, torch.tensor([0.0, 1e6])).sample((2000,), generator=generator())
        assert draws[:, 0, 0].mean().abs() < 4 / math.sqrt(3 * 2000)
        assert draws[:, 1, 0].min() > 0.9999


def check_gradient_in_kappa(dimension: int, kappa: float, n_draws: int) -> None:
    """E[d(mean.x)/dkappa] = A'(kappa)."""
    leaf = torch.full((n_draws,), kappa, dtype=torch.float64, requires_grad=True)
    draws = on_one_axis(dimension, leaf).rsample(generator=generator(5))
    (slopes,) = torch.autograd.grad(draws[:, 0].sum(), leaf)
    expected = bessel_ratio_derivative(dimension, torch.tensor(kappa, dtype=torch.float64))
    assert (slopes.mean() - expected).abs() <= 4 * slopes.std() / math.sqrt(n_draws)


class TestReparameterisation:
    @pytest.mark.parametrize(("dimension", "kappa"), [(2, 1.0), (3, 1.0), (3, 1e6), (16, 1e-3), (64, 100.0)])
    def test_light(self, dimension: int, kappa: float) -> None:
        check_gradient_in_kappa(dimension, kappa, 2_000)

    @pytest.mark.slow
    @pytest.mark.parametrize("kappa", [1e-6, 1.0, 30.0, 1e3, 1e8])
    @pytest.mark.parametrize("dimension", [2, 3, 8, 128])
    def test_in_full(self, dimension: int, kappa: float) -> None:
        check_gradient_in_kappa(dimension, kappa, 100_000)

    def test_in_three_dimensions_it_has_a_closed_form(self) -> None:
        """cos = 1 + log(u + (1 - u) exp(-2 kappa)) / kappa at fixed u."""
        kappa = torch.linspace(0.1, 20, 200, dtype=torch.float64, requires_grad=True)
        cosine = on_one_axis(3, kappa).rsample(generator=generator())[:, 0]
        (slope,) = torch.autograd.grad(cosine.sum(), kappa)
        k = kappa.detach()
        u = (torch.expm1(k * (cosine.detach() - 1)) - torch.expm1(-2 * k)) / -torch.expm1(-2 * k)
        twin = k.clone().requires_grad_()
        (expected,) = torch.autograd.grad((1 + torch.log(u + (1 - u) * torch.exp(-2 * twin)).div(twin)).sum(), twin)
        assert_close(slope, expected, rtol=1e-8, atol=1e-9)

    def test_forward_mode_gives_the_derivative_of_autograd(self) -> None:
        mean, kappa = directions(4, 3), torch.tensor([0.1, 2.0, 30.0, 1e4], dtype=torch.float64)
        changes = directions(4, 3, seed=1), torch.ones_like(kappa)

        def draw(mean: Tensor, kappa: Tensor) -> Tensor:
            return VonMisesFisher(mean, kappa).rsample(generator=generator())

        _, forward = torch.func.jvp(draw, (mean, kappa), changes)
        by_mean, by_kappa = torch.func.jacrev(draw, (0, 1))(mean, kappa)
        assert_close(forward, torch.tensordot(by_mean, changes[0], 2) + by_kappa @ changes[1])
        for constant in (VonMisesFisher.sample, lambda vmf: vmf.credible_cap(0.9)):
            _, slope = torch.func.jvp(lambda kappa, f=constant: f(VonMisesFisher(mean, kappa)), (kappa,), (kappa,))
            assert not slope.any()

    def test_in_the_mean(self) -> None:
        """E[x] = A mean, so along the sphere E[v.x] has the gradient A v projected on the tangent space."""
        mean = directions(4).requires_grad_()
        kappa = torch.tensor(3.0, dtype=torch.float64)
        target = directions(4, seed=1)
        copies = mean.expand(20_000, 4)
        values = VonMisesFisher(copies, kappa.expand(20_000)).rsample(generator=generator()) @ target
        (slopes,) = torch.autograd.grad(values.sum(), copies)
        expected = bessel_ratio(4, kappa) * (target - (target @ mean) * mean).detach()
        assert ((slopes.mean(0) - expected).abs() <= 4 * slopes.std(0) / math.sqrt(20_000)).all()


class TestFuse:
    def test_is_the_normalised_product(self) -> None:
        means, kappas = directions(6, 3, 4), torch.rand(6, 3, dtype=torch.float64, generator=generator()) * 9
        fused = fuse(means, kappas)
        x = directions(50, 1, 1, 4, seed=3)
        log_product = VonMisesFisher(means, kappas).log_prob(x).sum(-1)
        difference = log_product - fused.log_prob(x[:, 0])
        assert_close(difference, difference[:1].expand(50, 6))

    def test_opposites_give_the_uniform_distribution(self) -> None:
        means = torch.tensor([[0.6, 0.8], [-0.6, -0.8]])
        fused = fuse(means, torch.tensor([5.0, 5.0]))
        assert fused.concentration == 0
        assert_close(fused.loc, means[0])

    def test_one_alone_is_itself(self) -> None:
        means, kappas = directions(4, 1, 8, dtype=torch.float32), torch.tensor([[0.0], [1e-6], [1.0], [1e8]])
        fused = fuse(means, kappas)
        assert_close(fused.loc, means[:, 0])
        assert_close(fused.concentration, kappas[:, 0])

    def test_differentiable(self) -> None:
        kappas = torch.tensor([[1.0, 2.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
        fused = fuse(directions(2, 2, 3), kappas)
        (fused.concentration.sum() + fused.loc.sum()).backward()
        assert kappas.grad is not None
        assert kappas.grad.isfinite().all()

    def test_none(self) -> None:
        with pytest.raises(ValueError, match="fuse.*distribution"):
            fuse(torch.ones(2, 0, 3), torch.ones(2, 0))


class TestErrors:
    def test_parameters(self) -> None:
        kappa = torch.ones(9)
        kappa[7] = -3
        with pytest.raises(ValueError, match="concentration.*0.*-3.0.*index 7"):
            VonMisesFisher(directions(9, 3, dtype=torch.float32), kappa)
        with pytest.raises(ValueError, match="dimension.*2.*1"):
            VonMisesFisher(torch.ones(3, 1), torch.ones(3))

    def test_loc(self) -> None:
        loc = directions(4, 3)
        loc[2] = 0.5 * torch.eye(3)[2]  # its norm is 0.5 on every processor
        with pytest.raises(ValueError, match="loc.*unit length.*0.5.*index 2"):
            VonMisesFisher(loc, torch.ones(4))

    @pytest.mark.usefixtures("as_in_production")
    def test_batch_shapes(self) -> None:
        with pytest.raises(ValueError, match=r"loc.*\(\*concentration.shape, D\).*\(4, 3\) and \(5,\)"):
            VonMisesFisher(directions(4, 3), torch.ones(5))

    @pytest.mark.usefixtures("as_in_production")
    def test_integers(self) -> None:
        with pytest.raises(ValueError, match="concentration.*floating-point.*torch.int64"):
            VonMisesFisher(directions(1, 3)[0], torch.tensor(2))
        with pytest.raises(ValueError, match="loc.*floating-point.*torch.int64"):
            VonMisesFisher(torch.tensor([0, 0, 1]), torch.tensor(2.0), validate_args=False)

    def test_value(self) -> None:
        vmf = on_one_axis(3, torch.ones(2))
        with pytest.raises(ValueError, match=r"value.*3.*\(5, 4\)"):
            vmf.log_prob(directions(5, 4))
        with pytest.raises(ValueError, match="value.*unit length"):
            vmf.log_prob(torch.ones(3))
        with pytest.raises(ValueError, match="value.*unit length"):
            vmf.log_prob(torch.full((3,), torch.nan))


def test_the_gradient_of_a_draw_at_the_mean_direction_itself_is_zero() -> None:
    kappa, angle = torch.tensor([0.5, 3.0, 1e6], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for dimension in (2, 3, 4, 512):
        assert (angles.slope(dimension, kappa, angle).abs() < 1e-14).all()  # and no NaN


@pytest.mark.parametrize("dimension", [2, 3, 10, 512])
def test_the_gradient_of_a_draw_in_float32_is_that_in_float64(dimension: int) -> None:
    kappa = torch.logspace(-3, 6, 4, dtype=torch.float64).repeat(50)
    loc = on_one_axis(dimension, kappa).loc
    angle = torch.linalg.vecdot(
        VonMisesFisher(loc, kappa).sample(generator=torch.Generator().manual_seed(0)), loc
    ).acos()
    scale = (1 + kappa / dimension) ** 1.5
    few, exact = (angles.slope(dimension, kappa, angle, exact=exact) * scale for exact in (False, True))
    torch.testing.assert_close(few, exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))
