"""SimSiam with an explicit concentration: one view predicts the other view, without negatives.

Source: Chen and He (2021), "Exploring simple Siamese representation learning".
"""

from dataclasses import dataclass

from lam.losses import SimSiam
from lam.methods.views import ViewsMethod


@dataclass(frozen=True)
class Simsiam(ViewsMethod):
    """Train by the cosine of each view's prediction with the other view.

    Attributes:
        predictor: units of the predictor's hidden layer; the encoder has no predictor.
    """

    predictor: int = 128

    name = "simsiam"
    normalises = True

    def loss(self, dimension: int, seed: int) -> SimSiam:
        return SimSiam(dimension, self.predictor, self.explicit(), seed=seed)
