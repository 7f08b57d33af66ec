"""Methods that train a head beside a frozen network."""

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
"""Maps outputs of the head for N items, their embeddings (N, D), unit rows, and the batch to a scalar."""


@dataclass(frozen=True)
class HeadMethod(Method):
    """Train a network, then, with the network frozen, a head beside its own.

    Attributes:
        epochs: of the head, at least 1; the network has its own.
        learning_rate: of the head, positive; the network has its own.
    """

    epochs: int = 10
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        check_at_least("epochs", self.epochs, 1)
        check_positive("learning_rate", self.learning_rate)

    def train_head(
        self, head: nn.Module, network: nn.Module, path: str, loss: HeadLoss, dataset: Any, training: Training
    ) -> History:
        """Train a head on features (N, P) in the stage and the sub-folder `head`, on all pairs of each batch.

        All else is as for the network, whose last linear layer is at `path`. The last epoch is kept, as validation
        judges retrieval, which the head does not change.
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
    """Take the gradient at a head, beside a network in evaluation mode without gradients.

    Its settings hold a hash of the network's weights, and `options` of the method without those that a resumed run
    changes.
    """

    def __init__(self, network: nn.Module, path: str, loss: HeadLoss, options: dict[str, Any]) -> None:
        self.network, self.path, self.loss = network, path, loss
        self.settings = {**options, "head": path, "frozen": sha256_of_weights(network)[:12]}

    def value(self, network: nn.Module, loss: Loss, batch: Minibatch) -> Tensor:
        """The head's own loss; `loss`, which trained the network, is not used."""
        features, output = features_and_output(self.network, self.path, batch.inputs)
        return self.loss(network(features.float()), F.normalize(batch.gather(output).float()), batch)
