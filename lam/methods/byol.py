"""BYOL with an explicit concentration: each view predicts what a slower copy of the network makes of the other.

Source: Grill et al. (2020), "Bootstrap your own latent: a new approach to self-supervised learning".
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lam.losses import BYOL, Loss
from lam.methods.concentration import DistributionNetwork, DistributionStep
from lam.methods.views import ViewsMethod
from lam.training.steps import Minibatch


@dataclass(frozen=True)
class Byol(ViewsMethod):
    """Train by the distance of each view's prediction from the other view's target.

    Targets are of a copy of the network whose weights follow, ξ ← m ξ + (1 − m) θ after each step; the source lets m
    grow to 1. The copy is in the checkpoints and not in the encoder.

    Attributes:
        predictor: units of the hidden layer of the predictor, which is not kept.
        momentum: m in [0, 1).

    Raises:
        ValueError: for an option outside its range.
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
        """BYOL's loss and what the concentrations add, with a new predictor."""
        return BYOL(dimension, self.predictor, self.explicit(), seed=seed)

    def model(self) -> type["MomentumNetwork"]:
        """A network and its slower copy; see `ConcentrationMethod.model`."""
        return MomentumNetwork

    def step(self) -> "MomentumStep":
        """The step that keeps the copy; see `ConcentrationMethod.step`."""
        return MomentumStep(self.settings(), self.momentum)


class MomentumNetwork(DistributionNetwork):
    """A network, and a copy of it that has no gradients; else as `DistributionNetwork`."""

    def __init__(self, network: nn.Module, head: str, *arguments: Any, **options: Any) -> None:
        super().__init__(network, head, *arguments, **options)
        own = copy.deepcopy(network), copy.deepcopy(self.norm)
        self.target = DistributionNetwork(own[0], head, None, self.loss, start=1.0, norm=own[1])
        del self.target.loss
        self.target.requires_grad_(False)

    def forward(self, inputs: Any) -> tuple[Tensor, ...]:
        """μ (N, D), κ (N,) and targets (N, D)."""
        with torch.no_grad():
            targets, _ = self.target(inputs)
        return *super().forward(inputs), targets


class MomentumStep(DistributionStep):
    """Move the copy, then take the gradient of the loss with its targets.

    Args:
        options: of the method.
        momentum: m.
    """

    def __init__(self, options: dict[str, Any], momentum: float) -> None:
        super().__init__(options)
        self.momentum = momentum

    def backward(self, network: nn.Module, loss: Loss, batch: Minibatch, backward: Callable[[Tensor], None]) -> Tensor:
        """Add the gradient of one batch; the copy first follows the update that the last batch made."""
        model: Any = network
        for part in ("network", "norm"):
            follow(getattr(model.target, part), getattr(model, part), self.momentum)
        mean, kappa, targets = model(batch.inputs)
        value = model.loss(mean, kappa, batch.pairs, targets=targets)
        backward(value)
        return value.detach()


@torch.no_grad()
def follow(target: nn.Module, network: nn.Module, momentum: float) -> None:
    """ξ ← m ξ + (1 − m) θ for all weights, in place; equal ones stay equal to the bit."""
    for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
        slow.lerp_(fast, 1 - momentum)
