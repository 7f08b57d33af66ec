"""The recipe in an untrusted folder is compared with its tensors before a network takes memory."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lam
from lam import models
from lam.encoders.deterministic import DeterministicEncoder, HeadEncoder
from lam.encoders.ensemble import EnsembleEncoder
from lam.inputs import Preprocessing
from lam.models.kappa_head import KappaHead
from lam.utils.files import MANIFEST, seal
from tests.helpers import run_python


def changed(folder: Path, change: Any) -> Path:
    """The same folder with another recipe and new hashes."""
    metadata = next(folder.glob("generation-*/encoder.json"))
    content = json.loads(metadata.read_text())
    content["recipe"] = change(content["recipe"])
    metadata.write_text(json.dumps(content))
    seal(folder, json.loads((folder / MANIFEST).read_text())["sha256"])
    return folder


RECIPES: list[tuple[Any, str]] = [
    (lambda recipe: recipe | {"dimension": 10**9}, "head.bias.*.1000000000,.*.3,."),
    (lambda recipe: recipe | {"channels": 10**9}, "differs.*saved"),
    (lambda _: {"name": "torchvision:vit_h_14", "dimension": 3}, "differs.*saved"),
    (lambda _: {"name": "torchvision:regnet_x_400mf", "dimension": 3, "stem_width": 10**9}, "differs.*saved"),
    (lambda _: {"name": "torchvision:regnet_y_400mf", "dimension": 10**7}, "differs.*saved"),
    (lambda _: {"name": "torchvision:regnet_y_128gf", "dimension": 3}, "differs.*saved"),
    (lambda _: {"name": "torchvision:resnet18", "dimension": 3, "num_classes": 10**9}, "num_classes"),
    (lambda recipe: recipe | {"weights": "DEFAULT"}, "recipe.*hold weights"),
    (lambda recipe: recipe | {"weights": "/any/path.pth"}, "recipe.*hold weights"),
    (lambda recipe: recipe | {"channels": -1}, "without memory"),
    (lambda recipe: recipe | {"channels": [1] * 9}, "names and numbers"),
    (lambda recipe: [recipe] * 10**5, "100000 recipes for"),
    (lambda recipe: "convnet8", "names and numbers"),
]


@pytest.mark.parametrize(("change", "message"), RECIPES)
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


@pytest.mark.slow
def test_foreign_recipes_are_refused_within_a_quarter_of_a_gibibyte(tmp_path: Path) -> None:
    DeterministicEncoder(models.build("convnet8", dimension=3), "head").save(tmp_path / "own")
    for number, (change, _) in enumerate(RECIPES):
        changed(Path(shutil.copytree(tmp_path / "own", tmp_path / "foreign" / str(number))), change)
    code = (
        "import resource, sys, lam, torchvision, timm, lam.models\n"
        "from pathlib import Path\n"
        "lam.load(sys.argv[1])\n"
        "taken = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (taken + 2**28,) * 2)\n"
        "for folder in Path(sys.argv[2]).iterdir():\n"
        "    try:\n"
        "        lam.load(folder)\n"
        "    except ValueError as error:\n"
        "        print(type(error.__cause__).__name__)\n"
    )
    done = run_python("-c", code, tmp_path / "own", tmp_path / "foreign")
    assert len(done.stdout.splitlines()) == len(RECIPES)
    assert "MemoryError" not in done.stdout


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
    with pytest.raises(ValueError, match="differs.*first.bias"):
        lam.load(tmp_path / "encoder")


def test_a_recipe_of_very_many_brackets_is_refused(tmp_path: Path) -> None:
    DeterministicEncoder(models.build("convnet8", dimension=3), "head").save(tmp_path / "encoder")
    next((tmp_path / "encoder").glob("generation-*/encoder.json")).write_text("[" * 10**5)
    seal(tmp_path / "encoder", json.loads((tmp_path / "encoder" / MANIFEST).read_text())["sha256"])
    with pytest.raises(ValueError, match="valid JSON"):
        lam.load(tmp_path / "encoder")


def test_a_network_that_computes_its_sizes_by_tensors_is_read(tmp_path: Path) -> None:
    DeterministicEncoder(models.build("torchvision:regnet_y_400mf", dimension=3), "head").save(tmp_path / "encoder")
    assert isinstance(lam.load(tmp_path / "encoder"), DeterministicEncoder)


VALUES = (None, [1], {}, "x", 10**30, -1, math.nan)
"""Replacements for every value, in turn."""


def places(value: Any, *place: str | int) -> Iterator[tuple[str | int, ...]]:
    """The place of each value in JSON; elements of long lists are left out."""
    is_list = isinstance(value, list) and len(value) < 10
    inner: Any = value.items() if isinstance(value, dict) else enumerate(value) if is_list else ()
    for name, each in inner:
        yield (*place, name)
        yield from places(each, *place, name)


def written(content: Any, place: tuple[str | int, ...], value: Any) -> str:
    """JSON with another value at a place; `...` removes the value."""
    content = json.loads(json.dumps(content))
    inner = content
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    if value is ...:
        del inner[place[-1]]
    return json.dumps(content)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layers", ["last", "all"])
def test_an_encoder_with_any_value_exchanged_is_refused_in_words_or_works(layers: Any, tmp_path: Path) -> None:
    inputs, labels = torch.rand(24, 1, 8, 8), torch.arange(24) % 4
    read = Preprocessing(mode="L", size=(8, 8))
    options = lam.Laplace(margin=0.7, layers=layers)
    network = models.build("convnet8", dimension=3)
    encoder = lam.fit(network, [(inputs, labels)], options, preprocessing=read, progress=False)
    if layers == "last":
        encoder.tune([(inputs, labels)], n_samples=4)
    encoder.save(tmp_path / "encoder")
    metadata = next((tmp_path / "encoder").glob("generation-*/encoder.json"))
    files = json.loads((tmp_path / "encoder" / MANIFEST).read_text())["sha256"]
    content = json.loads(metadata.read_text())
    n_refused = 0
    for place in places(content):
        for value in (..., *VALUES):
            metadata.write_text(written(content, place, value))
            seal(tmp_path / "encoder", files)
            try:
                lam.load(tmp_path / "encoder").embed(inputs[:1])
            except ValueError:
                n_refused += 1
    assert n_refused > 100


@pytest.mark.parametrize("size", [10**9, [8, 10**5]])
def test_inputs_of_a_huge_size_are_refused(size: Any, tmp_path: Path) -> None:
    network = models.build("convnet8", dimension=3)
    DeterministicEncoder(network, "head", preprocessing=Preprocessing(mode="L", size=8)).save(tmp_path / "encoder")
    metadata = next((tmp_path / "encoder").glob("generation-*/encoder.json"))
    content = json.loads(metadata.read_text())
    metadata.write_text(written(content, ("preprocessing", "size"), size))
    seal(tmp_path / "encoder", json.loads((tmp_path / "encoder" / MANIFEST).read_text())["sha256"])
    with pytest.raises(ValueError, match="size.*8,192"):
        lam.load(tmp_path / "encoder")


def test_a_recipe_of_sentences_reads_files_of_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("sentence_transformers")
    asked: list[dict[str, Any]] = []

    def absent(*_: Any, **options: Any) -> Any:
        asked.append(options)
        raise OSError("there is no such network")

    monkeypatch.setattr(library, "SentenceTransformer", absent)
    recipe = {"name": "sentence-transformers:nobody/huge", "dimension": 3}
    state = {"head.weight": torch.zeros(3, 4)}
    with pytest.raises(ValueError, match="no network 'nobody/huge'"):
        models.rebuild({**recipe, "sha256": "0" * 64}, state)
    with pytest.raises(ValueError, match="no SHA-256"):
        models.rebuild(recipe, state)
    assert [options["local_files_only"] for options in asked] == [True]
