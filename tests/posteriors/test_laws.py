"""Laws that every posterior keeps."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lam.hessians import ContrastiveCurvature, diagonal_ggn
from lam.pairs import Pairs
from lam.posteriors import POSTERIORS, Posterior

N, D, P = 30, 3, 5
GGN: dict[str, Any] = {"diagonal": diagonal_ggn}
"""What forms the curvature of each posterior from a batch."""


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(name: str, seed: int = 0, *, bias: bool = True) -> tuple[Posterior, Tensor]:
    features, weight, b = draw(N, P, seed=seed), draw(D, P, seed=7), draw(D, seed=8) if bias else None
    pairs = Pairs.by_label(torch.arange(N) % 3)
    curvature = GGN[name](features, weight, b, pairs, ContrastiveCurvature(1.0))
    return POSTERIORS[name](weight, b, curvature, N, prior_precision=2.0, likelihood_scale=1e3), features


@pytest.fixture(params=POSTERIORS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_it_is_a_posterior_that_says_its_structure(name: str):
    cls = POSTERIORS[name]
    assert issubclass(cls, Posterior)
    assert isinstance(make(name)[0].curvature, cls.structure)


@pytest.mark.parametrize("bias", [True, False])
def test_the_variance_of_outputs_is_that_of_sampled_layers(name: str, bias: bool):
    posterior, features = make(name, bias=bias)
    weights, biases = posterior.sample(40_000)
    assert (biases is None) == (not bias)
    f = torch.einsum("np,sdp->snd", features[:4], weights) + (0 if biases is None else biases[:, None])
    torch.testing.assert_close(f.mean(0), F.linear(features[:4], posterior.weight, posterior.bias), atol=0.05, rtol=0)
    torch.testing.assert_close(f.var(0), posterior.output_variance()(features[:4]), rtol=0.05, atol=0)
    torch.testing.assert_close(
        posterior.predict(features[:4]).variance, posterior.output_variance()(features[:4]).sum(1)
    )


def test_predict_is_its_predictor_and_does_not_depend_on_the_batch(name: str):
    posterior, features = make(name)
    whole = posterior.predict(features, n_samples=8)
    predict = posterior.predictor(n_samples=8)
    parts = torch.cat([predict(part).kappa for part in features.split(7)])
    torch.testing.assert_close(parts, whole.kappa)
    torch.testing.assert_close(whole.mean.norm(dim=1), torch.ones(N, dtype=torch.float64))


def test_more_likelihood_or_more_prior_means_less_variance(name: str):
    posterior, features = make(name)
    variance = posterior.output_variance()(features)
    for change in ({"prior_precision": 20.0}, {"likelihood_scale": 1e4}):
        assert (replace(posterior, **change).output_variance()(features) <= variance * (1 + 1e-12)).all()
    sure = replace(posterior, prior_precision=1e9).predict(features).kappa
    assert (sure > posterior.predict(features).kappa).all()


def test_the_evidence_has_its_maximum_where_the_best_prior_is(name: str):
    posterior, _ = make(name)
    best = posterior.with_best_prior()
    alpha = best.prior_precision
    assert math.isfinite(posterior.log_marginal_likelihood(alpha))
    for factor in (0.9, 1.1):
        assert posterior.log_marginal_likelihood(alpha) >= posterior.log_marginal_likelihood(factor * alpha)


def test_it_adds_up_and_forgets(name: str):
    one, other = make(name)[0], make(name, seed=1)[0]
    both = one + other
    assert both.n_items == 2 * N
    again = both - other
    assert again.n_items == N
    features = draw(4, P, seed=3)
    torch.testing.assert_close(again.output_variance()(features), one.output_variance()(features), rtol=1e-9, atol=0)
    with pytest.raises(ValueError, match="same trained layer"):
        _ = one + replace(other, weight=other.weight + 1)
    with pytest.raises(ValueError, match="same prior precision, likelihood scale and seed add up"):
        _ = one - replace(other, seed=1)
    with pytest.raises(ValueError, match="never added"):
        _ = one - both


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_restored_from_its_tensors_and_settings(name: str, bias: bool):
    posterior, features = make(name, bias=bias)
    again = type(posterior).restored(posterior.tensors(), json.loads(json.dumps(posterior.settings())))
    assert torch.equal(again.predict(features).kappa, posterior.predict(features).kappa)
    assert again.to("cpu").settings() == posterior.settings()
    assert torch.equal(again.sample(3)[0], posterior.sample(3)[0])


def test_its_noise_is_its_own(name: str):
    posterior, features = make(name)
    state = torch.get_rng_state()
    assert torch.equal(posterior.predict(features).kappa, posterior.predict(features).kappa)
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(posterior.sample(2)[0], replace(posterior, seed=1).sample(2)[0])
