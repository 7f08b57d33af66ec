"""Uncertainty as the distance of features to the k-th nearest training item."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lam.encoders.base import directions_of
from lam.encoders.concentration import NeighbourEncoder
from lam.methods.base import Method, Trained, head_of, reference_inputs
from lam.models.head import features_and_output
from lam.models.weights import unwrapped
from lam.retrieval.metrics.reference import NEIGHBOUR
from lam.training import Training
from lam.utils.checks import check_at_least


@dataclass(frozen=True)
class KnnDistance(Method):
    """Train a network, then keep the features of some training items.

    Attributes:
        k: rank of the neighbour that gives the distance, from 1.
        reference: number of random training items to keep, at least k; all if there are fewer.
    """

    k: int = NEIGHBOUR
    reference: int = 5000

    name = "knn_distance"
    encoder = NeighbourEncoder
    learns_from_matches = False

    def __post_init__(self) -> None:
        check_at_least("k", self.k, 1)
        if self.reference < self.k:
            raise ValueError(f"reference must be at least k = {self.k} items, got {self.reference}")

    def check(self, network: nn.Module, dataset: Any, training: Training) -> None:
        """Also reject data of fewer than k items; see `Method.check`."""
        super().check(network, dataset, training)
        if len(dataset) < self.k:
            raise ValueError(f"dataset must hold at least k = {self.k} items, got {len(dataset)}: lower k")

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train a network and keep reference features; see `Method.train`. Stages are `train` and `reference`."""
        network = unwrapped(network)
        self.check(network, dataset, training)
        head = head_of(network, dataset)
        histories = self.train_network(network, dataset, training)
        with training.stage("reference"):
            inputs = reference_inputs(dataset, self.reference, seed=training.seed)
            reference = torch.cat([directions_of(features_and_output(network, head, batch)[0]) for batch in inputs])
        return Trained(self.encoder_of(network, head, dataset, training, reference=reference, k=self.k), histories)
