"""ResNets with GeM pooling, dropout in every network, and weights of the backbone from a file."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import lam
from lam import models
from lam.models.head import features_and_output, find_head
from lam.models.networks import GeM, resnet
from tests.helpers import unchecked

DROPPING = {
    "convnet8": ((1, 8, 8), 2),
    "convnet28": ((1, 28, 28), 2),
    "convnet32": ((3, 32, 32), 3),
    "resnet18": ((3, 33, 33), 1),
}


def _images(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def _resnet18() -> nn.Module:
    from torchvision import models

    return models.resnet18(num_classes=7)


@pytest.mark.parametrize("size", [(40, 56), (227, 227)])
def test_gem_takes_images_of_any_size(size: tuple[int, int]) -> None:
    network = models.build("resnet18", dimension=6, pooling="gem").eval()
    with torch.no_grad():
        embeddings = network(_images(2, 3, *size))
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(2))


def test_gem_pools_what_the_last_block_gives_and_learns_its_exponent() -> None:
    network: Any = models.build("resnet18", dimension=6, pooling="gem")
    maps: list[Tensor] = []
    network.features.layer4.register_forward_hook(lambda _module, _inputs, output: maps.append(output))
    images = _images(2, 3, 64, 64)
    features, _ = features_and_output(network, "head", images)
    torch.testing.assert_close(features, GeM()(maps[0]))
    network(images).square()[:, 0].sum().backward()
    assert network.features.avgpool.p.grad.abs() > 0
    assert network.head.bias is not None


def test_pooling_changes_no_other_weight() -> None:
    mean, gem = (models.build("resnet18", dimension=6, pooling=pooling).state_dict() for pooling in ("mean", "gem"))
    assert gem.pop("features.avgpool.p") == 3
    assert gem.keys() == mean.keys()
    assert all(torch.equal(gem[name], mean[name]) for name in mean)


@pytest.mark.parametrize("architecture", ["resnet18", "resnet50"])
def test_other_poolings_are_refused(architecture: str) -> None:
    with pytest.raises(ValueError, match="pooling.*mean, gem.*'max'"):
        unchecked(resnet)(architecture, dimension=4, pooling="max")


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_lies_between_trainable_layers_and_changes_no_weight(name: str) -> None:
    shape, places = DROPPING[name]
    plain, dropping = (models.build(name, dimension=4, **options) for options in ({}, {"dropout": 0.5}))
    assert not any(isinstance(module, nn.modules.dropout._DropoutNd) for module in plain.modules())
    assert sum(isinstance(module, nn.modules.dropout._DropoutNd) for module in dropping.modules()) == places
    assert list(dropping.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), dropping.parameters(), strict=True))
    images = _images(8, *shape)
    with torch.no_grad():
        assert torch.equal(plain.eval()(images), dropping.eval()(images))
        for module in dropping.modules():
            module.train(isinstance(module, nn.modules.dropout._DropoutNd))
        assert not torch.equal(dropping(images), dropping(images))


@pytest.mark.parametrize("name", DROPPING)
def test_no_dropout_is_the_network_as_it_was(name: str) -> None:
    shape, _ = DROPPING[name]
    images = _images(4, *shape)
    outputs = []
    for options in ({}, {"dropout": 0.0}):
        network = models.build(name, dimension=4, **options).train()
        torch.manual_seed(1)
        outputs += [network(images).detach(), torch.get_rng_state()]
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


@pytest.mark.parametrize("name", DROPPING)
def test_the_head_is_found_behind_dropout_and_sees_the_same_features(name: str) -> None:
    shape, _ = DROPPING[name]
    plain, dropping = (models.build(name, dimension=4, **options) for options in ({}, {"dropout": 0.5}))
    images = _images(4, *shape)
    assert find_head(dropping.train(), images) == "head"
    assert torch.equal(*(features_and_output(network, "head", images)[0] for network in (plain, dropping)))


def test_a_saved_encoder_is_rebuilt_with_pooling_and_dropout(tmp_path: Path) -> None:
    network = models.build("resnet18", dimension=4, pooling="gem", dropout=0.1)
    assert json.loads(json.dumps(network.recipe)) == network.recipe
    images, labels = _images(8, 3, 32, 32), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    encoder = lam.fit(network, [(images, labels)], margin=0.7)
    encoder.save(tmp_path / "encoder")
    again = lam.load(tmp_path / "encoder")
    assert any(isinstance(module, nn.Dropout) for module in again.network.modules())
    assert torch.equal(again.embed(images).kappa, encoder.embed(images).kappa)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("with_classifier", [True, False])
def test_weights_of_the_backbone_come_from_a_file(tmp_path: Path, suffix: str, with_classifier: bool) -> None:
    state = _resnet18().state_dict()
    if not with_classifier:
        state = {name: tensor for name, tensor in state.items() if not name.startswith("fc.")}
    path = tmp_path / f"backbone{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    with pytest.warns(match=r"fc \(2 tensors\)") if with_classifier else nullcontext():
        network = models.build("resnet18", dimension=4, weights=str(path), pooling="gem")
    assert "weights" not in network.recipe
    loaded = network.features.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items() if not name.startswith("fc."))
    assert torch.equal(network.head.weight, models.build("resnet18", dimension=4, pooling="gem").head.weight)


def test_weights_from_before_batches_were_counted_load(tmp_path: Path) -> None:
    state = {name: value for name, value in _resnet18().state_dict().items() if "num_batches" not in name}
    torch.save(state, tmp_path / "old.pth")
    with pytest.warns(match=r"fc \(2 tensors\)"):
        network = models.build("torchvision:resnet18", dimension=4, weights=str(tmp_path / "old.pth"))
    assert torch.equal(network.features.state_dict()["conv1.weight"], state["conv1.weight"])


def test_files_of_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere.pth.*not exist"):
        models.build("resnet18", dimension=4, weights=str(tmp_path / "nowhere.pth"))
    (tmp_path / "text.pth").write_text("weights")
    with pytest.raises(ValueError, match="text.pth.*plain weights"):
        models.build("resnet18", dimension=4, weights=str(tmp_path / "text.pth"))
    state = _resnet18().state_dict()
    del state["conv1.weight"]
    torch.save(state, tmp_path / "cut.pth")
    with pytest.raises(ValueError, match="cut.pth.*conv1.weight.*missing"):
        models.build("resnet18", dimension=4, weights=str(tmp_path / "cut.pth"))
