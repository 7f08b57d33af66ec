"""The network as it is, without any uncertainty: what every other method is compared with."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from lam.encoders.deterministic import DeterministicEncoder
from lam.encoders.seeded import SeededEncoder
from lam.methods.base import Method, Trained, head_of, inputs_of
from lam.training import Training


@dataclass(frozen=True)
class Deterministic(Method):
    """Train a network, and nothing more."""

    name = "deterministic"
    encoder: ClassVar[type[DeterministicEncoder]] = DeterministicEncoder
    learns_from_matches = False

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train a network; see `Method.train`. An encoder that draws samples gets the seed of the training."""
        self.check(network, dataset, training)
        head = head_of(network, dataset)
        layer: Any = network.get_submodule(head)
        own = replace(training, loss=self.own_loss(training.loss, layer.out_features))
        histories = self.trained_network(network, dataset, own)
        seed = {"seed": training.seed} if issubclass(self.encoder, SeededEncoder) else {}
        return Trained(self.encoder(network, head, **seed, **inputs_of(dataset, training)), histories)
