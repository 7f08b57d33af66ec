"""Monte-Carlo dropout: dropout between trainable layers, in training and when the network embeds.

Source: Gal and Ghahramani (2016); Warburg et al. (2023), appendix G.4, with a rate of 0.05.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from lam.encoders.dropout import DropoutEncoder, check_network
from lam.methods.base import Method, Trained, head_of, inputs_of
from lam.training import Training


@dataclass(frozen=True)
class McDropout(Method):
    """Train a network with its dropout on; where is dropped out, and at which rate, is the network's.

    The seed is also that of the masks, in training and afterwards. A network that is trained already may have been
    trained with dropout or without.
    """

    name = "mc_dropout"
    encoder = DropoutEncoder

    def check(self, network: nn.Module) -> None:
        """Refuse a network without dropout."""
        check_network(network)

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train a network; see `Method.train`."""
        self.check(network)
        head = head_of(network, dataset)
        histories = self.trained_network(network, dataset, training)
        return Trained(DropoutEncoder(network, head, seed=training.seed, **inputs_of(dataset, training)), histories)
