"""Online training on mined pairs, and errors if its loss or its curvature diverges."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lam import losses
from lam.methods.laplace_online import LaplaceOnline, OnlineLaplaceStep
from lam.pairs import Mining, Pairs, Relation
from lam.training import DivergenceError, Minibatch, Training, checkpoints, train
from tests.helpers import contrastive_ggn
from tests.methods.test_laplace_online import OPTIONS, QUIET, make_data, make_network

LOSS = losses.build(margin=0.7)


def fit(network: nn.Module, step: OnlineLaplaceStep, **options: Any) -> Any:
    training = Training(**{"loss": LOSS, "epochs": 2, "batch_size": 16, **QUIET} | options)
    return train(network, make_data(), training, step=step)


def online(**options: Any) -> OnlineLaplaceStep:
    return OnlineLaplaceStep("head", replace(OPTIONS, **options))


@pytest.mark.parametrize("hessian_miner", ["easy", "semihard"])
@pytest.mark.parametrize("miner", ["all", "semihard"])
@pytest.mark.parametrize("n_samples", [1, 2])
def test_miners_see_the_embeddings_of_each_sample(hessian_miner: Any, miner: Any, n_samples: int) -> None:
    network, data = make_network(), make_data(16)
    options = {"n_samples": n_samples, "negative_weight": 0.25}
    step = online(**options, hessian_miner=hessian_miner)
    inputs, pairs = data.batch(torch.arange(16)), Pairs.by_label(data.labels)
    draws = torch.Generator().manual_seed(0)
    batch = Minibatch(inputs, pairs, 0, torch.Generator().manual_seed(0), data.labels, Mining(miner))
    value = step.backward(network, LOSS, batch, lambda found: found.backward())
    with torch.no_grad():
        theta = torch.cat([network.head.weight, network.head.bias[:, None]], 1)
        features, expected, h_batch = network.features(inputs), torch.zeros(()), torch.zeros_like(theta)
        for _ in range(n_samples):
            sample = theta + torch.full_like(theta, 1e4 * 1e-3 + 1).rsqrt() * torch.randn(theta.shape, generator=draws)
            weight, bias = sample[:, :-1], sample[:, -1]
            embeddings = F.normalize(features @ weight.T + bias)
            chosen = [
                Mining(wanted).choose(embeddings, pairs, data.labels, margin=0.7, generator=draws)
                for wanted in (miner, hessian_miner)
            ]
            expected += LOSS(embeddings, chosen[0]) / n_samples
            ggn = contrastive_ggn(features, weight, bias, chosen[1], margin=0.7, negative_weight=0.25)
            h_batch += ggn.h / n_samples
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(step.h, 0.9 * torch.full_like(theta, 1e-3) + 0.1 * h_batch)


def test_the_hessian_is_mined_apart_from_the_loss() -> None:
    everything, mined, drawn, both = online(), online(hessian_miner="semihard"), online(hessian_max_pairs=5), online()
    first, second, third, fourth = (make_network() for _ in range(4))
    fit(first, everything, epochs=1)
    fit(second, mined, epochs=1)
    fit(third, drawn, epochs=1)
    fit(fourth, both, epochs=1, miner="semihard")
    h = [step.h for step in (everything, mined, drawn, both)]
    assert not any(torch.equal(h[0], other) for other in h[1:])


def test_the_hessian_is_mined_in_batches_whatever_the_scope_of_training() -> None:
    method, training = (
        LaplaceOnline(hessian_miner="hard"),
        Training(loss=LOSS, epochs=1, relation=Relation("dataset"), **QUIET),
    )
    encoder = method.train(make_network(), make_data(), training).encoder
    assert (encoder.relation.scope, encoder.relation.miner) == ("batch", "hard")


@pytest.mark.parametrize("curvature", ["contrastive", "supcon", "infonce", "varcon"])
def test_a_batch_of_which_the_hessian_takes_no_pair_lets_h_fade(curvature: str) -> None:
    network, data = make_network(), make_data(16)
    nothing = torch.zeros(0, dtype=torch.long)
    step, loss = online(curvature=curvature), losses.build(curvature, margin=0.7)
    step.mining = Mining(lambda embeddings, labels: (nothing, nothing, nothing))
    batch = Minibatch(
        data.batch(torch.arange(16)), Pairs.by_label(data.labels), 0, torch.Generator(), targets=data.labels
    )
    step.backward(network, loss, batch, lambda found: found.backward())
    torch.testing.assert_close(step.h, torch.full_like(step.h, 0.9e-3))


def test_a_resumed_mined_run_equals_an_uninterrupted_one_and_other_miners_are_refused(tmp_path: Path) -> None:
    options = {"hessian_miner": "semihard", "hessian_max_pairs": 8}
    common = {"miner": "semihard", "max_pairs": 9, "per_class": 4}
    whole, resumed = make_network(), make_network(5)
    steps = [online(**options) for _ in range(3)]
    fit(whole, steps[0], **common)
    fit(make_network(), steps[1], epochs=1, folder=tmp_path, **common)
    fit(resumed, steps[2], folder=tmp_path, **common)
    assert torch.equal(steps[0].h, steps[2].h)
    assert torch.equal(whole.head.weight, resumed.head.weight)
    for other in (online(hessian_max_pairs=8), online(**{**options, "hessian_miner": "easy"})):
        with pytest.raises(ValueError, match="has other settings: step_settings"):
            fit(make_network(), other, folder=tmp_path, **common)


class Poisoned(OnlineLaplaceStep):
    """A step that calls `disaster` at the fifth batch, in the second epoch of three batches."""

    def __init__(self, disaster: Callable[[nn.Module, "Poisoned"], None]) -> None:
        super().__init__("head", replace(OPTIONS, warmup_epochs=2))
        self.disaster = disaster

    def backward(self, network: nn.Module, loss: Any, batch: Minibatch, backward: Callable[[Tensor], None]) -> Tensor:
        if self.n_steps == 4:
            with torch.no_grad():
                self.disaster(network, self)
        return super().backward(network, loss, batch, backward)


def lose_features(network: nn.Module, _: Poisoned) -> None:
    next(iter(network.features.parameters())).fill_(torch.nan)


def lose_h(_: nn.Module, step: Poisoned) -> None:
    step.h[0, 0] = torch.nan


def lengthen_features(network: nn.Module, _: Poisoned) -> None:
    for parameter in network.features.parameters():
        parameter.mul_(1e10)


@pytest.mark.parametrize(
    ("disaster", "message"),
    [
        (lose_features, "loss.*nan"),
        (lose_h, "curvature h.*finite"),
        (lengthen_features, r"curvature of a batch.*\(features"),
    ],
)
def test_what_is_not_finite_stops_at_its_step_and_the_last_checkpoint_stands(
    tmp_path: Path, disaster: Callable[[nn.Module, Poisoned], None], message: str
) -> None:
    with pytest.raises(DivergenceError, match=f"{message}.*epoch 2, step 5: .*learning_rate.*last checkpoint"):
        fit(make_network(), Poisoned(disaster), folder=tmp_path)
    found = checkpoints.load(tmp_path)
    assert found is not None
    assert found.path.name == "checkpoint-00000003"
    assert all(tensor.isfinite().all() for tensor in found.tensors.values())


@pytest.mark.usefixtures("as_in_production")
def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="hessian_miner.*all, violating, easy, semihard, hard.*'best'"):
        LaplaceOnline(hessian_miner="best")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="hessian_max_pairs.*1, got 0"):
        LaplaceOnline(hessian_max_pairs=0)
