"""Posteriors over several layers against the dense Gaussian over all weights that they stand for."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from lam.hessians import ContrastiveCurvature, ggn_of_batch
from lam.hessians.structures.layers import unflat_weights
from lam.models.layers import own_weights
from lam.pairs import Pairs
from lam.pairs.relation import Relation
from lam.posteriors import DiagonalPosterior, KronPosterior, LayersPosterior
from lam.posteriors.layers import LayersAccumulator
from tests.posteriors.test_laws import OVER_LAYERS, D, draw, make, sampled

LINEARISED = [name for name in OVER_LAYERS if "sampled" not in name]


def dense_covariance(posterior: Any) -> Tensor:
    """The block-diagonal covariance of the flat weights of all layers."""
    blocks = []
    for v, basis in zip(posterior.variances, posterior.curvature.bases, strict=True):
        U = torch.eye(len(v), dtype=v.dtype) if basis is None else torch.kron(*basis)
        blocks.append(U @ v.diag() @ U.T)
    return torch.block_diag(*blocks)


def flat_jacobian(posterior: Any, inputs: Tensor) -> Tensor:
    """Jacobians (N, D, n) of the network's outputs with respect to the flat weights of all layers."""
    names = [
        f"{path}.{name}" for path in posterior.layers for name in own_weights(posterior.network.get_submodule(path))
    ]
    parameters = {name: posterior.network.get_parameter(name).detach() for name in names}

    def outputs(changed: dict[str, Tensor]) -> Any:
        return functional_call(posterior.network, changed, (inputs,))

    J: Any = jacrev(outputs)(parameters)
    columns = []
    for path in posterior.layers:
        module = posterior.network.get_submodule(path)
        weights = own_weights(module)
        n = sum(weight.numel() for weight in weights.values())
        units = unflat_weights(module, weights, torch.eye(n, dtype=torch.float64))
        own = [J[f"{path}.{name}"].flatten(2) @ units[name].reshape(n, -1).T for name in weights]
        columns.append(torch.stack(own).sum(0))
    return torch.cat(columns, 2)


@pytest.fixture(params=LINEARISED)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e8])
def test_the_linearised_covariance_of_outputs_is_that_of_the_dense_gaussian(name: str, scale: float):
    posterior: Any = replace(make(name)[0], likelihood_scale=scale)
    inputs = draw(5, 5, seed=9)
    J = flat_jacobian(posterior, inputs)
    expected = J @ dense_covariance(posterior) @ J.mT
    spread = posterior.output_spread()(inputs)
    torch.testing.assert_close(spread.covariance, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(posterior.predict(inputs).variance, spread.total)
    torch.testing.assert_close(posterior.predict(inputs, mode="network").variance, spread.total)


def test_sampled_weights_have_the_covariance_of_the_dense_gaussian(name: str):
    posterior: Any = make(name)[0]
    weights = posterior.sample(60_000)
    flat = []
    for path in posterior.layers:
        own = {key.removeprefix(f"{path}."): value for key, value in weights.items() if key.startswith(f"{path}.")}
        flat += [torch.cat([own["weight"], own["bias"][..., None]], 2).flatten(1)]
    theta = torch.cat(flat, 1)
    expected = dense_covariance(posterior)
    largest = float(expected.diagonal().max())
    torch.testing.assert_close(torch.cov(theta.T), expected, rtol=0.05, atol=0.02 * largest)
    torch.testing.assert_close(theta.mean(0), posterior.theta, rtol=0, atol=0.03 * largest**0.5)


def test_the_evidence_is_that_of_the_dense_gaussian(name: str):
    posterior: Any = make(name)[0]
    expected = -torch.logdet(dense_covariance(posterior))
    assert posterior.log_det_precision(posterior.prior_precision) == pytest.approx(float(expected), rel=1e-9)


def test_marginal_and_joint_samples_have_one_distribution(name: str):
    posterior, inputs = make(name)
    many: Any = {"n_samples": 20_000}
    marginal, joint = (posterior.predict(inputs[:4], mode=mode, **many) for mode in ("marginal", "network"))  # pyright: ignore
    torch.testing.assert_close(marginal.kappa, joint.kappa, rtol=0.05, atol=0)


@pytest.mark.long
def test_with_little_spread_sampled_networks_are_the_linearised_one(name: str):
    posterior: Any = replace(make(name)[0], prior_precision=1e8)
    networks = replace(posterior, predictive="sampled")
    inputs = draw(4, 5, seed=9)
    ours, theirs = (of.predict(inputs, mode="network", n_samples=200) for of in (posterior, networks))
    own, others = (of.sampled_embeddings(inputs, n_samples=200) for of in (posterior, networks))
    torch.testing.assert_close(own, others, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.kappa, theirs.kappa, rtol=1e-3, atol=0)
    torch.testing.assert_close(networks.predict(inputs, n_samples=4000).variance, ours.variance, rtol=0.1, atol=0)


def test_sampled_networks_are_networks_of_the_sampled_weights():
    posterior, inputs = make("all layers, kron, sampled")
    assert isinstance(posterior, LayersPosterior)
    weights = posterior.sample(3)
    expected = [
        functional_call(posterior.network, {name: value[s] for name, value in weights.items()}, (inputs,))
        for s in range(3)
    ]
    ours = posterior.sampled_embeddings(inputs, n_samples=3)
    torch.testing.assert_close(ours, F.normalize(torch.stack(expected), dim=2))
    assert torch.equal(posterior.predict(inputs).mean, F.normalize(posterior.network(inputs).detach()))


def test_sampling_holds_the_noise_of_few_layers_at_a_time(monkeypatch: pytest.MonkeyPatch):
    network = nn.Sequential(*(nn.Linear(5, 5) for _ in range(6))).double()
    posterior = over(replace(make("all layers, diag")[0], network=network), list("012345"), draw(6, 5, seed=1), "5")
    drawn: list[weakref.ref[Tensor]] = []
    randn = torch.randn

    def tracked(*shape: int, **options: Any) -> Tensor:
        noise = randn(*shape, **options)
        drawn.append(weakref.ref(noise))
        assert sum(noise() is not None for noise in drawn) <= 3  # noise of one layer, of the next, and of the outputs
        return noise

    monkeypatch.setattr(torch, "randn", tracked)
    posterior.sample(3)
    assert len(drawn) == 6
    posterior.joint_predictor(posterior.noise(3))
    assert len(drawn) > 12


@pytest.mark.parametrize(("structure", "own"), [("diag", DiagonalPosterior), ("kron", KronPosterior)])
def test_the_last_layer_alone_has_the_last_layers_covariance(structure: str, own: Any):
    posterior, inputs = make(f"all layers, {structure}")
    assert isinstance(posterior, LayersPosterior)
    features = posterior.network[:2](inputs).detach()  # pyright: ignore
    empty = own.structure.zeros(posterior.weight, ContrastiveCurvature(1.0), has_bias=True)
    arguments = features, posterior.weight, posterior.bias, Pairs.by_label(torch.arange(len(inputs)) % 3)
    last = own(*arguments[1:3], ggn_of_batch(empty, *arguments), len(inputs), 20.0, 1e3)
    alone = over(posterior, ["2"], inputs)
    expected, ours = last.output_spread()(features).covariance, alone.output_spread()(inputs).covariance
    torch.testing.assert_close(ours, expected.double())
    assert alone.log_marginal_likelihood(0.3) == pytest.approx(last.log_marginal_likelihood(0.3))
    assert len(ours[0]) == D
    assert len(sampled(alone, 2)) == 2


def over(posterior: Any, paths: list[str], inputs: Tensor, head: str = "2") -> Any:
    """The posterior of the same data over some of the layers."""
    modules = {path: posterior.network.get_submodule(path) for path in paths}
    layers = {path: (module, own_weights(module)) for path, module in modules.items()}
    empty = posterior.structure.zeros(layers, ContrastiveCurvature(1.0))
    batch = inputs, torch.arange(len(inputs)) % 3
    where: Any = {"network": posterior.network, "head": head, "layers": paths}
    curvature, _ = LayersAccumulator(empty=empty, relation=Relation(), **where).accumulate([batch])
    return replace(posterior, head=head, layers=tuple(paths), curvature=curvature)
