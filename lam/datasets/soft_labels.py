"""Soft labels: shares of people who chose each class for an image."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from lam.datasets.base import MissingDataError
from lam.utils.checks import check_distributions

CIFAR10H = "cifar10h-probs.npy"


def read_soft_labels(path: str | Path, n_items: int) -> Float32[Tensor, "N C"]:
    """Probabilities of classes for each item, such as CIFAR-10H for the 10,000 test images of CIFAR-10.

    The path is a .npy file with rows in the order of the items, or a folder with CIFAR-10H's `cifar10h-probs.npy`.

    Source: Peterson, Battleday, Griffiths and Russakovsky (2019), "Human uncertainty makes classification more robust".
    """
    path = Path(path)
    path = path / CIFAR10H if path.is_dir() else path
    if not path.is_file():
        source = "get it from CIFAR-10H, as its authors publish it"
        advice = source if path.name == CIFAR10H else "give a .npy file of class probabilities, or CIFAR-10H's folder"
        raise MissingDataError(f"{path} is missing: {advice}")
    try:
        with path.open("rb") as file:
            values = np.lib.format.read_array(file, allow_pickle=False).astype(np.float32)
    except ValueError as error:
        raise ValueError(f"{path} is no NumPy file of numbers: {error}; write it with numpy.save") from None
    if values.ndim != 2 or len(values) != n_items:
        raise ValueError(f"{path} must hold a row for each of {n_items} images, got shape {values.shape}")
    labels = torch.from_numpy(values)
    check_distributions(f"probabilities in {path}", labels)
    return labels
