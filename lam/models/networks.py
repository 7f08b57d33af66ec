"""`EmbeddingNetwork`, the class of every network, and networks with an embedding head in place of a classifier.

The small networks are cheap enough for a CPU. Their dropout is "between all trainable layers" (Warburg et al. 2023,
appendix G.4): it drops whole channels, before the head and before every convolution except the first. Weights have the
same names with and without dropout.
"""

import math
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from lam.models.weights import load_weights
from lam.utils.checks import check_at_least, check_choice, check_positive
from lam.utils.extras import install_command

Option = str | int | float | bool

_SUFFIXES = (".safetensors", ".pth", ".pt")
_INCEPTIONS = ("googlenet", "inception_v3")
Pooling = Literal["mean", "gem"]


class EmbeddingNetwork(nn.Module):
    """Map inputs x to points n on the unit sphere: n = f/‖f‖ with f = head(features(x)).

    Attributes:
        features: maps N inputs to (N, P), the inputs of the head.
        head: the last linear layer, from P to D dimensions; a posterior covers its weights.
        recipe: arguments of `lam.models.build` that rebuild the network, as JSON, without weights and seed.
    """

    def __init__(self, features: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.features = features
        self.head = head
        self.recipe: dict[str, Option] = {}

    def forward(self, inputs: Shaped[Tensor, "N ..."]) -> Float[Tensor, "N D"]:
        return F.normalize(self.head(self.features(inputs)), dim=1)


def check_dropout(rate: float) -> None:
    """Reject a dropout rate outside [0, 1); at 0 a network has no dropout layers."""
    if not 0 <= rate < 1:
        raise ValueError(f"dropout must be a rate in [0, 1), got {rate}")


def from_torchvision(
    architecture: str, *, dimension: int, weights: str | None = None, **options: Option
) -> EmbeddingNetwork:
    """A classifier of torchvision with a new head instead of its last linear layer.

    Args:
        architecture: torchvision's name, such as "resnet50" or "vit_b_16".
        dimension: embedding dimensions D.
        weights: torchvision's name of weights, such as "DEFAULT", or a file with weights; None for random weights.
        options: further arguments of torchvision, such as `image_size` of a vision transformer.
    """
    from torchvision import models

    known = models.list_models(module=models)
    if architecture not in known:
        raise ValueError(f"torchvision's image classifiers are {', '.join(known)}; got {architecture!r}")
    if "num_classes" in options:
        raise ValueError(f"num_classes sets the classifier of {architecture}, which lam removes: give dimension")
    allowed = list(models.get_model_weights(architecture).__members__)
    file = _file(weights)
    if file is None and weights is not None and weights not in allowed:
        raise ValueError(
            f"weights of {architecture} must be None, {', '.join(allowed)} or a file ({', '.join(_SUFFIXES)}); "
            f"got {weights!r}"
        )
    inception = {"init_weights": False} if architecture in _INCEPTIONS else {}
    if inception and (file is not None or weights is None):  # torchvision loads its weights only with auxiliary logits
        inception["aux_logits"] = False
    try:
        network: Any = models.get_model(architecture, weights=None if file else weights, **inception, **options)
    except TypeError as error:
        raise ValueError(f"{architecture} of torchvision does not take these options ({error})") from None
    if architecture in _INCEPTIONS:
        network.transform_input = True  # torchvision sets this only with `weights`, which a rebuilt network lacks
        network.aux_logits = False
        network.AuxLogits = None
    linear = [(path, module) for path, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise ValueError(f"{architecture} has no linear classifier that a head could replace; choose another network")
    path, classifier = linear[-1]
    network.set_submodule(path, nn.Identity())
    if file is not None:
        load_weights(network, file, classifier=[path], source="weights")
    embedding = EmbeddingNetwork(network, nn.Linear(classifier.in_features, dimension))
    if isinstance(network, models.VisionTransformer):
        embedding.recipe["image_size"] = network.image_size  # some weights change it
    return embedding


def from_timm(architecture: str, *, dimension: int, weights: str | None = None, **options: Option) -> EmbeddingNetwork:
    """A network of timm with a new head instead of its classifier.

    Args:
        architecture: timm's name, such as "resnet50.a1_in1k", which also names the weights.
        dimension: embedding dimensions D.
        weights: "DEFAULT" for the weights in the name, or a file with weights; None for random weights.
        options: further arguments of timm, such as `img_size` of a vision transformer.
    """
    try:
        import timm
    except ImportError as error:
        raise ValueError(f"timm:{architecture} needs timm ({error}): {install_command('images')}") from error
    if not timm.is_model(architecture):
        raise ValueError(f"timm has no network {architecture!r}; timm.list_models() lists them")
    file = _file(weights)
    if file is None and weights not in (None, "DEFAULT"):
        raise ValueError(
            "weights of a timm network must be 'DEFAULT' (the weights in its name), None or a file "
            f"({', '.join(_SUFFIXES)}), got {weights!r}"
        )
    if refused := options.keys() & {"pretrained", "num_classes", "checkpoint_path", "features_only"}:
        raise ValueError(
            f"{', '.join(sorted(refused))} of timm:{architecture} cannot be set, because lam replaces the classifier "
            "and loads the weights: give dimension and weights"
        )
    arguments: dict[str, Any] = {**options, "pretrained": file is None and weights is not None, "num_classes": 0}
    try:
        network: Any = timm.create_model(architecture, **arguments)
    except TypeError as error:
        raise ValueError(f"{architecture} of timm does not take these options ({error})") from None
    if file is not None:
        named = network.pretrained_cfg.get("classifier") or ()
        load_weights(network, file, classifier=[named] if isinstance(named, str) else named, source="weights")
    width: Any = getattr(network, "head_hidden_size", None) or network.num_features
    return EmbeddingNetwork(network, nn.Linear(width, dimension))


def _file(weights: str | None) -> str | None:
    return weights if weights is not None and Path(weights).suffix in _SUFFIXES else None


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

    The authors' network for birds and faces is the ResNet-50 with `pooling="gem"`: backbone, generalised mean, a
    learned whitening layer with D = 2,048, normalisation. Here the head is the whitening layer, with random initial
    weights. The paper has dropout "between all trainable layers, except for the blocks", that is, before the head.

    Source: Warburg et al. (2023), appendices G.2 and G.4.

    Args:
        architecture: torchvision's name, "resnet18" (P = 512) or "resnet50" (P = 2,048).
        dimension: embedding dimensions D.
        weights: as in `lam.models.networks.from_torchvision`.
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

    With a projection, the head is the second of two layers, as in methods without labels. Both papers use ResNet-50.

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


def convnet32(*, dimension: int, channels: int = 3, dropout: float = 0.0) -> EmbeddingNetwork:
    """The authors' network for 32 × 32 images: three 3 × 3 convolutions, one pooling, a linear layer of 9,216 inputs.

    The paper states the channels (32, 64, 64), a pooling of 2 after the second convolution, and 9,216 features. This
    implies 3 × 3 filters without padding. The paper says one colour channel, but CIFAR-10 has three. The authors' code
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
    """The authors' network for 28 × 28 images: two 3 × 3 convolutions, pooling, one linear layer of 9,216 inputs.

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
