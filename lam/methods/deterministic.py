"""The network as it is, without any uncertainty: what every other method is compared with."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lam.curvature import Relation
from lam.embeddings import KAPPA_RANGE, Embeddings
from lam.encoder_base import Encoder, Observations, Observer, common_of, own_direction
from lam.encoder_files import SavedEncoder
from lam.head import features_and_output
from lam.losses import Loss
from lam.methods.base import Stage, Trained, head_of, silent, train_network


@dataclass(frozen=True)
class DeterministicOptions:
    """There are none."""


class DeterministicEncoder(Encoder):
    """Embed without uncertainty: κ is the upper end of its range for every input, a bound, and the variance 0.

    Args:
        network: maps (N, ...) inputs to (N, D) by a linear layer at its end, normalised or not.
        head: path of that layer.
        common: `relation`, `preprocessing` and `ood_score` of `Encoder`.
    """

    kind = "deterministic"
    has_kappa = False

    def __init__(self, network: nn.Module, head: str, **common: Any) -> None:
        super().__init__(network, head, **common)

    @property
    def dimension(self) -> int:
        """The number of embedding dimensions D."""
        layer: Any = self._module.get_submodule(self.head)
        return layer.out_features

    def observer(self, *, n_samples: int, joint: bool = False) -> Observer:
        """Give what a batch goes through; nothing is drawn."""

        def observe(inputs: Any) -> Observations:
            features, output = features_and_output(self._module, self.head, inputs)
            return Observations(features, certain(own_direction(output)))

        return observe

    @classmethod
    def restored(cls, saved: SavedEncoder) -> "DeterministicEncoder":
        """Make the encoder again from what `save` wrote."""
        if saved.network is None:
            raise ValueError(f"an encoder of kind {saved.kind} needs its network")
        return cls(saved.network, saved.head, **common_of(saved))

    @property
    def _module(self) -> nn.Module:
        network: Any = self.network
        return network


def certain(mean: Tensor) -> Embeddings:
    """Give unit vectors (N, D) as embeddings of which no uncertainty is known."""
    one = mean.new_ones(len(mean))
    return Embeddings(mean, one * KAPPA_RANGE[1], one, 0 * one)


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
