"""Methods that only train a network: the baseline without uncertainty, and methods that differ in encoder or loss."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from lam.encoders.concentration import NormEncoder
from lam.encoders.deterministic import DeterministicEncoder
from lam.encoders.dropout import DropoutEncoder, check_network
from lam.losses import Loss, VarCon
from lam.losses.base import margin_of
from lam.methods.base import Method, Trained, head_of
from lam.models.weights import unwrapped
from lam.training import Training


@dataclass(frozen=True)
class Deterministic(Method):
    """Train a network by `training.loss`, without uncertainty."""

    name = "deterministic"
    encoder: ClassVar[type[DeterministicEncoder]] = DeterministicEncoder
    learns_from_matches = False

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        network = unwrapped(network)
        self.check(network, dataset, training)
        head = head_of(network, dataset)
        layer: Any = network.get_submodule(head)
        own = replace(training, loss=self.training_loss(training.loss, layer.out_features))
        histories = self.train_network(network, dataset, own)
        return Trained(self.encoder_of(network, head, dataset, training), histories)


@dataclass(frozen=True)
class Norm(Deterministic):
    """Train a network by `training.loss`; κ is the length of the embedding before normalisation.

    The seed also drives samples from the distributions.
    """

    name = "norm"
    encoder = NormEncoder


@dataclass(frozen=True)
class McDropout(Deterministic):
    """Train a network with its own dropout layers, which stay active when it embeds.

    The seed also drives the masks. A trained network may have been trained with or without dropout.

    Source: Gal and Ghahramani (2016); Warburg et al. (2023), appendix G.4, with a rate of 0.05.
    """

    name = "mc_dropout"
    encoder = DropoutEncoder

    def check(self, network: nn.Module, dataset: Any, training: Training) -> None:
        """Also reject a network without dropout; see `Method.check`."""
        check_network(network)
        super().check(network, dataset, training)


@dataclass(frozen=True)
class Varcon(Deterministic):
    """Train a network by VarCon instead of `training.loss`. The encoder has no uncertainty; a posterior can add it.

    Source: Wang et al. (2025), "Variational supervised contrastive learning".

    Attributes:
        temperature: τ₁ > 0 of `lam.losses.VarCon`.
        epsilon: initial ε of `lam.losses.VarCon`, within ±τ₁; by default τ₁ / 5.
        learn_epsilon: whether ε is learned.
    """

    temperature: float = 0.1
    epsilon: float | None = None
    learn_epsilon: bool = True

    name = "varcon"

    def __post_init__(self) -> None:
        self._loss()

    def training_loss(self, loss: Loss, dimension: int) -> VarCon:
        """VarCon, with the margin of `loss`, which miners use."""
        return self._loss(margin_of(loss))

    def check(self, network: nn.Module, dataset: Any, training: Training) -> None:
        """Also reject places; see `Method.check`."""
        super().check(network, dataset, replace(training, loss=self._loss()))

    def _loss(self, margin: float | None = None) -> VarCon:
        return VarCon(self.temperature, self.epsilon, learn=self.learn_epsilon, margin=margin)
