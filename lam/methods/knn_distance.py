"""The distance to the k-th nearest training item, among features of the network, as uncertainty."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lam.encoders.concentration import NeighbourEncoder, _unit
from lam.losses import Loss
from lam.methods import deterministic
from lam.methods.base import Stage, Trained, silent
from lam.methods.reference import reference_inputs
from lam.models.head import features_and_output
from lam.pairs.relation import Relation
from lam.retrieval.metrics.ood import NEIGHBOUR
from lam.utils.checks import refuse_below


@dataclass(frozen=True)
class NeighbourOptions:
    """What an item is compared with.

    Attributes:
        k: which of its nearest neighbours, counted from 1.
        reference: how many training items are kept, drawn at random; all of them where there are no more.

    Raises:
        ValueError: for a k below 1, or fewer than k reference items.
    """

    k: int = NEIGHBOUR
    reference: int = 5000

    def __post_init__(self) -> None:
        refuse_below("k", self.k, 1)
        if self.reference < self.k:
            raise ValueError(f"reference must be at least k = {self.k} items, got {self.reference}")


def train(
    network: nn.Module,
    dataset: Any,
    *,
    loss: Loss,
    epochs: int,
    options: NeighbourOptions | None = None,
    pretrained: bool = False,
    relation: Relation | None = None,
    seed: int = 0,
    stage: Stage = silent,
    **training: Any,
) -> Trained:
    """Train a network, then keep the features of some training items.

    Args:
        network, dataset, loss, epochs, pretrained, relation, stage, training: of `lam.methods.deterministic.train`.
        options: what an item is compared with.
        seed: of the order of the data, of the reference, and of the samples drawn from the distributions.

    Returns:
        The encoder, and the history unless the network was trained already.

    Raises:
        ValueError: as `lam.methods.deterministic.train`; or for a data set of fewer than k items.
    """
    options = options or NeighbourOptions()
    training |= {"loss": loss, "epochs": epochs, "pretrained": pretrained, "relation": relation, "seed": seed}
    encoder, histories = deterministic.train(network, dataset, stage=stage, method=NeighbourEncoder.kind, **training)
    with stage("reference"):
        inputs = reference_inputs(dataset, options.reference, seed=seed)
        reference = torch.cat([_unit(features_and_output(network, encoder.head, batch)[0]) for batch in inputs])
    return Trained(NeighbourEncoder.upon(encoder, reference=reference, k=options.k, seed=seed), histories)
