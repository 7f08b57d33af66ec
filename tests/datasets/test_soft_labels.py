"""Soft labels, from files made in the published layout."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lam.datasets.base import MissingDataError
from lam.datasets.soft_labels import CIFAR10H, read_soft_labels


def made(folder: Path, n: int = 20) -> Path:
    counts = np.random.default_rng(0).integers(0, 50, (n, 10)).astype(float) + 1
    np.save(folder / CIFAR10H, counts / counts.sum(1, keepdims=True))
    return folder


def test_the_published_layout_is_read_by_folder_and_by_file(tmp_path: Path) -> None:
    labels = read_soft_labels(made(tmp_path), 20)
    assert labels.shape == (20, 10)
    torch.testing.assert_close(labels.sum(1), torch.ones(20))
    assert torch.equal(read_soft_labels(tmp_path / CIFAR10H, 20), labels)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=f"{CIFAR10H} is not there: it is part of CIFAR-10H"):
        read_soft_labels(tmp_path, 20)
    with pytest.raises(ValueError, match=r"a row for each of 10000 images, got shape \(20, 10\)"):
        read_soft_labels(made(tmp_path), 10000)
    np.save(tmp_path / "counts.npy", np.full((2, 10), 5.0))
    with pytest.raises(ValueError, match="probabilities that add up to 1, got .* at row 0"):
        read_soft_labels(tmp_path / "counts.npy", 2)
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(ValueError, match=r"text.npy is no NumPy file of numbers"):
        read_soft_labels(tmp_path / "text.npy", 2)
