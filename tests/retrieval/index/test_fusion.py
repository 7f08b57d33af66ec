"""Fusion against the product of densities, and its cap against networks sampled from a posterior."""

from dataclasses import replace

import pytest
import torch

from lam.hessians import ContrastiveCurvature, Diagonal
from lam.posteriors.last_layer import DiagonalPosterior
from lam.retrieval.index.fusion import fuse_identities
from lam.vmf.distribution import fuse
from lam.vmf.embeddings import Embeddings, mean_resultant_length


def _embeddings(mean: torch.Tensor, kappa: torch.Tensor) -> Embeddings:
    return Embeddings(torch.nn.functional.normalize(mean, dim=1), kappa, torch.ones_like(kappa), torch.ones_like(kappa))


def _posterior(dimension: int = 4, width: int = 12) -> DiagonalPosterior:
    generator = torch.Generator().manual_seed(0)
    h = torch.rand(dimension, width, generator=generator, dtype=torch.float64) + 0.5
    curvature = Diagonal(h[None], None, ContrastiveCurvature(0.7), has_bias=False)
    weight = torch.randn(dimension, width, generator=generator, dtype=torch.float64)
    return DiagonalPosterior(weight, None, curvature, n_items=10, likelihood_scale=800.0)


def _sampled(shared: float) -> torch.Tensor:
    """(S, K, D) samples of six images of one identity; `shared` is the common part of their features."""
    generator = torch.Generator().manual_seed(1)
    common = torch.rand(12, generator=generator, dtype=torch.float64)
    own = torch.rand(6, 12, generator=generator, dtype=torch.float64)
    return _posterior().sampled_embeddings(shared * common + (1 - shared) * own, n_samples=4000)


def _error_correlation(samples: torch.Tensor) -> float:
    """Correlation of the errors of two images: mean ⟨e_j, e_k⟩ over mean √(⟨e_j, e_j⟩⟨e_k, e_k⟩)."""
    mean = torch.nn.functional.normalize(samples.mean(0), dim=-1)
    errors = samples - (samples * mean).sum(-1, keepdim=True) * mean
    products = torch.einsum("sjd,skd->jk", errors, errors) / len(samples)
    size = products.diagonal().sqrt()
    apart = ~torch.eye(len(size), dtype=torch.bool)
    return float(products[apart].sum() / (size[:, None] * size)[apart].sum())


def test_fusing_is_the_product_as_sure_as_its_images_agree() -> None:
    generator = torch.Generator().manual_seed(2)
    found = _embeddings(
        torch.randn(6, 3, generator=generator).double(), torch.rand(6, generator=generator).double() * 9
    )
    fused = fuse_identities(found, torch.tensor([5, 2, 5, 2, 2, 9]), correlation=0.0)
    assert fused.identities.tolist() == [2, 5, 9]
    assert fused.counts.tolist() == [3, 2, 1]
    for row, members in enumerate(([1, 3, 4], [0, 2], [5])):
        product = fuse(found.mean[members], found.kappa[members])
        torch.testing.assert_close(fused.embeddings.mean[row], product.loc)
        torch.testing.assert_close(fused.uncapped[row], product.concentration)
        resultant = product.concentration / found.kappa[members].sum()
        torch.testing.assert_close(fused.embeddings.resultant[row], resultant)
        torch.testing.assert_close(fused.embeddings.kappa[row], resultant * product.concentration)


@pytest.mark.parametrize(("correlation", "expected"), [(1.0, 9.0), (0.5, 9 * 8 / 4.5), (0.0, 72.0)])
def test_many_alike_images_are_never_surer_than_what_they_share(correlation: float, expected: float) -> None:
    n = torch.tensor([[0.0, 1.0]]).expand(8, 2)
    fused = fuse_identities(_embeddings(n, torch.full((8,), 9.0)), [0] * 8, correlation=correlation)
    assert float(fused.embeddings.kappa) == pytest.approx(expected)
    assert correlation == 0 or expected <= 9 / correlation


@pytest.mark.parametrize("shared", [0.0, 0.5, 0.9, 1.0])
def test_the_cap_is_what_sampled_networks_say(shared: float) -> None:
    samples = _sampled(shared)
    single = mean_resultant_length(samples, unbiased=False)
    kappa = single.kappa()
    identities = torch.zeros(6, dtype=torch.int64)
    found = _embeddings(single.mean, kappa)
    together = torch.nn.functional.normalize((kappa[:, None] * samples).sum(1), dim=-1)
    true = float(mean_resultant_length(together, unbiased=False).kappa())
    rho = _error_correlation(samples)
    assert float(fuse_identities(found, identities, correlation=rho).embeddings.kappa) == pytest.approx(true, rel=0.15)
    assert float(fuse_identities(found, identities).embeddings.kappa) <= true * 1.05  # safe for any correlation
    if shared >= 0.9:
        assert rho > 0.8
        assert float(fuse_identities(found, identities).uncapped) > 3 * true  # as if from six networks


def test_images_that_cancel_are_as_unsure_as_can_be() -> None:
    n = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    fused = fuse_identities(_embeddings(n, torch.full((3,), 5.0)), [3, 3, 4])
    assert fused.embeddings.kappa.tolist() == [0.0, 5.0]
    assert fused.embeddings.mean.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert fused.embeddings.resultant.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kappa", [1e-6, 1e-3, 1.0, 1e8])
def test_fused_directions_are_of_unit_length_however_nearly_images_cancel(kappa: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    for D in (2, 3, 512):
        n = torch.nn.functional.normalize(torch.randn(200, D, generator=generator, dtype=dtype), dim=1)
        opposite = torch.nn.functional.normalize(-n * torch.rand(200, 1, generator=generator, dtype=dtype), dim=1)
        found = _embeddings(torch.cat([n, opposite]), torch.full((400,), kappa, dtype=dtype))
        fused = fuse_identities(found, torch.arange(200).repeat(2)).embeddings
        torch.testing.assert_close(fused.mean.norm(dim=1), torch.ones(200, dtype=dtype))
        assert (fused.kappa <= kappa).all()


def test_what_is_refused() -> None:
    found = _embeddings(torch.eye(2), torch.ones(2))
    with pytest.raises(ValueError, match=r"correlation.*\[0, 1\].*2"):
        fuse_identities(found, [0, 0], correlation=2.0)
    with pytest.raises(ValueError, match="identities.*shape"):
        fuse_identities(found, [0])
    with pytest.raises(ValueError, match="positive kappa, got 0"):
        fuse_identities(_embeddings(torch.eye(2), torch.zeros(2)), [0, 0])
    with pytest.raises(ValueError, match="embeddings.*nan.*index 1"):
        fuse_identities(_embeddings(torch.tensor([[1.0, 0.0], [0.0, torch.nan]]), torch.ones(2)), [0, 0])
    with pytest.raises(ValueError, match="embeddings.*5.*index 0"):
        fuse_identities(replace(found, mean=5 * found.mean), [0, 0])
    with pytest.raises(ValueError, match="got no image"):
        fuse_identities(found[:0], [])
