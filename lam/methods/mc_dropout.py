"""Monte-Carlo dropout: dropout between trainable layers, in training and when the network embeds.

Source: Gal and Ghahramani (2016); Warburg et al. (2023), appendix G.4, with a rate of 0.05.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from lam.encoders.dropout import DropoutEncoder, check_network
from lam.losses import Loss
from lam.methods import deterministic
from lam.methods.base import Stage, Trained, silent
from lam.pairs.relation import Relation


@dataclass(frozen=True)
class DropoutOptions:
    """There are none: where is dropped out, and at which rate, is the network's."""


def train(
    network: nn.Module,
    dataset: Any,
    *,
    loss: Loss,
    epochs: int,
    options: DropoutOptions | None = None,
    pretrained: bool = False,
    relation: Relation | None = None,
    seed: int = 0,
    stage: Stage = silent,
    **training: Any,
) -> Trained:
    """Train a network with its dropout on.

    Args:
        network: as `lam.methods.deterministic.train` takes it, with dropout layers.
        dataset, loss, epochs, relation, stage, training: of `lam.methods.deterministic.train`.
        options: none.
        pretrained: the network is trained already, with dropout or without.
        seed: of the order of the data, and of the masks, in training and afterwards.

    Returns:
        The encoder, and the history unless the network was trained already.

    Raises:
        ValueError: as `lam.methods.deterministic.train`; or for a network without dropout.
    """
    check_network(network)
    training |= {"loss": loss, "epochs": epochs, "pretrained": pretrained, "relation": relation, "seed": seed}
    encoder, histories = deterministic.train(network, dataset, stage=stage, method=DropoutEncoder.kind, **training)
    return Trained(DropoutEncoder.upon(encoder, seed=seed), histories)
