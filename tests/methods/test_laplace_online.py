from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lam
from lam import Laplace, losses, models
from lam.datasets import TensorImages
from lam.hessians import ContrastiveCurvature
from lam.methods import OnlinePosterior
from lam.methods.fit import fit
from lam.methods.laplace_online import LaplaceOnline, OnlineLaplaceStep
from lam.pairs import Mining, Relation
from lam.training import Minibatch, Training
from lam.training import train as train_network
from lam.utils.random import derive_seed
from tests.helpers import contrastive_ggn
from tests.methods.small_data import trainer

train = trainer(LaplaceOnline)
OPTIONS = LaplaceOnline(likelihood_scale=1e4, memory_factor=0.9)
QUIET = {"progress": False, "accelerator": "cpu"}


def make_data(N: int = 48) -> TensorImages:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(N) % 4
    images = (40 * labels[:, None, None, None] + torch.randint(0, 60, (N, 1, 8, 8), generator=generator)).to(
        torch.uint8
    )
    return TensorImages(images, labels, name="made")


def make_network(seed: int = 0) -> models.EmbeddingNetwork:
    return models.build("convnet8", dimension=3, seed=seed)


@pytest.mark.parametrize("update", ["average", "accumulate"])
@pytest.mark.parametrize("n_samples", [1, 3])
def test_each_step_is_the_one_written_out_by_hand(update, n_samples):
    options = replace(OPTIONS, update=update, n_samples=n_samples)
    network, loss = make_network(), losses.build(margin=0.7)
    step = OnlineLaplaceStep("head", options)
    data = make_data(16)
    inputs, pairs = data.batch(torch.arange(16)), lam.Pairs.by_label(data.labels)
    h = torch.full((3, network.head.in_features + 1), 1e-3)
    for seed in range(3):
        network.zero_grad()
        batch = Minibatch(inputs, pairs, 0, torch.Generator().manual_seed(seed))
        value = step.backward(network, loss, batch, lambda found: found.backward())
        generator = torch.Generator().manual_seed(seed)
        theta = torch.cat([network.head.weight, network.head.bias[:, None]], 1)
        expected, h_batch = torch.zeros(()), torch.zeros_like(h)
        for _ in range(n_samples):
            sample = theta + (1e4 * h.clamp(min=0) + 1).rsqrt() * torch.randn(theta.shape, generator=generator)
            features = network.features(inputs)
            expected = expected + loss(F.normalize(features @ sample[:, :-1].T + sample[:, -1]), pairs) / n_samples
            ggn = contrastive_ggn(features.detach(), sample[:, :-1].detach(), sample[:, -1].detach(), pairs, margin=0.7)
            h_batch += ggn.h / n_samples
        gradients = torch.autograd.grad(expected, list(network.parameters()))
        torch.testing.assert_close(value, expected.detach())
        for parameter, gradient in zip(network.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        h = 0.9 * h + (0.1 * h_batch if update == "average" else h_batch.relu())
        torch.testing.assert_close(step.h, h)


@pytest.mark.parametrize("margin", [0.7, 2.0])
def test_the_authors_update_adds_the_mean_over_the_triplets_that_were_drawn_without_what_is_negative(margin):
    options = replace(OPTIONS, update="accumulate", hessian_miner="violating", hessian_max_pairs=40)
    network, data = make_network(), make_data(16)
    step, pairs = OnlineLaplaceStep("head", replace(options, margin=margin)), lam.Pairs.by_label(data.labels)
    inputs = data.batch(torch.arange(16))

    def backward() -> None:
        generator = torch.Generator().manual_seed(5)
        step.backward(network, losses.build(margin=0.7), Minibatch(inputs, pairs, 0, generator), lambda loss: None)

    backward()
    generator = torch.Generator().manual_seed(5)
    theta = torch.cat([network.head.weight, network.head.bias[:, None]], 1).detach()
    sample = theta + (1e4 * 1e-3 + 1) ** -0.5 * torch.randn(theta.shape, generator=generator)
    features = network.features(inputs).detach()
    weight, bias = sample[:, :-1], sample[:, -1]
    embeddings = F.normalize(features @ weight.T + bias)
    chosen = Mining("violating", 40).choose(embeddings, pairs, None, margin=0.7, generator=generator)
    ggn = contrastive_ggn(features, weight, bias, chosen, margin=margin)
    mean = (ggn.sums[0] - ggn.sums[1]) / 40
    assert (mean < 0).any()
    torch.testing.assert_close(step.h, 0.9 * 1e-3 + mean.relu(), rtol=1e-4, atol=1e-9)


def test_where_no_triplet_is_of_the_kind_the_authors_update_only_forgets():
    options = replace(OPTIONS, update="accumulate", hessian_miner="hard")
    network, data = make_network(), make_data(16)
    step, apart = OnlineLaplaceStep("head", options), torch.eye(16, dtype=torch.bool)
    none = lam.Pairs(apart & ~apart, ~apart, 0, 240)  # no positive pair, no triplet
    batch = Minibatch(data.batch(torch.arange(16)), replace(none, n_positives=1), 0, torch.Generator())
    step.backward(network, losses.build(margin=0.7), batch, lambda loss: None)
    torch.testing.assert_close(step.h, torch.full_like(step.h, 0.9 * 1e-3))


def test_without_noise_it_is_deterministic_training():
    data, loss = make_data(), losses.build(margin=0.7)
    sure = LaplaceOnline(likelihood_scale=1e-20, prior_precision=1e30)
    encoder, histories = train(make_network(), data, loss=loss, epochs=2, batch_size=16, options=sure, **QUIET)
    plain = make_network()
    expected = train_network(plain, data, Training(loss=loss, epochs=2, batch_size=16, **QUIET))
    torch.testing.assert_close(
        torch.tensor(histories["network"].losses), torch.tensor(expected.losses), rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(encoder.posterior.weight, plain.head.weight.detach(), rtol=1e-3, atol=1e-5)


def test_warm_up_is_without_noise_and_follows_the_curvature():
    network, data = make_network(), make_data(16)
    step = OnlineLaplaceStep("head", replace(OPTIONS, warmup_epochs=1))
    loss, pairs = losses.build(margin=0.7), lam.Pairs.by_label(data.labels)
    inputs = data.batch(torch.arange(16))
    values = [
        step.backward(network, loss, Minibatch(inputs, pairs, epoch, torch.Generator()), lambda found: found.backward())
        for epoch in (0, 1)
    ]
    torch.testing.assert_close(values[0], loss(network(inputs), pairs).detach())
    assert values[1] != values[0]
    assert not (step.h == 1e-3).all()


def test_h_is_refreshed_as_often_as_asked():
    network, data = make_network(), make_data(16)
    step = OnlineLaplaceStep("head", replace(OPTIONS, refresh_every=2))
    pairs = lam.Pairs.by_label(data.labels)
    seen = []
    for _ in range(4):
        batch = Minibatch(data.batch(torch.arange(16)), pairs, 0, torch.Generator())
        step.backward(network, losses.build(margin=0.7), batch, lambda found: found.backward())
        seen.append(step.h)
    assert seen[0] is seen[1] or torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[2], seen[3])


def test_other_options_or_another_step_do_not_resume(tmp_path: Path):
    data, loss = make_data(), losses.build(margin=0.7)
    common = {"loss": loss, "epochs": 2, "batch_size": 16, "folder": tmp_path, **QUIET}
    train(make_network(), data, options=OPTIONS, **common)
    with pytest.raises(ValueError, match="has other settings.*memory_factor"):
        train(make_network(), data, options=replace(OPTIONS, memory_factor=0.5), **common)
    with pytest.raises(ValueError, match="has other settings"):
        train_network(make_network(), data, Training(**common))


def test_the_encoder_embeds_saves_and_loads_but_does_not_forget(tmp_path: Path):
    data = make_data()
    encoder, _ = train(
        make_network(), data, loss=losses.build(margin=0.7), epochs=2, batch_size=16, options=OPTIONS, **QUIET
    )
    images = data.batch(torch.arange(8))
    kappa = encoder.embed(images).kappa
    assert encoder.posterior.scale == 1e4
    assert encoder.preprocessing == data.preprocessing
    encoder.save(tmp_path)
    assert torch.equal(lam.load(tmp_path).embed(images).kappa, kappa)
    with pytest.raises(ValueError, match="posterior fitted.*batches"):
        encoder.forget([(images, data.labels[:8])])
    with pytest.raises(ValueError, match="encoders.*: a running mean"):
        encoder + encoder


def looped(options: LaplaceOnline = OPTIONS, *, cut: int | None = None) -> tuple[OnlinePosterior, list[float]]:
    """A loop of six steps, which continues from a `state_dict` before step `cut`; also returns the losses."""
    network, data, found = make_network(), make_data(), list[float]()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    posterior = OnlinePosterior(network, losses.build(margin=0.7), options, seed=3)
    for number, rows in enumerate(2 * torch.arange(48).split(16)):
        if number == cut:
            state = posterior.state_dict()
            posterior = OnlinePosterior(network, losses.build(margin=0.7), options, seed=3)
            posterior.load_state_dict(state)
        optimizer.zero_grad()
        found.append(float(posterior.backward(data.batch(rows), data.labels[rows])))
        optimizer.step()
    return posterior, found


def test_a_loop_of_ones_own_takes_the_steps_of_the_method():
    posterior, found = looped()
    network, data, step = make_network(), make_data(), OnlineLaplaceStep("head", OPTIONS)
    optimizer, loss = torch.optim.SGD(network.parameters(), lr=0.1), losses.build(margin=0.7)
    for number, rows in enumerate(2 * torch.arange(48).split(16)):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(derive_seed(3, number, "step"))
        batch = Minibatch(data.batch(rows), lam.Pairs.by_label(data.labels[rows]), 0, generator)
        assert float(step.backward(network, loss, batch, Tensor.backward)) == found[number]
        optimizer.step()
    encoder = posterior.encoder(n_items=48)
    assert torch.equal(encoder.posterior.curvature.h, step.h)
    assert encoder.posterior.n_items == 48
    trained = F.normalize(network.eval()(data.batch(torch.arange(8))))
    torch.testing.assert_close(encoder.embed(data.batch(torch.arange(8))).mean, trained.detach())


def test_a_loop_of_ones_own_continues_from_its_state():
    (whole, expected), (parts, found) = looped(), looped(cut=4)
    assert found == expected
    assert torch.equal(parts.state_dict()["h"], whole.state_dict()["h"])
    assert torch.equal(looped(cut=0)[0].state_dict()["h"], whole.state_dict()["h"])


def test_a_loop_of_ones_own_may_scale_the_loss():
    network, data, scaled = make_network(), make_data(16), list[float]()
    posterior = OnlinePosterior(network, losses.build(margin=0.7), OPTIONS)
    inputs = data.batch(torch.arange(16))
    value = posterior.backward(inputs, data.labels, backward=lambda loss: scaled.append(8 * float(loss.detach())))
    assert scaled == [8 * float(value)]
    assert network.head.weight.grad is None


@pytest.mark.usefixtures("as_in_production")
def test_a_loop_of_ones_own_is_told_what_it_cannot_do():
    network, loss = make_network(), losses.build(margin=0.7)
    for options in (replace(OPTIONS, refit=True), replace(OPTIONS, warmup_epochs=1)):
        with pytest.raises(ValueError, match="refit.*warmup_epochs.*LaplaceOnline.train"):
            OnlinePosterior(network, loss, options)
    with pytest.raises(ValueError, match="loss.*lam.losses"):
        OnlinePosterior(network, nn.CrossEntropyLoss())  # pyright: ignore[reportArgumentType]
    posterior = OnlinePosterior(network, loss, OPTIONS)
    with pytest.raises(ValueError, match="positive.*skip"):
        posterior.backward(make_data(4).batch(torch.arange(4)), torch.arange(4))
    with pytest.raises(ValueError, match="posterior.*trained"):
        posterior.encoder(n_items=4)


def test_a_frozen_network_is_refused():
    with pytest.raises(ValueError, match="requires a gradient.*laplace_posthoc"):
        train(make_network().requires_grad_(False), make_data(), loss=losses.build(margin=0.7), epochs=1, **QUIET)


def test_a_warm_up_of_all_epochs_is_refused():
    warm = replace(OPTIONS, warmup_epochs=3)
    with pytest.raises(ValueError, match="warmup_epochs.*epochs.*2.*3"):
        train(make_network(), make_data(), options=warm, loss=losses.build(margin=0.7), epochs=2, **QUIET)


class Inside(nn.Module):
    def __init__(self, network: nn.Module):
        super().__init__()
        self.module = network

    def forward(self, images: Tensor) -> Tensor:
        return self.module(images)


def test_a_part_of_the_network_may_be_named_module():
    common: dict[str, Any] = {"loss": losses.build(margin=0.7), "epochs": 1, **QUIET}
    plain, inside = (
        train(network, make_data(), **common).encoder for network in (make_network(), Inside(make_network()))
    )
    images = make_data().batch(torch.arange(8))
    assert torch.equal(plain.embed(images).kappa, inside.embed(images).kappa)


def test_refitted_it_has_the_curvature_of_post_hoc_at_the_weights_of_online():
    data, loss = make_data(), losses.build(margin=0.7)
    options = LaplaceOnline(likelihood_scale=1e4, prior_precision=2.0, negative_weight=0.5, refit=True)
    common: dict[str, Any] = {"loss": loss, "epochs": 2, "batch_size": 16, "seed": 3, **QUIET}
    network = make_network()
    encoder, _ = train(network, data, options=options, **common)
    followed, _ = train(make_network(), data, options=replace(options, refit=False), **common)
    torch.testing.assert_close(encoder.posterior.weight, followed.posterior.weight)
    loader = DataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(3))
    expected = fit(
        network,
        loader,
        Laplace(curvature=ContrastiveCurvature(0.7, negative_weight=0.5), likelihood_scale=1e4),
        seed=3,
        progress=False,
    )
    torch.testing.assert_close(encoder.posterior.curvature.h, expected.posterior.curvature.h)
    assert (encoder.posterior.scale, encoder.posterior.alpha) == (1e4, expected.posterior.alpha)
    assert (encoder.posterior.curvature.adds_up, followed.posterior.curvature.adds_up) == (True, False)


class TwoHeads(torch.nn.Module):
    """Two layers compute the same output, so `head` must name one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 3)
        self.second = torch.nn.Linear(3, 3, bias=False)
        torch.nn.init.eye_(self.second.weight)
        self.second.weight.requires_grad_(False)

    def forward(self, inputs):
        return F.normalize(self.second(self.first(inputs.flatten(1))))


def test_a_refit_is_of_the_head_that_training_had_and_may_be_asked_for_later(tmp_path: Path):
    common: dict[str, Any] = {"loss": losses.build(margin=0.7), "epochs": 1, "batch_size": 16, **QUIET}
    for refit in (False, True):
        options = replace(OPTIONS, refit=refit, head="first")
        encoder, _ = train(TwoHeads(), make_data(), options=options, folder=tmp_path, **common)
        assert encoder.head == "first"


def test_a_refit_of_places_counts_every_pair_and_refuses_a_miner_before_training():
    generator = torch.Generator().manual_seed(0)
    cells = torch.arange(40) // 2
    positions = torch.stack([1000.0 * cells + torch.arange(40) % 2, torch.zeros(40)], 1)
    data = list(zip(torch.rand(40, 1, 8, 8, generator=generator), positions, strict=True))
    relation = Relation(positive_within=5.0)
    common: dict[str, Any] = {"loss": losses.build(margin=0.7), "epochs": 1, "batch_size": 40, **QUIET}
    options = replace(OPTIONS, refit=True)
    encoder, _ = train(make_network(), data, options=options, relation=relation, **common)
    assert encoder.relation.scope == "dataset"
    assert encoder.posterior.curvature.counts[0] == 40
    with pytest.raises(ValueError, match="leave out hessian_miner, or refit"):
        train(make_network(), data, options=replace(options, hessian_miner="hard"), relation=relation, **common)
