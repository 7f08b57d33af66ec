"""Data and a network so small that a test trains in a moment."""

from typing import Any

import torch

from lam import losses, models
from lam.datasets import TensorImages
from lam.models import EmbeddingNetwork

TRAINING: dict[str, Any] = {
    "loss": losses.build(margin=0.7),
    "epochs": 1,
    "batch_size": 16,
    "accelerator": "cpu",
    "progress": False,
}


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
    """Inputs that are no pattern at all."""
    return 3 * torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(2))


def network(**options: Any) -> EmbeddingNetwork:
    """A new network of three dimensions."""
    return models.build("convnet8", dimension=3, **options)
