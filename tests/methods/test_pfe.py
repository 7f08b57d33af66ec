from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lam
from lam import losses, models
from lam.datasets import TensorImages
from lam.encoders.deterministic import GaussianEncoder
from lam.losses.distributions import mutual_likelihood
from lam.methods.head import HeadStep, Pfe
from lam.models.kappa_head import UncertaintyHead
from lam.training import DivergenceError, Minibatch
from tests.methods.small_data import trainer

LOSS = losses.build(margin=0.7)
QUIET = {"progress": False, "accelerator": "cpu", "batch_size": 16}
train = trainer(Pfe)
OPTIONS = Pfe(epochs=2)


def make_data(N: int = 48) -> TensorImages:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(N) % 4
    images = 40 * labels[:, None, None, None] + torch.randint(0, 60, (N, 1, 8, 8), generator=generator)
    return TensorImages(images.to(torch.uint8), labels, name="made")


def make_network(seed: int = 0) -> models.EmbeddingNetwork:
    return models.build("convnet8", dimension=3, seed=seed)


class NetworkWithBatchNorm(nn.Module):
    """A network with batch norm and dropout, which change in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.head(self.features(inputs)), dim=1)


def make_encoder(*, unit_mean: bool = True, dimension: int = 3) -> GaussianEncoder:
    """An encoder whose variances differ between inputs and dimensions, without training."""
    network = models.build("convnet8", dimension=dimension)
    uncertainty = UncertaintyHead(512, dimension)
    with torch.no_grad():
        uncertainty.scale.fill_(0.5)
        uncertainty.shift.fill_(-4)
        uncertainty(network.features(make_data().batch(torch.arange(48))))
    return GaussianEncoder(network.eval(), "head", uncertainty, unit_mean=unit_mean, seed=3)


@pytest.mark.parametrize("factor", [255.0, 1e4, 1e6])
def test_inputs_far_from_the_data_have_a_finite_variance_and_a_small_kappa(factor: float) -> None:
    encoder, images = make_encoder(), make_data().batch(torch.arange(8))
    far = encoder.embed(factor * images)
    assert far.variance.isfinite().all()
    assert (far.kappa <= encoder.embed(images).kappa).all()


def test_the_frozen_network_keeps_every_bit_and_only_the_head_learns():
    network = NetworkWithBatchNorm()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    encoder, histories = train(
        network, make_data(), loss=LOSS, epochs=1, options=Pfe(epochs=3), pretrained=True, **QUIET
    )
    assert list(histories) == ["head"]
    assert histories["head"].losses[-1] < histories["head"].losses[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())
    assert encoder.uncertainty.state_dict()["layers.1.num_batches_tracked"] == 9
    assert not encoder.uncertainty.training


def test_a_step_is_the_one_written_out_by_hand():
    network, data = NetworkWithBatchNorm(), make_data(16)
    head, twin = UncertaintyHead(8, 3), UncertaintyHead(8, 3)
    inputs, pairs = data.batch(torch.arange(16)), lam.Pairs.by_label(data.labels)
    batch = Minibatch(inputs, pairs, 0, torch.Generator())

    def loss(log_variance: torch.Tensor, mean: torch.Tensor, batch: Minibatch) -> torch.Tensor:
        return mutual_likelihood(mean, log_variance, batch.pairs)

    value = HeadStep(network, "head", loss, {}).backward(head, LOSS, batch, torch.Tensor.backward)
    assert network.training
    network.eval()
    expected = mutual_likelihood(network(inputs).detach(), twin(network.features(inputs).detach()), pairs)
    expected.backward()
    torch.testing.assert_close(value, expected.detach())
    for parameter, other in zip(head.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_both_stages_run_and_a_resumed_training_equals_an_uninterrupted_one(tmp_path: Path):
    data, stages = make_data(), []
    common = {"loss": LOSS, **QUIET, "validate": lambda network: float(next(network.parameters()).sum())}
    whole, histories = train(make_network(), data, epochs=2, options=OPTIONS, **common)
    train(make_network(), data, epochs=2, options=replace(OPTIONS, epochs=1), folder=tmp_path, **common)
    resumed, again = train(
        make_network(5),
        data,
        epochs=2,
        options=OPTIONS,
        folder=tmp_path,
        stage=lambda name: nullcontext(stages.append(name)),
        **common,
    )
    assert stages == ["train", "head"]
    assert list(again) == ["network", "head"]
    assert {name: history.losses for name, history in again.items()} == {n: h.losses for n, h in histories.items()}
    assert again["head"].validation == ()
    assert (tmp_path / "head").is_dir()
    for name, tensor in whole.tensors().items():
        assert torch.equal(resumed.tensors()[name], tensor)
    with pytest.raises(ValueError, match="has other settings.*frozen"):
        train(make_network(7), data, epochs=2, options=OPTIONS, pretrained=True, folder=tmp_path, **common)


@pytest.mark.long
def test_noisy_items_get_a_larger_variance_and_a_smaller_kappa():
    generator = torch.Generator().manual_seed(0)
    labels, noisy = torch.arange(256) % 4, torch.arange(256) % 8 >= 4
    images = torch.zeros(256, 1, 8, 8)
    images[torch.arange(256), 0, 2 * labels, :] = 1  # the class is a row; the noise hides it
    images += torch.where(noisy, 0.6, 0.02)[:, None, None, None] * torch.randn(256, 1, 8, 8, generator=generator)
    images[:, 0, 7, 7] = noisy.float()
    data = TensorImages(images, labels, name="noisy")
    encoder, _ = train(make_network(), data, loss=LOSS, epochs=3, options=Pfe(epochs=40), **{**QUIET, "batch_size": 64})
    embeddings = encoder.embed(images)
    assert embeddings.variance[noisy].median() > 2 * embeddings.variance[~noisy].median()
    assert embeddings.kappa[noisy].median() < embeddings.kappa[~noisy].median() / 2


@pytest.mark.parametrize("unit_mean", [True, False])
def test_embeddings_are_those_of_samples_written_out_by_hand(unit_mean):
    encoder, images = make_encoder(unit_mean=unit_mean), make_data().batch(torch.arange(6))
    features = encoder.network.features(images)
    mean = encoder.network.head(features).detach()
    mean = F.normalize(mean) if unit_mean else mean
    variance = encoder.uncertainty(features).detach().exp()
    noise = torch.randn(50, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    embeddings = encoder.embed(images, n_samples=50)
    for item in range(6):
        samples = F.normalize(mean[item].double() + variance[item].double().sqrt() * noise)
        resultant = ((50 * samples.mean(0).norm() ** 2 - 1) / 49).sqrt()
        kappa = lam.vmf.kappa_from_resultant(resultant, 3)
        torch.testing.assert_close(embeddings.resultant[item].double(), resultant, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(embeddings.kappa[item].double(), kappa, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(embeddings.mean, encoder.network(images).detach())
    torch.testing.assert_close(embeddings.variance, variance.sum(1))
    assert len(embeddings.kappa.unique()) == 6


def test_many_items_are_taken_in_chunks_without_a_change(monkeypatch):
    encoder, images = make_encoder(), make_data().batch(torch.arange(12))
    whole = encoder.predict(images, n_samples=20, joint=True)
    monkeypatch.setattr("lam.encoders.deterministic.CHUNK_ELEMENTS", 5 * 20 * 3)
    chunked = encoder.predict(images, n_samples=20, joint=True)
    torch.testing.assert_close(chunked.embeddings.kappa, whole.embeddings.kappa, rtol=1e-4, atol=0)
    torch.testing.assert_close(chunked.samples, whole.samples)


def test_joint_samples_have_the_distribution_and_are_independent_between_items():
    encoder, images = make_encoder(unit_mean=False), make_data().batch(torch.zeros(2, dtype=torch.long))
    samples = encoder.predict(images, n_samples=4000, joint=True).samples.double()
    assert samples.shape == (4000, 2, 3)
    torch.testing.assert_close(samples.norm(dim=-1), torch.ones(4000, 2, dtype=torch.float64))
    mean, log_variance = encoder.distribution(encoder.network.features(images))
    spread = torch.randn(40000, 3, dtype=torch.float64) * (log_variance[0].double() / 2).exp()
    expected = F.normalize(mean[0].double() + spread).std(0)
    torch.testing.assert_close(samples.std(0), expected.expand(2, 3), rtol=0.06, atol=0)
    centred = (samples - samples.mean(0)) / samples.std(0)
    assert (centred[:, 0] * centred[:, 1]).mean(0).abs().max() < 4 / 4000**0.5


def test_float64_networks_give_float64_embeddings():
    encoder = make_encoder()
    encoder.network.double()
    assert encoder.embed(make_data().batch(torch.arange(3)).double()).kappa.dtype == torch.float64


def test_training_stops_where_the_loss_is_not_finite(tmp_path: Path):
    options = Pfe(learning_rate=1e30)
    with pytest.raises(DivergenceError, match="nan at epoch 1, step.*checkpoint in .*head"):
        train(
            make_network(), make_data(), loss=LOSS, epochs=1, options=options, pretrained=True, folder=tmp_path, **QUIET
        )
