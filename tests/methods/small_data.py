"""Data and a network that train in a moment."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from lam import losses, models
from lam.datasets import TensorImages
from lam.methods import METHODS, Method, Trained, Training
from lam.models import EmbeddingNetwork

TRAINING: dict[str, Any] = {
    "loss": losses.build(margin=0.7),
    "epochs": 1,
    "batch_size": 16,
    "accelerator": "cpu",
    "progress": False,
}


QUICK: dict[str, Any] = {"n_members": 2, "reference": 20, "epochs": 1, "n_samples": 2}


def training(**options: Any) -> Training:
    """The training settings of these tests, with some options changed."""
    return Training(**(TRAINING | options))


def quick(name: str) -> Any:
    """A method by name, with options for a short training."""
    known = {option.name for option in fields(METHODS[name])}
    return METHODS[name](**{option: value for option, value in QUICK.items() if option in known})


def trainer(method: type[Method]) -> Callable[..., Trained]:
    """A function that trains by a method; `options` is a method in its place, other arguments are for `Training`."""

    def train(network: nn.Module, data: Any, *, options: Method | None = None, **training: Any) -> Trained:
        return (options or method()).train(network, data, Training(**training))

    return train


def images(n: int = 48, *, noise: float = 0.2, seed: int = 0) -> TensorImages:
    """Images of four classes, each a pattern under noise."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(n) % 4
    return TensorImages(patterns[labels] + noise * torch.randn(n, 1, 8, 8, generator=generator), labels)


def batches(data: TensorImages, size: int = 20) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The data as a loader gives them."""
    return list(zip(data.images.split(size), data.labels.split(size), strict=True))


def outside(n: int = 20) -> torch.Tensor:
    """Inputs without a pattern."""
    return 3 * torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(2))


def network(**options: Any) -> EmbeddingNetwork:
    """A new network of three dimensions."""
    return models.build("convnet8", dimension=3, **options)
