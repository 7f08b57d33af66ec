"""SwAV with an explicit concentration: the views of an image share one of several learned prototypes.

Source: Caron et al. (2020), "Unsupervised learning of visual features by contrasting cluster assignments".
"""

from dataclasses import dataclass

from lam.losses import SwAV
from lam.methods.views import ViewsMethod


@dataclass(frozen=True)
class Swav(ViewsMethod):
    """Train by predicting the prototype of one view from the other; without multi-crop.

    Attributes:
        n_prototypes: number J of prototypes; the encoder does not keep them.
        temperature: τ of the predictions.
        smoothness: ε of the assignments.
        n_iterations: iterations of Sinkhorn and Knopp's algorithm.
    """

    n_prototypes: int = 256
    temperature: float = 0.1
    smoothness: float = 0.05
    n_iterations: int = 3

    name = "swav"
    normalises = True

    def loss(self, dimension: int, seed: int) -> SwAV:
        numbers = (self.n_prototypes, self.temperature, self.smoothness, self.n_iterations)
        return SwAV(dimension, *numbers, self.explicit(), seed=seed)
