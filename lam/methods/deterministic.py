"""The network as it is, without any uncertainty: what every other method is compared with."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from lam.encoders.deterministic import DeterministicEncoder
from lam.methods.base import Method, Trained, head_of, inputs_of
from lam.training import Training


@dataclass(frozen=True)
class Deterministic(Method):
    """Train a network, and nothing more."""

    name = "deterministic"
    encoder = DeterministicEncoder

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train a network; see `Method.train`."""
        head = head_of(network, dataset)
        histories = self.trained_network(network, dataset, training)
        return Trained(DeterministicEncoder(network, head, **inputs_of(dataset, training)), histories)
