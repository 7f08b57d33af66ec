"""PFE, probabilistic face embeddings: a head on a trained, frozen network learns the variance of embeddings.

Source: Shi and Jain (2019), "Probabilistic face embeddings"; Warburg et al. (2023), appendix G.4.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lam.encoders.gaussian import GaussianEncoder
from lam.losses.mutual_likelihood import mutual_likelihood
from lam.methods.base import Trained, head_of
from lam.methods.head import HeadMethod
from lam.models.uncertainty_head import UncertaintyHead
from lam.models.weights import unwrapped
from lam.training import Minibatch, Training


@dataclass(frozen=True)
class Pfe(HeadMethod):
    """Train a network, then freeze it and train an uncertainty head.

    The mean of an embedding is the network's unit vector. The head learns from all positive pairs of a batch.

    Attributes:
        learning_rate: learning rate of the head, high because the head starts at variance e⁻⁷ for all inputs.
        shared: whether the head's last batch norm shares one scale and shift between all dimensions.
    """

    learning_rate: float = 1e-2
    shared: bool = True

    name = "pfe"
    encoder = GaussianEncoder

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train a network and its uncertainty head; see `Method.train`. Stages are `train` and `head`."""
        network = unwrapped(network)
        path = head_of(network, dataset)
        histories = self.train_network(network, dataset, training)
        layer: Any = network.get_submodule(path)
        uncertainty = UncertaintyHead(layer.in_features, layer.out_features, shared=self.shared, seed=training.seed)
        histories["head"] = self.train_head(uncertainty, network, path, loss_of_head, dataset, training)
        own = {"uncertainty": uncertainty, "unit_mean": True}
        return Trained(self.encoder_of(network, path, dataset, training, **own), histories)


def loss_of_head(log_variance: Tensor, mean: Tensor, batch: Minibatch) -> Tensor:
    """The mutual likelihood loss over all positive pairs of a batch."""
    return mutual_likelihood(mean, log_variance, batch.pairs)
