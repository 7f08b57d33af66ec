"""Monte-Carlo dropout: dropout between trainable layers, in training and when the network embeds.

Source: Gal and Ghahramani (2016); Warburg et al. (2023), appendix G.4, with a rate of 0.05.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from lam.encoders.dropout import DropoutEncoder, check_network
from lam.methods.deterministic import Deterministic
from lam.training import Training


@dataclass(frozen=True)
class McDropout(Deterministic):
    """Train a network with its own dropout layers.

    The seed also drives the masks. A trained network may have been trained with or without dropout.
    """

    name = "mc_dropout"
    encoder = DropoutEncoder

    def check(self, network: nn.Module, dataset: Any, training: Training) -> None:
        """Also reject a network without dropout; see `Method.check`."""
        check_network(network)
        super().check(network, dataset, training)
