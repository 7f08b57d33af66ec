"""The length of the unnormalised embedding as κ: the free baseline of every table."""

from dataclasses import dataclass

from lam.encoders.concentration import NormEncoder
from lam.methods.deterministic import Deterministic


@dataclass(frozen=True)
class Norm(Deterministic):
    """Train a network, and nothing more; the seed is also that of samples from the distributions."""

    name = "norm"
    encoder = NormEncoder
