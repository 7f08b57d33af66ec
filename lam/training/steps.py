"""A training step: the gradient of one batch, and a state that lasts between batches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lam.losses import Loss
from lam.losses.base import margin_of
from lam.models.head import check_matrix, refusal
from lam.pairs.mining import ALL_PAIRS, Mining
from lam.pairs.pairs import Pairs
from lam.utils import distributed
from lam.utils.checks import unit_tolerance

_ROUNDING = 1e-3  # greatest rounding error of the length of a normalised output
_SHORTEST = 1e-12  # as torch.nn.functional.normalize


class DivergenceError(ValueError):
    """Training reached NaN or infinity; the message names the step."""


@dataclass(frozen=True)
class Minibatch:
    """A batch for a step.

    Attributes:
        inputs: (N, ...) inputs on the network's device. With several processes, each process has only its part of them,
            but all pairs and targets, and the same generator.
        pairs: pairs of the N items, with at least one positive pair.
        epoch: counted from 0.
        generator: CPU generator, seeded for this batch.
        targets: (N,) labels, or (N, X) positions, that define the pairs.
        mining: choice of the pairs for the loss; see `choose_pairs`.
        sizes: number of items in each process; empty if each process has all N.
    """

    inputs: Tensor
    pairs: Pairs
    epoch: int
    generator: torch.Generator
    targets: Tensor | None = None
    mining: Mining = ALL_PAIRS
    sizes: tuple[int, ...] = ()

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all processes for the N items of the batch; with one process, `rows` itself.

        The loop gathers the network's outputs; a step gathers values from inside the network.
        """
        return distributed.all_gather(rows, self.sizes) if self.sizes else rows

    def choose_pairs(self, embeddings: Tensor, loss: Loss, mining: Mining | None = None) -> Pairs:
        """Pairs that `mining` (default `self.mining`) chooses from unit embeddings (N, D) and the loss's margin."""
        mining = mining or self.mining
        if mining == ALL_PAIRS:
            return self.pairs
        return mining.choose(embeddings, self.pairs, self.targets, margin=margin_of(loss), generator=self.generator)


def normalized(output: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """Rows scaled to length 1; rows that have this length up to rounding do not change."""
    length = torch.linalg.vector_norm(output, dim=1, keepdim=True)
    is_unit = (length - 1).abs() <= unit_tolerance(output.dtype, least=_ROUNDING)
    return output / torch.where(is_unit, 1.0, length.clamp(min=_SHORTEST))


class Step:
    """The gradient of the loss at the network's current weights; a method with another loss overrides `value`.

    Attributes:
        settings: options as JSON; a resumed training must have the same options.
    """

    settings: Mapping[str, Any] = {}

    def value(self, network: nn.Module, loss: Loss, batch: Minibatch) -> Tensor:
        """The loss of a batch, a scalar; arguments as in `backward`.

        Raises:
            DivergenceError: as `backward`.
            ValueError: for inputs of a type or shape that the network does not take, or outputs that are not (N, D).
        """
        try:
            output = network(batch.inputs)
        except RuntimeError as error:
            if reason := refusal(batch.inputs, next(network.parameters()), str(error)):
                raise ValueError(reason) from error
            raise
        check_matrix(output)
        embeddings = normalized(output)
        return loss(embeddings, batch.choose_pairs(embeddings, loss))

    def backward(self, network: nn.Module, loss: Loss, batch: Minibatch, backward: Callable[[Tensor], None]) -> Tensor:
        """Add the gradient of one batch to the parameters' `grad`.

        Args:
            network: network in training mode, with zero gradients; the loop updates the weights afterwards. With
                several processes, the network returns all outputs of the batch, so each computes the whole loss.
            loss: loss of embeddings and pairs.
            batch: inputs and pairs.
            backward: replaces `Tensor.backward`, because mixed precision may scale the loss.

        Returns:
            The loss, a detached scalar; training stops if it is not finite.

        Raises:
            DivergenceError: if the step cannot go on.
        """
        value = self.value(network, loss, batch)
        backward(value)
        return value.detach()

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors of the state that lasts between batches, for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state_dict`; the tensors of a checkpoint are on the CPU."""
