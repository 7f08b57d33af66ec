"""Embedding a folder in shards, and merging them: the same index as from the folder at once."""

import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lam.cli import main
from lam.gallery.embed import embed_items
from lam.gallery.shards import Shard, merge_embeddings
from lam.runs import index as gallery
from lam.runs.finished import Run
from lam.utils.files import CorruptFileError
from tests.conftest import FinishedRun

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def key(finished_run: FinishedRun) -> str:
    return Run(finished_run.folder).fingerprint


@pytest.fixture(scope="module")
def parts(finished_run: FinishedRun, digit_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three shards of a folder that holds one image twice."""
    folder = tmp_path_factory.mktemp("parts")
    paths = [folder / f"part-{number}.npz" for number in (1, 2, 3)]
    for number, path in enumerate(paths, 1):
        given = [str(finished_run.folder), str(digit_folder), "--shard", f"{number}/3", "-o", str(path), "--quiet"]
        assert main(["embed", *given]) == 0
    return paths


def rewritten(path: Path, target: Path, **changes: object) -> Path:
    with np.load(path) as found:
        np.savez(target, **{**dict(found), **changes})
    return target


@pytest.mark.parametrize(("total", "count"), [(1, 1), (7, 1), (7, 2), (7, 7), (24, 5), (1000, 13)])
def test_every_image_is_in_exactly_one_shard(total: int, count: int) -> None:
    found = torch.cat([Shard(number, count).positions(total) for number in range(1, count + 1)])
    assert found.sort().values.tolist() == list(range(total))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("0/3", "shard i/n.*0/3"),
        ("4/3", "shard i/n.*4/3"),
        ("1/0", "i from 1 to n"),
        ("3", "shard must be i/n.*1/4.*'3'"),
        ("1/-3", "must be i/n"),
        ("1 / 3", "must be i/n"),
        ("١/٣", "must be i/n"),
    ],
)
def test_bad_shards_are_refused(text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Shard.parse(text)


def test_a_shard_without_an_image_is_refused(run_copy: Path, digit_folder: Path) -> None:
    with pytest.raises(ValueError, match="25/30 of 24 images"):
        embed_items(Run(run_copy).encoder, digit_folder, shard=Shard(25, 30))


def test_merged_shards_give_the_index_of_the_folder(run_copy: Path, digit_folder: Path, parts: list[Path]) -> None:
    whole = gallery.index_images(run_copy, digit_folder, progress=False)
    shuffled = [parts[1], parts[2], parts[0]]
    assert main(["index", str(run_copy), "--quiet", "--embeddings", *map(str, shuffled)]) == 0
    merged = Run(run_copy).gallery
    found = sorted(merged.items, key=lambda item: item.id)
    for item, expected in zip(found, sorted(whole.items, key=lambda item: item.id), strict=True):
        same = replace(item, vector=expected.vector, kappa=expected.kappa, thumbnail=expected.thumbnail)
        assert same == expected
        assert item.kappa == pytest.approx(expected.kappa, rel=1e-4)
    hits = merged.search(whole.embeddings, k=1)
    torch.testing.assert_close(hits.scores, torch.ones(24, 1))


def test_names_of_files_that_are_no_unicode_are_kept_and_shown(
    finished_run: FinishedRun, digit_folder: Path, tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "images").mkdir()
    image = tmp_path / "images" / os.fsdecode(b"caf\xe9.png")
    shutil.copy(next(digit_folder.rglob("*.png")), image)
    run, images, output = str(finished_run.folder), str(image.parent), tmp_path / "embeddings.npz"
    assert main(["embed", run, images, "-o", str(output), "--quiet"]) == 0
    (source,), _ = merge_embeddings([output], encoder=key)
    assert source.path == str(image)
    assert main(["search", run, images, "-o", str(tmp_path / "hits.csv"), "--quiet"]) == 0
    assert f"{image.parent}/caf?.png," in (tmp_path / "hits.csv").read_text()
    capsys.readouterr()
    assert main(["search", run, str(image), images, "--quiet"]) == 0
    assert rf"image: {image.parent}/caf\udce9.png" in capsys.readouterr().out


def test_a_file_of_the_whole_folder_is_indexed_too(run_copy: Path, digit_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "all.npz"
    assert main(["embed", str(run_copy), str(digit_folder), "-o", str(output), "--quiet"]) == 0
    made = gallery.index_images(run_copy, [output], fuse=True, progress=False)
    assert [(item.label, item.images) for item in made.items] == [("0", 8), ("1", 8), ("2", 8)]


def test_parts_that_make_no_whole_are_refused(parts: list[Path], key: str, tmp_path: Path) -> None:
    def changed(**changes: object) -> Path:
        return rewritten(parts[1], tmp_path / "other.npz", **changes)

    first = parts[:1]
    with pytest.raises(ValueError, match="other.npz.*format 99.*version.*1"):
        merge_embeddings([*first, changed(format=np.array(99))], encoder=key)
    with pytest.raises(ValueError, match="2 of 3 shards.*missing.*2/3"):
        merge_embeddings(first, encoder=key)
    with pytest.raises(ValueError, match="shard 2/3 is given twice: .*part-2.npz and .*other.npz"):
        merge_embeddings([*parts, changed()], encoder=key)
    with pytest.raises(ValueError, match="part-1.npz.*another network"):
        merge_embeddings(parts, encoder="other")
    with pytest.raises(ValueError, match="other.npz and .*part-1.npz.*folders"):
        merge_embeddings([*first, changed(listing=np.array("other"))], encoder=key)
    with pytest.raises(ValueError, match="other.npz is shard 1/1, .*part-1.npz.*3"):
        merge_embeddings(
            [*first, changed(shard=np.array([1, 1]), total=np.array(8), positions=np.arange(8))], encoder=key
        )
    with pytest.raises(ValueError, match="other.npz has dimension 2, .*part-1.npz 3: embed again"):
        merge_embeddings([*first, changed(mean=np.ones((8, 2), np.float32)), parts[2]], encoder=key)
    with pytest.raises(ValueError, match="no file.*none.npz"):
        merge_embeddings([tmp_path / "none.npz"], encoder=key)
    with pytest.raises(ValueError, match="merging.*file"):
        merge_embeddings([], encoder=key)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"kappa": np.ones(7, np.float32)}, r"kappa.*\(7,\).*float32"),
        ({"ids": np.ones(8)}, r"ids.*\(8,\).*float64"),
        ({"mean": np.ones(8, np.float32)}, r"mean.*\(8,\)"),
        ({"positions": np.arange(8)}, "images of shard 2/3"),
        ({"labels": np.array([None] * 8)}, "truncated, altered.*pickle"),
    ],
)
def test_files_that_cannot_be_are_named(parts: list[Path], key: str, tmp_path: Path, changes: dict, match: str) -> None:
    path = rewritten(parts[1], tmp_path / "other.npz", **changes)
    with pytest.raises(CorruptFileError, match=f"other.npz.*{match}"):
        merge_embeddings([path], encoder=key)


def test_flipped_and_cut_files_are_caught(parts: list[Path], key: str, tmp_path: Path) -> None:
    """An altered file raises an error, or gives the same result if the archive ignores the altered bytes."""
    draw, content, path = random.Random(0), parts[0].read_bytes(), tmp_path / "other.npz"
    whole = merge_embeddings(parts, encoder=key)[1].mean
    for number in range(200):
        altered = bytearray(content)
        if number % 2:
            del altered[draw.randrange(len(altered)) :]
        else:
            altered[draw.randrange(len(altered))] ^= 1 << draw.randrange(8)
        path.write_bytes(altered)
        try:
            assert torch.equal(merge_embeddings([path, *parts[1:]], encoder=key)[1].mean, whole)
        except CorruptFileError as error:
            assert "other.npz" in str(error)  # noqa: PT017 - either outcome is right


def test_values_that_are_not_finite_are_refused(run_copy: Path, parts: list[Path], tmp_path: Path) -> None:
    before = len(Run(run_copy).gallery)
    path = rewritten(parts[1], tmp_path / "other.npz", kappa=np.full(8, np.nan, np.float32))
    with pytest.raises(ValueError, match="kappa.*nan.*index 1"):
        gallery.index_images(run_copy, [parts[0], path, parts[2]], progress=False)
    assert len(Run(run_copy).gallery) == before


@pytest.mark.long
def test_processes_of_torchrun_share_a_folder_out(run_copy: Path, digit_folder: Path, tmp_path: Path, key: str) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "lam")
    given = ("embed", str(run_copy), str(digit_folder), "-o", str(tmp_path / "part.npz"), "--quiet")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*launcher, *given], capture_output=True, text=True, check=False, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    files = sorted(tmp_path.glob("part*.npz"))
    assert [file.name for file in files] == ["part-1-of-2.npz", "part-2-of-2.npz"]
    entries, embeddings = merge_embeddings(files, encoder=key)
    assert len(entries) == len(embeddings) == 24


def test_a_shard_of_a_process_is_not_cut_again(
    run_copy: Path, digit_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lam.utils.distributed.world_size", lambda: 2)
    output = str(run_copy.parent / "part.npz")
    assert main(["embed", str(run_copy), str(digit_folder), "-o", output, "--shard", "1/2"]) == 1
    assert "--shard" in capsys.readouterr().err
