"""Explicit concentration: an alignment scaled by the concentrations of a pair, and a regulariser that bounds them."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from lam.losses.base import weighted_mean
from lam.losses.distributions import DistributionLoss
from lam.losses.infonce import mean_cross_entropy
from lam.pairs.pairs import Pairs
from lam.utils.checks import check_choice, check_positive

Regulariser = Literal["square", "likelihood"]


@dataclass(frozen=True)
class Explicit:
    """Term that a loss adds for each pair to learn concentrations κ: −λ_a (κ₁ + κ₂) cos + R(κ₁) + R(κ₂).

    The regulariser R(κ) is λκ² ("square"), as from a Gaussian prior, or κ − (D − 1)/2 log κ ("likelihood"). At large κ,
    "likelihood" is the negative log normaliser of the von Mises-Fisher density, up to a constant. With "square", the
    best κ of an item is λ_a/(2λ) times the mean cosine of its pairs.

    Source: "Probabilistic contrastive learning with explicit concentration on the hypersphere", equations 5, 6 and 10;
    λ_a = 0.05 and λ = 0.005 are its settings for SimCLR.

    Attributes:
        weight: λ_a > 0.
        regulariser: "square" or "likelihood".
        decay: λ > 0, for "square".
    """

    weight: float = 0.05
    regulariser: Regulariser = "square"
    decay: float = 0.005

    def __post_init__(self) -> None:
        check_positive("weight", self.weight)
        check_choice("regulariser", self.regulariser, get_args(Regulariser))
        check_positive("decay", self.decay)

    def __call__(
        self, kappa: Float[Tensor, " N"], other: Float[Tensor, " N"], cosine: Float[Tensor, " N"], dimension: int
    ) -> Float[Tensor, " N"]:
        """The term of each of N pairs, from its concentrations and its cosine."""
        regular = self._regular(kappa, dimension) + self._regular(other, dimension)
        return -self.weight * (kappa + other) * cosine + regular

    def _regular(self, kappa: Tensor, dimension: int) -> Tensor:
        if self.regulariser == "square":
            return self.decay * kappa.square()
        return kappa - (dimension - 1) / 2 * kappa.log()


class ConcentrationAlignment(DistributionLoss):
    """InfoNCE of the mean directions, plus the mean of `Explicit` over unordered positive pairs.

    Source: as `Explicit`, equation 11.

    Args:
        explicit: the alignment and its regulariser; None for only InfoNCE.
        temperature: τ > 0 of InfoNCE.

    Example:
        >>> mean, kappa = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([5.0, 5.0])
        >>> ConcentrationAlignment(Explicit())(mean, kappa, Pairs.by_label(torch.tensor([0, 0])))
        tensor(-0.2500)
    """

    def __init__(self, explicit: Explicit | None, temperature: float = 0.5) -> None:
        super().__init__()
        check_positive("temperature", temperature)
        self.explicit, self.temperature = explicit, temperature

    def curvature(self, dimension: int, kappa: float) -> dict[str, Any]:
        """The curvature of InfoNCE alone, because the alignment is linear in the cosines and has no curvature."""
        return {"name": "infonce", "temperature": self.temperature}

    def _compute(self, mean: Tensor, kappa: Tensor, pairs: Pairs, generator: torch.Generator | None) -> Tensor:
        value = mean_cross_entropy(mean @ mean.T / self.temperature, pairs)
        if self.explicit is None:
            return value
        first, second = pairs.positive.triu().nonzero(as_tuple=True)
        cosine = (mean[first] * mean[second]).sum(1)
        added = self.explicit(kappa[first], kappa[second], cosine, mean.shape[1])
        return value + weighted_mean(added, pairs.positive[first, second])
