"""Folders of images with a COCO file, as labelling tools export them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lam import datasets
from lam.inputs.preprocessing import Preprocessing
from lam.utils.notes import Note

SMALL = Preprocessing(size=(8, 8))
CATEGORIES = [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}]


def coco(file: Path, beside: Path, *, name: str = "{}.png", n: int = 20, **changed: Any) -> Path:
    """`n` images, and a COCO file with one or several annotations of each image."""
    for folder in (file.parent, beside):
        folder.mkdir(parents=True, exist_ok=True)
    for number in range(n):
        Image.new("L", (9, 9), number).save(beside / f"{number}.png")
    content = {
        "images": [{"id": number, "file_name": name.format(number)} for number in range(n)],
        "annotations": [
            {"image_id": number, "category_id": (3, 7)[number % 2], "bbox": [0, 0, 4, 4]}
            for number in (*range(n), 0, 1)
        ],
        "categories": CATEGORIES,
    }
    file.write_text(json.dumps({**content, **changed}))
    return file


@pytest.mark.parametrize(
    ("file", "images", "name"),
    [
        ("annotations/instances_default.json", "images/default", "{}.png"),
        ("annotations/instances_default.json", "images", "{}.png"),
        ("result.json", "images", "images/{}.png"),
        ("result.json", "images", "images\\{}.png"),
        ("_annotations.coco.json", ".", "{}.png"),
        ("export/annotations/instances_default.json", "export/images", "{}.png"),
    ],
    ids=["CVAT", "CVAT, older", "Label Studio", "Windows", "Roboflow", "unpacked"],
)
@pytest.mark.filterwarnings("ignore:.* holds only the folder export")
def test_categories_are_classes(tmp_path: Path, file: str, images: str, name: str) -> None:
    coco(tmp_path / file, tmp_path / images, name=name)
    parts = datasets.load("folder", root=tmp_path, preprocessing=SMALL).parts()
    assert [len(part) for part in parts.values()] == [12, 4, 4]
    for part in parts.values():
        assert part.classes == ("cat", "dog")
        assert all(int(path.stem) % 2 == label for path, label in zip(part.files, part.labels, strict=True))
    assert len(datasets.folder.read(root=tmp_path, preprocessing=SMALL, labelled=True)) == 20


def test_names_are_the_same_however_their_accents_are_written(tmp_path: Path) -> None:
    categories = [{"id": 3, "name": "cafe\u0301 "}, {"id": 7, "name": "the\u0301"}]
    coco(tmp_path / "labels.json", tmp_path, name="e\u0301{}.png", categories=categories)
    for number in range(20):
        (tmp_path / f"{number}.png").rename(tmp_path / f"\u00e9{number}.png")
    parts = datasets.load("folder", root=tmp_path, preprocessing=SMALL)
    assert parts.train.classes == ("caf\u00e9", "th\u00e9")


def test_each_part_may_have_its_own(tmp_path: Path) -> None:
    for part, n in (("train", 8), ("valid", 4), ("test", 6)):
        coco(tmp_path / part / "_annotations.coco.json", tmp_path / part, n=n)
    splits = datasets.load("folder", root=tmp_path, preprocessing=SMALL)
    assert [len(part) for part in splits.parts().values()] == [8, 4, 6]
    assert splits.train.classes == ("cat", "dog")


def test_images_without_one_category_are_left_out_and_counted(tmp_path: Path) -> None:
    marks = [(0, 3), (1, 7), (2, 3), (2, 7), (3, 7), (4, 3), (5, 7), (6, 3)]
    annotations = [{"image_id": image, "category_id": category} for image, category in marks]
    coco(tmp_path / "result.json", tmp_path / "images", n=10, annotations=annotations)
    with pytest.warns(UserWarning, match=r"3 image\(s\).*no category.*1 have several"):
        assert len(datasets.folder.read(root=tmp_path, preprocessing=SMALL)) == 6
    Image.new("L", (9, 9), 99).save(tmp_path / "images" / "late.png")
    with pytest.warns(UserWarning, match=r"1 image\(s\).*not listed, 3 image\(s\).*no category.*1 have"):
        assert len(datasets.folder.read(root=tmp_path, preprocessing=SMALL)) == 6


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"categories": [{"id": 3}]}, r"result.json.*COCO.*damaged \(KeyError\('name'\)\)"),
        ({"annotations": [{"image_id": 99, "category_id": 3}]}, r"is damaged \(KeyError\(99\)\)"),
        ({"annotations": []}, "20 images.*category"),
        ({"images": [{"id": 0, "file_name": "../../0.png"}], "annotations": []}, "1 of 1 images"),
    ],
)
@pytest.mark.filterwarnings("ignore:.* image.s. have no category")
def test_a_damaged_file_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    coco(tmp_path / "result.json", tmp_path / "images", **changed)
    with pytest.raises(ValueError, match=message):
        datasets.load("folder", root=tmp_path, preprocessing=SMALL)


def test_several_files_are_refused_and_other_json_is_none(tmp_path: Path) -> None:
    coco(tmp_path / "annotations" / "instances_train.json", tmp_path / "images")
    os.link(tmp_path / "annotations" / "instances_train.json", tmp_path / "annotations" / "instances_val.json")
    with pytest.raises(ValueError, match="_train.json and annotations/instances_val.json: keep one"):
        datasets.load("folder", root=tmp_path, preprocessing=SMALL)
    for name in ("cat", "dog"):
        coco(tmp_path / "classes" / "notes.json", tmp_path / "classes" / name, n=10)
    (tmp_path / "classes" / "notes.json").write_text("{")
    with pytest.warns(Note, match=r"1 file\(s\).*suffix.*notes.json"):
        parts = datasets.load("folder", root=tmp_path / "classes", preprocessing=SMALL)
    assert parts.train.classes == ("cat", "dog")
