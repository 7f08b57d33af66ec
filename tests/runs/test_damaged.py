"""Damaged images and copies among what a user brings: listed, refused or left out by each command."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lam.cli import main
from lam.datasets import FolderImages, Splits
from lam.inputs import Preprocessing
from lam.runs.copies import find_copies
from lam.runs.data import check_files
from lam.runs.finished import Run
from lam.utils.files import read_json

pytestmark = pytest.mark.filterwarnings("default")  # which `lam` prints

SIZE = ("--data.options={preprocessing: {mode: L, size: 8}}", "--network.name=convnet8", "--network.dimension=4")
QUICK = ("--training.epochs=1", "--evaluation.n_samples=4", "--evaluation.corrupted=0", "--data.strangers=0", "--quiet")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def names(listed: Path) -> set[str]:
    return {Path(row["path"]).name for row in rows(listed)}


@pytest.fixture
def images(digit_folder: Path, tmp_path: Path) -> Path:
    """Images of three classes, two of them damaged."""
    folder = Path(shutil.copytree(digit_folder, tmp_path / "images"))
    (folder / "0" / "1.png").write_bytes(b"milk, bread")
    (folder / "2" / "3.png").write_bytes((folder / "2" / "3.png").read_bytes()[:50])
    return folder


def lam(*words: object) -> int:
    return main([str(word) for word in words])


@pytest.mark.long
@pytest.mark.usefixtures("unrendered")
def test_a_run_lists_damaged_images_or_goes_on_without_them(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "runs" / "run"
    command = ("run", "folder", "laplace_posthoc", f"--data.root={images}", f"--output={output}", *SIZE, *QUICK)
    assert lam(*command) == 1
    assert f"2 of 24 images cannot be read, all listed in {output}-damaged.csv: " in capsys.readouterr().err
    assert names(tmp_path / "runs" / "run-damaged.csv") == {"1.png", "3.png"}
    assert not output.exists()
    assert lam(*command, "--skip-damaged") == 0
    assert "note: 2 of 24 images cannot be read" in capsys.readouterr().err
    assert names(output / "damaged.csv") == {"1.png", "3.png"}
    assert sum(part["items"] for part in read_json(output / "data.json")["parts"].values()) == 22
    assert "damaged.csv" in read_json(output / "MANIFEST.json")["sha256"]
    (output / "MANIFEST.json").unlink()
    assert lam(*command, "--skip-damaged") == 0  # continues, on the same data
    assert lam(*command, "--skip-damaged") == 0  # is finished
    images.rename(tmp_path / "moved")
    assert lam(*command, "--skip-damaged", f"--data.root={tmp_path / 'moved'}") == 0


@pytest.mark.long
@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize(("duplicates", "n_items"), [("keep", 27), ("drop", 23), ("refuse", 0)])
def test_a_run_says_what_copies_its_data_hold(
    digit_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], duplicates: str, n_items: int
) -> None:
    folder, output = Path(shutil.copytree(digit_folder, tmp_path / "images")), tmp_path / "run"
    shutil.copy(folder / "0" / "0.png", folder / "0" / "again.png")
    shutil.copy(folder / "0" / "1.png", folder / "1" / "mislabelled.png")
    shutil.copy(folder / "2" / "0.png", folder / "2" / "again.png")
    words = (f"--data.root={folder}", f"--output={output}", f"--data.duplicates={duplicates}", *SIZE, *QUICK)
    assert lam("run", "folder", "laplace_posthoc", *words) == (duplicates == "refuse")
    said = capsys.readouterr().err
    assert "the data hold 3 exact copies" in said
    assert "1 under another label" in said
    if duplicates == "refuse":
        assert not output.exists()
        return
    assert sum(part["items"] for part in read_json(output / "data.json")["parts"].values()) == n_items
    assert len(rows(output / "copies.csv")) == 3
    assert "the data hold 3 exact copies" in (output / "report.html").read_text(encoding="utf-8")
    (output / "MANIFEST.json").unlink()
    assert lam("run", output, "--quiet") == 0  # continues, and says it in the report alone
    assert "copies" not in capsys.readouterr().err
    assert "the data hold 3 exact copies" in (output / "report.html").read_text(encoding="utf-8")


def test_texts_that_stand_twice_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"text {number} of {label},{label}" for label in "abc" for number in range(8)]
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *lines, *lines, "text 0 of a,b"]))
    words = ("--network.name=textcnn", "--data.duplicates=refuse", *QUICK)
    assert lam("run", "texts", "laplace_posthoc", f"--data.root={tmp_path / 'texts.csv'}", *words) == 1
    said = capsys.readouterr().err
    assert "the data hold 25 exact copies" in said
    assert "1 under another label" in said


@pytest.mark.long
def test_a_search_answers_for_the_others(
    run_copy: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lam("search", run_copy, images, "--quiet") == 1
    done = capsys.readouterr()
    assert done.out.count("image: ") == 22
    assert "lam: warning: " in done.err
    assert "2 of 24 images cannot be read: " in done.err
    assert lam("search", run_copy, images, "--quiet", "-o", tmp_path / "hits.json") == 1
    assert len(read_json(tmp_path / "hits.json")["images"]) == 22
    assert names(tmp_path / "hits-damaged.csv") == {"1.png", "3.png"}
    assert lam("search", run_copy, images, "--quiet", "--skip-damaged") == 0


@pytest.mark.long
def test_embeddings_in_shards_without_damaged_images_are_indexed(
    run_copy: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "part.npz"
    assert lam("embed", run_copy, images, "--quiet", "-o", output) == 1
    assert f"2 of 24 images cannot be read, all listed in {tmp_path}/part-damaged.csv" in capsys.readouterr().err
    assert not output.exists()
    shards = [tmp_path / f"{number}.npz" for number in (1, 2)]
    for number, shard in enumerate(shards, start=1):
        words = ("--shard", f"{number}/2", "-o", shard, "--skip-damaged", "--quiet")
        assert lam("embed", run_copy, images, *words) == 0
    assert lam("index", run_copy, "--embeddings", *shards, "--quiet") == 0
    merged = {item.id: item for item in Run(run_copy).gallery.items}
    assert lam("index", run_copy, images, "--quiet") == 1
    assert names(tmp_path / "run-damaged.csv") == {"1.png", "3.png"}
    assert lam("index", run_copy, images, "--quiet", "--skip-damaged") == 0
    at_once = {item.id: item for item in Run(run_copy).gallery.items}
    assert merged.keys() == at_once.keys()
    for name, item in at_once.items():
        assert np.allclose(np.frombuffer(item.vector, "f4"), np.frombuffer(merged[name].vector, "f4"), atol=1e-5)
        assert (item.label, item.path) == (merged[name].label, merged[name].path)
    listed = tmp_path / "list.csv"
    listed.write_text("\n".join(["path", *(str(path) for path in sorted(images.rglob("*.png")))]))
    assert lam("index", run_copy, "--list", listed, "--quiet", "--skip-damaged") == 0
    assert len(Run(run_copy).gallery.items) == 22


@pytest.mark.long
def test_a_folder_to_calibrate_on_may_hold_damaged_images(
    run_copy: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--folder", images, "--target-far", "0.3", "--target-ood", "0.3", "--target-miss", "0.3", "--quiet")
    assert lam("calibrate", run_copy, *words) == 1
    assert "2 of 24 images cannot be read, all listed in" in capsys.readouterr().err
    assert names(tmp_path / "run-damaged.csv") == {"1.png", "3.png"}
    assert lam("calibrate", run_copy, *words, "--skip-damaged") == 0


@pytest.mark.long
@pytest.mark.usefixtures("unrendered")
def test_a_run_keeps_where_its_data_are(
    digit_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(digit_folder, tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    words = ("--output=run", *SIZE, *QUICK)
    assert lam("run", "folder", "laplace_posthoc", "--data.root=images", *words) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    rates = ("--target-far", "0.3", "--target-ood", "0.3", "--target-miss", "0.3", "--quiet")
    assert lam("calibrate", "../run", *rates) == 0
    (tmp_path / "images").rename(tmp_path / "moved")
    assert lam("calibrate", "../run", *rates) == 1
    assert "--data-root" in capsys.readouterr().err
    assert lam("calibrate", "../run", *rates, "--data-root", "../moved") == 0
    monkeypatch.chdir(tmp_path)
    assert lam("run", "folder", "laplace_posthoc", "--data.root=moved", *words) == 0  # finished, on the same data
    assert lam("run", "folder", "laplace_posthoc", "--data.root=missing", *words) == 1


def test_near_copies_are_counted(tmp_path: Path) -> None:
    for number in range(12):
        coarse = torch.rand(3, 24, 24, generator=torch.Generator().manual_seed(number))
        fine = torch.nn.functional.interpolate(coarse[None], size=(200, 200), mode="bicubic").clamp(0, 1)[0]
        image = Image.fromarray(fine.permute(1, 2, 0).mul(255).byte().numpy())
        image.save(tmp_path / f"{number}.png")
        if number < 3:
            image.resize((150, 150)).save(tmp_path / f"{number} again.jpg", quality=60)
    paths = sorted(tmp_path.iterdir())
    labels, sized = torch.zeros(len(paths), dtype=torch.int64), Preprocessing(size=(64, 64))
    part = FolderImages(paths, labels, name="images", classes=["a"], preprocessing=sized)
    splits = Splits(part.subset(range(5)), part.subset(range(5, 10)), part.subset(range(10, 15)))
    hashes, _ = check_files([part], progress=False)
    found = {
        frozenset((Path(copy.path).stem, Path(copy.path_of_original).stem)) for copy in find_copies(splits, {}, hashes)
    }
    assert found == {frozenset((str(number), f"{number} again")) for number in range(3)}


@pytest.mark.parametrize("block", [7, 256])
def test_each_of_many_near_copies_is_found(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lam.runs.copies._BLOCK", block)
    paths = [tmp_path / f"{number}.png" for number in range(30)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]))
    labels, sized = torch.zeros(30, dtype=torch.int64), Preprocessing(size=(64, 64))
    part = FolderImages(paths, labels, name="images", classes=["a"], preprocessing=sized)
    splits = Splits(part.subset(range(20)), part.subset(range(20, 25)), part.subset(range(25, 30)))
    generator = torch.Generator().manual_seed(0)
    hashes = dict(zip(paths, torch.randint(256, (1, 32), generator=generator).repeat(30, 1).byte(), strict=True))
    for bits in hashes.values():
        bits[torch.randperm(32, generator=generator)[:8]] ^= 1  # two hashes differ in at most 16 bits
    assert len(find_copies(splits, {}, hashes)) == 29
