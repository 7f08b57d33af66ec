"""Networks of torchvision and timm with an embedding head instead of the classifier."""

from pathlib import Path
from typing import Any

from torch import nn

from lam.models.network import EmbeddingNetwork, Option
from lam.models.weights import load_weights
from lam.utils.extras import install_command

_SUFFIXES = (".safetensors", ".pth", ".pt")
_INCEPTIONS = ("googlenet", "inception_v3")


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
    inception = {"aux_logits": False, "init_weights": False} if architecture in _INCEPTIONS else {}
    try:
        network: Any = models.get_model(architecture, weights=None if file else weights, **inception, **options)
    except TypeError as error:
        raise ValueError(f"{architecture} of torchvision does not take these options ({error})") from None
    if architecture in _INCEPTIONS:
        network.transform_input = True  # torchvision sets this only with `weights`, which a rebuilt network lacks
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


def from_timm(architecture: str, *, dimension: int, weights: str | None = None) -> EmbeddingNetwork:
    """A network of timm with a new head instead of its classifier.

    Args:
        architecture: timm's name, such as "resnet50.a1_in1k", which also names the weights.
        dimension: embedding dimensions D.
        weights: "DEFAULT" for the weights in the name, or a file with weights; None for random weights.
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
    network: Any = timm.create_model(architecture, pretrained=file is None and weights is not None, num_classes=0)
    if file is not None:
        named = network.pretrained_cfg.get("classifier") or ()
        load_weights(network, file, classifier=[named] if isinstance(named, str) else named, source="weights")
    width: Any = getattr(network, "head_hidden_size", None) or network.num_features
    return EmbeddingNetwork(network, nn.Linear(width, dimension))


def _file(weights: str | None) -> str | None:
    return weights if weights is not None and Path(weights).suffix in _SUFFIXES else None
