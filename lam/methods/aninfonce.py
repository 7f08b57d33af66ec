"""AnInfoNCE: a network trained with a concentration of each embedding dimension, and nothing more.

Source: Rusak et al. (2024), "InfoNCE: identifying the gap between theory and practice".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lam.losses import AnInfoNCE, Loss, margin_of
from lam.methods.base import Trained, head_of, own_curvature
from lam.methods.deterministic import Deterministic
from lam.training import Training
from lam.utils.checks import check_positive


@dataclass(frozen=True)
class Aninfonce(Deterministic):
    """Train a network by AnInfoNCE in place of `training.loss`; what Λ became is in the history, `learned`.

    Attributes:
        concentration: Λ > 0 of all dimensions at the beginning; 5 is InfoNCE at temperature 0.1.

    Raises:
        ValueError: for a concentration that is not positive.
    """

    concentration: float = 5.0

    name = "aninfonce"

    def __post_init__(self) -> None:
        check_positive("concentration", self.concentration)

    def trained_by(
        self, loss: Loss, dimension: int, learned: Mapping[str, Sequence[float]] | None = None
    ) -> dict[str, Any]:
        """AnInfoNCE's; see `Method.trained_by`."""
        return own_curvature(AnInfoNCE(dimension, self.concentration), learned)

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train a network; see `Method.train`."""
        layer: Any = network.get_submodule(head_of(network, dataset))
        loss = AnInfoNCE(layer.out_features, self.concentration, margin=margin_of(training.loss))
        return super().train(network, dataset, replace(training, loss=loss))
