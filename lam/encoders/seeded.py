"""`SeededEncoder`: one trained network and the seed of all draws, which several encoders begin with."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lam.encoders.base import at_least_float32
from lam.encoders.deterministic import DeterministicEncoder
from lam.utils.autocast import without_autocast
from lam.utils.random import derive_seed


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
