"""A network without uncertainty: the baseline of every other method."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from lam.encoders.deterministic import DeterministicEncoder
from lam.methods.base import Method, Trained, head_of
from lam.models.weights import unwrapped
from lam.training import Training


@dataclass(frozen=True)
class Deterministic(Method):
    """Train a network by `training.loss`."""

    name = "deterministic"
    encoder: ClassVar[type[DeterministicEncoder]] = DeterministicEncoder
    learns_from_matches = False

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        network = unwrapped(network)
        self.check(network, dataset, training)
        head = head_of(network, dataset)
        layer: Any = network.get_submodule(head)
        own = replace(training, loss=self.training_loss(training.loss, layer.out_features))
        histories = self.train_network(network, dataset, own)
        return Trained(self.encoder_of(network, head, dataset, training), histories)
