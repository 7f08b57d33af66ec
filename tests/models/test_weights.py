"""Weights from files in the forms that training scripts write."""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import lam  # noqa: F401, before libraries
from lam import losses, models
from lam.datasets import TensorImages
from lam.models.weights import load_weights
from lam.training import Training, train

State = dict[str, Tensor]


def make_network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 3))


def under(prefix: str, state: State) -> State:
    return {prefix + name: value for name, value in state.items()}


def loaded(path: Path, saved: object) -> State:
    torch.save(saved, path)
    network = make_network(seed=1)
    load_weights(network, path)
    return dict(network.state_dict())


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (lambda own, _: {"model": own, "epoch": 3, "args": argparse.Namespace(lr=0.1)}, None),
        (lambda own, _: {"state_dict": under("model.", own)}, None),
        (lambda own, _: under("module._orig_mod.backbone.", own), None),
        (lambda own, _: {**under("module.", own), "n_averaged": torch.tensor(4)}, r"left out n_averaged \(1 tensors\)"),
        (lambda own, _: {**own, "fc.weight": torch.zeros(9, 3)}, r"fc \(1 tensors\)"),
        (
            lambda own, other: {"state_dict": other, "state_dict_ema": own},
            "took 'state_dict_ema', left out 'state_dict'",
        ),
        (lambda own, other: under("model.", other) | under("model_ema.", own), r"'model_ema'.*model \("),
        (lambda own, other: {"student": other, "teacher": under("backbone.", own)}, "took 'teacher', left out"),
    ],
)
def test_weights_are_found_in_a_checkpoint_and_what_is_left_out_is_said(
    saved: Callable[[State, State], object], said: str | None, tmp_path: Path
) -> None:
    own = dict(make_network().state_dict())
    with pytest.warns(match=said) if said else nullcontext():
        found = loaded(tmp_path / "weights.pth", saved(own, dict(make_network(seed=2).state_dict())))
    assert all(torch.equal(found[name], value) for name, value in own.items())


def test_a_file_of_several_networks_or_of_a_deeper_one_is_refused(tmp_path: Path) -> None:
    own = dict(make_network().state_dict())
    with pytest.raises(ValueError, match="holds several networks, under 'encoder_k', 'encoder_q': save"):
        loaded(tmp_path / "weights.pth", under("encoder_q.", own) | under("encoder_k.", own))
    deeper = {f"layer.{name}": value for name, value in own.items()}
    torch.save({**deeper, "layer.3.weight": torch.zeros(1)}, tmp_path / "deeper.pth")
    with pytest.raises(ValueError, match="3.weight.*missing"):
        load_weights(nn.ModuleDict({"layer": make_network()}), tmp_path / "deeper.pth")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(("name", "classifier"), [("test_vit", "head"), ("mobilenetv3_small_050", "classifier")])
def test_a_network_of_timm_takes_a_file(name: str, classifier: str, suffix: str, tmp_path: Path) -> None:
    import timm

    state, path = timm.create_model(name).state_dict(), tmp_path / f"weights{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save({"state_dict": under("module.", state)}, path)
    with pytest.warns(match=rf"left out {classifier} \(2 tensors\)"):
        network = models.build(f"timm:{name}", dimension=4, weights=str(path))
    assert "weights" not in network.recipe
    found = network.features.state_dict()
    assert all(torch.equal(found[name], value) for name, value in state.items() if not name.startswith(classifier))


def test_a_file_of_another_network_of_timm_is_refused(tmp_path: Path) -> None:
    import timm

    torch.save(timm.create_model("resnet34").state_dict(), tmp_path / "deeper.pth")
    with pytest.raises(ValueError, match="deeper.pth.*missing in the network"):
        models.build("timm:resnet18", dimension=4, weights=str(tmp_path / "deeper.pth"))


def test_a_checkpoint_of_a_library_is_refused_with_advice(tmp_path: Path) -> None:
    import timm

    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "library.pth")
    with pytest.raises(ValueError, match="--network.weights=.*library.pth"):
        load_weights(models.build("timm:test_resnet", dimension=4), tmp_path / "library.pth")


def test_a_network_whose_layers_have_a_version_can_be_saved_and_trained_with_validation(tmp_path: Path) -> None:
    network = models.build("torchvision:mnasnet0_5", dimension=3, seed=1)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    again = models.build("torchvision:mnasnet0_5", dimension=3, seed=2)
    load_weights(again, tmp_path / "weights.pth")
    assert torch.equal(again.head.weight, network.head.weight)
    items = TensorImages(torch.rand(8, 3, 32, 32), torch.arange(8) % 2)
    options: Any = {"epochs": 1, "batch_size": 8, "progress": False, "accelerator": "cpu"}
    training = Training(loss=losses.build(margin=0.7), validate=lambda _: 0.5, **options)
    assert train(again, items, training).best_epoch == 1
