"""Residual networks with an embedding head."""

from lam.models.libraries import from_torchvision
from lam.models.network import EmbeddingNetwork


def resnet18(*, dimension: int, weights: str | None = None) -> EmbeddingNetwork:
    """torchvision's ResNet-18, its classifier replaced by a linear head of 512 inputs.

    Args:
        dimension: embedding dimensions D.
        weights: torchvision's name, such as "IMAGENET1K_V1" or "DEFAULT"; None leaves them random.
    """
    return from_torchvision("resnet18", dimension=dimension, weights=weights)


def resnet50(*, dimension: int, weights: str | None = None) -> EmbeddingNetwork:
    """torchvision's ResNet-50, its classifier replaced by a linear head of 2,048 inputs.

    Args:
        dimension: embedding dimensions D.
        weights: torchvision's name, such as "IMAGENET1K_V2" or "DEFAULT"; None leaves them random.
    """
    return from_torchvision("resnet50", dimension=dimension, weights=weights)
