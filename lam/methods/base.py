"""What the training functions of all methods share: their result, their stages, a network trained as it is."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lam.datasets.augmented import without_augmentation
from lam.encoders.base import Encoder
from lam.models.head import find_head
from lam.pairs.pairs import Pairs
from lam.pairs.relation import Relation
from lam.training import History, device_of
from lam.training import train as train_by_loop

Stage = Callable[[str], AbstractContextManager[Any]]
"""Called with the name of a stage, gives the context that it runs in: who called can time and announce it."""


class Trained(NamedTuple):
    """What `train` of any method gives.

    Attributes:
        encoder: fitted, in evaluation mode.
        histories: of every training that was part of it, by name: that of the network is `network`.
    """

    encoder: Encoder
    histories: dict[str, History]


def silent(_: str) -> AbstractContextManager[Any]:
    """A stage that nobody watches."""
    return nullcontext()


def train_network(
    network: nn.Module,
    dataset: Any,
    *,
    method: str,
    pretrained: bool,
    relation: Relation | None = None,
    stage: Stage = silent,
    **training: Any,
) -> dict[str, History]:
    """Train a network by the gradient of its loss, unless it is trained already; then only move it to its device.

    Args:
        network: trained in place.
        dataset: of (input, label).
        method: whose network this is; checkpoints name it.
        pretrained: leave the weights as they are.
        relation: what makes two items a positive or a negative pair; by default their labels.
        stage: see `Stage`.
        training: options of `lam.training.train`.

    Returns:
        The history by name, or nothing.
    """
    if pretrained:
        network.to(device_of(training.get("accelerator", "auto"))).eval()
        return {}
    with stage("train"):
        return {"network": train_by_loop(network, dataset, method=method, pairs=pairs_of(relation), **training)}


def pairs_of(relation: Relation | None) -> Callable[[Tensor], Pairs]:
    """Give what makes the pairs of a batch from its targets, for `lam.training.train`."""
    return Pairs.by_label if relation is None or relation.positive_within is None else relation.pairs


def head_of(network: nn.Module, dataset: Any, head: str | None = None) -> str:
    """Find the head of a network on the first items of a data set, not augmented; see `lam.models.head.find_head`."""
    plain = without_augmentation(dataset)
    return find_head(network, torch.stack([plain[index][0] for index in range(min(2, len(plain)))]), head)
