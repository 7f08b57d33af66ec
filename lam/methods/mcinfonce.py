"""MCInfoNCE: concentrations of the posteriors of the process that made the data.

Source: Kirchhof, Kasneci and Oh (2023), "Probabilistic contrastive learning recovers the correct aleatoric uncertainty
of ambiguous inputs".
"""

from dataclasses import dataclass

from lam.losses import MCInfoNCE
from lam.methods.concentration import ConcentrationMethod


@dataclass(frozen=True)
class Mcinfonce(ConcentrationMethod):
    """Train μ and κ by MCInfoNCE; in phases, as the source found best.

    Attributes:
        kappa_pos: how closely the latents of a positive pair lie.
        learn_kappa_pos: learn it with the network; in phases the head then keeps it.
        n_samples: samples of each item and step.
        n_negatives: negatives of each anchor, drawn from the batch; None for all.
    """

    kappa_pos: float = 20.0
    learn_kappa_pos: bool = False
    n_samples: int = 16
    n_negatives: int | None = None

    name = "mcinfonce"

    def loss(self, dimension: int, seed: int) -> MCInfoNCE:
        return MCInfoNCE(self.kappa_pos, self.n_samples, self.n_negatives, learn_kappa_pos=self.learn_kappa_pos)
