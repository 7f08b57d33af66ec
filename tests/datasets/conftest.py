"""What tests of data sets share: checks of types off where errors are tested, and where real files may be."""

from pathlib import Path

import jaxtyping
import pytest

MNIST = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "mnist"
FASHIONMNIST = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture
def as_in_production(monkeypatch):
    """Shapes and types of arguments are not checked by the tests' own tools: the library must."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


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
