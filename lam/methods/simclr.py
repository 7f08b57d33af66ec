"""SimCLR with an explicit concentration: two views of each image, no labels, κ from the agreement of the views.

Source: Chen et al. (2020), "A simple framework for contrastive learning of visual representations".
"""

from dataclasses import dataclass

from lam.losses import ConcentrationAlignment
from lam.methods.views import ViewsMethod


@dataclass(frozen=True)
class Simclr(ViewsMethod):
    """Train by NT-Xent; negatives are the views of all other images in a batch.

    Attributes:
        temperature: τ of NT-Xent.
    """

    temperature: float = 0.5

    name = "simclr"

    def loss(self, dimension: int, seed: int) -> ConcentrationAlignment:
        return ConcentrationAlignment(self.explicit(), self.temperature)
