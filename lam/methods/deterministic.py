"""The network as it is, without any uncertainty: what every other method is compared with."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from lam.encoders.deterministic import DeterministicEncoder
from lam.losses import Loss
from lam.methods.base import Stage, Trained, head_of, silent, train_network
from lam.pairs.relation import Relation


@dataclass(frozen=True)
class DeterministicOptions:
    """There are none."""


def train(
    network: nn.Module,
    dataset: Any,
    *,
    loss: Loss,
    epochs: int,
    options: DeterministicOptions | None = None,
    pretrained: bool = False,
    relation: Relation | None = None,
    seed: int = 0,
    stage: Stage = silent,
    method: str = "deterministic",
    **training: Any,
) -> Trained:
    """Train a network.

    Args:
        network: maps (N, ...) inputs to unit rows (N, D) by a linear layer and normalisation.
        dataset: of (input, label); see `lam.training.train`.
        loss: of `lam.losses`.
        epochs: passes over the data.
        options: none.
        pretrained: the network is trained already.
        relation: what makes two items a pair; by default their labels.
        seed: of the order of the data and of everything drawn.
        stage: see `lam.methods.base.Stage`.
        method: that of which this is the training of the network; see `lam.training.train`.
        training: further options of `lam.training.train`.

    Returns:
        The encoder, and the history unless the network was trained already.

    Raises:
        ValueError: as `lam.training.train`, or where no linear layer gives the network's output.
    """
    head = head_of(network, dataset)
    training |= {"loss": loss, "epochs": epochs, "seed": seed, "method": method}
    histories = train_network(network, dataset, pretrained=pretrained, relation=relation, stage=stage, **training)
    preprocessing = getattr(dataset, "preprocessing", None)
    encoder = DeterministicEncoder(network, head, relation=relation, preprocessing=preprocessing)
    return Trained(encoder, histories)
