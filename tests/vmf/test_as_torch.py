"""The von Mises-Fisher distribution as a distribution of torch: moments, divergence and compositions."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import (
    Categorical,
    Independent,
    MixtureSameFamily,
    Normal,
    Transform,
    TransformedDistribution,
    kl_divergence,
)
from torch.testing import assert_close

from lam.vmf import VonMisesFisher, bessel_ratio
from lam.vmf.distribution import unit_vector
from tests.vmf.test_distribution import directions, generator, on_one_axis

CELLS = [(d, k) for d in (2, 3, 16, 512, 4096) for k in (1e-6, 1.0, 300.0, 1e8)]
KAPPAS = torch.tensor([0.0, 1e-6, 1.0, 299.0, 300.0, 1e8], dtype=torch.float64)


def one(dimension: int, kappa: float, seed: int = 0) -> VonMisesFisher:
    return VonMisesFisher(directions(dimension, seed=seed), torch.tensor(kappa, dtype=torch.float64))


def quadrature(dimension: int, kappa: float) -> tuple[Tensor, Tensor]:
    """Polar angles, and logarithms of the density sin(a)^(D-2) exp(kappa (cos(a) - 1)) with Gauss-Legendre weights."""
    power = dimension - 2
    mode = math.acos(2 * kappa / (power + math.hypot(power, 2 * kappa))) if power else 0.0
    width = 1 / math.sqrt(kappa * math.cos(mode) + (power / math.sin(mode) ** 2 if power else 0))
    low, high = max(0.0, mode - 14 * width), min(math.pi, mode + 14 * width)
    nodes, weights = (torch.from_numpy(part) for part in _legendre(400))
    angle = low + (high - low) * (nodes + 1) / 2
    log_density = torch.xlogy(torch.tensor(float(power)), angle.sin()) - 2 * kappa * (angle / 2).sin() ** 2
    return angle, log_density + torch.log(weights * (high - low) / 2)


def _legendre(degree: int) -> Any:
    import numpy as np

    return np.polynomial.legendre.leggauss(degree)


class TestMoments:
    @pytest.mark.long
    @pytest.mark.parametrize(("dimension", "kappa"), CELLS)
    def test_by_quadrature(self, dimension: int, kappa: float) -> None:
        angle, log_weights = quadrature(dimension, kappa)
        weights = log_weights.softmax(0)
        cosine, sine_squared = weights @ angle.cos(), weights @ angle.sin().square()
        versine = 2 * (angle / 2).sin().square()
        along = weights @ (versine - weights @ versine).square()
        vmf = one(dimension, kappa)
        assert_close(vmf.mean, cosine * vmf.loc, rtol=1e-9, atol=1e-15)
        square = vmf.loc.square()
        assert_close(vmf.variance, square * along + (1 - square) * sine_squared / (dimension - 1), rtol=1e-8, atol=0)
        assert_close(vmf.variance.sum(), along + sine_squared, rtol=1e-8, atol=0)
        assert_close(vmf.stddev, vmf.variance.sqrt())

    @pytest.mark.parametrize(("dimension", "kappa"), [(2, 0.5), (3, 20.0), (10, 5.0), (10, 1e4)])
    def test_many_proposals_at_once_give_draws_of_the_same_law(
        self, dimension: int, kappa: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lam.vmf.angles._TRIES", {"cpu": 8})  # as on a GPU
        vmf, n_draws = one(dimension, kappa), 20_000
        draws = vmf.sample((n_draws,), generator=generator())
        assert_close(draws.norm(dim=1), torch.ones(n_draws, dtype=draws.dtype))
        deviations = draws - vmf.mean
        assert (deviations.mean(0).abs() <= 6 * (vmf.variance / n_draws).sqrt()).all()
        squares = deviations.square()
        assert ((squares.mean(0) - vmf.variance).abs() <= 6 * squares.std(0) / math.sqrt(n_draws)).all()
        assert torch.equal(draws, vmf.sample((n_draws,), generator=generator()))

    @pytest.mark.parametrize("dimension", [2, 3, 4096])
    def test_uniform(self, dimension: int) -> None:
        vmf = one(dimension, 0.0)
        assert_close(vmf.mean, torch.zeros_like(vmf.loc))
        assert_close(vmf.variance, torch.full_like(vmf.loc, 1 / dimension))

    def test_along_the_axis_a_tiny_variance_keeps_its_digits(self) -> None:
        vmf = on_one_axis(4, torch.tensor([1e8], dtype=torch.float64))
        assert_close(vmf.variance, torch.tensor([[1.5e-16, 1e-8, 1e-8, 1e-8]], dtype=torch.float64), rtol=1e-6, atol=0)

    def test_gradients(self) -> None:
        kappa = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
        loc = directions(5).requires_grad_()
        vmf = VonMisesFisher(loc, kappa)
        (slope,) = torch.autograd.grad(vmf.mean @ loc.detach(), kappa)
        assert_close(slope, _slope(5, 3.0))
        (turned,) = torch.autograd.grad(VonMisesFisher(loc, kappa.detach()).variance.sum(), loc)
        assert_close(turned, torch.zeros_like(turned), rtol=0, atol=1e-12)
        with pytest.raises(NotImplementedError, match="second derivative.*Bessel"):
            vmf.variance.sum().backward()

    def test_float32(self) -> None:
        vmf = VonMisesFisher(directions(4, 8, dtype=torch.float32), torch.logspace(-6, 8, 4))
        wide = VonMisesFisher(vmf.loc.double(), vmf.concentration.double())
        assert_close(vmf.mean, wide.mean.float())
        assert_close(vmf.variance, wide.variance.float())


def _slope(dimension: int, kappa: float) -> Tensor:
    step, at = 1e-5, torch.tensor(kappa, dtype=torch.float64)
    return (bessel_ratio(dimension, at + step) - bessel_ratio(dimension, at - step)) / (2 * step)


class TestDivergence:
    @pytest.mark.parametrize("dimension", [2, 3, 16, 512, 4096])
    def test_by_quadrature(self, dimension: int) -> None:
        for kappa in (1e-6, 1.0, 300.0, 1e8):
            angle, log_weights = quadrature(dimension, kappa)
            weights = log_weights.softmax(0)
            versine = weights @ (2 * (angle / 2).sin().square())
            for other in (1e-6, 1.0, 299.0, 300.0, 1e8):
                p, q = one(dimension, kappa), one(dimension, other, seed=1)
                normalizers = quadrature(dimension, other)[1].logsumexp(0) - log_weights.logsumexp(0)
                tilt = (p.loc - q.loc).square().sum() / 2
                expected = normalizers + (other - kappa) * versine + other * (1 - versine) * tilt
                scale = max(1.0, expected.item(), dimension * math.log(max(kappa, other, 2)))
                assert_close(kl_divergence(p, q) / scale, expected / scale, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("dimension", [2, 3, 64, 4096])
    def test_is_zero_for_equals_alone_and_never_negative(self, dimension: int) -> None:
        vmf = VonMisesFisher(directions(dimension), KAPPAS)
        assert kl_divergence(vmf, vmf).tolist() == [0.0] * len(KAPPAS)
        near = VonMisesFisher(directions(dimension), KAPPAS * (1 + 1e-9))
        assert (kl_divergence(vmf, near) >= 0).all()
        other = VonMisesFisher(directions(dimension, seed=1), KAPPAS)
        assert (kl_divergence(vmf, other)[2:] > 0).all()

    def test_to_the_uniform_distribution_is_the_loss_of_entropy(self) -> None:
        vmf = VonMisesFisher(directions(16), KAPPAS)
        uniform = VonMisesFisher(directions(16, seed=1), torch.zeros((), dtype=torch.float64))
        assert_close(kl_divergence(vmf, uniform), uniform.entropy() - vmf.entropy())

    def test_gradients(self) -> None:
        """Against finite differences, for all four parameters."""
        loc = torch.randn(2, 5, dtype=torch.float64, generator=generator()).requires_grad_()
        kappa = torch.tensor([2.0, 30.0], dtype=torch.float64, requires_grad=True)

        def divergence(loc: Tensor, kappa: Tensor) -> Tensor:
            unit = torch.nn.functional.normalize(loc, dim=-1)
            return kl_divergence(VonMisesFisher(unit[0], kappa[0]), VonMisesFisher(unit[1], kappa[1]))

        assert torch.autograd.gradcheck(divergence, (loc, kappa))

    def test_broadcasts_and_keeps_the_wider_type(self) -> None:
        p = VonMisesFisher(directions(4, 1, 3, dtype=torch.float32), torch.ones(4, 1))
        q = VonMisesFisher(directions(5, 3), torch.ones(5))
        divergence = kl_divergence(p, q)
        assert divergence.shape == (4, 5)
        assert divergence.dtype == torch.float64

    def test_two_spheres(self) -> None:
        with pytest.raises(ValueError, match=r"shapes \(3,\) and \(4,\)"):
            kl_divergence(one(3, 1.0), one(4, 1.0))


class _Rotation(Transform):
    """x -> R x, which maps the sphere onto itself and keeps areas."""

    domain = codomain = unit_vector  # pyright: ignore [reportAssignmentType]
    bijective = True

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.matrix = matrix

    def _call(self, x: Tensor) -> Tensor:
        return x @ self.matrix.mT

    def _inverse(self, y: Tensor) -> Tensor:
        return y @ self.matrix

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return x.new_zeros(x.shape[:-1])


class TestComposes:
    def test_shapes_and_names(self) -> None:
        vmf = VonMisesFisher(loc=directions(2, 1, 3), concentration=torch.ones(4, dtype=torch.float64))
        assert (vmf.batch_shape, vmf.event_shape) == ((2, 4), (3,))
        assert vmf.loc.shape == vmf.mean.shape == vmf.variance.shape == vmf.mode.shape == (2, 4, 3)
        assert vmf.entropy().shape == vmf.perplexity().shape == (2, 4)
        assert repr(vmf) == "VonMisesFisher(loc: torch.Size([2, 4, 3]), concentration: torch.Size([2, 4]))"
        for name, constraint in vmf.arg_constraints.items():
            assert constraint.check(getattr(vmf, name)).all()
        assert unit_vector.check(vmf.rsample((5,), generator=generator())).shape == (5, 2, 4)

    def test_expand(self) -> None:
        vmf = VonMisesFisher(directions(4, 3), torch.arange(4, dtype=torch.float64), validate_args=False)
        many = vmf.expand((5, 4))
        assert (many.batch_shape, many.event_shape) == ((5, 4), (3,))
        x = directions(5, 4, 3, seed=1)
        assert_close(many.log_prob(x), vmf.log_prob(x))
        assert many.loc.data_ptr() == vmf.loc.data_ptr()
        assert not many._validate_args
        assert many.sample((2,), generator=generator()).shape == (2, 5, 4, 3)

    def test_independent(self) -> None:
        vmf = VonMisesFisher(directions(2, 4, 3), torch.full((2, 4), 7.0, dtype=torch.float64))
        joint = Independent(vmf, 1)
        assert (joint.batch_shape, joint.event_shape) == ((2,), (4, 3))
        x = joint.rsample((6,))
        assert unit_vector.check(x).all()
        assert_close(joint.log_prob(x), vmf.log_prob(x).sum(-1))
        assert_close(joint.entropy(), vmf.entropy().sum(-1))
        other = Independent(VonMisesFisher(directions(2, 4, 3, seed=1), vmf.concentration), 1)
        assert_close(kl_divergence(joint, other), kl_divergence(vmf, other.base_dist).sum(-1))
        assert joint.expand((5, 2)).batch_shape == (5, 2)

    def test_mixture(self) -> None:
        shares = torch.tensor([0.3, 0.7], dtype=torch.float64)
        vmf = VonMisesFisher(directions(2, 3), torch.tensor([2.0, 40.0], dtype=torch.float64))
        mixture = MixtureSameFamily(Categorical(shares), vmf, validate_args=True)
        torch.manual_seed(0)
        draws = mixture.sample((40_000,))
        assert_close(mixture.log_prob(draws).exp(), (shares * vmf.log_prob(draws[:, None]).exp()).sum(-1))
        deviations = draws - mixture.mean
        assert (deviations.mean(0).abs() <= 4 * (mixture.variance / len(draws)).sqrt()).all()
        assert_close(deviations.square().mean(0), mixture.variance, rtol=0.03, atol=0)
        with pytest.raises(ValueError, match="within the support"):
            mixture.log_prob(2 * draws)

    def test_transformed_by_a_rotation_it_is_the_rotated_one(self) -> None:
        rotation = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=generator())).Q
        vmf = VonMisesFisher(directions(5, 4), torch.logspace(-1, 3, 5, dtype=torch.float64))
        turned = TransformedDistribution(vmf, [_Rotation(rotation)])
        assert (turned.batch_shape, turned.event_shape) == ((5,), (4,))
        x = turned.rsample((3,))
        assert_close(turned.log_prob(x), VonMisesFisher(vmf.loc @ rotation.mT, vmf.concentration).log_prob(x))

    def test_without_a_generator_draws_come_from_the_global_one(self) -> None:
        vmf = one(3, 2.0)
        torch.manual_seed(5)
        draws = vmf.sample((4,))
        assert_close(draws, vmf.sample((4,), generator=generator(5)), rtol=0, atol=0)

    def test_on_the_circle_it_is_the_distribution_of_torch(self) -> None:
        angle = torch.linspace(-3, 3, 50, dtype=torch.float64)
        theirs = torch.distributions.VonMises(torch.tensor(0.3, dtype=torch.float64), torch.tensor(4.0).double())
        vmf = VonMisesFisher(torch.stack([theirs.loc.cos(), theirs.loc.sin()]), theirs.concentration)
        points = torch.stack([angle.cos(), angle.sin()], -1)
        assert_close(vmf.log_prob(points), theirs.log_prob(angle), rtol=1e-6, atol=1e-6)  # theirs has 7 digits
        assert_close(1 - vmf.mean.norm(), theirs.variance, rtol=1e-5, atol=0)

    def test_has_no_divergence_from_another_family(self) -> None:
        with pytest.raises(NotImplementedError):
            kl_divergence(one(3, 1.0), Normal(0.0, 1.0))


class TestValidation:
    def test_off(self) -> None:
        loc = 2 * directions(3)
        vmf = VonMisesFisher(loc, torch.tensor(1.0, dtype=torch.float64), validate_args=False)
        x = directions(3, seed=1)
        assert_close(vmf.log_prob(x), one(3, 1.0).log_prob(x))
        assert vmf.log_prob(1.1 * x).isfinite()
        VonMisesFisher(directions(3), torch.tensor(-1.0), validate_args=False)

    def test_what_a_compilation_turns_off_for_all_distributions_stays_on(self) -> None:
        default = torch.distributions.Distribution._validate_args
        torch.distributions.Distribution.set_default_validate_args(False)
        try:
            with pytest.raises(ValueError, match="loc.*unit length"):
                VonMisesFisher(2 * directions(3), torch.tensor(1.0))
        finally:
            torch.distributions.Distribution.set_default_validate_args(default)

    @pytest.mark.parametrize("kappa", [-1e-9, math.inf, math.nan])
    def test_concentration(self, kappa: float) -> None:
        with pytest.raises(ValueError, match=f"concentration.*0.*{kappa}"):
            one(3, kappa)
        assert not one(3, 1.0).arg_constraints["concentration"].check(torch.tensor(kappa))

    def test_values_that_do_not_go_with_the_batch(self) -> None:
        vmf = VonMisesFisher(directions(4, 3), torch.ones(4, dtype=torch.float64))
        with pytest.raises(ValueError, match="broadcastable.*batch_shape"):
            vmf.log_prob(directions(5, 3))
