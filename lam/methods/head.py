"""Methods that train a head on the features of a frozen network."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lam.losses import Loss
from lam.methods.base import Method
from lam.models.head import features_and_output
from lam.models.weights import sha256_of_weights
from lam.training import History, Minibatch, Step, Training, train
from lam.utils.checks import check_at_least, check_positive

HeadLoss = Callable[[Tensor, Tensor, Minibatch], Tensor]
"""Maps the head's outputs for N items, the items' unit embeddings (N, D) and the batch to a scalar loss."""


@dataclass(frozen=True)
class HeadMethod(Method):
    """Train a network, then freeze it and train a second head.

    Attributes:
        epochs: epochs of the second head, at least 1.
        learning_rate: learning rate of the second head, positive.
    """

    epochs: int = 10
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        check_at_least("epochs", self.epochs, 1)
        check_positive("learning_rate", self.learning_rate)

    def train_head(
        self, head: nn.Module, network: nn.Module, path: str, loss: HeadLoss, dataset: Any, training: Training
    ) -> History:
        """Train a head on the inputs (N, P) of the layer `path`, in the stage and the sub-folder `head`.

        The head has its own epochs and learning rate, and learns from all pairs of a batch; other settings are the
        network's. The last epoch is kept, because validation measures retrieval, which the head does not change.
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
    """A training step by a head's loss; the network stays in evaluation mode, without gradients.

    A resumed run must have the same `options`, path and network weights; a hash compares the weights.
    """

    def __init__(self, network: nn.Module, path: str, loss: HeadLoss, options: dict[str, Any]) -> None:
        self.network, self.path, self.loss = network, path, loss
        self.settings = {**options, "head": path, "frozen": sha256_of_weights(network)[:12]}

    def value(self, network: nn.Module, loss: Loss, batch: Minibatch) -> Tensor:
        """The head's loss; the argument `loss` is not used."""
        features, output = features_and_output(self.network, self.path, batch.inputs)
        return self.loss(network(features.float()), F.normalize(batch.gather(output).float()), batch)
