"""CLINC150 and BANKING77: small files in their form, and the real ones where they are."""

import gzip
import json
import os
from pathlib import Path

import pytest

from lam import datasets
from lam.datasets import MissingDataError
from lam.datasets.intents import clinc150_oos
from tests.helpers import unchecked


def write_clinc150(folder: Path, *, suffix: str = "", **others: list) -> Path:
    content = {
        part: [[f"{part} {label} {number}", label] for label in ("alarm", "balance") for number in range(3)]
        for part in ("train", "val", "test")
    }
    content |= {
        f"oos_{part}": [[f"{part} outside {number}", "oos"] for number in range(2)] for part in content
    } | others
    data = json.dumps(content).encode()
    (folder / f"data_full.json{suffix}").write_bytes(gzip.compress(data) if suffix else data)
    return folder


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_clinc150(tmp_path: Path, suffix: str) -> None:
    root = write_clinc150(tmp_path, suffix=suffix)
    splits = datasets.load("clinc150", root=root)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [6, 6, 6]
    assert splits.train.classes == ("alarm", "balance")
    inside = {text for part in (splits.train, splits.validation, splits.test) for text in part.names}
    assert not any("outside" in text for text in inside)
    for part in ("train", "validation", "test"):
        outside = datasets.load_ood("clinc150_oos", root=root, like=splits.test, part=part)
        assert len(outside) == 2
        assert all("outside" in text for text in outside.names)


def test_clinc150_refuses(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="clinc150: these are missing:"):
        datasets.load("clinc150", root=tmp_path)
    with pytest.raises(ValueError, match="test.*list of pairs"):
        datasets.load("clinc150", root=write_clinc150(tmp_path, test=["only a text"]))
    with pytest.raises(ValueError, match="weather without"):
        datasets.load("clinc150", root=write_clinc150(tmp_path, test=[["is it cold", "weather"]]))
    like = datasets.load("docstrings").test
    with pytest.raises(ValueError, match="part.*train, validation, test.*'all'"):
        unchecked(clinc150_oos)(root=tmp_path, like=like, part="all")


def test_banking77(tmp_path: Path) -> None:
    for part, count in (("train", 20), ("test", 4)):
        lines = [f'"{part} {number}, please",{"ab"[number % 2]}' for number in range(count)]
        (tmp_path / f"{part}.csv").write_text("\n".join(["text,category", *lines]))
    splits = datasets.load("banking77", root=tmp_path)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [18, 2, 4]
    assert splits.train.classes == ("a", "b")
    (tmp_path / "test.csv").write_text("text,label\na,b")
    with pytest.raises(ValueError, match="no column category.*text, label"):
        datasets.load("banking77", root=tmp_path)


@pytest.mark.parametrize(
    ("name", "sizes", "n_classes"), [("clinc150", [15000, 3000, 4500], 150), ("banking77", [9003, 1000, 3080], 77)]
)
def test_the_real_files(name: str, sizes: list[int], n_classes: int) -> None:
    root = Path(os.environ.get("LAM_DATA", "")) / name
    if not root.is_dir():
        pytest.skip(f"LAM_DATA names no folder that has {name}")
    splits = datasets.load(name, root=root)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == sizes
    assert len(splits.train.classes) == n_classes
