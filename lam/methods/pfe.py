"""PFE, probabilistic face embeddings: a trained network is frozen, and a head beside it learns how sure it is.

Source: Shi and Jain (2019), "Probabilistic face embeddings"; Warburg et al. (2023), appendix G.4.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lam.encoders.gaussian import GaussianEncoder
from lam.losses import Loss
from lam.losses.mutual_likelihood import mutual_likelihood
from lam.methods.base import Stage, Trained, head_of, pairs_of, silent, train_network
from lam.models.head import features_and_output
from lam.models.uncertainty_head import UncertaintyHead
from lam.pairs.relation import Relation
from lam.training import train as train_by_loop
from lam.training.steps import Minibatch, Step
from lam.utils.checks import refuse_below, refuse_non_positive


@dataclass(frozen=True)
class PfeOptions:
    """How the uncertainty head is trained.

    Attributes:
        epochs: of the head; the network has its own.
        learning_rate: of the head; the network has its own. By default larger than is usual, as the head begins with
            one variance, e⁻⁷, for all inputs, and has to leave it.
        shared: one scale and shift for all dimensions in the head's last batch norm.

    Raises:
        ValueError: for an option outside its range.
    """

    epochs: int = 10
    learning_rate: float = 1e-2
    shared: bool = True

    def __post_init__(self) -> None:
        refuse_below("epochs", self.epochs, 1)
        refuse_non_positive("learning_rate", self.learning_rate)


class MutualLikelihoodStep(Step):
    """Take the gradient of the mutual likelihood loss at the uncertainty head, which is all that the loop trains.

    The network runs in evaluation mode, without gradients, so that nothing of it changes, its batch norms included.

    Args:
        network: frozen; on the device of the batches.
        head: path of its last linear layer, whose input the uncertainty head sees.
    """

    def __init__(self, network: nn.Module, head: str) -> None:
        self.network, self.head = network, head

    @property
    def settings(self) -> dict[str, Any]:
        """A fingerprint of the network: a head goes on only beside the one that it began with."""
        return {"head": self.head, "frozen": _fingerprint(self.network)}

    def backward(self, network: nn.Module, loss: Loss, batch: Minibatch, backward: Callable[[Tensor], None]) -> Tensor:
        """Add the gradient over all positive pairs; `loss`, which trained the network, is not used."""
        features, output = features_and_output(self.network, self.head, batch.inputs)
        means = F.normalize(batch.gathered(output).float())
        value = mutual_likelihood(means, network(features.float()), batch.pairs)
        backward(value)
        return value.detach()


def train(
    network: nn.Module,
    dataset: Any,
    *,
    loss: Loss,
    epochs: int,
    options: PfeOptions | None = None,
    pretrained: bool = False,
    relation: Relation | None = None,
    seed: int = 0,
    stage: Stage = silent,
    **training: Any,
) -> Trained:
    """Train a network, then, with the network frozen, the uncertainty head.

    The mean of an embedding is the network's own, a unit vector. The head takes the options of training that the
    network has, but for epochs and learning rate, and for miners: it learns from all positive pairs of a batch. The
    last epoch of the head is kept, as validation judges the retrieval, which the head does not change. Source and
    recipe are silent about these.

    Args:
        network: maps (N, ...) inputs to unit rows (N, D) by a linear layer and normalisation.
        dataset: of (input, label); see `lam.training.train`.
        loss: of `lam.losses`, of the network.
        epochs: passes over the data, of the network.
        options: of the head.
        pretrained: the network is trained already, and only the head is trained.
        relation: what makes two items a pair; by default their labels.
        seed: of the order of the data and of everything drawn.
        stage: see `lam.methods.base.Stage`; here `train` and `head`.
        training: further options of `lam.training.train`; the checkpoints of the head are in the sub-folder `head`.

    Returns:
        The encoder, and the histories: `head`, and `network` unless it was trained already.

    Raises:
        ValueError: as `lam.training.train`, or where no linear layer gives the network's output.
    """
    options = options or PfeOptions()
    head = head_of(network, dataset)
    common = {"loss": loss, "seed": seed, "method": "pfe"}
    histories = train_network(
        network, dataset, pretrained=pretrained, relation=relation, stage=stage, epochs=epochs, **common, **training
    )
    layer: Any = network.get_submodule(head)
    uncertainty = UncertaintyHead(layer.in_features, layer.out_features, shared=options.shared, seed=seed)
    folder = training.get("folder")
    training |= {
        "validate": None,
        "miner": "all",
        "max_pairs": None,
        "learning_rate": options.learning_rate,
        "folder": None if folder is None else Path(folder) / "head",
    }
    with stage("head"):
        step = MutualLikelihoodStep(network, head)
        histories["head"] = train_by_loop(
            uncertainty, dataset, epochs=options.epochs, step=step, pairs=pairs_of(relation), **common, **training
        )
    encoder = GaussianEncoder(
        network,
        head,
        uncertainty,
        unit_mean=True,
        seed=seed,
        relation=relation,
        preprocessing=getattr(dataset, "preprocessing", None),
    )
    return Trained(encoder, histories)


def _fingerprint(network: nn.Module) -> str:
    found = hashlib.sha256()
    for name, tensor in network.state_dict().items():
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:12]
