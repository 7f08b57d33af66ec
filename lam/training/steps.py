"""A training step: how the gradient of one batch is taken, and what is remembered between batches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lam.losses import Loss
from lam.losses.base import margin_of
from lam.pairs.mining import ALL_PAIRS, Mining
from lam.pairs.pairs import Pairs
from lam.utils import distributed


class DivergenceError(ValueError):
    """Training that ran into NaN or infinity; where a step raises it, the loop adds at which step."""


@dataclass(frozen=True)
class Minibatch:
    """A batch for a step.

    Attributes:
        inputs: (N, ...) inputs of the network, on its device; each of several processes has its part of them, and all
            share pairs, targets and generator.
        pairs: the pairs among them, at least one of them positive.
        epoch: counted from 0.
        generator: on the CPU, seeded for this batch alone.
        targets: (N,) labels, or (N, X) positions, of the pairs.
        mining: which of the pairs the loss takes; see `choose_pairs`.
        sizes: items of each process; empty where each has all N, as in one process.
    """

    inputs: Tensor
    pairs: Pairs
    epoch: int
    generator: torch.Generator
    targets: Tensor | None = None
    mining: Mining = ALL_PAIRS
    sizes: tuple[int, ...] = ()

    def gather(self, rows: Tensor) -> Tensor:
        """The N rows of all processes, from this process's rows; the same tensor in one process.

        The network that a step gets gathers its output itself; this is for values from inside it.
        """
        return distributed.all_gather(rows, self.sizes) if self.sizes else rows

    def choose_pairs(self, embeddings: Tensor, margin: float | None, mining: Mining | None = None) -> Pairs:
        """Pairs that the loss's mining, or another, chooses by these embeddings (N, D), unit rows."""
        mining = mining or self.mining
        if mining == ALL_PAIRS:
            return self.pairs
        return mining.choose(embeddings, self.pairs, self.targets, margin=margin, generator=self.generator)


class Step:
    """The gradient of the loss at the network's own weights; a method with another loss overrides `value`.

    Attributes:
        settings: options as JSON; a run is resumed only with the same.
    """

    settings: Mapping[str, Any] = {}

    def value(self, network: nn.Module, loss: Loss, batch: Minibatch) -> Tensor:
        """The loss of one batch, a scalar; arguments and errors as in `backward`."""
        embeddings = network(batch.inputs)
        return loss(embeddings, batch.choose_pairs(embeddings, margin_of(loss)))

    def backward(self, network: nn.Module, loss: Loss, batch: Minibatch, backward: Callable[[Tensor], None]) -> Tensor:
        """Add the gradient of one batch to the parameters' `grad`.

        Args:
            network: in training mode, gradients zeroed; the loop updates it afterwards. In several processes it gives
                the outputs of all, so each takes the loss of the whole batch, and gradients are averaged.
            loss: of the embeddings and the pairs.
            batch: inputs and pairs.
            backward: takes the place of `Tensor.backward`, as the precision may scale the loss.

        Returns:
            The loss, a detached scalar; training stops where it is not finite.

        Raises:
            DivergenceError: where the step cannot go on; the loop adds at which step.
        """
        value = self.value(network, loss, batch)
        backward(value)
        return value.detach()

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors that are remembered between batches, for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; from a checkpoint, it is on the CPU."""
