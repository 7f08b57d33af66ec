"""Residual networks with an embedding head, for birds, faces and places."""

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
    """torchvision's residual network, its classifier replaced by a linear head, for images of any size.

    The head of ResNet-18 has 512 inputs, that of ResNet-50 has 2,048. The paper's network for birds and faces is the
    ResNet-50 with `pooling="gem"`: backbone, generalised mean, a learned whitening layer, normalisation. The head is
    the whitening layer; it is drawn as every linear layer is, bias and all, and learned with the rest. The paper's
    keeps the dimension (D = 2048). Dropout is "between all trainable layers, except for the blocks", which leaves one
    place: between pooling and head.

    Source: Warburg et al. (2023), appendices G.2 and G.4.

    Args:
        architecture: torchvision's name, "resnet18" or "resnet50".
        dimension: embedding dimensions D.
        weights: torchvision's name, such as "IMAGENET1K_V1" or "DEFAULT", or a file (.safetensors or .pth) of
            torchvision's network, with or without its classifier; None leaves them random. The head is always new.
        pooling: "mean", as torchvision has it, or "gem".
        dropout: rate in [0, 1) before the head.

    Raises:
        ValueError: for other weights or pooling, a rate outside [0, 1), or a file that holds another network.
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
    """A residual network for images of 32 × 32: a first convolution of 3 × 3 and stride 1, no pooling before blocks.

    With a projection the embedding's head is the last of two layers, as in the methods that learn without labels; what
    enters it, and a κ head, is the hidden layer. The network of the sources is the ResNet-50.

    Source: Chen et al. (2020), "A simple framework for contrastive learning of visual representations", appendix B.9;
    "Probabilistic contrastive learning with explicit concentration on the hypersphere", appendix G: projection=512.

    Args:
        architecture: torchvision's name, "resnet18" or "resnet50".
        dimension: embedding dimensions D.
        channels: of an image.
        projection: units of a hidden layer with batch norm between pooling and head; 0 for none.
        dropout: rate in [0, 1) before the head.

    Raises:
        ValueError: for fewer than one channel, a projection below 0, or a rate outside [0, 1).
    """
    check_dropout(dropout)
    check_at_least("channels", channels, 1)
    check_at_least("projection", projection, 0)
    network = from_torchvision(architecture, dimension=dimension)
    stem = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as torchvision draws the others
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
