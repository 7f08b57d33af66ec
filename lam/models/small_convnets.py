"""Small convolutional networks for small images, cheap enough for a CPU."""

from torch import nn

from lam.models.network import EmbeddingNetwork


def convnet28(*, dimension: int, channels: int = 1) -> EmbeddingNetwork:
    """The paper's network for 28 × 28 images: two 3 × 3 convolutions, pooling, one linear layer of 9,216 inputs.

    Args:
        dimension: embedding dimensions D.
        channels: of the images.
    """
    return EmbeddingNetwork(_convolutions(channels, 32, 64, padding=0), nn.Linear(9216, dimension))


def convnet8(*, dimension: int, channels: int = 1) -> EmbeddingNetwork:
    """The same in small, for 8 × 8 images: half of the filters, padded borders, a linear layer of 512 inputs.

    Args:
        dimension: embedding dimensions D.
        channels: of the images.
    """
    return EmbeddingNetwork(_convolutions(channels, 16, 32, padding=1), nn.Linear(512, dimension))


def _convolutions(channels: int, first: int, second: int, padding: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, first, 3, padding=padding),
        nn.ReLU(),
        nn.Conv2d(first, second, 3, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
