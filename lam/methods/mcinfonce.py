"""MCInfoNCE: learns the posterior concentrations of the process that generated the data.

Source: Kirchhof, Kasneci and Oh (2023), "Probabilistic contrastive learning recovers the correct aleatoric uncertainty
of ambiguous inputs".
"""

from dataclasses import dataclass

from lam.losses import MCInfoNCE
from lam.methods.concentration import ConcentrationMethod


@dataclass(frozen=True)
class Mcinfonce(ConcentrationMethod):
    """Train mean directions and concentrations by MCInfoNCE; phases are the default, as the source found them best.

    Attributes:
        kappa_pos: concentration of the latents of a positive pair.
        learn_kappa_pos: learn `kappa_pos` with the network; in phases it is fixed while the head is trained.
        n_samples: samples of each item in a step.
        n_negatives: negatives of each anchor, drawn from the batch; None for all.
    """

    kappa_pos: float = 20.0
    learn_kappa_pos: bool = False
    n_samples: int = 16
    n_negatives: int | None = None

    name = "mcinfonce"

    def loss(self, dimension: int, seed: int) -> MCInfoNCE:
        return MCInfoNCE(self.kappa_pos, self.n_samples, self.n_negatives, learn_kappa_pos=self.learn_kappa_pos)
