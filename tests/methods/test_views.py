"""Methods that learn from two views: extra trained parts, saved parts, and no collapse."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import lam
from lam import losses, models
from lam.datasets import TensorImages
from lam.encoders.deterministic import DeterministicEncoder, HeadEncoder
from lam.methods import Aninfonce, Byol, Simclr, Simsiam, Swav, Training
from lam.methods.concentration import DistributionNetwork
from lam.methods.views import follow
from lam.retrieval.metrics.probing import knn_accuracy
from lam.training import checkpoints
from tests.methods import small_data as small

METHODS: list[Any] = [Simclr, Simsiam, Byol, Swav]
DATA = small.images()


def test_the_copy_moves_by_one_minus_the_momentum_and_equal_weights_stay_equal() -> None:
    slow, fast = small.network(seed=1), small.network(seed=2)
    expected = {name: 0.75 * weight + 0.25 * fast.get_parameter(name) for name, weight in slow.named_parameters()}
    follow(slow, fast, 0.75)
    for name, weight in slow.named_parameters():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)
    for _ in range(3):
        before = [weight.clone() for weight in slow.parameters()]
        follow(slow, copy.deepcopy(slow), 0.99)
        assert all(torch.equal(one, other) for one, other in zip(before, slow.parameters(), strict=True))
    follow(slow, fast, 0.0)
    assert all(torch.equal(one, other) for one, other in zip(slow.parameters(), fast.parameters(), strict=True))


@pytest.mark.parametrize("bias", [True, False])
def test_a_batch_norm_folded_into_the_head_changes_no_direction(bias: bool) -> None:
    generator, network = torch.Generator().manual_seed(0), small.network()
    if not bias:
        network.head.bias = None
    norm = nn.BatchNorm1d(3)
    for values in (norm.running_mean, norm.running_var, norm.weight.data, norm.bias.data):
        assert values is not None
        values.copy_(torch.rand(3, generator=generator) + 0.5)
    model = DistributionNetwork(network, "head", None, losses.ELK(), start=1.0, norm=norm).eval()
    with torch.no_grad():
        expected, _ = model(DATA.images)
        model.fold()
        torch.testing.assert_close(network.eval()(DATA.images), expected)
        torch.testing.assert_close(model(DATA.images)[0], expected)
    assert model.norm is None


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_head_whose_weight_is_computed_takes_no_batch_norm(norm: Any) -> None:
    network = small.network()
    norm(network.head)
    with pytest.raises(ValueError, match="simsiam.*'head'.*computed"):
        Simsiam().train(network, DATA, small.training())


@pytest.mark.parametrize("method", [Simsiam, Byol])
def test_a_trained_network_without_its_predictor_takes_no_kappa_in_phases(method: Any) -> None:
    with pytest.raises(ValueError, match="in phases.*kappa=shared"):
        method(kappa="phases").train(small.network(), DATA, small.training(pretrained=True))


def test_checkpoints_hold_the_copy_the_predictor_and_the_prototypes(tmp_path: Path) -> None:
    for method, names in (
        (Byol(), ("network/target.network.head.weight", "network/loss.predictor.0.weight", "network/norm.weight")),
        (Swav(), ("network/loss.prototypes",)),
    ):
        folder = tmp_path / method.name
        encoder = method.train(small.network(), DATA, small.training(folder=folder)).encoder
        saved = checkpoints.load(folder)
        assert saved is not None
        assert all(f"last/{name}" in saved.tensors for name in names)
        assert isinstance(encoder.network, nn.Module)
        assert encoder.network.state_dict().keys() == small.network().state_dict().keys()


@pytest.mark.parametrize("method", METHODS)
def test_without_a_concentration_it_is_the_base_method(method: Any) -> None:
    encoder, histories = method(kappa="none").train(small.network(), DATA, small.training())
    assert type(encoder) is DeterministicEncoder
    assert list(histories) == ["network"]
    assert method(kappa="none").explicit() is None
    in_phases, histories = method(kappa="phases", epochs=1).train(small.network(), DATA, small.training())
    assert type(in_phases) is HeadEncoder
    assert list(histories) == ["network", "head"]


@pytest.mark.long
def test_a_residual_network_of_two_heads_is_trained_with_kappa() -> None:
    colours = TensorImages(torch.rand(16, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 4)
    network = models.build("cifar_resnet18", dimension=4, projection=8)
    encoder, histories = Simclr().train(network, colours, small.training(batch_size=8))
    before, after = models.build("cifar_resnet18", dimension=4, projection=8), encoder.network
    assert isinstance(encoder, HeadEncoder)
    assert isinstance(after, nn.Module)
    for layer in ("features.conv1", "features.layer4.1.conv2", "features.fc.0", "head"):
        assert not torch.equal(after.get_parameter(f"{layer}.weight"), before.get_parameter(f"{layer}.weight")), layer
    assert math.isfinite(histories["network"].losses[-1])
    kappa = encoder.embed(colours.images).kappa
    assert kappa.isfinite().all()
    assert (kappa > 0).all()
    assert kappa.std() > 0


@pytest.mark.parametrize("method", METHODS)
def test_labels_are_not_read(method: Any) -> None:
    def means(labels: Tensor) -> Tensor:
        data = lam.datasets.TensorImages(DATA.images, labels)
        return method().train(small.network(), data, small.training()).encoder.embed(DATA.images).mean

    assert torch.equal(means(DATA.labels), means(torch.zeros_like(DATA.labels)))


@pytest.mark.parametrize("method", [*(method() for method in METHODS), Aninfonce(n_members=2, crop_scales=(0.3, 0.6))])
def test_a_list_of_images_is_trained_on_like_a_data_set(method: Any) -> None:
    def means(data: Any) -> Tensor:
        return method.train(small.network(), data, small.training()).encoder.embed(DATA.images).mean

    assert torch.equal(means(list(zip(DATA.images, DATA.labels.tolist(), strict=True))), means(DATA))


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kappa", ["shared", "none"])
def test_none_collapses(method: Any, kappa: str) -> None:
    digits = lam.datasets.load("digits")
    train, test = (part.batch(range(len(part))) for part in (digits.train, digits.test))

    def accuracy(network: nn.Module) -> float:
        with torch.no_grad():
            own, other = network.eval()(train), network(test)
        return knn_accuracy(own, digits.train.labels, other, digits.test.labels)

    network = models.build("convnet8", dimension=16)
    untrained = accuracy(network)
    options: dict[str, Any] = {"epochs": 8, "batch_size": 128, "learning_rate": 2e-3, "accelerator": "cpu"}
    training = Training(loss=losses.build(margin=0.7), progress=False, **options)
    encoder = method(kappa=kappa, crop_scale=0.6).train(network, digits.train, training).encoder
    assert accuracy(network) > untrained + 0.03
    mean = encoder.embed(test).mean
    assert (mean - F.normalize(mean.mean(0), dim=0)).norm(dim=1).mean() > 0.5
