"""Networks that stay as they came, with a head of lam's: what they make of an input is computed once.

The frozen weights are no part of a network's state; a saved network names where they came from, and the hash by which
they are known again. Which networks there are is said by `lam.models.sentences` and `lam.models.photographs`.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, MutableMapping, Sequence
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from lam.models.network import EmbeddingNetwork, check_dropout
from lam.models.weights import sha256_of_weights
from lam.utils.checks import check_choice

Head = Literal["train", "identity"]
Layers = Literal["last", "all"]
KEPT_BYTES = 2**30
"""What the kept features of one network may take; those of further inputs are computed anew."""


class Frozen(nn.Module, ABC):
    """Map inputs to what a network that is never trained makes of them.

    Once training has begun, the features of an input are kept: every epoch and every later pass needs them. Features in
    place of inputs, (N, P), are returned as they are.

    Attributes:
        width: P.
        sha256: of the frozen weights, in hexadecimal digits.
        of_data: (N, P) features of whole data sets, which go when these do; see `lam.training.features`.

    Args:
        network: whose weights stay as they are.
        width: P.
    """

    def __init__(self, network: Any, width: int) -> None:
        super().__init__()
        network.eval().requires_grad_(False)
        self._frozen = [network]  # in a list, so that it is no part of the state, of the modules or of their modes
        self._kept: dict[Hashable, Tensor] | None = None
        self.of_data: MutableMapping[Any, Tensor] = WeakKeyDictionary()
        self.width = width
        self.sha256 = sha256_of_weights(network)

    @abstractmethod
    def keys(self, inputs: Shaped[Tensor, "N ..."]) -> Sequence[Hashable]:
        """What tells each of N inputs from others."""

    @abstractmethod
    def compute(self, inputs: Shaped[Tensor, "N ..."]) -> Float[Tensor, "N P"]:
        """Features of N inputs, on any device."""

    def traced(self, inputs: Shaped[Tensor, "N ..."]) -> Float[Tensor, "N P"]:
        """Features of N inputs by operations of torch alone, as a program that is exported has them.

        Raises:
            ValueError: where there are none such.
        """
        raise ValueError(
            "a network for texts cannot be exported: what cuts a text into tokens is no operation of torch; save the "
            "encoder, and serve it with lam"
        )

    def train(self, mode: bool = True) -> "Frozen":
        """Change the mode; features are kept from the first training on."""
        if mode:
            self.keep()
        return super().train(mode)

    def keep(self) -> None:
        """Keep features from now on."""
        if self._kept is None:
            self._kept = {}

    def is_features(self, inputs: Tensor) -> bool:
        """Whether these are features already."""
        return inputs.is_floating_point() and inputs.ndim == 2 and inputs.shape[1] == self.width

    def forward(self, inputs: Shaped[Tensor, "N ..."]) -> Float[Tensor, "N P"]:
        """Features (N, P) of N inputs, whatever their gradient mode: there is none."""
        if self.is_features(inputs):
            return inputs
        if torch.compiler.is_exporting():
            return self.traced(inputs)
        kept = {} if self._kept is None else self._kept
        keys = range(len(inputs)) if self._kept is None else self.keys(inputs)
        missing = {key: row for row, key in enumerate(keys) if key not in kept}
        made: dict[Hashable, Tensor] = {}
        if missing:
            rows = list(missing.values())
            with torch.inference_mode(False), torch.no_grad():
                features = self.compute(inputs if len(rows) == len(inputs) else inputs[rows]).float().clone()
            made = dict(zip(missing, features.unbind(), strict=True))
        result = torch.stack([made[key] if key in made else kept[key] for key in keys])
        if self._kept is not None and 4 * self.width * (len(kept) + len(made)) <= KEPT_BYTES:
            kept |= made
        return result.to(inputs.device)


def frozen_in(network: nn.Module) -> Frozen | None:
    """The frozen part of a network; None where it has none, or several."""
    found = [module for module in network.modules() if isinstance(module, Frozen)]
    return found[0] if len(found) == 1 else None


def check_head(head: str, layers: str | None, dropout: float) -> None:
    """Refuse heads and layers that are unknown or do not go together, and a rate of dropout outside [0, 1)."""
    check_choice("head", head, get_args(Head))
    if layers is not None:
        check_choice("layers", layers, get_args(Layers))
    if head == "identity" and layers == "all":
        raise ValueError("layers='all' is for a head that learns from them: give head='train', or layers='last'")
    check_dropout(dropout)


def with_head(
    frozen: Frozen, *, name: str, dimension: int, head: Head, dropout: float, sha256: str | None
) -> EmbeddingNetwork:
    """A frozen network with a new head.

    Args:
        frozen: what the head learns from.
        name: of the network, which its recipe keeps.
        dimension: embedding dimensions D of a head that is trained.
        head: `train` for a linear layer; `identity` to keep the features, D being P.
        dropout: rate in [0, 1) before a head that is trained, while it is.
        sha256: what the frozen weights must have; None for any.

    Raises:
        ValueError: for weights that are not those asked for.
    """
    if sha256 not in (None, frozen.sha256):
        raise ValueError(f"{name} has other weights than the network that was saved: put those back, or train anew")
    last = identity_layer(frozen.width) if head == "identity" else nn.Linear(frozen.width, dimension)
    features = nn.Sequential(frozen, nn.Dropout(dropout)) if dropout and head == "train" else frozen
    embedding = EmbeddingNetwork(features, last)
    embedding.recipe = {"name": name, "dimension": last.out_features, "sha256": frozen.sha256}
    return embedding


def identity_layer(width: int) -> nn.Linear:
    """A linear layer that changes nothing and is not trained."""
    layer = nn.Linear(width, width, bias=False).requires_grad_(False)
    nn.init.eye_(layer.weight)
    return layer
