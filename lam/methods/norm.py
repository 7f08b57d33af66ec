"""The length of the unnormalised embedding as κ: free of cost, and in any honest table."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from lam.encoders.concentration import NormEncoder
from lam.losses import Loss
from lam.methods import deterministic
from lam.methods.base import Stage, Trained, silent
from lam.pairs.relation import Relation


@dataclass(frozen=True)
class NormOptions:
    """There are none."""


def train(
    network: nn.Module,
    dataset: Any,
    *,
    loss: Loss,
    epochs: int,
    options: NormOptions | None = None,
    pretrained: bool = False,
    relation: Relation | None = None,
    seed: int = 0,
    stage: Stage = silent,
    **training: Any,
) -> Trained:
    """Train a network, and nothing more.

    Args:
        network, dataset, loss, epochs, pretrained, relation, stage, training: of `lam.methods.deterministic.train`.
        options: none.
        seed: of the order of the data, and of the samples drawn from the distributions.

    Returns:
        The encoder, and the history unless the network was trained already.

    Raises:
        ValueError: as `lam.methods.deterministic.train`.
    """
    training |= {"loss": loss, "epochs": epochs, "pretrained": pretrained, "relation": relation, "seed": seed}
    encoder, histories = deterministic.train(network, dataset, stage=stage, method=NormEncoder.kind, **training)
    return Trained(NormEncoder.upon(encoder, seed=seed), histories)
