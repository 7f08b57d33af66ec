"""What a training step is: how the gradient of one batch is taken, and what is remembered between batches.

The loop around it is in `lam.training`. A method with a gradient of its own derives its step from `Step`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lam.losses import Loss, margin_of
from lam.pairs.mining import ALL_PAIRS, Mining
from lam.pairs.pairs import Pairs
from lam.utils import distributed


class DivergenceError(ValueError):
    """Training that ran into NaN or infinity; where a step raises it, the loop adds at which step."""


@dataclass(frozen=True)
class Minibatch:
    """A batch as a step receives it.

    Attributes:
        inputs: (N, ...) inputs of the network, on its device; of several processes each has its own part of them, and
            all have the pairs, the targets and the same generator.
        pairs: the pairs among them, at least one of them positive.
        epoch: counted from 0.
        generator: on the CPU, seeded for this batch alone.
        targets: (N,) labels, or (N, X) positions, that the pairs are of.
        mining: which of the pairs the loss takes; see `mined`.
        sizes: how many of the N items each process has; empty where each has them all, as in one process.
    """

    inputs: Tensor
    pairs: Pairs
    epoch: int
    generator: torch.Generator
    targets: Tensor | None = None
    mining: Mining = ALL_PAIRS
    sizes: tuple[int, ...] = ()

    def gathered(self, rows: Tensor) -> Tensor:
        """The N rows of all processes from those of this one's items; the same tensor in one process.

        What the network that a step is given returns is gathered already; this is for what is taken from inside it.
        """
        return distributed.all_gather(rows, self.sizes) if self.sizes else rows

    def mined(self, embeddings: Tensor, margin: float | None, mining: Mining | None = None) -> Pairs:
        """Pairs chosen by these embeddings (N, D), unit rows: those of the loss, or of another mining."""
        mining = mining or self.mining
        if mining == ALL_PAIRS:
            return self.pairs
        return mining.choose(embeddings, self.pairs, self.targets, margin=margin, generator=self.generator)


class Step:
    """Take the gradient of the loss at the network's own weights; methods with another gradient override this."""

    @property
    def settings(self) -> dict[str, Any]:
        """Options as JSON; a run is resumed only with the same."""
        return {}

    def backward(self, network: nn.Module, loss: Loss, batch: Minibatch, backward: Callable[[Tensor], None]) -> Tensor:
        """Add the gradient of one batch to the parameters' `grad`.

        Args:
            network: in training mode, gradients zeroed; the loop updates it afterwards. In several processes it gives
                the outputs of all of them, so that each takes the loss of the whole batch; the gradients of the weights
                are then averaged over processes, which makes them those of one process.
            loss: of the embeddings and the pairs.
            batch: inputs and pairs.
            backward: called in place of `Tensor.backward`, as the precision may scale the loss.

        Returns:
            The loss, a detached scalar; training stops where it is not finite.

        Raises:
            DivergenceError: where the step cannot go on; the loop says at which step that was.
        """
        embeddings = network(batch.inputs)
        value = loss(embeddings, batch.mined(embeddings, margin_of(loss)))
        backward(value)
        return value.detach()

    def state_dict(self) -> dict[str, Tensor]:
        """What is remembered between batches, for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; read from a checkpoint, it is on the CPU."""
