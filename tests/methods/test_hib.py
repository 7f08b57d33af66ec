from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, kl_divergence

import lam
from lam import models
from lam.encoders.deterministic import GaussianEncoder
from lam.losses.distributions import soft_contrastive
from lam.methods.head import Hib, HibNetwork, HibStep, divergence_from_unit_gaussian
from lam.models.kappa_head import UncertaintyHead
from lam.pairs.mining import Mining
from lam.training import Minibatch
from tests.methods.small_data import trainer
from tests.methods.test_pfe import LOSS, QUIET, make_data, make_network

train = trainer(Hib)
OPTIONS = Hib(n_samples=3, kl_weight=0.1)


def test_the_divergence_is_that_of_torch():
    generator = torch.Generator().manual_seed(0)
    mean, log_variance = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    gaussian = Independent(Normal(mean, (log_variance / 2).exp()), 1)
    unit = Independent(Normal(torch.zeros_like(mean), torch.ones_like(mean)), 1)
    divergence = divergence_from_unit_gaussian(mean, log_variance)
    assert (divergence > 0).all()
    torch.testing.assert_close(divergence, kl_divergence(gaussian, unit))
    zero = torch.zeros(1, 4)
    assert divergence_from_unit_gaussian(zero, zero) == 0


def test_a_step_is_the_one_written_out_by_hand():
    data, model = make_data(16), HibNetwork(make_network(), "head", UncertaintyHead(512, 3), OPTIONS)
    inputs, pairs = data.batch(torch.arange(16)), lam.Pairs.by_label(data.labels)
    batch = Minibatch(inputs, pairs, 0, torch.Generator().manual_seed(1))
    value = HibStep(OPTIONS).backward(model, LOSS, batch, Tensor.backward)
    features = model.network.features(inputs)
    mean, log_variance = model.network.head(features), model.uncertainty(features)
    noise = torch.randn(3, 16, 3, generator=torch.Generator().manual_seed(1))
    samples = mean + log_variance.exp().sqrt() * noise
    five = torch.tensor(5.0, requires_grad=True)
    divergence = (mean**2 + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
    expected = soft_contrastive(samples, pairs, scale=five, offset=torch.tensor(5.0)) + 0.1 * divergence
    torch.testing.assert_close(value, expected.detach())
    parameters = [*model.network.parameters(), *model.uncertainty.parameters()]
    gradients = torch.autograd.grad(expected, [*parameters, five])
    for parameter, gradient in zip(parameters, gradients, strict=False):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model.log_scale.grad, 5 * gradients[-1])
    assert model.offset.grad != 0


def test_miners_choose_by_the_directions_of_the_means():
    data, model = make_data(16), HibNetwork(make_network(), "head", UncertaintyHead(512, 3), OPTIONS)
    pairs, chosen_by = lam.Pairs.by_label(data.labels), []

    def miner(embeddings, labels):
        chosen_by.append(embeddings)
        none = torch.zeros(0, dtype=torch.long)
        return none, none, none, none

    inputs = data.batch(torch.arange(16))
    batch = Minibatch(inputs, pairs, 0, torch.Generator().manual_seed(1), data.labels, Mining(miner))
    value = HibStep(replace(OPTIONS, kl_weight=0.0)).backward(model, LOSS, batch, Tensor.backward)
    assert value == 0
    torch.testing.assert_close(chosen_by[0].detach(), model.network(inputs).detach())


def test_network_head_and_match_are_learned_together():
    data = make_data()
    network, plain = make_network(), make_network()
    encoder, histories = train(network, data, loss=LOSS, epochs=6, **QUIET)
    assert isinstance(encoder, GaussianEncoder)
    assert list(histories) == ["network"]
    assert histories["network"].losses[-1] < histories["network"].losses[0] / 2
    assert not torch.equal(network.head.weight, plain.head.weight)
    assert not encoder.unit_mean
    assert not network.training
    assert not encoder.uncertainty.training
    assert encoder.uncertainty.shift != -7
    metrics = lam.evaluate(encoder, [(data.batch(torch.arange(48)), data.labels)], n_samples=10).metrics
    assert metrics["recall@1"] > 0.9
    assert len(encoder.embed(data.batch(torch.arange(8))).kappa.unique()) == 8


def test_a_trained_network_is_where_training_begins():
    data, network = make_data(), make_network()
    train(network, data, loss=LOSS, epochs=3, **QUIET)
    _, first = train(make_network(), data, loss=LOSS, epochs=1, **QUIET)
    _, second = train(network, data, loss=LOSS, epochs=1, pretrained=True, **QUIET)
    assert second["network"].losses[0] < first["network"].losses[0]


def test_the_network_is_validated_and_other_options_do_not_resume(tmp_path: Path):
    data, validated = make_data(), []

    def validate(network: nn.Module) -> float:
        validated.append(type(network))
        return 0.0

    common = {"loss": LOSS, "epochs": 1, "validate": validate, "folder": tmp_path, **QUIET}
    train(make_network(), data, options=OPTIONS, **common)
    assert set(validated) == {models.EmbeddingNetwork}
    with pytest.raises(ValueError, match="has other settings.*kl_weight"):
        train(make_network(), data, options=replace(OPTIONS, kl_weight=0.5), **common)


def test_the_checkpoint_holds_what_turns_distance_into_a_match(tmp_path: Path):
    train(make_network(), make_data(), loss=LOSS, epochs=1, folder=tmp_path, **QUIET)
    (path,) = tmp_path.glob("checkpoint-*")
    tensors = lam.utils.files.read_tensors(path / "tensors.safetensors")
    assert abs(float(tensors["last/network/log_scale"].exp()) - 5) > 1e-4
    assert abs(float(tensors["last/network/offset"]) - 5) > 1e-4
