"""Explicit concentration: an alignment that the concentrations of a pair scale, and what keeps these from growing."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lam.losses.base import weighted_mean
from lam.losses.distributions import DistributionLoss
from lam.losses.infonce import mean_cross_entropy
from lam.pairs.pairs import Pairs
from lam.utils.checks import check_choice, check_positive

Regulariser = Literal["square", "likelihood"]


class ConcentrationAlignment(DistributionLoss):
    """Mean over positive pairs of −λ_a (κ₁ + κ₂) μ₁·μ₂ + R(κ₁) + R(κ₂), plus InfoNCE of the mean directions.

    R(κ) is λκ² ("square"), the prior of a Gaussian, or κ − (D − 1)/2 log κ ("likelihood"), which the normaliser of the
    distribution leaves at large κ. A pair counts once, whichever of its items comes first. By the square alone, the
    best κ of an item is λ_a/(2λ) times the mean cosine of its pairs.

    Source: "Probabilistic contrastive learning with explicit concentration on the hypersphere", equations 5, 6, 10 and
    11; λ_a = 0.05 and λ = 0.005 are its settings for SimCLR.

    Args:
        weight: λ_a > 0.
        regulariser: "square" or "likelihood".
        decay: λ > 0 of the square.
        temperature: τ > 0 of InfoNCE; None for a base loss of the caller's own, which is added outside.

    Raises:
        ValueError: for one outside its range.

    Example:
        >>> mean, kappa = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([5.0, 5.0])
        >>> ConcentrationAlignment(temperature=None)(mean, kappa, Pairs.by_label(torch.tensor([0, 0])))
        tensor(-0.2500)
    """

    def __init__(
        self,
        weight: float = 0.05,
        regulariser: Regulariser = "square",
        decay: float = 0.005,
        temperature: float | None = 0.5,
    ) -> None:
        super().__init__()
        check_positive("weight", weight)
        check_choice("regulariser", regulariser, get_args(Regulariser))
        check_positive("decay", decay)
        check_positive("temperature", temperature)
        self.weight, self.regulariser, self.decay, self.temperature = weight, regulariser, decay, temperature

    def curvature(self, dimension: int, kappa: float) -> dict[str, Any]:
        """That of InfoNCE, as the alignment is linear in cosines; without InfoNCE, that of the positive pairs alone."""
        if self.temperature is None:
            return {"name": "contrastive", "margin": 2.0, "negative_weight": 0.0}
        return {"name": "infonce", "temperature": self.temperature}

    def _compute(self, mean: Tensor, kappa: Tensor, pairs: Pairs, generator: torch.Generator | None) -> Tensor:
        first, second = pairs.positive.triu().nonzero(as_tuple=True)
        if self.regulariser == "square":
            regular = self.decay * kappa.square()
        else:
            regular = kappa - (mean.shape[1] - 1) / 2 * kappa.log()
        cosine = (mean[first] * mean[second]).sum(1)
        aligned = -self.weight * (kappa[first] + kappa[second]) * cosine + regular[first] + regular[second]
        value = weighted_mean(aligned, pairs.positive[first, second])
        if self.temperature is None:
            return value
        return value + mean_cross_entropy(mean @ mean.T / self.temperature, pairs)
