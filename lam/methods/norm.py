"""κ as the length of the embedding before normalisation: a baseline without cost."""

from dataclasses import dataclass

from lam.encoders.concentration import NormEncoder
from lam.methods.deterministic import Deterministic


@dataclass(frozen=True)
class Norm(Deterministic):
    """Train a network by `training.loss`; the seed also drives samples from the distributions."""

    name = "norm"
    encoder = NormEncoder
