"""The folders of real files."""

from pathlib import Path

import pytest

MNIST = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "mnist"
FASHIONMNIST = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture
def mnist_root():
    if not MNIST.is_dir():
        pytest.skip(f"MNIST's files are not in {MNIST}")
    return MNIST


@pytest.fixture
def fashionmnist_root():
    if not FASHIONMNIST.is_dir():
        pytest.skip(f"FashionMNIST's files are not in {FASHIONMNIST}: apt-get install dataset-fashion-mnist")
    return FASHIONMNIST
