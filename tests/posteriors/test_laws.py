"""Laws of every posterior; over a last layer it takes features, over several layers the network's inputs."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lam.hessians import ContrastiveCurvature, ggn_of_batch
from lam.models.layers import find_layers, own_weights
from lam.pairs import Pairs
from lam.pairs.relation import Relation
from lam.posteriors import LAYERS_POSTERIORS, POSTERIORS, LayersPosterior, Posterior
from lam.posteriors.layers import LayersAccumulator
from lam.posteriors.settings import PRIOR_RATIO
from lam.vmf.embeddings import Embeddings
from tests.helpers import unchecked
from tests.hessians.test_structures import empty_of

N, D, P = 30, 3, 5


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make(
    name: str, seed: int = 0, *, bias: bool = True, dtype: torch.dtype = torch.float64
) -> tuple[Posterior, Tensor]:
    if name in OVER_LAYERS:
        return make_over_layers(*OVER_LAYERS[name], seed=seed, bias=bias, dtype=dtype)
    features, weight = draw(N, P, seed=seed, dtype=dtype), draw(D, P, seed=7, dtype=dtype)
    b = draw(D, seed=8, dtype=dtype) if bias else None
    pairs = Pairs.by_label(torch.arange(N) % 3)
    empty = empty_of(POSTERIORS[name].structure, weight, ContrastiveCurvature(1.0), has_bias=bias)
    curvature = ggn_of_batch(empty, features, weight, b, pairs)
    return POSTERIORS[name](weight, b, curvature, N, prior_precision=2.0, likelihood_scale=1e3), features


OVER_LAYERS: dict[str, Any] = {
    "all layers, diag": ("diag", "linearised"),
    "all layers, kron": ("kron", "linearised"),
    "all layers, diag, sampled": ("diag", "sampled"),
    "all layers, kron, sampled": ("kron", "sampled"),
}
LINEAR_IN_WEIGHTS = [name for name in (*POSTERIORS, *OVER_LAYERS) if "sampled" not in name]


def make_over_layers(
    structure: str, predictive: Any, *, seed: int, bias: bool, dtype: torch.dtype
) -> tuple[Posterior, Tensor]:
    network = nn.Sequential(nn.Linear(P, 4, bias=bias), nn.Tanh(), nn.Linear(4, D, bias=bias)).to(dtype)
    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=7 + number, dtype=dtype))
    inputs = draw(N, P, seed=seed, dtype=dtype)
    paths = find_layers(network, "2", inputs, "all")
    layers = {path: (network.get_submodule(path), own_weights(network.get_submodule(path))) for path in paths}
    cls: Any = LAYERS_POSTERIORS[structure]
    where: Any = {"network": network, "head": "2", "layers": paths}
    empty = cls.structure.zeros(layers, ContrastiveCurvature(1.0))
    summing = LayersAccumulator(empty=empty, relation=Relation(), **where)
    weights, settings = own_weights(network[2]), {"prior_precision": 20.0, "likelihood_scale": 1e3}
    sums = summing.accumulate([(inputs, torch.arange(N) % 3)])
    posterior = cls(weights["weight"], weights.get("bias"), *sums, **settings, **where, predictive=predictive)
    return posterior, inputs


@pytest.fixture(params=[*POSTERIORS, *OVER_LAYERS])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def sampled(posterior: Any, n_samples: int, generator: torch.Generator | None = None) -> list[Tensor]:
    """Sampled weights of each parameter."""
    weights = posterior.sample(n_samples, generator=generator)
    return list(weights.values()) if isinstance(weights, dict) else [part for part in weights if part is not None]


def test_it_is_a_posterior_that_says_its_structure(name: str):
    posterior = make(name)[0]
    assert isinstance(posterior, Posterior)
    assert isinstance(posterior.curvature, posterior.structure)


@pytest.mark.parametrize("name", POSTERIORS)
@pytest.mark.parametrize("bias", [True, False])
def test_joint_samples_are_the_outputs_of_sampled_layers(name: str, bias: bool):
    posterior, features = make(name, bias=bias, dtype=torch.float64)
    weights, biases = posterior.sample(5)
    outputs = torch.stack(
        [F.linear(features, *layer) for layer in zip(weights, [None] * 5 if biases is None else biases, strict=True)]
    )
    ours = posterior.sampled_embeddings(features, n_samples=5)
    torch.testing.assert_close(ours, F.normalize(outputs, dim=2), rtol=0, atol=1e-12)


def test_every_likelihood_scale_and_prior_takes_the_same_noise_and_keeps_it(name: str):
    posterior, inputs = make(name, dtype=torch.float64)
    noise = posterior.noise(4)
    kept = [values.clone() for values in noise]
    for other in (replace(posterior, likelihood_scale=1e6), replace(posterior, prior_precision=0.3)):
        for one, another in zip(noise, other.noise(4), strict=True):
            assert torch.equal(one, another)
        expected = other.sampled_embeddings(inputs, n_samples=4)
        assert torch.equal(other.joint_predictor(noise)(inputs), expected)
    assert all(map(torch.equal, noise, kept))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_predict_is_its_predictor_and_does_not_depend_on_the_batch(name: str, dtype: torch.dtype):
    posterior, features = make(name, dtype=dtype)
    whole, predict = posterior.predict(features, n_samples=8), posterior.predictor(n_samples=8)
    rtol = 1e-4 if dtype == torch.float32 else 1e-7
    for size in (1, 7):
        parts = Embeddings.concatenate([predict(part) for part in features.split(size)])
        torch.testing.assert_close(parts.kappa, whole.kappa, rtol=rtol, atol=0)
        torch.testing.assert_close(parts.mean, whole.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        posterior.predict(features.flip(0), n_samples=8).kappa.flip(0), whole.kappa, rtol=rtol, atol=0
    )
    torch.testing.assert_close(whole.mean.norm(dim=1), torch.ones(N, dtype=dtype))


@pytest.mark.long
def test_chunks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch):
    posterior, features = make(name)
    whole = posterior.predict(features)
    monkeypatch.setattr("lam.posteriors.base.CHUNK_ELEMENTS", 32 * D * 7)
    monkeypatch.setattr("lam.models.layers.AT_ONCE", 100)
    torch.testing.assert_close(posterior.predict(features).kappa, whole.kappa)


def test_network_samples_are_consistent_across_inputs(name: str):
    posterior, features = make(name)
    together = posterior.sampled_embeddings(features, n_samples=4)
    torch.testing.assert_close(together[:, 3:4], posterior.sampled_embeddings(features[3:4], n_samples=4))
    own = Embeddings.from_samples(together.double(), posterior.predict(features).variance)
    torch.testing.assert_close(posterior.predict(features, mode="network", n_samples=4).kappa, own.kappa)
    assert posterior.sampled_embeddings(features, n_samples=1).shape == (1, N, D)


def test_an_output_of_length_zero_has_a_random_direction_and_the_least_kappa(name: str):
    posterior, features = make(name, bias=False)
    nowhere = posterior.predict(torch.cat([torch.zeros_like(features[:1]), features[:1]]))
    assert nowhere.mean.isfinite().all()
    assert nowhere.kappa[0] < 1 < nowhere.kappa[1]


@pytest.mark.parametrize("name", LINEAR_IN_WEIGHTS)
def test_more_likelihood_or_more_prior_means_less_variance(name: str):
    posterior, features = make(name)
    variance = posterior.output_spread()(features).variance
    for change in ({"prior_precision": 20.0}, {"likelihood_scale": 1e4}):
        assert (replace(posterior, **change).output_spread()(features).variance <= variance * (1 + 1e-12)).all()
    sure = replace(posterior, prior_precision=1e9).predict(features).kappa
    assert (sure > posterior.predict(features).kappa).all()


@pytest.mark.parametrize("name", LINEAR_IN_WEIGHTS)
def test_the_default_prior_follows_the_scale_so_that_the_shape_stays(name: str):
    posterior, features = make(name)
    wide, narrow = (replace(posterior, prior_precision=None, likelihood_scale=scale) for scale in (1e6, 1e9))
    n, large = posterior.theta.numel(), 1e7
    level = (posterior.log_det_precision(large) - n * math.log(large)) * large / posterior.scale / n
    assert narrow.alpha == pytest.approx(PRIOR_RATIO * 1e9 * level, rel=1e-3)
    of_wide, of_narrow = (one.output_spread()(features).covariance for one in (wide, narrow))
    torch.testing.assert_close(of_wide, 1e3 * of_narrow, rtol=1e-8, atol=1e-12 * float(of_wide.abs().max()))
    other = replace(narrow, prior_ratio=10 * PRIOR_RATIO)
    assert other.alpha == pytest.approx(10 * narrow.alpha)


def test_untuned_the_prior_is_no_wider_than_the_weights(name: str):
    posterior, _ = make(name)
    least = 1 / float(posterior.theta.square().mean())
    untuned = replace(posterior, prior_precision=None, likelihood_scale=None)
    assert untuned.scale == max(N**2, least / (PRIOR_RATIO * posterior.curvature.level))
    assert replace(untuned, prior_ratio=1e-6).alpha == pytest.approx(least)
    nothing = replace(posterior.curvature, sums=torch.zeros_like(posterior.curvature.sums))
    assert replace(untuned, curvature=nothing).alpha == pytest.approx(least)


def test_the_evidence_has_its_maximum_where_the_best_prior_is(name: str):
    posterior, _ = make(name)
    best = posterior.with_best_prior()
    alpha = best.prior_precision
    assert math.isfinite(posterior.log_marginal_likelihood(alpha))
    for factor in (0.9, 1.1):
        assert posterior.log_marginal_likelihood(alpha) >= posterior.log_marginal_likelihood(factor * alpha)


def test_the_best_prior_and_a_step_keep_an_untuned_scale(name: str):
    posterior = replace(make(name)[0], prior_precision=None, likelihood_scale=None, prior_ratio=1e-9)
    assert posterior.scale > 2 * N**2  # raised, because the curvature is small
    fixed = replace(posterior, likelihood_scale=posterior.scale)
    assert posterior.log_marginal_likelihood(0.3) == pytest.approx(fixed.log_marginal_likelihood(0.3))
    for of_untuned, of_fixed in (
        (posterior.with_best_prior(), fixed.with_best_prior()),
        (posterior.with_prior_step(0.1), fixed.with_prior_step(0.1)),
    ):
        assert of_untuned.scale == posterior.scale
        assert of_untuned.alpha == pytest.approx(of_fixed.alpha)


def test_it_adds_up_and_forgets(name: str):
    one, other = make(name)[0], make(name, seed=1)[0]
    both = one + other
    assert both.n_items == 2 * N
    assert replace(both, likelihood_scale=None).scale == (2 * N) ** 2
    again = both - other
    assert again.n_items == N
    tuned = replace(one, likelihood_scale=7.0)
    for joined in (tuned + other, both - tuned):
        assert joined.likelihood_scale is None
    assert both.likelihood_scale == again.likelihood_scale == one.likelihood_scale
    features = draw(4, P, seed=3)
    torch.testing.assert_close(
        again.output_spread()(features).variance, one.output_spread()(features).variance, rtol=1e-9, atol=0
    )
    with pytest.raises(ValueError, match="same trained weights"):
        _ = one + replace(other, weight=other.weight + 1)
    if isinstance(other, LayersPosterior):
        with pytest.raises(ValueError, match="same trained weights"):
            _ = one + replace(other, layers=other.layers[:1])
    with pytest.raises(ValueError, match="same settings"):
        _ = one - replace(other, seed=1)
    with pytest.raises(ValueError, match="never added"):
        _ = one - both


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_restored_from_its_tensors_and_settings(name: str, bias: bool):
    posterior, features = make(name, bias=bias)
    around = {"network": posterior.network, "head": posterior.head} if isinstance(posterior, LayersPosterior) else {}
    again = type(posterior).restored(posterior.tensors(), json.loads(json.dumps(posterior.settings())), **around)
    assert torch.equal(again.predict(features).kappa, posterior.predict(features).kappa)
    assert again.to("cpu").settings() == posterior.settings()
    assert all(map(torch.equal, sampled(again, 3), sampled(posterior, 3)))


def test_its_noise_is_its_own(name: str):
    posterior, features = make(name)
    other, state = replace(posterior, seed=1), torch.get_rng_state()
    assert torch.equal(posterior.predict(features).kappa, posterior.predict(features).kappa)
    assert torch.equal(sampled(posterior, 2)[0], sampled(posterior, 2)[0])
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(posterior.predict(features).kappa, other.predict(features).kappa)
    assert not torch.equal(sampled(posterior, 2)[0], sampled(other, 2)[0])
    assert not torch.equal(sampled(posterior, 2)[0], sampled(posterior, 2, torch.Generator().manual_seed(5))[0])
    generator = torch.Generator().manual_seed(5)
    first, second = posterior.noise(2, generator=generator), posterior.noise(2, generator=generator)
    assert all(map(torch.equal, first, first))
    assert not any(map(torch.equal, first, second))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prior_precision": 0.0}, "prior_precision.*got 0.0"),
        ({"prior_ratio": 0.0}, "prior_ratio.*got 0.0"),
        ({"likelihood_scale": -1.0}, "likelihood_scale.*-1.0"),
        ({"likelihood_scale": float("nan")}, "got nan"),
        ({"n_items": 0}, "n_items.*1"),
    ],
)
def test_bad_settings_are_refused(name: str, change: dict[str, Any], message: str):
    posterior, _ = make(name)
    with pytest.raises(ValueError, match=message):
        replace(posterior, **change)


def test_bad_options_are_refused(name: str):
    posterior, features = make(name)
    with pytest.raises(ValueError, match="n_samples.*2.*1"):
        posterior.predict(features, n_samples=1)
    with pytest.raises(ValueError, match="mode.*marginal, network.*'both'"):
        unchecked(Posterior.predictor)(posterior, n_samples=4, mode="both")
    with pytest.raises(ValueError, match="mean.*network, sampled.*'median'"):
        unchecked(Posterior.predictor)(posterior, n_samples=4, mean="median")
    with pytest.raises(ValueError, match="n_samples.*1"):
        posterior.sample(0)
    if name in OVER_LAYERS:
        return  # an encoder looks at the inputs of its network
    with pytest.raises(ValueError, match=r"features.*\(N, P\).*weight \(D, P\)"):
        posterior.predict(features[:, :4])
    features[2, 1] = float("nan")
    with pytest.raises(ValueError, match="nan.*item 2, feature 1"):
        posterior.predict(features)
