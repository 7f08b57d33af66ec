"""Runs on a folder of images: end to end, and errors before any work."""

import io
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lam.methods import Simclr
from lam.runs.config import DataConfig, NetworkConfig, OodConfig, RunConfig, TrainingConfig
from lam.runs.config_files import load_config
from lam.runs.run import run
from lam.runs.search import search
from lam.utils.files import read_json


def folder_config(root: Path, output: Path, ood: list[OodConfig]) -> RunConfig:
    """`folder laplace_posthoc`, on small images and by a small network."""
    options = {"preprocessing": {"mode": "RGB", "size": [8, 8]}}
    short = [f"--output={output}", "--training.epochs=1", "--network.name=resnet18"]
    config = load_config("folder laplace_posthoc", short)
    data, network = DataConfig("folder", str(root), options, ood), NetworkConfig("convnet8", 3, options={"channels": 3})
    return replace(config, data=data, network=network, evaluation=replace(config.evaluation, n_samples=4))


@pytest.mark.long
def test_a_folder_of_images_end_to_end(digit_folder: Path, tmp_path: Path) -> None:
    noise = tmp_path / "noise"
    for name in ("first", "second"):
        (noise / name).mkdir(parents=True)
        for number in range(3):
            pixels = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(noise / name / f"{number}.png")
    ood = [OodConfig("folder", str(noise / name), title=name) for name in ("first", "second")]
    result = run(folder_config(digit_folder, tmp_path / "run", ood), progress=False)
    assert {"recall@1", "auroc", "auroc@second"} <= result.metrics.keys()
    (items,) = search(result.folder, digit_folder / "1" / "0.png", k=3).items
    assert all(Path(item.path).is_file() and item.label in "012" for item in items)


@pytest.mark.long
@pytest.mark.usefixtures("unrendered")
def test_a_run_without_ood_set_and_on_changed_data(digit_folder: Path, tmp_path: Path) -> None:
    images = Path(shutil.copytree(digit_folder, tmp_path / "images"))
    config = folder_config(images, tmp_path / "run", [])
    result = run(config, progress=False)
    assert "auroc" not in result.metrics
    page = result.report.read_text(encoding="utf-8")
    assert "Sparsification" in page
    assert "Out-of-distribution detection" not in page
    (images / "0" / "0.png").rename(images / "0" / "new.png")
    (result.folder / "MANIFEST.json").unlink()
    with pytest.raises(ValueError, match=r"data changed.*\(.*\): .*--output"):
        run(config, progress=False)


@pytest.mark.long
@pytest.mark.usefixtures("unrendered")
def test_images_without_classes_are_learned_from_and_searched(digit_folder: Path, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, path in enumerate(sorted(digit_folder.rglob("*.png"))):
        shutil.copy(path, flat / f"{number}.png")
    config = folder_config(flat, tmp_path / "run", [])
    with pytest.raises(ValueError, match="no two images.*train split"):
        run(config, progress=False)
    assert not (tmp_path / "run").exists()
    config = replace(config, method=Simclr(), training=TrainingConfig(epochs=2))
    with pytest.warns(UserWarning, match="no two images.*label: .*`lam index RUN DIR`"):
        result = run(config, progress=False)
    assert (result.metrics["recall@1"], result.metrics["ausc"]) == (None, None)
    assert read_json(result.folder / "training.json")["network"]["best_epoch"] == 2
    (items,) = search(result.folder, flat / "3.png", k=3).items
    assert all(Path(item.path) == flat / item.label for item in items)


def test_a_file_that_cannot_be_read_is_named_before_any_work(digit_folder: Path, tmp_path: Path) -> None:
    images = Path(shutil.copytree(digit_folder, tmp_path / "images"))
    bad = images / "2" / "bad.png"
    whole = (images / "2" / "0.png").read_bytes()
    icon, floating = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (16, 16)).save(icon, "ICO")
    Image.new("F", (8, 8)).save(floating, "TIFF")
    for content, reason in (
        (b"milk, bread", "not an image; "),
        (icon.getvalue(), "not an image; "),
        (whole[: len(whole) // 2], "as an image: "),
        (floating.getvalue(), "mode F"),
    ):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=f"2/bad.png.*{reason}"):
            run(folder_config(images, tmp_path / "run", []), progress=False)
        assert not (tmp_path / "run").exists()


def test_the_check_of_many_files_shows_how_far_it_is(
    digit_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lam.gallery.embed.MANY_FILES", 10)
    monkeypatch.setattr("lam.runs.plan.Plan.start", lambda *_: pytest.fail("the files are read"))
    for progress in (True, False):
        with pytest.raises(pytest.fail.Exception, match="files.*read"):
            run(folder_config(digit_folder, tmp_path / "run", []), progress=progress)
        assert ("checking: 100%" in capsys.readouterr().err) == progress


@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_a_split_in_which_nothing_can_be_found_is_refused(part: str, digit_folder: Path, tmp_path: Path) -> None:
    images = tmp_path / "images"
    for name in ("train", "validation", "test"):
        for label in range(5):
            (images / name / str(label)).mkdir(parents=True)
            for number in range(1 if name == part else 2):
                shutil.copy(digit_folder / "0" / "0.png", images / name / str(label) / f"{number}.png")
    with pytest.raises(ValueError, match=f"no two images.*{part} split"):
        run(folder_config(images, tmp_path / "run", []), progress=False)
    assert not (tmp_path / "run").exists()
