from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lam.pairs.pairs import Pairs
from lam.posteriors.last_layer import DiagonalPosterior
from lam.vmf.distribution import VonMisesFisher
from lam.vmf.embeddings import KAPPA_RANGE, Embeddings
from tests.helpers import contrastive_ggn


def make(
    N: int = 30, D: int = 3, P: int = 5, *, scale: float | None = 1e3, bias: bool = True, dtype=torch.float64, seed=0
) -> tuple[DiagonalPosterior, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(N, P, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(D, P, generator=generator, dtype=torch.float64).to(dtype)
    b = torch.randn(D, generator=generator, dtype=torch.float64).to(dtype) if bias else None
    pairs = Pairs.by_label(torch.arange(N) % 3)
    curvature = contrastive_ggn(features, weight, b, pairs, margin=1.0)
    return DiagonalPosterior(weight, b, curvature, N, likelihood_scale=scale), features


def marginal_samples(posterior: DiagonalPosterior, features: Tensor, *, n_samples: int) -> Tensor:
    deviations = posterior.output_spread()(features).variance.sqrt() * posterior._output_noise(n_samples)
    return F.normalize(posterior.outputs(features) + deviations, dim=-1)


@pytest.mark.parametrize("mode", ["marginal", "network"])
def test_kappa_is_the_maximum_likelihood_fit_of_its_samples_corrected_for_chance(mode):
    posterior, features = make()
    S = 20_000
    embeddings = posterior.predict(features[:3], n_samples=S, mode=mode)
    draw = marginal_samples if mode == "marginal" else DiagonalPosterior.sampled_embeddings
    samples = draw(posterior, features[:3], n_samples=S)
    fitted = VonMisesFisher.fit(samples)
    torch.testing.assert_close(embeddings.kappa, fitted.concentration, rtol=5e-3, atol=0)
    sampled = posterior.predict(features[:3], n_samples=S, mode=mode, mean="sampled")
    torch.testing.assert_close(sampled.mean, fitted.loc, rtol=1e-6, atol=1e-6)


def test_few_samples_of_a_vague_item_do_not_look_sure():
    posterior, features = make(scale=1e-9, D=64, P=400)
    raw = marginal_samples(posterior, features, n_samples=32).mean(0).norm(dim=1)
    corrected = posterior.predict(features, n_samples=32).resultant
    truth = posterior.predict(features, n_samples=4000).resultant
    assert (corrected.mean() - truth.mean()).abs() < 0.35 * (raw.mean() - truth.mean()).abs()


@pytest.mark.parametrize("unit", [1e-9, 1e-3, 1e6])
def test_kappa_does_not_depend_on_the_unit_of_the_output(unit):
    posterior, features = make(scale=1e6)
    curvature = contrastive_ggn(
        features, unit * posterior.weight, unit * posterior.bias, Pairs.by_label(torch.arange(30) % 3), margin=1.0
    )
    scaled = replace(
        posterior,
        weight=unit * posterior.weight,
        bias=unit * posterior.bias,
        curvature=curvature,
        prior_precision=1 / unit**2,
    )
    torch.testing.assert_close(scaled.predict(features).kappa, posterior.predict(features).kappa, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_types_are_kept_and_sure_items_are_resolved_in_float32(dtype):
    posterior, features = make(dtype=dtype, scale=1e9)
    posterior = replace(posterior, prior_precision=1e7)
    embeddings = posterior.predict(features, n_samples=64)
    assert {t.dtype for t in (embeddings.mean, embeddings.kappa, embeddings.variance, embeddings.resultant)} == {dtype}
    wide, wide_features = make(dtype=torch.float64, scale=1e9)
    wide = replace(wide, prior_precision=1e7)
    expected = wide.predict(wide_features, n_samples=64).kappa
    assert expected.median() > 1e5
    torch.testing.assert_close(embeddings.kappa.double(), expected, rtol=1e-3, atol=0)


def test_kappa_stays_in_its_range_and_says_where_it_is_capped():
    posterior, features = make(scale=1e30)
    sure = replace(posterior, prior_precision=1e30).predict(features)
    assert (sure.kappa == KAPPA_RANGE[1]).all()
    assert sure.capped.all()
    vague = [
        replace(posterior, prior_precision=1e-30, likelihood_scale=1e-30, seed=seed).predict(features, n_samples=2)
        for seed in range(8)
    ]
    opposed = [embeddings for embeddings in vague if embeddings.capped.all()]
    assert opposed
    assert (opposed[0].kappa == KAPPA_RANGE[0]).all()
    assert not posterior.predict(features).capped.any()


def test_embeddings_join_slice_and_refuse_other_shapes():
    posterior, features = make()
    whole = posterior.predict(features)
    joined = Embeddings.concatenate([whole[:10], whole[10:]])
    assert torch.equal(joined.kappa, whole.kappa)
    assert len(whole[torch.tensor([1, 5])]) == 2
    assert whole.to("cpu").dimension == 3
    with pytest.raises(ValueError, match="batch.*embeddings"):
        Embeddings.concatenate([])
    with pytest.raises(ValueError, match="p_known belong together, got p_known alone"):
        replace(whole, p_known=whole.kappa)
    with_parts = replace(whole, kappa_epistemic=whole.kappa, kappa_aleatoric=whole.kappa, p_known=whole.kappa)
    for mixed in ([whole, with_parts], [with_parts, whole]):
        with pytest.raises(ValueError, match="batches.*1 of 2"):
            Embeddings.concatenate(mixed)
    sampled = [posterior.predict(features, n_samples=n_samples, mean="sampled") for n_samples in (8, 9)]
    assert sampled[0][:3].to("cpu").mean_samples == Embeddings.concatenate(sampled[:1]).mean_samples == 8
    with pytest.raises(ValueError, match="means.*9 samples.*8 samples"):
        Embeddings.concatenate(sampled)
    with pytest.raises(ValueError, match="directions.*8 samples"):
        Embeddings.concatenate([sampled[0], whole])


def test_the_share_of_variance_of_clipped_weights():
    posterior, features = make()
    h = posterior.curvature.h.clone()
    h[0, 1] = -abs(h[0, 1])
    h[1:] = h[1:].abs() + 1e-3
    h[0, [0, 2, 3, 4, 5]] = h[0, [0, 2, 3, 4, 5]].abs() + 1e-3
    curvature = replace(posterior.curvature, sums=h[None], counts=None)
    posterior = replace(posterior, curvature=curvature)
    variance = posterior.output_spread()(features).total
    clipped = features[:, 1].square() * posterior.variance[0, 1]
    assert posterior.clipped_variance_share(features) == pytest.approx((clipped.sum() / variance.sum()).item())
    assert posterior.clipped_variance_share(features) > 0.5
    none, _ = make()
    positive = replace(none.curvature, sums=h.abs()[None], counts=None)
    assert replace(none, curvature=positive).clipped_variance_share(features) == 0
