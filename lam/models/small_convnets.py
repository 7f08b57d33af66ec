"""Small convolutional networks for small images, cheap enough for a CPU.

Dropout is "between all trainable layers" (Warburg et al. 2023, appendix G.4): it drops whole channels, before the head
and before every convolution except the first. Weights have the same names with and without dropout.
"""

from torch import nn

from lam.models.network import EmbeddingNetwork, check_dropout


def convnet32(*, dimension: int, channels: int = 3, dropout: float = 0.0) -> EmbeddingNetwork:
    """The source's network for 32 × 32 images: three 3 × 3 convolutions, one pooling, a linear layer of 9,216 inputs.

    The source states the channels (32, 64, 64), a pooling of 2 after the second convolution, and 9,216 features. This
    implies 3 × 3 filters without padding. The text says one colour channel, but CIFAR-10 has three. The authors' code
    also pools after the first convolution and has 1,024 features; lam follows the text.

    Source: Warburg et al. (2023), appendix G.2.

    Args:
        dimension: embedding dimensions D.
        channels: channels of the images.
        dropout: rate in [0, 1) at which channels are dropped.
    """
    layers = (
        *(nn.Conv2d(channels, 32, 3), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3), nn.ReLU()),
    )
    return EmbeddingNetwork(_features(*layers, dropout=dropout), nn.Linear(9216, dimension))


def convnet28(*, dimension: int, channels: int = 1, dropout: float = 0.0) -> EmbeddingNetwork:
    """The source's network for 28 × 28 images: two 3 × 3 convolutions, pooling, one linear layer of 9,216 inputs.

    Source: Warburg et al. (2023), appendix G.2.

    Args:
        dimension: embedding dimensions D.
        channels, dropout: as in `convnet32`.
    """
    layers = (nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2))
    return EmbeddingNetwork(_features(*layers, dropout=dropout), nn.Linear(9216, dimension))


def convnet8(*, dimension: int, channels: int = 1, dropout: float = 0.0) -> EmbeddingNetwork:
    """`convnet28` for 8 × 8 images: half as many filters, padded borders, a linear layer of 512 inputs.

    Args:
        dimension: embedding dimensions D.
        channels, dropout: as in `convnet32`.
    """
    first, second = nn.Conv2d(channels, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
    layers = (first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2))
    return EmbeddingNetwork(_features(*layers, dropout=dropout), nn.Linear(512, dimension))


def _features(*layers: nn.Module, dropout: float) -> nn.Sequential:
    check_dropout(dropout)
    features = nn.Sequential()
    for number, layer in enumerate((*layers, nn.Flatten())):
        if dropout and number and isinstance(layer, nn.Conv2d | nn.Flatten):
            features.add_module(f"dropout{number}", nn.Dropout2d(dropout))
        features.add_module(str(number), layer)
    return features
