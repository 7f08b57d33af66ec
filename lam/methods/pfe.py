"""PFE, probabilistic face embeddings: a trained network is frozen, and a head beside it learns how sure it is.

Source: Shi and Jain (2019), "Probabilistic face embeddings"; Warburg et al. (2023), appendix G.4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lam.encoders.gaussian import GaussianEncoder
from lam.losses import Loss
from lam.losses.mutual_likelihood import mutual_likelihood
from lam.methods.base import Method, Trained, fingerprint, head_of, inputs_of, train_head
from lam.models.head import features_and_output
from lam.models.uncertainty_head import UncertaintyHead
from lam.training import Training
from lam.training.steps import Minibatch, Step
from lam.utils.checks import check_at_least, check_positive


@dataclass(frozen=True)
class Pfe(Method):
    """Train a network, then, with the network frozen, the uncertainty head.

    The mean of an embedding is the network's own, a unit vector. The head is trained as the network is, but for epochs
    and learning rate, and for miners: it learns from all positive pairs of a batch. The last epoch of the head is kept,
    as validation judges the retrieval, which the head does not change. Source and recipe are silent about these.

    Attributes:
        epochs: of the head; the network has its own.
        learning_rate: of the head; the network has its own. By default larger than is usual, as the head begins with
            one variance, e⁻⁷, for all inputs, and has to leave it.
        shared: one scale and shift for all dimensions in the head's last batch norm.

    Raises:
        ValueError: for an option outside its range.
    """

    epochs: int = 10
    learning_rate: float = 1e-2
    shared: bool = True

    name = "pfe"
    encoder = GaussianEncoder

    def __post_init__(self) -> None:
        check_at_least("epochs", self.epochs, 1)
        check_positive("learning_rate", self.learning_rate)

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train a network and its uncertainty head; see `Method.train`. Stages are `train` and `head`.

        The checkpoints of the head are in the sub-folder `head`.
        """
        path = head_of(network, dataset)
        histories = self.trained_network(network, dataset, training)
        layer: Any = network.get_submodule(path)
        uncertainty = UncertaintyHead(layer.in_features, layer.out_features, shared=self.shared, seed=training.seed)
        step = MutualLikelihoodStep(network, path)
        own: Any = {"epochs": self.epochs, "learning_rate": self.learning_rate, "method": self.name}
        histories["head"] = train_head(uncertainty, dataset, training, step, **own)
        common = {"unit_mean": True, "seed": training.seed, **inputs_of(dataset, training)}
        return Trained(GaussianEncoder(network, path, uncertainty, **common), histories)


class MutualLikelihoodStep(Step):
    """Take the gradient of the mutual likelihood loss at the uncertainty head, which is all that the loop trains.

    The network runs in evaluation mode, without gradients, so that nothing of it changes, its batch norms included.

    Args:
        network: frozen; on the device of the batches.
        head: path of its last linear layer, whose input the uncertainty head sees.
    """

    def __init__(self, network: nn.Module, head: str) -> None:
        self.network, self.head = network, head

    @property
    def settings(self) -> dict[str, Any]:
        """A fingerprint of the network: a head goes on only beside the one that it began with."""
        return {"head": self.head, "frozen": fingerprint(self.network)}

    def backward(self, network: nn.Module, loss: Loss, batch: Minibatch, backward: Callable[[Tensor], None]) -> Tensor:
        """Add the gradient over all positive pairs; `loss`, which trained the network, is not used."""
        features, output = features_and_output(self.network, self.head, batch.inputs)
        means = F.normalize(batch.gathered(output).float())
        value = mutual_likelihood(means, network(features.float()), batch.pairs)
        backward(value)
        return value.detach()
