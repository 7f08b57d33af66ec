"""What the methods share that train a head beside a network, which is frozen meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lam.losses import Loss
from lam.methods.base import Method
from lam.models.head import features_and_output
from lam.models.weights import sha256_of_weights
from lam.training import History, Training, train
from lam.training.steps import Minibatch, Step
from lam.utils.checks import check_at_least, check_positive

HeadLoss = Callable[[Tensor, Tensor, Minibatch], Tensor]
"""Maps what the head says of N items, their embeddings (N, D), unit rows, and the batch to a scalar."""


@dataclass(frozen=True)
class HeadMethod(Method):
    """Train a network, then, with the network frozen, a head beside its own.

    Attributes:
        epochs: of the head; the network has its own.
        learning_rate: of the head; the network has its own.

    Raises:
        ValueError: for an option outside its range.
    """

    epochs: int = 10
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        check_at_least("epochs", self.epochs, 1)
        check_positive("learning_rate", self.learning_rate)

    def train_head(
        self, head: nn.Module, network: nn.Module, path: str, loss: HeadLoss, dataset: Any, training: Training
    ) -> History:
        """Train a head in the stage and the sub-folder `head`.

        As the network is trained, but for epochs and learning rate, and for miners: it learns from all pairs of a
        batch. Its last epoch is kept, as validation judges the retrieval, which the head does not change.

        Args:
            head: what is trained; it maps features (N, P).
            network: trained; it stays as it is.
            path: of the network's last linear layer, whose input the head sees.
            loss: of what the head says.
            dataset, training: of `Method.train`.
        """
        own = replace(
            training,
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            miner="all",
            max_pairs=None,
            validate=None,
            folder=training.part("head"),
        )
        options = {name: value for name, value in self.settings().items() if name != "epochs"}
        with training.stage("head"):
            return train(head, dataset, own, step=HeadStep(network, path, loss, options), method=self.name)


class HeadStep(Step):
    """Take the gradient at a head, which is all that the loop trains.

    The network runs in evaluation mode, without gradients, so that nothing of it changes, its batch norms included.

    Args:
        network: frozen; on the device of the batches.
        path: of its last linear layer, whose input the head sees.
        loss: of what the head says.
        options: of the method; more epochs may be asked for when a run is resumed.
    """

    def __init__(self, network: nn.Module, path: str, loss: HeadLoss, options: dict[str, Any]) -> None:
        self.network, self.path, self.loss, self.options = network, path, loss, options

    @property
    def settings(self) -> dict[str, Any]:
        """The options and a hash of the network's weights: a head goes on only beside the one it began with."""
        return {**self.options, "head": self.path, "frozen": sha256_of_weights(self.network)[:12]}

    def backward(self, network: nn.Module, loss: Loss, batch: Minibatch, backward: Callable[[Tensor], None]) -> Tensor:
        """Add the gradient of one batch; `loss`, which trained the network, is not used."""
        features, output = features_and_output(self.network, self.path, batch.inputs)
        embeddings = F.normalize(batch.gathered(output).float())
        value = self.loss(network(features.float()), embeddings, batch)
        backward(value)
        return value.detach()
