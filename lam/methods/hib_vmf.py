"""HIB on the sphere: the cosine of two samples gives the probability that they match.

Source: Kirchhof, Kasneci and Oh (2023), equation 54. `hib` is the original, with Gaussians and distances.
"""

from dataclasses import dataclass

from lam.losses import HIB
from lam.methods.concentration import ConcentrationMethod, KappaBy


@dataclass(frozen=True)
class HibVmf(ConcentrationMethod):
    """Train mean directions and concentrations by the probability sigmoid(a cosine + b) that two samples match.

    Attributes:
        n_samples: samples of each item in a step.
        scale: a > 0.
        offset: b.
        n_negatives: negatives of each item, drawn from the batch; None for all.
    """

    kappa: KappaBy = "shared"
    n_samples: int = 16
    scale: float = 1.0
    offset: float = 0.0
    n_negatives: int | None = None

    name = "hib_vmf"

    def loss(self, dimension: int, seed: int) -> HIB:
        return HIB(self.n_samples, self.scale, self.offset, self.n_negatives)
