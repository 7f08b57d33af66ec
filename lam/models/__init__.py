"""Networks by name: they map images or texts to the unit sphere, and end in a linear layer called `head`.

Each network holds a recipe, the arguments that rebuild it, so a saved encoder needs no pickle.
"""

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lam.inputs.preprocessing import Preprocessing
from lam.models import photographs
from lam.models.networks import (
    EmbeddingNetwork,
    Option,
    cifar_resnet,
    convnet8,
    convnet28,
    convnet32,
    from_timm,
    from_torchvision,
    resnet,
)
from lam.models.photographs import efficientnet_lite0
from lam.models.sentences import from_sentence_transformers
from lam.models.weights import by_plain_name, check_state
from lam.utils.checks import check_at_least, check_options
from lam.utils.random import seeded
from lam.utils.registry import enter, find

_NETWORKS: dict[str, Callable[..., EmbeddingNetwork]] = {
    "convnet8": convnet8,
    "convnet28": convnet28,
    "convnet32": convnet32,
    "resnet18": partial(resnet, "resnet18"),
    "resnet50": partial(resnet, "resnet50"),
    "cifar_resnet18": partial(cifar_resnet, "resnet18"),
    "cifar_resnet50": partial(cifar_resnet, "resnet50"),
    photographs.NAME: efficientnet_lite0,
}
_FROZEN = (photographs.NAME, "sentence-transformers:")
_LIBRARIES: dict[str, Callable[..., EmbeddingNetwork]] = {
    "torchvision": from_torchvision,
    "timm": from_timm,
    "sentence-transformers": from_sentence_transformers,
}


def build(
    name: str, *, dimension: int, weights: str | None = None, seed: int = 0, **options: Option
) -> EmbeddingNetwork:
    """A new network by name; `build(**network.recipe)` builds another network of the same shape.

    Args:
        name: a network of lam, "torchvision:NAME", "timm:NAME" or "sentence-transformers:NAME". "convnet8" takes images
            of 8 × 8 pixels, "convnet28" of 28 × 28 and "convnet32" of 32 × 32.
        dimension: embedding dimensions D, at least 2.
        weights: the library's name for pretrained weights, or a file; None for random weights. The head is always new.
        seed: seed of the random weights; torch's global random state does not change.
        options: options of the network, such as `channels`, `pooling` or `dropout`.

    Returns:
        A network that maps N inputs, images (N, C, H, W) or texts (N, L), to unit rows (N, D).

    Raises:
        ValueError: for an unknown name or weights, a dimension below 2, or an option that the network does not have.

    Example:
        >>> import torch
        >>> network = build("convnet8", dimension=3)
        >>> network(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 3])
        >>> network.recipe
        {'name': 'convnet8', 'dimension': 3}
    """
    check_at_least("dimension", dimension, 2)
    constructor = _constructor(name)
    arguments = {"dimension": dimension, **options} | ({} if weights is None else {"weights": weights})
    try:
        inspect.signature(constructor).bind(**arguments)
    except TypeError as error:
        allowed = ", ".join(inspect.signature(constructor).parameters)
        raise ValueError(
            f"{name} does not take these options ({error}); it takes {allowed}. If a configuration sets them for "
            "another network, use --network.options={} and --network.weights=null"
        ) from None
    with seeded(seed):
        try:
            network = constructor(**arguments)
        except (AttributeError, TypeError):
            check_options(name, constructor, options)
            raise
    if not isinstance(network, EmbeddingNetwork):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"the builder of {name} must return a lam.models.EmbeddingNetwork, got {type(network).__name__}: return "
            "EmbeddingNetwork(features, head)"
        )
    outputs, inputs = network.head.weight.shape
    if outputs not in (network.recipe.get("dimension", dimension), inputs):  # identity heads keep the features' size
        raise ValueError(
            f"{name} has a head of {outputs} outputs for dimension {dimension}: its builder must use "
            "the argument `dimension`"
        )
    network.recipe = {"name": name, "dimension": dimension, **options, **network.recipe}
    return network


def rebuild(recipe: Any, state: Mapping[str, Tensor]) -> EmbeddingNetwork:
    """Build a saved network from an untrusted recipe, after a check of its shapes against the saved tensors.

    Args:
        recipe: the saved network's options, by name.
        state: the saved tensors; only shapes and types are read, so tensors on the meta device are enough.

    Raises:
        ValueError: as `build`; also, before memory is allocated, for a recipe with weights, a seed or lists, or for
            shapes that differ from `state`.
    """
    if not isinstance(recipe, dict) or not all(isinstance(value, Option) for value in recipe.values()):
        raise ValueError("a network's recipe must hold only names and numbers")
    if not isinstance(recipe.get("name"), str) or "dimension" not in recipe:
        raise ValueError(f"a network's recipe must hold a name and a dimension, got {recipe}")
    if refused := recipe.keys() & {"weights", "seed"}:
        raise ValueError(f"a network's recipe must not hold {', '.join(sorted(refused))}: weights are in the folder")
    head = by_plain_name(state).get("head.weight")
    if str(recipe.get("name")).startswith(_FROZEN):
        if not isinstance(recipe.get("sha256"), str):
            raise ValueError(f"the recipe of {recipe['name']} has no SHA-256 of its weights")
        if head is not None and recipe.get("dimension") != len(head):
            raise ValueError(f"the recipe has dimension {recipe.get('dimension')}, but the saved head {len(head)}")
    else:
        try:
            with torch.device("meta"), warnings.catch_warnings():
                # a builder that loads pretrained weights copies nothing here, which torch warns of for each tensor
                warnings.filterwarnings("ignore", ".*to a meta parameter in the current model, which is a no-op")
                own = build(**recipe).state_dict()
        except RuntimeError:  # some libraries compute sizes with tensors, which need values
            try:
                with _WeightsOnMeta():
                    own = build(**recipe).state_dict()
            except RuntimeError as error:
                raise ValueError(
                    f"{recipe['name']} cannot be built without memory ({error}): build it yourself and call "
                    "lam.load(folder, network)"
                ) from None
        check_state(own, state)
    return build(**recipe)


class _WeightsOnMeta(TorchFunctionMode):
    """Creates weights on the meta device; other tensors, such as ranges, are created as usual."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_meta = func in (torch.empty, torch.zeros, torch.ones) and kwargs.get("device") is None
        return func(*args, **{**kwargs, "device": "meta"} if on_meta else kwargs)


def preprocessing_of(name: str) -> Preprocessing | None:
    """The image preprocessing that a network needs, or None for any preprocessing.

    Example:
        >>> preprocessing_of("efficientnet_lite0").shape, preprocessing_of("resnet18")
        ((3, 224, 224), None)
    """
    return photographs.PREPROCESSING if name == photographs.NAME else None


def why_missing(name: str) -> str | None:
    """Text that names a network's missing packages and how to install them; None if no package is missing."""
    return photographs.why_missing() if name == photographs.NAME else None


def register(name: str, constructor: Callable[..., EmbeddingNetwork]) -> None:
    """Register a network under a new name, for `build` and configurations.

    Args:
        constructor: function that returns an `EmbeddingNetwork`. Its keywords are `dimension` and options, which are
            numbers, strings or booleans.

    Raises:
        ValueError: if another network has the name.
    """
    enter(_NETWORKS, "network", name, constructor)


def _constructor(name: str) -> Callable[..., EmbeddingNetwork]:
    library, _, architecture = name.partition(":")
    if library in _LIBRARIES and architecture:
        return partial(_LIBRARIES[library], architecture)
    known = _NETWORKS | {f"{library}:NAME": constructor for library, constructor in _LIBRARIES.items()}
    return find(known, "network", name, "lam.models.register")


__all__ = ["EmbeddingNetwork", "build", "preprocessing_of", "register"]
