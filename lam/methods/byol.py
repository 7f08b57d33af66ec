"""BYOL with an explicit concentration: from one view, the network predicts how a slower copy embeds the other view.

Source: Grill et al. (2020), "Bootstrap your own latent: a new approach to self-supervised learning".
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lam.losses import BYOL
from lam.methods.concentration import DistributionNetwork
from lam.methods.views import ViewsMethod


@dataclass(frozen=True)
class Byol(ViewsMethod):
    """Train by the distance of each view's prediction from the other view's target.

    A copy of the network computes the targets. Before each training pass, the copy's weights ξ follow the network's
    weights θ: ξ ← m ξ + (1 − m) θ. In the source, m grows to 1. Checkpoints hold the copy; encoders do not.

    Attributes:
        predictor: units of the predictor's hidden layer; the encoder has no predictor.
        momentum: m in [0, 1).
    """

    predictor: int = 128
    momentum: float = 0.99

    name = "byol"
    normalises = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")

    def loss(self, dimension: int, seed: int) -> BYOL:
        return BYOL(dimension, self.predictor, self.explicit(), seed=seed)

    def model(self) -> Callable[..., "MomentumNetwork"]:
        return partial(MomentumNetwork, momentum=self.momentum)


class MomentumNetwork(DistributionNetwork):
    """A `DistributionNetwork` and a slower copy without gradients, updated before each training pass."""

    def __init__(self, network: nn.Module, head: str, *arguments: Any, momentum: float, **options: Any) -> None:
        super().__init__(network, head, *arguments, **options)
        self.momentum = momentum
        own = copy.deepcopy(network), copy.deepcopy(self.norm)
        self.target = DistributionNetwork(own[0], head, None, self.loss, start=1.0, norm=own[1])
        del self.target.loss
        self.target.requires_grad_(False)

    def forward(self, inputs: Any) -> tuple[Tensor, ...]:
        """μ (N, D), κ (N,) and targets (N, D)."""
        if self.training:
            for part in ("network", "norm"):
                follow(getattr(self.target, part), getattr(self, part), self.momentum)
        with torch.no_grad():
            targets, _ = self.target(inputs)
        return *super().forward(inputs), targets


@torch.no_grad()
def follow(target: nn.Module, network: nn.Module, momentum: float) -> None:
    """ξ ← m ξ + (1 − m) θ for all weights, in place; equal weights stay exactly equal."""
    for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
        slow.lerp_(fast, 1 - momentum)
