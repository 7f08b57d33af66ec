"""Means, lengths of means and fits of samples from the von Mises-Fisher distribution, in both precisions."""

import math

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lam.vmf.bessel import bessel_ratio, bessel_ratio_derivative, kappa_from_resultant
from lam.vmf.distribution import VonMisesFisher
from lam.vmf.embeddings import MeanResultant, mean_resultant_length
from tests.vmf.test_distribution import directions, generator, on_one_axis


def check_fit(dimension: int, kappa: float) -> None:
    """The likelihood of the samples is stationary at the fit, and the truth lies as near as chance allows."""
    n_samples = 1000
    truth = on_one_axis(dimension, torch.tensor(kappa, dtype=torch.float64))
    samples = truth.sample((n_samples,), generator=generator())
    fit = VonMisesFisher.fit(samples)
    length = samples.mean(0).norm()
    deviation = (bessel_ratio_derivative(dimension, fit.concentration) * n_samples).rsqrt()
    exact = kappa_from_resultant(length, dimension, max_kappa=1e9)
    assert (fit.concentration - exact).abs() <= max(1e-3 * deviation, 1e-6 * exact)
    assert_close(bessel_ratio(dimension, fit.concentration), length, rtol=1e-12, atol=1e-13)
    unbiased = mean_resultant_length(samples, unbiased=True)
    if bessel_ratio(dimension, truth.concentration) > 4 / math.sqrt(n_samples):
        assert (unbiased.kappa() - kappa).abs() <= 4 * deviation


class TestFit:
    @pytest.mark.parametrize(("dimension", "kappa"), [(16, 1.0), (16, 1e6), (128, 100.0), (512, 1e4)])
    def test_light(self, dimension: int, kappa: float) -> None:
        check_fit(dimension, kappa)

    @pytest.mark.slow
    @pytest.mark.parametrize("kappa", [1.0, 10.0, 1e2, 1e3, 1e4, 1e5, 1e6])
    @pytest.mark.parametrize("dimension", [16, 32, 64, 128, 256, 512, 1024, 2048])
    def test_in_full(self, dimension: int, kappa: float) -> None:
        check_fit(dimension, kappa)

    def test_weights_are_repeats(self) -> None:
        samples = directions(3, 2, 5)
        weights = torch.tensor([[1.0, 0.0], [2.0, 1.0], [1.0, 1.0]])
        fit = VonMisesFisher.fit(samples, weights=weights)
        first = VonMisesFisher.fit(samples[[0, 1, 1, 2], 0])
        second = VonMisesFisher.fit(samples[[1, 2], 1])
        assert_close(fit.loc, torch.stack([first.loc, second.loc]))
        assert_close(fit.concentration, torch.stack([first.concentration, second.concentration]))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("dimension", [2, 64, 4096])
    def test_equal_samples_get_the_cap(self, dimension: int, dtype: torch.dtype) -> None:
        samples = directions(1, 3, dimension, dtype=dtype).expand(10, 3, dimension)
        fit = VonMisesFisher.fit(samples, max_kappa=1e7)
        assert fit.concentration.tolist() == [1e7] * 3
        assert fit.concentration.dtype == dtype
        assert VonMisesFisher.fit(samples[:1]).concentration.tolist() == [1e8] * 3

    def test_equal_samples_of_half_precision_get_its_greatest_number(self) -> None:
        fit = VonMisesFisher.fit(torch.eye(1, 3, dtype=torch.float16).expand(10, 3))
        assert fit.concentration.item() == torch.finfo(torch.float16).max

    def test_bad_weights(self) -> None:
        samples = directions(2, 3, 4)
        with pytest.raises(ValueError, match=r"weights.*0.*-1.0.*index \(1, 2\)"):
            VonMisesFisher.fit(samples, weights=torch.tensor([[1.0, 1, 1], [1, 1, -1]]))
        with pytest.raises(ValueError, match="weights.*sum.*0.0.*index 0"):
            VonMisesFisher.fit(samples, weights=torch.tensor([[0.0, 1, 1], [0, 1, 1]]))

    def test_arguments_of_another_shape_or_type(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        with pytest.raises(ValueError, match=r"weights.*\(2, 3\).*\(2,\)"):
            VonMisesFisher.fit(directions(2, 3, 4), weights=torch.ones(2))
        with pytest.raises(ValueError, match="samples.*floating-point.*torch.int64"):
            VonMisesFisher.fit(torch.eye(3).long())


class TestMeanResultantLength:
    def test_by_its_definition(self) -> None:
        samples = directions(7, 5, 3)
        moments = mean_resultant_length(samples, unbiased=False)
        mean = samples.mean(0)
        assert_close(moments.resultant, mean.norm(dim=-1))
        assert_close(moments.one_minus_resultant, 1 - mean.norm(dim=-1))
        assert_close(moments.mean, torch.nn.functional.normalize(mean, dim=-1))

    def test_unbiased_by_its_definition(self) -> None:
        samples = directions(32, 50, 3, seed=2)
        biased = mean_resultant_length(samples, unbiased=False).resultant
        moments = mean_resultant_length(samples, unbiased=True)
        expected = ((32 * biased**2 - 1) / 31).clamp(min=0).sqrt()
        assert (expected == 0).any()
        assert_close(moments.resultant, expected)
        assert_close(moments.one_minus_resultant, 1 - expected)

    @pytest.mark.parametrize("unbiased", [True, False])
    @pytest.mark.parametrize(("dimension", "kappa"), [(2, 1e6), (3, 1e6), (512, 1e7)])
    def test_float32_keeps_a_large_kappa(self, dimension: int, kappa: float, unbiased: bool) -> None:
        """The same float32 points, summed in float32 and in float64."""
        vmf = on_one_axis(dimension, torch.tensor([kappa]))
        samples = vmf.sample((32,), generator=generator())
        wide = torch.nn.functional.normalize(samples.double(), dim=-1)
        moments = [mean_resultant_length(x, unbiased=unbiased) for x in (samples, wide)]
        kappas = [each.kappa(max_kappa=1e10) for each in moments]
        assert_close(kappas[0], kappas[1], rtol=1e-4, atol=0)

    def test_one_item_is_the_same_alone_and_in_a_batch(self) -> None:
        samples = directions(32, 1000, 17, dtype=torch.float32)
        batch = mean_resultant_length(samples, unbiased=True)
        alone = mean_resultant_length(samples[:, 123:124], unbiased=True)
        assert_close(alone.mean[0], batch.mean[123], rtol=1e-6, atol=1e-7)
        assert_close(alone.one_minus_resultant[0], batch.one_minus_resultant[123], rtol=1e-6, atol=0)

    def test_differentiable(self) -> None:
        samples = directions(4, 2, 3).requires_grad_()
        mean_resultant_length(samples, unbiased=True).one_minus_resultant.sum().backward()
        assert samples.grad is not None
        assert samples.grad.isfinite().all()

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match="2 samples.*1.*unbiased=False"):
            mean_resultant_length(directions(1, 3), unbiased=True)
        with pytest.raises(ValueError, match=r"samples.*\(S, ..., D\).*S >= 1.*D >= 2.*\(0, 3\)"):
            mean_resultant_length(directions(0, 3), unbiased=False)
        with pytest.raises(ValueError, match=r"S >= 1.*D >= 2.*\(2, 1\)"):
            mean_resultant_length(torch.ones(2, 1), unbiased=False)
        with pytest.raises(ValueError, match="mean.*1.*4.*index 0"):
            mean_resultant_length(2 * directions(5, 2, 3), unbiased=False)
        samples = directions(5, 4, 3)
        samples[2, 3, 1] = torch.nan
        with pytest.raises(ValueError, match="nan.*index 3"):
            mean_resultant_length(samples, unbiased=False)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("scale", [-1, 0])
    def test_an_item_without_a_direction_is_named(self, scale: int, dtype: torch.dtype) -> None:
        """Its samples cancel, or are zero vectors."""
        samples = directions(4, 3, 5, dtype=dtype)
        samples[:2, 1] *= abs(scale)
        samples[2:, 1] = scale * samples[:2, 1]
        with pytest.raises(ValueError, match="samples.*index 1"):
            mean_resultant_length(samples, unbiased=False)


class TestFloat32AgainstFloat64:
    @pytest.mark.parametrize("kappa", [1.0, 1e3, 1e6])
    @pytest.mark.parametrize("dimension", [3, 64, 512])
    def test_mean_and_kappa(self, dimension: int, kappa: float) -> None:
        truth = VonMisesFisher(directions(2, dimension, seed=3), torch.full((2,), kappa, dtype=torch.float64))
        samples = truth.sample((500,), generator=generator())
        wide, narrow = VonMisesFisher.fit(samples), VonMisesFisher.fit(samples.float())
        assert narrow.loc.dtype == narrow.concentration.dtype == torch.float32
        assert_close(narrow.loc.double(), wide.loc, rtol=0, atol=2e-7)
        assert_close(narrow.concentration.double(), wide.concentration, rtol=1e-5, atol=0)

    @pytest.mark.parametrize("weighted", [False, True])
    @pytest.mark.parametrize(("n_samples", "kappa"), [(30_001, 1e6), (100_000, 3.0)])
    def test_many_samples(self, n_samples: int, kappa: float, weighted: bool) -> None:
        """A plain float32 sum of these samples would have an error of 5e-4, and unit vectors would be rejected."""
        samples = on_one_axis(3, torch.tensor([kappa], dtype=torch.float64)).sample((n_samples,), generator=generator())
        weights = torch.rand(n_samples, 1, generator=generator(1)) if weighted else None
        wide = VonMisesFisher.fit(samples, weights=weights)
        narrow = VonMisesFisher.fit(samples.float(), weights=weights)
        assert_close(narrow.loc.double(), wide.loc, rtol=0, atol=1e-7)
        assert_close(narrow.concentration.double(), wide.concentration, rtol=1e-6, atol=0)

    @pytest.mark.parametrize("n_samples", [1, 2, 64, 65, 128, 129, 1000])
    def test_blocks_of_samples_leave_none_out(self, n_samples: int) -> None:
        samples = directions(n_samples, 2, 3, seed=n_samples)
        weights = torch.rand(n_samples, 2, dtype=torch.float64, generator=generator())
        fit = VonMisesFisher.fit(samples, weights=weights)
        mean = (weights[..., None] * samples).sum(0) / weights.sum(0)[:, None]
        assert_close(fit.loc, torch.nn.functional.normalize(mean, dim=-1))
        assert_close(fit.concentration, kappa_from_resultant(mean.norm(dim=-1), 3), rtol=1e-9, atol=0)


class _Moments(torch.nn.Module):
    def forward(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        moments: MeanResultant = mean_resultant_length(samples, unbiased=True)
        return moments.mean, moments.kappa()


@pytest.mark.long
def test_one_program_serves_any_number_of_items() -> None:
    example, other = directions(100, 4, 3), directions(100, 7, 3, seed=1)
    items = {1: torch.export.Dim("items")}
    program = torch.export.export(_Moments(), (example,), dynamic_shapes=(items,)).module()
    for one, expected in zip(program(other), _Moments()(other), strict=True):
        assert_close(one, expected)
