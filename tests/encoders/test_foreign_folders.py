"""An encoder's folder that somebody else wrote is held to its tensors before a network takes memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lam
from lam import models
from lam.encoders.concentration import HeadEncoder
from lam.encoders.deterministic import DeterministicEncoder
from lam.encoders.ensemble import EnsembleEncoder
from lam.models.kappa_head import KappaHead
from lam.utils.files import MANIFEST, seal


def changed(folder: Path, change: Any) -> Path:
    """The same folder with another recipe, and digests made again."""
    metadata = next(folder.glob("generation-*/encoder.json"))
    content = json.loads(metadata.read_text())
    content["recipe"] = change(content["recipe"])
    metadata.write_text(json.dumps(content))
    seal(folder, json.loads((folder / MANIFEST).read_text())["sha256"])
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda recipe: recipe | {"dimension": 10**9},
            "head.bias is .1000000000,. in the network, .3,. in the file",
        ),
        (lambda recipe: recipe | {"channels": 10**9}, "is not the one that was saved"),
        (lambda _: {"name": "torchvision:vit_h_14", "dimension": 3}, "is not the one that was saved"),
        (
            lambda _: {"name": "torchvision:regnet_x_400mf", "dimension": 3, "stem_width": 10**9},
            "is not the one that was saved",
        ),
        (lambda _: {"name": "torchvision:regnet_y_400mf", "dimension": 10**7}, "is not the one that was saved"),
        (lambda _: {"name": "torchvision:regnet_y_128gf", "dimension": 3}, "is not the one that was saved"),
        (lambda _: {"name": "torchvision:resnet18", "dimension": 3, "num_classes": 10**9}, "num_classes is of the"),
        (lambda recipe: recipe | {"weights": "DEFAULT"}, "recipe has no weights"),
        (lambda recipe: recipe | {"weights": "/any/path.pth"}, "recipe has no weights"),
        (lambda recipe: recipe | {"channels": -1}, "cannot be built without memory"),
        (lambda recipe: recipe | {"channels": [1] * 9}, "holds names and numbers alone"),
        (lambda recipe: [recipe] * 10**5, "100000 recipes for"),
        (lambda recipe: "convnet8", "holds names and numbers alone"),
    ],
)
def test_a_recipe_that_is_not_that_of_the_tensors_is_refused(
    change: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DeterministicEncoder(models.build("convnet8", dimension=3), "head").save(tmp_path / "encoder")
    built: list[torch.device] = []
    build = models.build

    def watched(name: str, **options: Any) -> Any:
        network = build(name, **options)
        built.append(network.head.weight.device)
        return network

    monkeypatch.setattr(models, "build", watched)
    with pytest.raises(ValueError, match=message):
        lam.load(changed(tmp_path / "encoder", change))
    assert torch.device("cpu") not in built


def test_an_ensemble_of_other_members_is_refused_and_its_own_is_read(tmp_path: Path) -> None:
    networks = [models.build("convnet8", dimension=3, seed=seed) for seed in range(2)]
    EnsembleEncoder(torch.nn.ModuleList(networks), "head").save(tmp_path / "encoder")
    assert isinstance(lam.load(tmp_path / "encoder"), EnsembleEncoder)
    with pytest.raises(ValueError, match="4 recipes for 2 networks"):
        lam.load(changed(tmp_path / "encoder", lambda recipes: recipes * 2))


def test_an_own_head_of_another_size_is_refused(tmp_path: Path) -> None:
    network = models.build("convnet8", dimension=3)
    HeadEncoder(network, "head", kappa_head=KappaHead(network.head.in_features)).save(tmp_path / "encoder")
    assert isinstance(lam.load(tmp_path / "encoder"), HeadEncoder)
    metadata = next((tmp_path / "encoder").glob("generation-*/encoder.json"))
    metadata.write_text(metadata.read_text().replace('"hidden": 128', '"hidden": 100000000000'))
    seal(tmp_path / "encoder", json.loads((tmp_path / "encoder" / MANIFEST).read_text())["sha256"])
    with pytest.raises(ValueError, match="is not the one that was saved: first.bias is"):
        lam.load(tmp_path / "encoder")


def test_a_recipe_of_very_many_brackets_is_refused(tmp_path: Path) -> None:
    DeterministicEncoder(models.build("convnet8", dimension=3), "head").save(tmp_path / "encoder")
    next((tmp_path / "encoder").glob("generation-*/encoder.json")).write_text("[" * 10**5)
    seal(tmp_path / "encoder", json.loads((tmp_path / "encoder" / MANIFEST).read_text())["sha256"])
    with pytest.raises(ValueError, match="is not valid JSON"):
        lam.load(tmp_path / "encoder")


def test_a_network_that_computes_its_sizes_by_tensors_is_read(tmp_path: Path) -> None:
    DeterministicEncoder(models.build("torchvision:regnet_y_400mf", dimension=3), "head").save(tmp_path / "encoder")
    assert isinstance(lam.load(tmp_path / "encoder"), DeterministicEncoder)
