"""An encoder without uncertainty, and base classes of encoders with a seed or with a second head."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lam.encoders.base import Encoder, Prediction, Predictor, at_least_float32, directions_of
from lam.encoders.files import SavedEncoder
from lam.models.head import features_and_output
from lam.models.weights import check_state
from lam.utils.autocast import without_autocast
from lam.utils.random import derive_seed
from lam.vmf.embeddings import KAPPA_RANGE, Embeddings

Same = TypeVar("Same", bound="TwoHeadedEncoder")


class DeterministicEncoder(Encoder):
    """Embed without uncertainty: for every input, κ is the upper end of `KAPPA_RANGE`, and the variance is 0.

    The network maps inputs (N, ...) to (N, D) and ends in the linear layer `head`, with or without normalisation.
    """

    kind = "deterministic"
    has_kappa = False
    network: nn.Module

    @property
    def dimension(self) -> int:
        layer: Any = self.network.get_submodule(self.head)
        return layer.out_features

    def predictor(self, *, n_samples: int, joint: bool = False) -> Predictor:
        def predict(inputs: Any, offset: int) -> Prediction:
            features, output = features_and_output(self.network, self.head, inputs)
            mean = directions_of(output)
            one = mean.new_ones(len(mean))
            return Prediction(features, Embeddings(mean, one * KAPPA_RANGE[1], one, 0 * one))

        return predict


class SeededEncoder(DeterministicEncoder):
    """An encoder that draws samples from its own seed, not from torch's global generator."""

    has_kappa = True
    keeps = ("seed",)

    def __init__(self, network: nn.Module, head: str, *, seed: int = 0, **common: Any) -> None:
        super().__init__(network, head, **common)
        self.seed = seed

    @without_autocast()
    def unnormalised(self, features: Float[Tensor, "N P"]) -> Float[Tensor, "N D"]:
        """Outputs of the head before normalisation, float32 or wider."""
        head = self.network.get_submodule(self.head)
        with torch.no_grad():
            return at_least_float32(head(features.to(next(head.parameters()).dtype)))

    def draw_each(
        self, positions: Iterable[int], draw: Callable[[int, torch.Generator], Float[Tensor, "S D"]]
    ) -> Float[Tensor, "S N D"]:
        """Samples of N items. Each item has its own CPU generator, so batches and devices do not change the samples.

        `positions` are the items' positions in the pass, from 0; `draw` takes an item's index among the N.
        """
        generators = (torch.Generator().manual_seed(derive_seed(self.seed, position)) for position in positions)
        return torch.stack([draw(number, generator) for number, generator in enumerate(generators)], 1)


class TwoHeadedEncoder(SeededEncoder):
    """An encoder with a second head on the network's features; `save` writes the head's recipe and state.

    `own_head` is the name and the type of the attribute that holds the second head.
    """

    own_head: ClassVar[tuple[str, type[Any]]]

    def settings(self) -> dict[str, Any]:
        name, _ = self.own_head
        return {**super().settings(), name: getattr(self, name).recipe}

    def tensors(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = getattr(self, self.own_head[0]).state_dict()
        return state

    @classmethod
    def restored(cls: type[Same], saved: SavedEncoder) -> Same:
        name, kind = cls.own_head
        with torch.device("meta"):  # an untrusted recipe takes no memory before its shapes are checked
            check_state(kind(**saved.settings[name]).state_dict(), saved.tensors)
        head = kind(**saved.settings[name])
        head.load_state_dict(saved.tensors)
        return super().restored(replace(saved, settings={**saved.settings, name: head}, tensors={}))
