"""Loss prediction: a trained network is frozen, and a head beside it learns what each item's loss will be.

Source: Yoo and Kweon (2019), "Learning loss for active learning"; Kirchhof et al. (2023), "URL: a representation
learning benchmark for transferable uncertainty estimates", whose strongest head it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lam.encoders.concentration import HeadEncoder
from lam.losses import Loss, SupCon
from lam.losses.loss_prediction import loss_prediction
from lam.methods.base import Method, Trained, fingerprint, head_of, inputs_of, train_head
from lam.models.head import features_and_output
from lam.models.kappa_head import KappaHead
from lam.training import Training
from lam.training.steps import Minibatch, Step
from lam.utils.checks import check_at_least, check_positive


@dataclass(frozen=True)
class LossPrediction(Method):
    """Train a network by the training loss, then, with the network frozen, a head that predicts each item's loss.

    That is the supervised contrastive loss of the item as an anchor, whatever the network was trained with: it is one
    number of every item that has a match in the batch. κ is one over the prediction, of which only the order means
    something. The source trains network and head together; frozen, the head costs the network nothing.

    Attributes:
        temperature: of the loss that is predicted.
        hidden: units of the head's hidden layer.
        epochs: of the head; the network has its own.
        learning_rate: of the head; the network has its own.

    Raises:
        ValueError: for an option outside its range.
    """

    temperature: float = 0.1
    hidden: int = 128
    epochs: int = 10
    learning_rate: float = 1e-3

    name = "loss_prediction"
    encoder = HeadEncoder

    def __post_init__(self) -> None:
        check_positive("temperature", self.temperature)
        check_at_least("hidden", self.hidden, 1)
        check_at_least("epochs", self.epochs, 1)
        check_positive("learning_rate", self.learning_rate)

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train a network and its head; see `Method.train`. Stages are `train` and `head`.

        The checkpoints of the head are in the sub-folder `head`.
        """
        path = head_of(network, dataset)
        histories = self.trained_network(network, dataset, training)
        layer: Any = network.get_submodule(path)
        head = KappaHead(layer.in_features, self.hidden, start=1.0, form="inverse", seed=training.seed)
        step = LossStep(network, path, SupCon(2.0, self.temperature))
        own: Any = {"epochs": self.epochs, "learning_rate": self.learning_rate, "method": self.name}
        histories["head"] = train_head(head, dataset, training, step, **own)
        common = {"seed": training.seed, **inputs_of(dataset, training)}
        return Trained(HeadEncoder(network, path, head, **common), histories)


class LossStep(Step):
    """Take the gradient of the squared error of what the head predicts; the network is frozen, in evaluation mode.

    Args:
        network: frozen; on the device of the batches.
        head: path of its last linear layer, whose input the head sees.
        predicted: the loss whose anchors are predicted.
    """

    def __init__(self, network: nn.Module, head: str, predicted: SupCon) -> None:
        self.network, self.head, self.predicted = network, head, predicted

    @property
    def settings(self) -> dict[str, Any]:
        """What is predicted, and a fingerprint of the network."""
        return {"head": self.head, "frozen": fingerprint(self.network), "predicted": repr(self.predicted)}

    def backward(self, network: nn.Module, loss: Loss, batch: Minibatch, backward: Callable[[Tensor], None]) -> Tensor:
        """Add the gradient over all items with a match; `loss`, which trained the network, is not used."""
        features, output = features_and_output(self.network, self.head, batch.inputs)
        losses, counts = self.predicted.of_anchors(F.normalize(batch.gathered(output).float()), batch.pairs)
        value = loss_prediction(1 / network(features.float()), losses, counts)
        backward(value)
        return value.detach()
