"""Copies among the data of a run: exact and near ones, of images and of texts."""

import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from lam.datasets import FolderImages, Splits, Texts
from lam.datasets.splits import hold_out_classes
from lam.inputs import Preprocessing
from lam.runs.copies import (
    check_copies,
    find_copies,
    perceptual_hash,
    read_copies,
    remark_on,
    without_copies,
    write_copies,
)
from lam.runs.data import check_files

SIZED = Preprocessing(size=(64, 64))


def _image(seed: int) -> Image.Image:
    coarse = torch.rand(1, 24, 24, generator=torch.Generator().manual_seed(seed))
    smooth = (
        torch.nn.functional.interpolate(coarse[None], size=(96, 96), mode="bicubic").clamp(0, 1)[0].expand(3, -1, -1)
    )
    return Image.fromarray(smooth.permute(1, 2, 0).mul(255).byte().numpy())


def _splits(folder: Path, parts: dict[str, list[tuple[str, str]]]) -> Splits:
    """Splits of image files by name and label."""
    made = {}
    for part, named in parts.items():
        made[part] = _images([folder / name for name, _ in named], ["ab".index(label) for _, label in named])
    return Splits(**made)


def _images(paths: list[Path], labels: list[int]) -> FolderImages:
    return FolderImages(paths, torch.tensor(labels), name="images", classes=["a", "b"], preprocessing=SIZED)


@pytest.fixture
def copied(tmp_path: Path) -> Splits:
    for number in range(6):
        _image(number).save(tmp_path / f"{number}.png")
    shutil.copy(tmp_path / "0.png", tmp_path / "same.png")
    shutil.copy(tmp_path / "1.png", tmp_path / "mislabelled.png")
    _image(2).resize((150, 150)).save(tmp_path / "near.jpg", quality=60)
    return _splits(
        tmp_path,
        {
            "train": [("same.png", "a"), ("mislabelled.png", "b"), ("near.jpg", "a"), ("3.png", "b")],
            "validation": [("1.png", "a"), ("4.png", "b")],
            "test": [("0.png", "a"), ("2.png", "a"), ("5.png", "b")],
        },
    )


def test_exact_copies_are_found_with_their_originals(copied: Splits, tmp_path: Path) -> None:
    copies = find_copies(copied, {}, {})
    found = {(copy.kind, Path(copy.path).name, Path(copy.path_of_original).name) for copy in copies}
    assert found == {("exact", "same.png", "0.png"), ("exact", "mislabelled.png", "1.png")}
    remark = remark_on(copies, "keep")
    assert remark is not None
    assert "2 exact copies (2 in another split, 1 under another label)" in remark
    assert "hold 1 exact copy (1 in another split)" in str(remark_on(copies[:1], "keep"))
    write_copies(copies, tmp_path)
    assert read_copies(tmp_path) == copies
    with pytest.raises(ValueError, match=r"2 exact copies .*same.png \(train\) of .*0.png"):
        check_copies(copies, "refuse")


def test_dropping_leaves_one_of_each_content_and_none_of_a_contradiction(copied: Splits) -> None:
    splits, _, copies = without_copies(copied, {})
    assert [path.name for path in splits.train.files] == ["near.jpg", "3.png"]
    assert [path.name for path in splits.validation.files] == ["4.png"]
    assert [path.name for path in splits.test.files] == ["0.png", "2.png", "5.png"]
    assert len(copies) == 2
    assert without_copies(splits, {})[2] == []


def test_copies_in_an_ood_set_are_counted_apart_and_dropped(copied: Splits, tmp_path: Path) -> None:
    _image(7).save(tmp_path / "stranger.png")
    paths = [tmp_path / name for name in ("5.png", "stranger.png", "stranger.png", "near.jpg")]
    ood = {"others": _images(paths, [0] * 4)}
    hashes, _ = check_files([*copied.parts().values(), *ood.values()], progress=False)
    copies = find_copies(copied, ood, hashes)
    outside = [(copy.kind, Path(copy.path).name, copy.part_of_original) for copy in copies if "OOD" in copy.part]
    assert outside == [("exact", "5.png", "test"), ("exact", "near.jpg", "train")]
    remark = remark_on(copies, "keep")
    assert remark is not None
    assert "4 exact copies (2 in another split, 1 under another label, 2 in an OOD set)" in remark
    assert "AUROC" in remark
    splits, kept, _ = without_copies(copied, ood)
    assert [path.name for path in kept["others"].files] == ["stranger.png", "stranger.png"]
    assert splits.test.files == without_copies(copied, {})[0].test.files


def test_texts_are_compared_as_they_are_read_and_answers_are_not() -> None:
    asked = torch.tensor([True, True, False])
    parts = {}
    for name in ("train", "validation", "test"):
        texts = [f"where is {name}?", "where is my parcel?", "On its way."]
        parts[name] = Texts(texts, torch.tensor([0, 1, 1]), is_query=asked)
    copies = find_copies(Splits(**parts, answers=True), {}, {})
    assert [(copy.part, copy.part_of_original) for copy in copies] == [("validation", "test"), ("train", "test")]


def test_texts_of_strangers_are_compared() -> None:
    texts = (["one", "two", "one", "three"], ["four", "five"], ["six", "seven"])
    parts = [Texts(part, torch.arange(len(part)) // (len(part) // 2), classes=["a", "b"]) for part in texts]
    (copy,) = find_copies(hold_out_classes(Splits(*parts), 0.5, seed=0), {}, {})
    assert (copy.part, copy.part_of_original) == ("strangers", "train")


def test_small_and_even_images_have_no_perceptual_hash() -> None:
    assert perceptual_hash(SIZED, torch.rand(3, 16, 16)) is None
    assert perceptual_hash(SIZED, torch.full((3, 64, 64), 0.5)) is None


def test_without_copies_nothing_is_said(tmp_path: Path) -> None:
    assert remark_on([], "keep") is None
    assert read_copies(tmp_path) == []
    check_copies([], "refuse")
