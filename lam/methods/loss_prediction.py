"""Loss prediction: a head on a trained, frozen network learns each item's loss.

Source: Yoo and Kweon (2019), "Learning loss for active learning"; Kirchhof et al. (2023), "URL: a representation
learning benchmark for transferable uncertainty estimates", where this head is the strongest.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lam.encoders.concentration import HeadEncoder
from lam.losses import SupCon
from lam.losses.loss_prediction import loss_prediction
from lam.methods.base import Trained, head_of
from lam.methods.head import HeadMethod
from lam.models.kappa_head import KappaHead
from lam.models.weights import unwrapped
from lam.training import Minibatch, Training
from lam.utils.checks import check_at_least, check_positive


@dataclass(frozen=True)
class LossPrediction(HeadMethod):
    """Train a network, then freeze it and train a head that predicts each item's loss.

    The predicted loss is the supervised contrastive loss of an item as an anchor, whichever loss trained the network.
    Only items with a match in the batch train the head. κ is 1 / prediction; only the order of κ has a meaning. A
    Laplace run that starts from this run takes this κ as κ_a, the κ of ambiguity. The source trains network and head
    together; here the head does not change retrieval.

    Attributes:
        temperature: temperature of the predicted loss, positive.
        hidden: units of the head's hidden layer, at least 1.
    """

    temperature: float = 0.1
    hidden: int = 128

    name = "loss_prediction"
    encoder = HeadEncoder

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("temperature", self.temperature)
        check_at_least("hidden", self.hidden, 1)

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train a network and its head; see `Method.train`. Stages are `train` and `head`."""
        network = unwrapped(network)
        path = head_of(network, dataset)
        histories = self.train_network(network, dataset, training)
        layer: Any = network.get_submodule(path)
        head = KappaHead(layer.in_features, self.hidden, start=1.0, form="inverse", seed=training.seed)
        predicted = SupCon(2.0, self.temperature)

        def loss(kappa: Tensor, embeddings: Tensor, batch: Minibatch) -> Tensor:
            return loss_prediction(1 / kappa, *predicted.of_anchors(embeddings, batch.pairs))

        histories["head"] = self.train_head(head, network, path, loss, dataset, training)
        return Trained(self.encoder_of(network, path, dataset, training, kappa_head=head), histories)
