"""Damaged image files: found in one pass, listed, and left out or raised as an error."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from lam.datasets import FolderImages
from lam.gallery.embed import (
    DamagedFiles,
    ImageBatches,
    path_key,
    read_damaged,
    read_images,
    without_damaged,
    write_damaged,
)
from lam.inputs import Preprocessing
from lam.utils.notes import Note

SIZED = Preprocessing(size=(8, 8))


def _files(folder: Path, n: int = 6) -> list[Path]:
    files = [folder / f"{number}.png" for number in range(n)]
    for number, path in enumerate(files):
        Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(path)
    return files


def test_all_damaged_files_are_found_in_one_pass(tmp_path: Path) -> None:
    files = _files(tmp_path)
    files[1].write_bytes(b"milk, bread")
    files[4].write_bytes(files[4].read_bytes()[:40])
    files.append(tmp_path / "gone.png")
    made, damaged = read_images([(path, SIZED) for path in files], lambda path, image: (path.name, image.shape))
    assert made == [(f"{number}.png", (3, 8, 8)) for number in (0, 2, 3, 5)]
    assert list(damaged) == [files[1], files[4], files[6]]
    assert "is not an image" in damaged[files[1]]
    listed = tmp_path / "lists" / "damaged.csv"
    said = "3 of 7 images.*damaged.csv.*--skip-damaged"
    with pytest.raises(ValueError, match=said):
        DamagedFiles(listed, reasons=damaged).settle(len(files))
    assert read_damaged(listed) == {str(path) for path in damaged}
    with pytest.warns(Note, match="3 of 7 images.*left out"):
        DamagedFiles(skip=True, reasons=damaged).settle(len(files))
    with pytest.raises(ValueError, match="3 of 3 images"):
        DamagedFiles(skip=True, reasons=damaged).settle(3)


def test_nothing_damaged_is_nothing_refused(tmp_path: Path) -> None:
    DamagedFiles(tmp_path / "damaged.csv").settle(3)
    assert read_damaged(tmp_path / "damaged.csv") == frozenset()
    assert not (tmp_path / "damaged.csv").exists()


def test_the_others_stay_whatever_names_hold(tmp_path: Path) -> None:
    files = [*_files(tmp_path, 3), tmp_path / 'a "comma", \udcff\n.png']
    items = FolderImages(files, torch.arange(4) % 2, name="images", classes=["a", "b"], preprocessing=SIZED)
    write_damaged({files[0]: "no", files[3]: "one\ntwo"}, tmp_path / "damaged.csv")
    left = without_damaged(items, read_damaged(tmp_path / "damaged.csv"))
    assert list(left.files) == files[1:3]
    assert left.labels.tolist() == [1, 0]
    with pytest.raises(ValueError, match="4 images.*damaged"):
        without_damaged(items, frozenset(map(path_key, files)))


def test_a_damaged_file_that_is_listed_twice_is_the_only_one(tmp_path: Path) -> None:
    (file := tmp_path / "bad.png").write_bytes(b"milk, bread")
    with pytest.raises(ValueError, match="1 of 1 images"):
        list(ImageBatches([file, file], SIZED, DamagedFiles(skip=True)))


@pytest.mark.parametrize(
    ("skip", "goes_on", "sizes"),
    [(True, None, [63, 64, 2]), (False, None, []), (False, True, [63, 64, 2])],
    ids=["skip", "refuse", "refuse at the end"],
)
def test_batches_go_on_after_a_damaged_file_or_the_rest_is_read_alone(
    tmp_path: Path, skip: bool, goes_on: bool | None, sizes: list[int]
) -> None:
    files = _files(tmp_path, 6) * 22
    files[3], files[131], files[130] = tmp_path / "gone.png", tmp_path / "gone too.png", tmp_path / "and this.png"
    damaged, read = DamagedFiles(skip=skip), list[int]()
    batches = ImageBatches(files, SIZED, damaged, goes_on=goes_on)
    with pytest.warns(Note) if skip else pytest.raises(ValueError, match="3 of 9 images"):
        read.extend(len(batch) for batch in batches)
    assert (len(batches), read) == (3, sizes)
    assert batches.read == [path for path in files if path not in damaged.reasons][: sum(read)]
    assert set(damaged.reasons) == {files[3], files[131], files[130]}
