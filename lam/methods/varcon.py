"""VarCon: a network trained to match items with the class centroids of their batch.

Source: Wang et al. (2025), "Variational supervised contrastive learning".
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lam.losses import Loss, VarCon
from lam.losses.base import margin_of
from lam.methods.deterministic import Deterministic
from lam.training import Training


@dataclass(frozen=True)
class Varcon(Deterministic):
    """Train a network by VarCon instead of `training.loss`. The encoder has no uncertainty; a posterior can add it.

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
