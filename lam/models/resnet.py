"""Residual networks with an embedding head, for birds, faces and places."""

from typing import Literal, get_args

from torch import nn

from lam.models.gem import GeM
from lam.models.libraries import from_torchvision
from lam.models.network import EmbeddingNetwork, check_dropout

Pooling = Literal["mean", "gem"]


def resnet18(
    *, dimension: int, weights: str | None = None, pooling: Pooling = "mean", dropout: float = 0.0
) -> EmbeddingNetwork:
    """torchvision's ResNet-18, its classifier replaced by a linear head of 512 inputs; see `resnet50`.

    Args:
        dimension: embedding dimensions D.
        weights: torchvision's name, such as "IMAGENET1K_V1" or "DEFAULT", or a file; None leaves them random.
        pooling: "mean" or "gem".
        dropout: rate in [0, 1) before the head.
    """
    return _resnet("resnet18", dimension, weights, pooling, dropout)


def resnet50(
    *, dimension: int, weights: str | None = None, pooling: Pooling = "mean", dropout: float = 0.0
) -> EmbeddingNetwork:
    """torchvision's ResNet-50, its classifier replaced by a linear head of 2,048 inputs, for images of any size.

    The paper's network for birds and faces is `pooling="gem"`: backbone, generalised mean, a learned whitening layer,
    normalisation. The head is the whitening layer; it is drawn as every linear layer is, bias and all, and learned with
    the rest. The paper's keeps the dimension (D = 2048). Dropout is "between all trainable layers, except for the
    blocks", which leaves one place: between pooling and head.

    Source: Warburg et al. (2023), appendices G.2 and G.4.

    Args:
        dimension: embedding dimensions D.
        weights: torchvision's name, such as "IMAGENET1K_V2" or "DEFAULT", or a file (.safetensors or .pth) of
            torchvision's network, with or without its classifier; None leaves them random. The head is always new.
        pooling: "mean", as torchvision has it, or "gem".
        dropout: rate in [0, 1) before the head.

    Raises:
        ValueError: for other weights or pooling, a rate outside [0, 1), or a file that holds another network.
    """
    return _resnet("resnet50", dimension, weights, pooling, dropout)


def _resnet(architecture: str, dimension: int, weights: str | None, pooling: str, dropout: float) -> EmbeddingNetwork:
    check_dropout(dropout)
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling must be one of {', '.join(get_args(Pooling))}, got {pooling!r}")
    network = from_torchvision(architecture, dimension=dimension, weights=weights)
    if pooling == "gem":
        network.features.set_submodule("avgpool", GeM())
    if dropout:
        network.features.set_submodule("fc", nn.Dropout(dropout))  # in the classifier's place
    return network
