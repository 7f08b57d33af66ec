"""Damaged images and copies in a user's data: each command lists, rejects or leaves them out."""

import csv
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lam.datasets import FolderImages, Splits
from lam.inputs import Preprocessing
from lam.runs.copies import find_copies
from lam.runs.data import check_files
from lam.runs.finished import Run
from lam.utils.files import read_json
from tests.runs.conftest import Lam

pytestmark = pytest.mark.filterwarnings("default")  # `lam` prints these

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


@pytest.mark.long
@pytest.mark.usefixtures("unrendered")
def test_a_run_lists_damaged_images_or_goes_on_without_them(images: Path, tmp_path: Path, lam: Lam) -> None:
    output = tmp_path / "runs" / "run"
    command = ("run", "folder", "laplace_posthoc", f"--data.root={images}", f"--output={output}", *SIZE, *QUICK)
    assert f"{output}-damaged.csv: " in lam(*command, code=1).err
    assert names(tmp_path / "runs" / "run-damaged.csv") == {"1.png", "3.png"}
    assert not output.exists()
    assert "note: 2 of 24 images" in lam(*command, "--skip-damaged").err
    assert names(output / "damaged.csv") == {"1.png", "3.png"}
    assert sum(part["items"] for part in read_json(output / "data.json")["parts"].values()) == 22
    assert "damaged.csv" in read_json(output / "MANIFEST.json")["sha256"]
    (output / "MANIFEST.json").unlink()
    for _ in range(2):  # continues on the same data, and is finished then
        lam(*command, "--skip-damaged")
    images.rename(tmp_path / "moved")
    lam(*command, "--skip-damaged", f"--data.root={tmp_path / 'moved'}")


@pytest.mark.long
@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize(("duplicates", "n_items"), [("keep", 27), ("drop", 23), ("refuse", 0)])
def test_a_run_says_what_copies_its_data_hold(
    digit_folder: Path, tmp_path: Path, lam: Lam, duplicates: str, n_items: int
) -> None:
    folder, output = Path(shutil.copytree(digit_folder, tmp_path / "images")), tmp_path / "run"
    shutil.copy(folder / "0" / "0.png", folder / "0" / "again.png")
    shutil.copy(folder / "0" / "1.png", folder / "1" / "mislabelled.png")
    shutil.copy(folder / "2" / "0.png", folder / "2" / "again.png")
    words = (f"--data.root={folder}", f"--output={output}", f"--data.duplicates={duplicates}", *SIZE, *QUICK)
    said = lam("run", "folder", "laplace_posthoc", *words, code=duplicates == "refuse").err
    assert "the data hold 3 exact copies" in said
    assert "1 under another label" in said
    if duplicates == "refuse":
        assert not output.exists()
        return
    assert sum(part["items"] for part in read_json(output / "data.json")["parts"].values()) == n_items
    assert len(rows(output / "copies.csv")) == 3
    assert "the data hold 3 exact copies" in (output / "report.html").read_text(encoding="utf-8")
    (output / "MANIFEST.json").unlink()
    assert "copies" not in lam("run", output, "--quiet").err  # continues, and says it in the report alone
    assert "the data hold 3 exact copies" in (output / "report.html").read_text(encoding="utf-8")


def test_texts_that_stand_twice_are_said(tmp_path: Path, lam: Lam) -> None:
    lines = [f"text {number} of {label},{label}" for label in "abc" for number in range(8)]
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *lines, *lines, "text 0 of a,b"]))
    words = ("--network.name=textcnn", "--data.duplicates=refuse", *QUICK)
    said = lam("run", "texts", "laplace_posthoc", f"--data.root={tmp_path / 'texts.csv'}", *words, code=1).err
    assert "the data hold 25 exact copies" in said
    assert "1 under another label" in said


@pytest.mark.long
def test_a_search_answers_for_the_others(run_copy: Path, images: Path, tmp_path: Path, lam: Lam) -> None:
    done = lam("search", run_copy, images, "--quiet", code=1)
    assert done.out.count("image: ") == 22
    assert "lam: warning: " in done.err
    assert "2 of 24 images" in done.err
    lam("search", run_copy, images, "--quiet", "-o", tmp_path / "hits.json", code=1)
    assert len(read_json(tmp_path / "hits.json")["images"]) == 22
    assert names(tmp_path / "hits-damaged.csv") == {"1.png", "3.png"}
    lam("search", run_copy, images, "--quiet", "--skip-damaged")


@pytest.mark.long
def test_embeddings_in_shards_without_damaged_images_are_indexed(
    run_copy: Path, images: Path, tmp_path: Path, lam: Lam
) -> None:
    output = tmp_path / "part.npz"
    said = lam("embed", run_copy, images, "--quiet", "-o", output, code=1).err
    assert f"2 of 24 images cannot be read, all listed in {tmp_path}/part-damaged.csv" in said
    assert not output.exists()
    shards = [tmp_path / f"{number}.npz" for number in (1, 2)]
    for number, shard in enumerate(shards, start=1):
        words = ("--shard", f"{number}/2", "-o", shard, "--skip-damaged", "--quiet")
        lam("embed", run_copy, images, *words)
    lam("index", run_copy, "--embeddings", *shards, "--quiet")
    merged = {item.id: item for item in Run(run_copy).gallery.items}
    lam("index", run_copy, images, "--quiet", code=1)
    assert names(tmp_path / "run-damaged.csv") == {"1.png", "3.png"}
    lam("index", run_copy, images, "--quiet", "--skip-damaged")
    at_once = {item.id: item for item in Run(run_copy).gallery.items}
    assert merged.keys() == at_once.keys()
    for name, item in at_once.items():
        assert np.allclose(np.frombuffer(item.vector, "f4"), np.frombuffer(merged[name].vector, "f4"), atol=1e-5)
        assert (item.label, item.path) == (merged[name].label, merged[name].path)
    listed = tmp_path / "list.csv"
    listed.write_text("\n".join(["path", *(str(path) for path in sorted(images.rglob("*.png")))]))
    lam("index", run_copy, "--list", listed, "--quiet", "--skip-damaged")
    assert len(Run(run_copy).gallery.items) == 22


@pytest.mark.long
def test_a_folder_to_calibrate_on_may_hold_damaged_images(
    run_copy: Path, images: Path, tmp_path: Path, lam: Lam
) -> None:
    words = ("--folder", images, "--target-far", "0.3", "--target-ood", "0.3", "--target-miss", "0.3", "--quiet")
    assert "2 of 24 images" in lam("calibrate", run_copy, *words, code=1).err
    assert names(tmp_path / "run-damaged.csv") == {"1.png", "3.png"}
    lam("calibrate", run_copy, *words, "--skip-damaged")


@pytest.mark.long
@pytest.mark.usefixtures("unrendered")
def test_a_run_keeps_where_its_data_are(
    digit_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lam: Lam
) -> None:
    shutil.copytree(digit_folder, tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    words = ("--output=run", *SIZE, *QUICK)
    lam("run", "folder", "laplace_posthoc", "--data.root=images", *words)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    rates = ("--target-far", "0.3", "--target-ood", "0.3", "--target-miss", "0.3", "--quiet")
    lam("calibrate", "../run", *rates)
    (tmp_path / "images").rename(tmp_path / "moved")
    assert "--data-root" in lam("calibrate", "../run", *rates, code=1).err
    lam("calibrate", "../run", *rates, "--data-root", "../moved")
    monkeypatch.chdir(tmp_path)
    lam("run", "folder", "laplace_posthoc", "--data.root=moved", *words)  # finished, on the same data
    lam("run", "folder", "laplace_posthoc", "--data.root=missing", *words, code=1)


def parted(paths: list[Path], first: int, second: int) -> tuple[FolderImages, Splits]:
    """Images of one class, and their splits, cut at two positions."""
    labels, sized = torch.zeros(len(paths), dtype=torch.int64), Preprocessing(size=(64, 64))
    part = FolderImages(paths, labels, name="images", classes=["a"], preprocessing=sized)
    return part, Splits(*(part.subset(range(*ends)) for ends in pairwise((0, first, second, len(paths)))))


def test_near_copies_are_counted(tmp_path: Path) -> None:
    for number in range(12):
        coarse = torch.rand(3, 24, 24, generator=torch.Generator().manual_seed(number))
        fine = torch.nn.functional.interpolate(coarse[None], size=(200, 200), mode="bicubic").clamp(0, 1)[0]
        image = Image.fromarray(fine.permute(1, 2, 0).mul(255).byte().numpy())
        image.save(tmp_path / f"{number}.png")
        if number < 3:
            image.resize((150, 150)).save(tmp_path / f"{number} again.jpg", quality=60)
    paths = sorted(tmp_path.iterdir())
    part, splits = parted(paths, 5, 10)
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
    _, splits = parted(paths, 20, 25)
    generator = torch.Generator().manual_seed(0)
    hashes = dict(zip(paths, torch.randint(256, (1, 32), generator=generator).repeat(30, 1).byte(), strict=True))
    for bits in hashes.values():
        bits[torch.randperm(32, generator=generator)[:8]] ^= 1  # two hashes differ in at most 16 bits
    assert len(find_copies(splits, {}, hashes)) == 29
