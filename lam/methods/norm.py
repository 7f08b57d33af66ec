"""The length of the unnormalised embedding as κ: free of cost, and in any honest table."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from lam.encoders.concentration import NormEncoder
from lam.methods.base import Method, Trained, head_of, inputs_of
from lam.training import Training


@dataclass(frozen=True)
class Norm(Method):
    """Train a network, and nothing more; the seed is also that of the samples drawn from the distributions."""

    name = "norm"
    encoder = NormEncoder

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train a network; see `Method.train`."""
        head = head_of(network, dataset)
        histories = self.trained_network(network, dataset, training)
        return Trained(NormEncoder(network, head, seed=training.seed, **inputs_of(dataset, training)), histories)
