"""Residual networks with an embedding head, for birds, faces, places and small photographs."""

from typing import Literal, get_args

from torch import nn

from lam.models.gem import GeM
from lam.models.libraries import from_torchvision
from lam.models.network import EmbeddingNetwork, check_dropout
from lam.utils.checks import check_at_least, check_choice

Pooling = Literal["mean", "gem"]


def resnet(
    architecture: str, *, dimension: int, weights: str | None = None, pooling: Pooling = "mean", dropout: float = 0.0
) -> EmbeddingNetwork:
    """torchvision's residual network with a linear head instead of its classifier, for images of any size.

    The paper's network for birds and faces is the ResNet-50 with `pooling="gem"`: backbone, generalised mean, a learned
    whitening layer, normalisation. Here the head is the whitening layer, with random initial weights; the paper's has
    D = 2,048. Dropout "between all trainable layers, except for the blocks" leaves one place: before the head.

    Source: Warburg et al. (2023), appendices G.2 and G.4.

    Args:
        architecture: torchvision's name, "resnet18" (P = 512) or "resnet50" (P = 2,048).
        dimension: embedding dimensions D.
        weights: as in `lam.models.libraries.from_torchvision`.
        pooling: "mean", torchvision's own, or "gem".
        dropout: rate in [0, 1) before the head.
    """
    check_dropout(dropout)
    check_choice("pooling", pooling, get_args(Pooling))
    network = from_torchvision(architecture, dimension=dimension, weights=weights)
    if pooling == "gem":
        network.features.set_submodule("avgpool", GeM())
    if dropout:
        network.features.set_submodule("fc", nn.Dropout(dropout))  # in the classifier's place
    return network


def cifar_resnet(
    architecture: str, *, dimension: int, channels: int = 3, projection: int = 0, dropout: float = 0.0
) -> EmbeddingNetwork:
    """A residual network for 32 × 32 images: a 3 × 3 first convolution of stride 1, and no pooling before the blocks.

    With a projection, the head is the second of two layers, as in methods without labels. The sources use ResNet-50.

    Source: Chen et al. (2020), "A simple framework for contrastive learning of visual representations", appendix B.9;
    "Probabilistic contrastive learning with explicit concentration on the hypersphere", appendix G: projection=512.

    Args:
        architecture: torchvision's name, "resnet18" or "resnet50".
        dimension: embedding dimensions D.
        channels: channels of an image.
        projection: units of a hidden layer with batch norm between pooling and head; 0 for no such layer.
        dropout: rate in [0, 1) before the head.
    """
    check_dropout(dropout)
    check_at_least("channels", channels, 1)
    check_at_least("projection", projection, 0)
    network = from_torchvision(architecture, dimension=dimension)
    stem = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's other layers
    network.features.set_submodule("conv1", stem)
    network.features.set_submodule("maxpool", nn.Identity())
    last: list[nn.Module] = []
    if projection:
        hidden = nn.Linear(network.head.in_features, projection, bias=False)
        last += [hidden, nn.BatchNorm1d(projection), nn.ReLU()]
        network.head = nn.Linear(projection, dimension)
    if dropout:
        last.append(nn.Dropout(dropout))
    network.features.set_submodule("fc", nn.Sequential(*last))  # in the classifier's place
    return network
