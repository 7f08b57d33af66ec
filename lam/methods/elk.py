"""ELK: learns concentrations by the expected likelihood of two items' distributions, in closed form.

Source: Kirchhof, Kasneci and Oh (2023), equation 55.
"""

from dataclasses import dataclass

from lam.losses import ELK
from lam.methods.concentration import ConcentrationMethod, KappaBy


@dataclass(frozen=True)
class Elk(ConcentrationMethod):
    """Train mean directions and concentrations by InfoNCE on log expected likelihoods, without sampling.

    Attributes:
        kappa_pos: factor of the log likelihood; the source chooses among 16, 32 and 64 on CIFAR-10 (appendix C.2).
    """

    kappa: KappaBy = "shared"
    kappa_pos: float = 1.0

    name = "elk"

    def loss(self, dimension: int, seed: int) -> ELK:
        return ELK(self.kappa_pos)
