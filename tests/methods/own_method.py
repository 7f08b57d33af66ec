"""A user's method: κ grows with the length of the features."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from lam.encoders.deterministic import ConcentrationEncoder
from lam.methods.base import Method, Trained, head_of
from lam.training import Training


class LengthEncoder(ConcentrationEncoder):
    keeps = ("seed", "level")

    def __init__(self, network: nn.Module, head: str, *, level: float, **common: Any) -> None:
        super().__init__(network, head, **common)
        self.level = level

    def concentration(self, features: Float[Tensor, "N P"]) -> Float[Tensor, " N"]:
        return self.level * features.double().norm(dim=1)


@dataclass(frozen=True)
class Length(Method):
    level: float = 10.0
    encoder = LengthEncoder

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        head, histories = head_of(network, dataset), self.train_network(network, dataset, training)
        return Trained(self.encoder_of(network, head, dataset, training, level=self.level), histories)
