"""Soft labels, from files made in the published layout."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lam.datasets.base import MissingDataError
from lam.datasets.published import CIFAR10H, read_soft_labels
from lam.runs.config import DataConfig
from lam.runs.data import load_data
from tests.datasets import layouts


def made(folder: Path, n: int = 20) -> Path:
    counts = np.random.default_rng(0).integers(0, 50, (n, 10)).astype(float) + 1
    np.save(folder / CIFAR10H, counts / counts.sum(1, keepdims=True))
    return folder


def test_the_published_layout_is_read_by_folder_and_by_file(tmp_path: Path) -> None:
    labels = read_soft_labels(made(tmp_path), 20)
    assert labels.shape == (20, 10)
    torch.testing.assert_close(labels.sum(1), torch.ones(20))
    assert torch.equal(read_soft_labels(tmp_path / CIFAR10H, 20), labels)


def test_a_run_takes_them_with_the_images_that_it_keeps(tmp_path: Path) -> None:
    layouts.cifar10(tmp_path / "cifar10")
    path = str(made(tmp_path, 30))
    data = DataConfig("cifar10", str(tmp_path / "cifar10"), {"validation": 30}, soft_labels=path)
    whole = load_data(data)[0].test
    assert whole.soft_labels is not None
    assert torch.equal(whole.soft_labels, read_soft_labels(path, 30))
    for cut in (replace(data, strangers=0.5), replace(data, limit=12)):
        part = load_data(cut)[0].test
        assert part.soft_labels is not None
        assert 0 < len(part) == len(part.soft_labels) < 30
        places = [int((whole.images == image).flatten(1).all(1).nonzero()[0]) for image in part.images]
        assert torch.equal(part.soft_labels, whole.soft_labels[places])
    np.save(tmp_path / "short.npy", np.full((29, 10), 0.1))
    with pytest.raises(ValueError, match=r"short.npy.*30 images.*\(29, 10\)"):
        load_data(replace(data, soft_labels=str(tmp_path / "short.npy")))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=f"{CIFAR10H}.*missing.*CIFAR-10H"):
        read_soft_labels(tmp_path, 20)
    with pytest.raises(MissingDataError, match="mine.npy is missing.*probabilities"):
        read_soft_labels(tmp_path / "mine.npy", 20)
    with pytest.raises(ValueError, match=r"row.*10000 images.*\(20, 10\)"):
        read_soft_labels(made(tmp_path), 10000)
    np.save(tmp_path / "counts.npy", np.full((2, 10), 5.0))
    with pytest.raises(ValueError, match="up to 1, .* row 0"):
        read_soft_labels(tmp_path / "counts.npy", 2)


@pytest.mark.parametrize("content", [b"", b"no array", b"words", b"archive", b"cut"])
def test_a_file_of_something_else_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "labels.npy"
    path.write_bytes(content)
    if content == b"words":
        np.save(path, np.full((2, 2), "word"))
    if content == b"archive":
        with path.open("wb") as file:
            np.savez(file, labels=np.full((2, 2), 0.5))
    if content == b"cut":
        np.save(path, np.full((2, 2), 0.5))
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"labels\.npy.*NumPy.*: ((?!unsafe).)*numpy.save$"):
        read_soft_labels(path, 2)
