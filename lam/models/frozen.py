"""Networks with frozen weights and a new head; features of an input are computed once.

The state_dict of a network leaves out frozen weights; the recipe has the source and the hash of these weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, MutableMapping, Sequence
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from lam.models.networks import EmbeddingNetwork, check_dropout
from lam.models.weights import sha256_of_weights
from lam.utils.checks import check_choice

Head = Literal["train", "identity"]
Layers = Literal["last", "all"]
KEPT_BYTES = 2**30
"""Greatest size in bytes of a network's cached features; features of further inputs are computed every time."""


class Frozen(nn.Module, ABC):
    """Map inputs to features (N, P) by a network that is never trained; inputs that are already features stay the same.

    Features are cached from the start of training, because every epoch needs them.

    Attributes:
        width: number of features P.
        sha256: SHA-256 of the frozen weights, in hexadecimal.
        data_features: (N, P) features of each data set, kept while the data set exists; see `lam.training.batches`.
    """

    def __init__(self, network: Any, width: int) -> None:
        super().__init__()
        self.training = False  # so that only `train` starts the cache
        network.eval().requires_grad_(False)
        self._frozen = [network]  # a list hides it from state_dict, modules and train()
        self._kept: dict[Hashable, Tensor] | None = None
        self.data_features: MutableMapping[Any, Tensor] = WeakKeyDictionary()
        self.width = width
        self.sha256 = sha256_of_weights(network)

    @abstractmethod
    def keys(self, inputs: Shaped[Tensor, "N ..."]) -> Sequence[Hashable]:
        """A key for each of N inputs, equal for equal inputs."""

    @abstractmethod
    def compute(self, inputs: Shaped[Tensor, "N ..."]) -> Float[Tensor, "N P"]:
        """Features of N inputs, on any device."""

    def traced(self, inputs: Shaped[Tensor, "N ..."]) -> Float[Tensor, "N P"]:
        """Features of N inputs, computed by operations of torch only, for an exported program."""
        raise ValueError(
            "a network for texts cannot be exported, because its tokenizer is not an operation of torch: save the "
            "encoder, and serve it with lam"
        )

    def train(self, mode: bool = True) -> "Frozen":
        """Set the mode; the first switch to training mode starts the cache of features."""
        if mode:
            self.keep()
        return super().train(mode)

    def keep(self) -> None:
        if self._kept is None:
            self._kept = {}

    def forward(self, inputs: Shaped[Tensor, "N ..."]) -> Float[Tensor, "N P"]:
        """Features (N, P) of N inputs, without a gradient."""
        if inputs.is_floating_point() and inputs.ndim == 2 and inputs.shape[1] == self.width:
            return inputs
        if torch.compiler.is_exporting():
            return self.traced(inputs)
        if len(inputs) == 0:
            return torch.empty(0, self.width, device=inputs.device)
        kept = {} if self._kept is None else self._kept
        keys = range(len(inputs)) if self._kept is None else self.keys(inputs)
        missing = {key: row for row, key in enumerate(keys) if key not in kept}
        new: dict[Hashable, Tensor] = {}
        if missing:
            rows = list(missing.values())
            with torch.inference_mode(False), torch.no_grad():
                features = self.compute(inputs if len(rows) == len(inputs) else inputs[rows]).float().clone()
            new = dict(zip(missing, features.unbind(), strict=True))
        result = torch.stack([new[key] if key in new else kept[key] for key in keys])
        if self._kept is not None and 4 * self.width * (len(kept) + len(new)) <= KEPT_BYTES:
            kept |= new
        return result.to(inputs.device)


def frozen_in(network: nn.Module) -> Frozen | None:
    """The frozen part of a network; None unless it has exactly one."""
    found = [module for module in network.modules() if isinstance(module, Frozen)]
    return found[0] if len(found) == 1 else None


def check_head(head: str, layers: str | None, dropout: float) -> None:
    """Reject unknown or contradictory values of `head` and `layers`, and a dropout rate outside [0, 1)."""
    check_choice("head", head, get_args(Head))
    if layers is not None:
        check_choice("layers", layers, get_args(Layers))
    if head == "identity" and layers == "all":
        raise ValueError("layers='all' needs a trained head: give head='train', or layers='last'")
    check_dropout(dropout)


def with_head(
    frozen: Frozen,
    *,
    name: str,
    dimension: int,
    head: Head,
    dropout: float,
    sha256: str | None,
    layers: Layers = "last",
) -> EmbeddingNetwork:
    """A frozen network with a new head: dropout and a linear layer, or for `identity` a layer that keeps the features.

    `recipe` keeps `name` and `layers`, to rebuild the network. If given, `sha256` must be the frozen weights' hash.
    """
    if sha256 not in (None, frozen.sha256):
        raise ValueError(f"{name} has other weights than the saved network: put the old ones back, or train anew")
    last = identity_layer(frozen.width) if head == "identity" else nn.Linear(frozen.width, dimension)
    features = nn.Sequential(frozen, nn.Dropout(dropout)) if dropout and head == "train" else frozen
    embedding = EmbeddingNetwork(features, last)
    embedding.recipe = {"name": name, "dimension": last.out_features, "sha256": frozen.sha256, "layers": layers}
    return embedding


def identity_layer(width: int) -> nn.Linear:
    """A linear layer that returns its input and is not trained."""
    layer = nn.Linear(width, width, bias=False).requires_grad_(False)
    nn.init.eye_(layer.weight)
    return layer
