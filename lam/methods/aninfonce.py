"""AnInfoNCE: a network trained with a concentration of each embedding dimension, and nothing more.

Source: Rusak et al. (2024), "InfoNCE: identifying the gap between theory and practice".
"""

from dataclasses import dataclass

from lam.losses import AnInfoNCE, Loss, margin_of
from lam.methods.deterministic import Deterministic
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

    def own_loss(self, loss: Loss, dimension: int) -> AnInfoNCE:
        """AnInfoNCE, with the margin of the training's loss, which miners go by."""
        return AnInfoNCE(dimension, self.concentration, margin=margin_of(loss))
