"""The mean resultant length of projected Gaussian samples, without an array of the samples."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lam.vmf.embeddings import mean_resultant_length, projected_resultant

N, S = 7, 32


def drawn(dimension: int, spread: float, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, variances of their coordinates, and noise."""
    generator = torch.Generator().manual_seed(seed)
    center, sizes = (torch.randn(N, dimension, generator=generator, dtype=torch.float64) for _ in range(2))
    noise = torch.randn(S, dimension, generator=generator, dtype=torch.float64)
    return center, (spread * sizes.exp()).square(), noise


@pytest.mark.parametrize("dimension", [2, 3, 16, 512])
@pytest.mark.parametrize("spread", [1e-3, 0.1, 1.0, 30.0, 1e6])
def test_it_is_that_of_the_samples(dimension: int, spread: float) -> None:
    center, variances, noise = drawn(dimension, spread)
    samples = F.normalize(center + variances.sqrt() * noise[:, None], dim=-1)
    got, twin = projected_resultant(center, variances, noise), mean_resultant_length(samples, unbiased=True)
    torch.testing.assert_close(got.mean, twin.mean, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(got.resultant, twin.resultant, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.one_minus_resultant, twin.one_minus_resultant, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dimension", [2, 3, 16, 512])
@pytest.mark.parametrize("spread", [1e-8, 1e-5])
def test_what_is_left_to_one_keeps_its_digits(dimension: int, spread: float) -> None:
    center, variances, noise = drawn(dimension, spread)
    samples = (
        center.numpy().astype(np.longdouble) + np.sqrt(variances.numpy().astype(np.longdouble)) * noise.numpy()[:, None]
    )
    samples /= np.sqrt(np.square(samples).sum(-1, keepdims=True))
    unseen = (1 - np.square(samples.mean(0)).sum(-1)) * S / (S - 1)  # 1 - R²
    expected = torch.from_numpy((unseen / (1 + np.sqrt(1 - unseen))).astype(np.float64))
    rounding = float(np.finfo(np.longdouble).eps) * 100
    got = projected_resultant(center, variances, noise).one_minus_resultant
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=rounding)


def test_an_output_of_length_zero_has_samples_of_any_direction() -> None:
    center, variances, noise = drawn(3, 1.0)
    center[2] = 0
    samples = F.normalize(center + variances.sqrt() * noise[:, None], dim=-1)
    got, twin = projected_resultant(center, variances, noise), mean_resultant_length(samples, unbiased=True)
    torch.testing.assert_close(got.resultant, twin.resultant, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.mean, twin.mean, rtol=1e-12, atol=1e-12)


def test_samples_that_cancel_are_refused() -> None:
    center, variances, noise = drawn(2, 1.0)
    opposite = torch.stack([noise[0], -noise[0]])
    with pytest.raises(ValueError, match="mean.*index 1"):
        projected_resultant(center * torch.tensor([[1.0], *[[0.0]] * (N - 1)]), variances, opposite)
