"""Lists of images: their contents, and errors that name the line."""

from pathlib import Path
from unicodedata import normalize

import pytest

from lam.gallery.image_list import read_list
from lam.gallery.item import file_id
from lam.utils.notes import Note


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", "b c.png", "é.png"):
        (tmp_path / name).write_bytes(b"")
    return tmp_path


def listed(folder: Path, text: str, encoding: str = "utf-8") -> Path:
    path = folder / "list.csv"
    path.write_text(text, encoding=encoding)
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_columns_come_in_any_order(folder: Path, encoding: str) -> None:
    text = 'label, path ,note,id\r\nx,a.png,"two\r\nlines",1\r\n\r\n,b c.png,,\r\ny,é.png,"a, b",\r\n'
    found = read_list(listed(folder, text, encoding))
    assert [image.path for image in found] == [str(folder / name) for name in ("a.png", "b c.png", "é.png")]
    assert [(image.listed_id, image.label) for image in found] == [("1", "x"), (None, ""), (None, "y")]
    assert [image.metadata for image in found] == [{"note": "two\r\nlines"}, {}, {"note": "a, b"}]
    assert [image.content for image in found] == [file_id(folder / "a.png")] * 3


def test_column_names_may_be_in_upper_case(folder: Path) -> None:
    (image,) = read_list(listed(folder, "Path,ID,Label,Note\na.png,1,x,y\n"))
    assert (image.listed_id, image.label, image.metadata) == ("1", "x", {"Note": "y"})


def test_paths_of_windows_are_read(folder: Path) -> None:
    (folder / "in").mkdir()
    for name in ("in/c.png", "in\\d.png", "in/d.png"):
        (folder / name).write_bytes(b"")
    found = read_list(listed(folder, "path\nin\\c.png\nin\\d.png\n"))
    assert [image.path for image in found] == [str(folder / name) for name in ("in/c.png", "in\\d.png")]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "list.csv.*no column path.*none"),
        ("file,id\na.png,1\n", "list.csv.*no column path.*file, id"),
        ("path,id,id\n", "columns.*path, id, id"),
        ("path,\n", "column.*'path', ''"),
        ("path\n", "list.csv.*no image"),
        ("path,id\na.png,1\na.png\n", "list.csv.*2 columns.*1.*line 3"),
        ("path,id\na.png,1,2\n", "list.csv.*2 columns.*3.*line 2"),
        ("path,id\n,1\n", "line 2: .*path.*''"),
        ("path\na\0.png\n", "line 2: "),
        ('path\n"a.png"x\n', "line 2: ',' expected after '\"'"),
        ('path\n"a.png\n', "line 2: .*end of data"),
        ("path,id\na.png,1\nb c.png,2\na.png,1\n", r"line 4: id '1' .*line 2; .* fused \(--fuse\)"),
        (
            "path\n" + "".join(f"{i}.png\n" for i in range(7)) + "a.png\n",
            r"list.csv: 7 of 8 images.*/0.png \(line 2\), .*/4.png \(line 6\), \.\.\.$",
        ),
    ],
)
def test_mistakes_are_named_with_their_line(folder: Path, text: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_list(listed(folder, text))


def test_ids_may_repeat_where_that_is_wanted(folder: Path) -> None:
    path = listed(folder, "path,id\na.png,1\nb c.png,1\n")
    assert [image.listed_id for image in read_list(path, repeated_ids=True)] == ["1", "1"]


def test_what_is_no_text_is_refused(folder: Path) -> None:
    path = listed(folder, "path\né.png\n", encoding="latin-1")
    with pytest.raises(ValueError, match="list.csv.*UTF-8"):
        read_list(path)
    with pytest.raises(ValueError, match="no file.*none.csv.*table"):
        read_list(folder / "none.csv")


def test_labels_are_the_same_however_their_accents_are_written(folder: Path) -> None:
    found = read_list(listed(folder, f"path,label\na.png,{normalize('NFD', 'é')}\nb c.png,é\n"))
    assert [image.label for image in found] == ["é", "é"]


@pytest.mark.parametrize("label", ["-1", "-1.0", "NaN", "null", "<NA>", "NaT", "n/a", "#N/A"])
def test_what_programs_write_for_no_label_is_none(folder: Path, label: str) -> None:
    with pytest.warns(Note, match="label"):
        (found,) = read_list(listed(folder, f"path,label\na.png,{label}\n"))
    assert found.label == ""
