"""Folders of images in both layouts; errors name missing, empty and unexpected files."""

import os
import re
from pathlib import Path
from unicodedata import normalize

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from lam.datasets import FolderImages, MissingDataError, folder, load, load_ood
from lam.inputs.preprocessing import Preprocessing
from lam.utils.notes import Note
from tests.datasets.layouts import folder as make

SMALL = Preprocessing(size=10, crop=8)


def test_one_folder_is_split_by_class(tmp_path):
    make(tmp_path, {"cat": 20, "dog": 10})
    parts = load("folder", root=tmp_path, preprocessing=SMALL, validation=0.2, test=0.3)
    counts = [torch.bincount(part.labels).tolist() for part in (parts.train, parts.validation, parts.test)]
    assert counts == [[10, 5], [4, 2], [6, 3]]
    paths = [path for part in (parts.train, parts.validation, parts.test) for path in part.paths]
    assert sorted(paths) == sorted(tmp_path.resolve().rglob("*.png"))
    for part in (parts.train, parts.validation, parts.test):
        assert part.classes == ("cat", "dog")
        assert [path.parent.name for path in part.paths] == [part.classes[label] for label in part.labels]


def test_items_are_preprocessed_files(tmp_path):
    make(tmp_path, {"cat": 5, "dog": 5})
    train = load("folder", root=tmp_path, preprocessing=SMALL).train
    image, label = train[0]
    torch.testing.assert_close(image, torch.full((3, 8, 8), int(train.paths[0].stem) / 255))
    assert label == int(train.labels[0])
    images, labels = next(iter(DataLoader(train, batch_size=4)))
    assert (images.shape, labels.shape) == ((4, 3, 8, 8), (4,))


def test_every_image_without_a_class_is_kept_whatever_its_name(tmp_path: Path) -> None:
    folder = os.fsencode(make(tmp_path, {"a": 20}) / "a") + b"/"
    for number, name in enumerate((b"\xff", b"\xfe", b"\xfd")):
        Image.new("L", (4, 4), number).save(os.fsdecode(folder + name + b".png"))
    parts = load("folder", root=tmp_path / "a", preprocessing=SMALL).parts()
    assert sum(map(len, parts.values())) == 23


@pytest.mark.parametrize("flat", [True, False])
def test_images_of_no_class_or_of_one_match_no_other(tmp_path, flat):
    make(tmp_path, {"a": 20})
    parts = load("folder", root=tmp_path / "a" if flat else tmp_path, preprocessing=SMALL)
    splits = (parts.train, parts.validation, parts.test)
    assert [len(part) for part in splits] == [12, 4, 4]
    assert torch.cat([part.labels for part in splits]).sort().values.equal(torch.arange(20))
    first = parts.test.paths[0]
    assert parts.test.classes[parts.test.labels[0]] == (first.name if flat else f"a/{first.name}")
    assert parts.gallery == "identities"


def test_parts_without_classes_match_no_other_and_none_is_beside_parts_with_classes(tmp_path):
    make(tmp_path, {"train": 8, "validation": 2, "test": 3})
    parts = load("folder", root=tmp_path, preprocessing=SMALL)
    assert (len(parts.train.classes), parts.gallery) == (13, "identities")
    make(make(tmp_path / "other", {"test": 3}) / "train", {"cat": 4, "dog": 4})
    with pytest.raises(ValueError, match="other: test.*no class"):
        load("folder", root=tmp_path / "other", preprocessing=SMALL)
    make(make(tmp_path / "reverse", {"train": 8}) / "test", {"cat": 4, "dog": 4})
    with pytest.raises(ValueError, match="reverse: train.*no class"):
        load("folder", root=tmp_path / "reverse", preprocessing=SMALL)


@pytest.mark.parametrize("validation", ["validation", "val", "valid", "dev"])
def test_parts_in_folders_are_taken_as_they_are(tmp_path, validation):
    make(tmp_path / "train", {"cat": 4, "dog": 4})
    make(tmp_path / validation, {"cat": 2, "dog": 2})
    make(tmp_path / "test", {"bird": 3, "dog": 1})
    parts = load("folder", root=tmp_path, preprocessing=SMALL)
    assert parts.train.classes == parts.test.classes == ("bird", "cat", "dog")
    assert torch.bincount(parts.train.labels).tolist() == [0, 4, 4]
    assert torch.bincount(parts.validation.labels).tolist() == [0, 2, 2]
    assert torch.bincount(parts.test.labels).tolist() == [3, 0, 1]
    assert {path.parts[-3] for path in parts.validation.paths} == {validation}


def test_parts_may_be_in_upper_case(tmp_path):
    for part in ("Train", "VAL", "Test"):
        make(tmp_path / part, {"Cat": 4, "dog": 4})
    parts = load("folder", root=tmp_path, preprocessing=SMALL)
    assert parts.train.classes == ("Cat", "dog")
    assert [{path.parts[-3] for path in part.files} for part in parts.parts().values()] == [
        {"Train"},
        {"VAL"},
        {"Test"},
    ]
    assert load_ood("folder", root=tmp_path, like=parts.train).files == parts.test.files


def test_parts_may_be_named_training_and_testing(tmp_path: Path) -> None:
    for offset, part in enumerate(("training", "validation", "testing")):
        make(tmp_path / part, {"cat": 3, "dog": 3}, offset=10 * offset)
    parts = load("folder", root=tmp_path, preprocessing=SMALL)
    assert parts.train.classes == ("cat", "dog")
    assert [path.parts[-3] for path in parts.test.files] == 6 * ["testing"]
    assert [path.parts[-3] for path in parts.train.files] == 6 * ["training"]


def test_sub_folders_that_become_one_class_are_named(tmp_path: Path) -> None:
    for inner in ("cat", "dog"):
        make(tmp_path / "animals" / inner / "deeper", {"a": 5, "b": 5})
    make(tmp_path / "plants", {"oak": 10})
    make(tmp_path / "things", {"photos": 10})
    (tmp_path / "labels.csv").write_text("path,label\n")
    said = r"1 of 3 classes.*sub-folders.*animals \(cat, dog\)"
    with pytest.warns(Note) as told:
        parts = load("folder", root=tmp_path, preprocessing=SMALL)
    assert parts.train.classes == ("animals", "plants", "things")
    assert [bool(re.search(said, str(each.message))) for each in told] == [False, True]
    assert re.search(r"1 file\(s\).*suffix.*labels.csv", str(told[0].message))


@pytest.mark.filterwarnings("default:.*differ only in case")
@pytest.mark.parametrize("other", ["Cat", "cAT"])
def test_classes_whose_names_are_nearly_one_are_named(tmp_path: Path, other: str) -> None:
    make(tmp_path, {"cat": 10, other: 10, "dog": 10, "dog 2": 10})
    with pytest.warns(Note, match=r"'cat'.*differ.*\(1.*groups\)") as told:
        load("folder", root=tmp_path, preprocessing=SMALL)
    assert repr(other) in str(told[0].message)


def test_parts_without_a_folder_are_carved_out_of_training(tmp_path):
    make(tmp_path / "train", {"cat": 10, "dog": 10})
    make(tmp_path / "test", {"cat": 3, "dog": 3})
    parts = load("folder", root=tmp_path, preprocessing=SMALL)
    assert [len(part) for part in (parts.train, parts.validation, parts.test)] == [16, 4, 6]
    assert {path.parts[-3] for path in parts.train.paths + parts.validation.paths} == {"train"}
    assert not set(parts.train.paths) & set(parts.validation.paths)


def test_a_class_may_be_called_train(tmp_path):
    make(tmp_path, {"train": 5, "plane": 5})
    assert load("folder", root=tmp_path, preprocessing=SMALL).train.classes == ("plane", "train")


@pytest.mark.parametrize("parts", [("test",), ("val", "test")])
def test_parts_without_training_are_no_classes(tmp_path, parts):
    for part in parts:
        make(tmp_path / part, {"cat": 10, "dog": 10})
    with pytest.raises(ValueError, match="no folder train"):
        load("folder", root=tmp_path, preprocessing=SMALL)


def test_parts_share_the_classes_of_all(tmp_path):
    make(tmp_path / "train", {"cat": 10, "dog": 10, "bird": 1})
    make(tmp_path / "validation", {"cat": 2})
    make(tmp_path / "test", {"dog": 1, "fish": 1})
    parts = load("folder", root=tmp_path, preprocessing=SMALL)
    assert parts.train.classes == parts.test.classes == ("bird", "cat", "dog", "fish")
    assert parts.train.labels.bincount(minlength=4).tolist() == [1, 10, 10, 0]
    assert parts.test.labels.bincount(minlength=4).tolist() == [0, 0, 1, 1]


def test_files_beside_the_splits_are_counted(tmp_path: Path) -> None:
    for part in ("train", "test", ".cache/train"):
        make(tmp_path / part, {"cat": 10, "dog": 10})
    (tmp_path / "0.png").write_bytes((tmp_path / "train" / "cat" / "0.png").read_bytes())
    with pytest.warns(Note) as told:
        load("folder", root=tmp_path, preprocessing=SMALL)
    (note,) = [str(note.message) for note in told]
    assert "1 file(s) belong to no split" in note
    assert "20 file(s) lie in hidden folders" in note


def test_images_may_lie_deeper_and_hidden_files_do_not_count(tmp_path):
    make(tmp_path / "cat", {"a": 3, "b": 3})
    make(tmp_path, {"dog": 4, ".cache": 1})
    (tmp_path / "dog" / ".DS_Store").write_bytes(b"x")
    make(tmp_path / "dog", {".thumbnails": 4, "a/.thumbnails/small": 4})
    with pytest.warns(Note) as told:
        parts = load("folder", root=tmp_path, preprocessing=SMALL)
    assert any("9 file(s) lie in hidden folders" in str(note.message) for note in told)
    assert any(": cat (a, b)" in str(note.message) for note in told)
    assert parts.train.classes == ("cat", "dog")
    assert len(parts.train) + len(parts.validation) + len(parts.test) == 10


def test_what_systems_leave_is_counted_and_left_out(tmp_path: Path) -> None:
    make(tmp_path, {"cat": 10, "dog": 10})
    make(tmp_path / "cat", {"@eaDir/0.png": 2, "#recycle": 1})
    make(tmp_path, {"__MACOSX/cat": 3, "lost+found": 1, "System Volume Information": 1, "@Recently-Snapshot/cat": 2})
    for name in ("Thumbs.db", "desktop.ini", "SYNOPHOTO_THUMB_M.jpg", "._0.png"):
        (tmp_path / "dog" / name).write_bytes(b"x")
    with pytest.warns(UserWarning, match=r": 13 file\(s\).*system.*: ") as told:
        parts = load("folder", root=tmp_path, preprocessing=SMALL)
    assert len(told) == 1
    assert parts.train.classes == ("cat", "dog")
    assert sum(map(len, parts.parts().values())) == 20


@pytest.mark.parametrize(("n_classes", "size", "held_out"), [(10, 3, 2), (30, 3, 6), (40, 2, 8)])
def test_classes_of_two_or_three_are_held_out_whole(tmp_path: Path, n_classes: int, size: int, held_out: int) -> None:
    make(tmp_path, {f"person {number}": size for number in range(n_classes)})
    said = rf"few items.*\({size}\).*{n_classes} classes.*{held_out} for test"
    with pytest.warns(Note, match=said):
        parts = load("folder", root=tmp_path, preprocessing=SMALL)
    of_part = {name: set(part.labels.tolist()) for name, part in parts.parts().items()}
    assert [len(of_part[name]) for name in ("validation", "test")] == [held_out, held_out]
    assert sum(map(len, of_part.values())) == len(set().union(*of_part.values())) == n_classes
    assert all(len(part) == size * len(of_part[name]) for name, part in parts.parts().items())


@pytest.mark.parametrize(
    ("n_classes", "size", "held_out", "kept"),
    [(2, 6, 3, 2), (3, 4, 3, 2), (4, 3, 3, 1), (5, 5, 5, 3), (10, 5, 10, 3), (30, 4, 24, 2), (12, 6, 14, 2)],
)
def test_pairs_of_small_classes_are_held_out(
    tmp_path: Path, n_classes: int, size: int, held_out: int, kept: int
) -> None:
    make(tmp_path, {f"person {number}": size for number in range(n_classes)})
    said = rf"few items.*\({size}\).*pairs of one class.*{held_out} for test and {held_out} for validation"
    with pytest.warns(Note, match=said):
        parts = load("folder", root=tmp_path, preprocessing=SMALL).parts()
    counts = {name: part.labels.unique(return_counts=True)[1] for name, part in parts.items()}
    assert all(len(of_part) >= 2 and of_part.max() >= 2 for of_part in counts.values())
    assert parts["train"].labels.bincount(minlength=n_classes).min() == kept
    files = [file for part in parts.values() for file in part.files]
    assert len(files) == len(set(files)) == n_classes * size
    with pytest.warns(Note):
        again = load("folder", root=tmp_path, preprocessing=SMALL)
    assert again.validation.files == parts["validation"].files


@pytest.mark.parametrize("sizes", [[30] + [2] * 35, [40, 40] + [2] * 60, [8] + [2] * 6, [20] + [1] * 80])
def test_large_classes_do_not_fill_the_held_out_splits(tmp_path: Path, sizes: list[int]) -> None:
    make(tmp_path, {f"person {number:02}": size for number, size in enumerate(sizes)})
    with pytest.warns(Note, match="few items"):
        parts = load("folder", root=tmp_path, preprocessing=SMALL, validation=0.1, test=0.1).parts()
    counts = [parts[name].labels.unique(return_counts=True)[1] for name in ("validation", "test")]
    least = max(2, round(sum(size > 1 for size in sizes) / 10))
    assert all(len(of_part) >= least and of_part.max() >= 2 for of_part in counts)


def test_larger_classes_give_the_pairs(tmp_path: Path) -> None:
    sizes = {f"{number} of {size}": size for size, count in ((4, 5), (7, 15)) for number in range(count)}
    make(tmp_path, sizes)
    with pytest.warns(Note, match="few items.*25 for test and 25 for validation"):
        train = load("folder", root=tmp_path, preprocessing=SMALL).train
    left = dict(zip(sorted(sizes), train.labels.bincount().tolist(), strict=True))
    assert all(left[name] == 4 if size == 4 else left[name] >= 3 for name, size in sizes.items())


@pytest.mark.parametrize("size", [1, 8])
def test_classes_of_one_item_or_of_many_are_in_every_part(tmp_path: Path, size: int) -> None:
    make(tmp_path, {f"thing {number}": size for number in range(12)})
    parts = load("folder", root=tmp_path, preprocessing=SMALL)
    assert len(parts.train) > len(parts.test) == len(parts.validation) > 1


def test_preprocessing_is_imagenets_or_from_json(tmp_path):
    make(tmp_path, {"cat": 5, "dog": 5})
    assert load("folder", root=tmp_path).train.preprocessing == Preprocessing.imagenet()
    assert load("folder", root=tmp_path, preprocessing=SMALL.to_json()).train.preprocessing == SMALL


class TestOutOfDistribution:
    @pytest.fixture
    def like(self, tmp_path):
        return load("folder", root=make(tmp_path / "id", {"cat": 5, "dog": 5}), preprocessing=SMALL).test

    def test_a_folder_of_classes_is_read_whole_with_the_same_preprocessing(self, tmp_path, like):
        out = load_ood("folder", root=make(tmp_path / "ood", {"bird": 3, "fish": 2}), like=like)
        assert (len(out), out.classes, out.preprocessing) == (5, ("bird", "fish"), SMALL)

    def test_of_parts_the_test_part_is_read(self, tmp_path, like):
        make(tmp_path / "ood" / "train", {"bird": 3})
        make(tmp_path / "ood" / "test", {"bird": 2})
        assert len(load_ood("folder", root=tmp_path / "ood", like=like)) == 2

    def test_splits_without_a_test_split_are_no_classes(self, tmp_path, like):
        for part in ("train", "val"):
            make(tmp_path / "ood" / part, {"bird": 2, "fish": 2})
        with pytest.raises(MissingDataError, match="ood.*train, validation.*no folder test"):
            load_ood("folder", root=tmp_path / "ood", like=like)

    def test_items_of_a_flat_folder_have_no_label(self, tmp_path, like):
        make(tmp_path, {"flat": 3})
        out = load_ood("folder", root=tmp_path / "flat", like=like)
        assert (len(out), out.classes) == (3, ("",))

    def test_a_flat_folder_is_read_without_its_hidden_folders(self, tmp_path, like):
        make(tmp_path / ".hidden", {"cat": 3, "cat/.thumbnails": 3})
        with pytest.warns(Note, match="3 file"):
            assert len(load_ood("folder", like=like, root=tmp_path / ".hidden" / "cat")) == 3

    def test_no_image(self, tmp_path, like):
        (tmp_path / "none").mkdir()
        with pytest.raises(MissingDataError, match=r"none.*no images.*\.avif, "):
            load_ood("folder", root=tmp_path / "none", like=like)


class TestRefusals:
    def test_no_images(self, tmp_path):
        with pytest.raises(MissingDataError, match=r"has no images; allowed: \.avif, "):
            load("folder", root=tmp_path)

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "texts.csv").write_text("text,label\n")
        with pytest.raises(MissingDataError, match="texts.csv.*folder"):
            load("folder", root=tmp_path / "texts.csv")

    def test_empty_classes(self, tmp_path):
        make(tmp_path, {"cat": 3, "dog": 0, "eel": 0})
        with pytest.raises(ValueError, match=r"no images in dog, eel.*\.avif, "):
            load("folder", root=tmp_path)

    def test_strange_folders_beside_the_parts(self, tmp_path):
        make(tmp_path / "train", {"cat": 3})
        make(tmp_path, {"extra": 3})
        with pytest.raises(ValueError, match="must be train, .*validation, val, valid, dev, test, .*eval, got extra"):
            load("folder", root=tmp_path)

    def test_two_validation_folders(self, tmp_path):
        for part in ("train", "validation", "val"):
            make(tmp_path / part, {"cat": 3})
        with pytest.raises(ValueError, match="val and validation"):
            load("folder", root=tmp_path)

    def test_too_few_images(self, tmp_path):
        with pytest.raises(ValueError, match="2 items.*test and validation"):
            load("folder", root=make(tmp_path, {"cat": 1, "dog": 1}))

    def test_a_file_that_is_no_image_is_named_when_read(self, tmp_path):
        make(tmp_path, {"cat": 5, "dog": 5})
        (tmp_path / "cat" / "0.png").write_text("no image")
        parts = load("folder", root=tmp_path, preprocessing=SMALL)
        with pytest.raises(ValueError, match=r"cat/0\.png.*image"):
            [image for part in (parts.train, parts.validation, parts.test) for image in part]

    def test_what_is_left_out_is_named(self, tmp_path):
        make(tmp_path, {"cat": 5, "dog": 5})
        (tmp_path / "cat" / "notes.txt").write_text("no image")
        with pytest.warns(UserWarning, match=r": 1 file\(s\) .* are left out: cat/notes\.txt"):
            load("folder", root=tmp_path)
        (tmp_path / "cat" / "notes.txt").unlink()
        Image.new("L", (4, 4)).save(tmp_path / "stray.png")
        with pytest.warns(UserWarning, match=r"1 file\(s\).*no class.*stray\.png"):
            load("folder", root=tmp_path)

    @pytest.mark.usefixtures("as_in_production")
    def test_links_that_are_not_followed_are_named(self, tmp_path):
        root = make(tmp_path / "root", {"cat": 5, "dog": 5})
        make(tmp_path, {"elsewhere": 3})
        (root / "cat" / "gone.png").symlink_to(tmp_path / "nothing.png")
        (root / "cat" / "more").symlink_to(tmp_path / "elsewhere")
        (root / "cat" / "one.png").symlink_to(tmp_path / "elsewhere" / "0.png")
        message = r": 2 file\(s\).*links.*cat/gone\.png, cat/more"
        with pytest.warns(UserWarning, match=message):
            assert sum(map(len, load("folder", root=root).parts().values())) == 11
        for name in ("gone.png", "more"):
            (root / "cat" / name).unlink()
        (root / "eel").symlink_to(tmp_path / "nothing")
        with pytest.warns(UserWarning, match=r"1 file\(s\).*links.*eel"):
            load("folder", root=root)

    def test_paths_and_labels_are_as_many(self):
        with pytest.raises(ValueError, match="paths.*2 labels.*1"):
            FolderImages([Path("a")], torch.tensor([0, 0]), name="x", classes=("a",), preprocessing=SMALL)

    def test_one_shape_is_needed(self, tmp_path):
        with pytest.raises(ValueError, match="one shape: .*crop"):
            load("folder", root=make(tmp_path, {"cat": 5, "dog": 5}), preprocessing=Preprocessing(size=8))


def test_a_class_whose_name_is_not_in_utf_8_is_refused(tmp_path: Path) -> None:
    for name in (b"cat", b"B\xe4ume"):
        folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
        folder.mkdir()
        Image.new("L", (4, 4)).save(folder / "a.png")
    with pytest.raises(ValueError, match=r"'B\\udce4ume'.*UTF-8"):
        load("folder", root=tmp_path)


@pytest.mark.parametrize("inside", ["", "train/"])
def test_a_folder_that_lies_alone_in_another_is_read(tmp_path: Path, inside: str) -> None:
    make(tmp_path / "archive" / "photos", {f"{inside}cat": 10, f"{inside}dog": 10})
    make(tmp_path / "archive" / "__MACOSX" / "photos", {"cat": 1})
    said = r"folder photos.*1 file\(s\) of the system"
    with pytest.warns(UserWarning, match=said):
        assert load("folder", root=tmp_path / "archive", preprocessing=SMALL).train.classes == ("cat", "dog")
    if not inside:
        with pytest.warns(UserWarning, match=said):
            assert folder.read(root=tmp_path / "archive", preprocessing=SMALL).classes == ("cat", "dog")


def test_names_of_classes_are_the_same_however_their_accents_are_written(tmp_path: Path) -> None:
    make(tmp_path, {normalize("NFD", "Café"): 5, "Bar": 10})
    make(tmp_path, {"Café": 5}, offset=9)
    parts = load("folder", root=tmp_path, preprocessing=SMALL)
    assert parts.train.classes == ("Bar", "Café")
    assert sum(map(len, parts.parts().values())) == 20


def test_blanks_around_the_name_of_a_class_do_not_count(tmp_path: Path) -> None:
    make(tmp_path, {"dog ": 5, "cat": 10})
    make(tmp_path, {"dog": 5}, offset=9)
    assert load("folder", root=tmp_path, preprocessing=SMALL).train.classes == ("cat", "dog")
    make(tmp_path, {" ": 5})
    with pytest.raises(ValueError, match="name is blank"):
        load("folder", root=tmp_path, preprocessing=SMALL)


def test_names_that_a_terminal_would_obey_are_quoted(tmp_path: Path) -> None:
    make(tmp_path, {"cat": 10, "dog": 10})
    for name in ("Icon\r", "\x1b[2J.txt"):
        (tmp_path / "cat" / name).write_bytes(b"")
    with pytest.warns(UserWarning, match=r"'cat/\\x1b\[2J\.txt'.*'cat/Icon\\r'") as told:
        load("folder", root=tmp_path, preprocessing=SMALL)
    assert str(told[0].message).isprintable()
