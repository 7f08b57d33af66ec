"""Residual networks with an embedding head, for birds, faces, places and small photographs; `GeM`, their pooling."""

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lam.models.libraries import from_torchvision
from lam.models.network import EmbeddingNetwork, check_dropout
from lam.utils.checks import check_at_least, check_choice, check_positive

Pooling = Literal["mean", "gem"]


class GeM(nn.Module):
    """Generalised mean of every channel of a feature map.

    f_c = (1/(HW) Σ_hw max(x_chw, ε)^p)^(1/p); p = 1 is the mean, p → ∞ the maximum. Logarithms in float32 or wider keep
    a large p from overflowing, and give a channel without activation a finite gradient.

    Source: Radenović, Tolias and Chum (2018), "Fine-tuning CNN image retrieval with no human annotation", equation 3.

    Args:
        p: initial exponent, positive; one learned exponent for all channels.
        eps: ε > 0, the floor of activations.

    Example:
        >>> pooled = GeM(p=2.0)(torch.tensor([[[[1.0, 7.0]]]]))
        >>> pooled.shape, round(pooled.item(), 4)
        (torch.Size([1, 1]), 5.0)
    """

    def __init__(self, *, p: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__()
        check_positive("p of GeM", p)
        check_positive("eps of GeM", eps)
        self.p = nn.Parameter(torch.tensor(float(p)))
        self.eps = eps

    def forward(self, maps: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C"]:
        """Generalised means (N, C) of feature maps (N, C, H, W) of any size, in their type."""
        wide = torch.promote_types(maps.dtype, torch.float32)
        p = self.p.to(wide)
        logarithms = maps.to(wide).clamp(min=self.eps).flatten(2).log()
        pooled = (torch.logsumexp(p * logarithms, dim=2) - math.log(logarithms.shape[2])) / p
        return pooled.exp().to(maps.dtype)


def resnet(
    architecture: str, *, dimension: int, weights: str | None = None, pooling: Pooling = "mean", dropout: float = 0.0
) -> EmbeddingNetwork:
    """torchvision's residual network with a linear head instead of its classifier, for images of any size.

    The source's network for birds and faces is the ResNet-50 with `pooling="gem"`: backbone, generalised mean, a
    learned whitening layer with D = 2,048, normalisation. Here the head is the whitening layer, with random initial
    weights. The source has dropout "between all trainable layers, except for the blocks", that is, before the head.

    Source: Warburg et al. (2023), appendices G.2 and G.4.

    Args:
        architecture: torchvision's name, "resnet18" (P = 512) or "resnet50" (P = 2,048).
        dimension: embedding dimensions D.
        weights: as in `lam.models.libraries.from_torchvision`.
        pooling: "mean", torchvision's own, or "gem".
        dropout: rate in [0, 1) of the dropout before the head.
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
    "Probabilistic contrastive learning with explicit concentration on the hypersphere", appendix G, for projection=512.

    Args:
        architecture: torchvision's name, "resnet18" or "resnet50".
        dimension: embedding dimensions D.
        channels: channels of an image.
        projection: units of a hidden layer with batch norm between pooling and head; 0 for no hidden layer.
        dropout: rate in [0, 1) of the dropout before the head.
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
