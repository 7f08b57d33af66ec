"""VarCon: a network trained against the centroids of its batches' classes, and nothing more.

Source: Wang et al. (2025), "Variational supervised contrastive learning".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lam.losses import Loss, VarCon, margin_of
from lam.methods.base import Trained, own_curvature
from lam.methods.deterministic import Deterministic
from lam.training import Training


@dataclass(frozen=True)
class Varcon(Deterministic):
    """Train a network by VarCon in place of `training.loss`; it has no uncertainty, a posterior gives it one.

    Attributes:
        temperature: τ₁ > 0.
        epsilon: ε at the beginning, within ±τ₁; by default τ₁ / 5.
        learn_epsilon: whether ε is learned.

    Raises:
        ValueError: for an option outside its range.
    """

    temperature: float = 0.1
    epsilon: float | None = None
    learn_epsilon: bool = True

    name = "varcon"

    def __post_init__(self) -> None:
        self.loss()

    def loss(self, margin: float | None = None) -> VarCon:
        """VarCon with these options."""
        return VarCon(self.temperature, self.epsilon, learn=self.learn_epsilon, margin=margin)

    def trained_by(
        self, loss: Loss, dimension: int, learned: Mapping[str, Sequence[float]] | None = None
    ) -> dict[str, Any]:
        """VarCon's; see `Method.trained_by`."""
        return own_curvature(self.loss(), learned)

    def check(self, network: nn.Module, dataset: Any, training: Training) -> None:
        """Refuse places, too; see `Method.check`."""
        super().check(network, dataset, self._with_loss(training))

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train a network; see `Method.train`."""
        return super().train(network, dataset, self._with_loss(training))

    def _with_loss(self, training: Training) -> Training:
        return replace(training, loss=self.loss(margin_of(training.loss)))
