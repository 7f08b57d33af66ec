"""`SeededEncoder`: one trained network and the seed of all draws, which several encoders begin with."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lam.encoders.base import at_least_float32
from lam.encoders.deterministic import DeterministicEncoder
from lam.encoders.files import SavedEncoder
from lam.models.weights import check_state
from lam.utils.autocast import without_autocast
from lam.utils.random import derive_seed

Same = TypeVar("Same", bound="TwoHeadedEncoder")


class SeededEncoder(DeterministicEncoder):
    """A trained network, and a seed for all that is drawn when it embeds.

    Args:
        network, head, common: of `DeterministicEncoder`.
        seed: of everything drawn; torch's global generator is not used.
    """

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
        """Draws for N items, each from its own generator: the same however a pass is cut into batches.

        Args:
            positions: of the N items in the whole pass, counted from 0.
            draw: draws for one item, by its number among the N and its generator; this is on the CPU, so that every
                device sees the same.
        """
        generators = (torch.Generator().manual_seed(derive_seed(self.seed, position)) for position in positions)
        return torch.stack([draw(number, generator) for number, generator in enumerate(generators)], 1)


class TwoHeadedEncoder(SeededEncoder):
    """An encoder with a head of its own beside the network's, which is saved by its recipe and its state."""

    own_head: ClassVar[tuple[str, type[Any]]]
    """Name and type of the attribute that holds it."""

    def settings(self) -> dict[str, Any]:
        """The seed and the recipe of the head."""
        name, _ = self.own_head
        return {**super().settings(), name: getattr(self, name).recipe}

    def tensors(self) -> dict[str, Tensor]:
        """The state of the head."""
        state: dict[str, Tensor] = getattr(self, self.own_head[0]).state_dict()
        return state

    @classmethod
    def restored(cls: type[Same], saved: SavedEncoder) -> Same:
        """The encoder that `save` wrote."""
        name, kind = cls.own_head
        with torch.device("meta"):  # a recipe that anybody may have written takes no memory before it fits
            check_state(kind(**saved.settings[name]).state_dict(), saved.tensors)
        head = kind(**saved.settings[name])
        head.load_state_dict(saved.tensors)
        return super().restored(replace(saved, settings={**saved.settings, name: head}, tensors={}))
