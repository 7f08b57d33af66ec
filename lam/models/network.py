"""`EmbeddingNetwork`, the class of every network of `lam.models`: features, a linear head, normalisation."""

import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

Option = str | int | float | bool


class EmbeddingNetwork(nn.Module):
    """Map inputs x to points n on the unit sphere: n = f/‖f‖ with f = head(features(x)).

    Attributes:
        features: maps N inputs to (N, P), the inputs of the head.
        head: the last linear layer, P to D; a posterior covers its weights.
        recipe: arguments of `lam.models.build` that rebuild the network, as JSON, without weights and seed.
    """

    def __init__(self, features: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.features = features
        self.head = head
        self.recipe: dict[str, Option] = {}

    def forward(self, inputs: Shaped[Tensor, "N ..."]) -> Float[Tensor, "N D"]:
        return F.normalize(self.head(self.features(inputs)), dim=1)


def check_dropout(rate: float) -> None:
    """Reject a dropout rate outside [0, 1); at 0 a network has no dropout layers."""
    if not 0 <= rate < 1:
        raise ValueError(f"dropout must be a rate in [0, 1), got {rate}")
