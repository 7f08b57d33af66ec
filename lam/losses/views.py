"""Losses on two views of each image, with an explicit concentration: an alignment scaled by κ, and its regulariser."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.losses.base import weighted_mean
from lam.losses.distributions import DistributionLoss
from lam.losses.softmax import mean_cross_entropy
from lam.pairs.pairs import Pairs
from lam.utils.checks import check_at_least, check_choice, check_positive
from lam.utils.random import seeded

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
        explicit: an `Explicit` to add; None for only InfoNCE.
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
        """The curvature of InfoNCE; the alignment is linear in the cosines, so its curvature is zero."""
        return {"name": "infonce", "temperature": self.temperature}

    def _compute(self, mean: Tensor, kappa: Tensor, pairs: Pairs, generator: torch.Generator | None) -> Tensor:
        value = mean_cross_entropy(mean @ mean.T / self.temperature, pairs)
        if self.explicit is None:
            return value
        first, second = pairs.positive.triu().nonzero(as_tuple=True)
        cosine = (mean[first] * mean[second]).sum(1)
        added = self.explicit(kappa[first], kappa[second], cosine, mean.shape[1])
        return value + weighted_mean(added, pairs.positive[first, second])


class Siamese(DistributionLoss):
    """Loss of the cosine between the prediction h(μ₁) from an item and a target, the mean direction of its match.

    Targets have no gradient; with a gradient, all means would collapse into one. The predictor h has one hidden layer
    with batch norm. `explicit` uses these cosines, in both directions of a pair.

    Args:
        dimension: D.
        hidden: units of the predictor's hidden layer.
        explicit: an `Explicit` to add; None for only the base loss.
        seed: seed of the predictor's weights; the global random state does not change.
    """

    def __init__(self, dimension: int, hidden: int = 128, explicit: Explicit | None = None, *, seed: int = 0) -> None:
        super().__init__()
        check_at_least("dimension", dimension, 1)
        check_at_least("predictor", hidden, 1)
        self.dimension, self.explicit = dimension, explicit
        with seeded(seed):
            layers = (nn.Linear(dimension, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU())
            self.predictor = nn.Sequential(*layers, nn.Linear(hidden, dimension))

    def _compute(
        self,
        mean: Tensor,
        kappa: Tensor,
        pairs: Pairs,
        generator: torch.Generator | None,
        targets: Float[Tensor, "N D"] | None = None,
    ) -> Tensor:
        """The loss; `targets` are unit rows of a second network, by default the means."""
        first, second = pairs.positive.nonzero(as_tuple=True)
        predicted = F.normalize(self.predictor(mean.to(next(self.predictor.parameters()).dtype)))
        targets = (mean if targets is None else targets).detach()
        cosine = (predicted[first] * targets[second]).sum(1)
        values = self._base(cosine)
        if self.explicit is not None:
            values = values + self.explicit(kappa[first], kappa[second], cosine, mean.shape[1])
        return weighted_mean(values, pairs.positive[first, second])

    def curvature(self, dimension: int, kappa: float) -> dict[str, Any]:
        """The contrastive curvature of positive pairs only."""
        return {"name": "contrastive", "margin": 2.0, "negative_weight": 0.0}

    @abstractmethod
    def _base(self, cosine: Float[Tensor, " pairs"]) -> Float[Tensor, " pairs"]:
        """Loss of each pair, from the cosine of its prediction and target."""


class SimSiam(Siamese):
    """Mean over matches, in both directions, of −cos(h(μ₁), μ₂), without a gradient through μ₂.

    `lam.losses.Siamese` defines h and the arguments.

    Source: Chen and He (2021), "Exploring simple Siamese representation learning", equations 1 to 4.

    Example:
        >>> loss = SimSiam(2).eval()
        >>> -1 <= loss(torch.eye(2), torch.ones(2), Pairs.by_label(torch.tensor([0, 0]))).item() <= 1
        True
    """

    def _base(self, cosine: Tensor) -> Tensor:
        return -cosine


class BYOL(Siamese):
    """Mean over matches of ‖h(μ₁) − t₂‖² = 2 − 2 cos, summed over both directions.

    `lam.losses.Siamese` defines h and the arguments. The target t₂ comes from a slowly updated copy of the
    network; see `lam.methods.Byol`.

    Source: Grill et al. (2020), "Bootstrap your own latent", equation 2.

    Example:
        >>> loss = BYOL(2).eval()
        >>> 0 <= loss(torch.eye(2), torch.ones(2), Pairs.by_label(torch.tensor([0, 0]))).item() <= 8
        True
    """

    def _base(self, cosine: Tensor) -> Tensor:
        return 4 - 4 * cosine


class SwAV(DistributionLoss):
    """Mean over pairs of views of −½ Σ_j [q₁ log p₂ + q₂ log p₁], plus an optional `Explicit`.

    The prototypes c_j are learned unit vectors. p is the softmax of a view's μ·c_j/τ over j. q is `sinkhorn` of the
    view's μ·c_j/ε, without gradient. A pair counts once; the item with the smaller index is the first view.

    Source: Caron et al. (2020), "Unsupervised learning of visual features by contrasting cluster assignments",
    equations 2 to 5. This class leaves out multi-crop and the queue. The paper's values are τ = 0.1, ε = 0.05 and three
    iterations.

    Args:
        dimension: D.
        n_prototypes: J ≥ 2.
        temperature: τ > 0.
        smoothness: ε > 0, the divisor of the cosines in the assignments.
        n_iterations: number of iterations of `sinkhorn`, at least 1.
        explicit: an `Explicit` to add; None for only the base loss.
        seed: seed of the prototypes; the global random state does not change.

    Raises:
        ValueError: for a setting outside its range.
    """

    def __init__(
        self,
        dimension: int,
        n_prototypes: int = 256,
        temperature: float = 0.1,
        smoothness: float = 0.05,
        n_iterations: int = 3,
        explicit: Explicit | None = None,
        *,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_at_least("dimension", dimension, 1)
        check_at_least("n_prototypes", n_prototypes, 2)
        check_at_least("n_iterations", n_iterations, 1)
        check_positive("temperature", temperature)
        check_positive("smoothness", smoothness)
        self.temperature, self.smoothness, self.n_iterations = temperature, smoothness, n_iterations
        self.dimension, self.explicit = dimension, explicit
        rows = torch.randn(n_prototypes, dimension, generator=torch.Generator().manual_seed(seed))
        self.prototypes = nn.Parameter(F.normalize(rows))

    def curvature(self, dimension: int, kappa: float) -> dict[str, Any]:
        """The curvature of InfoNCE at the same temperature; other items replace the prototypes."""
        return {"name": "infonce", "temperature": self.temperature}

    def _compute(self, mean: Tensor, kappa: Tensor, pairs: Pairs, generator: torch.Generator | None) -> Tensor:
        first, second = pairs.positive.triu().nonzero(as_tuple=True)
        cosines = mean @ F.normalize(self.prototypes).to(mean).T
        log_p = (cosines / self.temperature).log_softmax(1)
        value = mean.new_zeros(())
        for own, other in ((first, second), (second, first)):
            q = sinkhorn(cosines[own].detach() / self.smoothness, self.n_iterations)
            value = value - (q * log_p[other]).sum(1).mean() / 2
        if self.explicit is not None:
            cosine = (mean[first] * mean[second]).sum(1)
            value = value + self.explicit(kappa[first], kappa[second], cosine, mean.shape[1]).mean()
        return value


def sinkhorn(scores: Float[Tensor, "N J"], n_iterations: int) -> Float[Tensor, "N J"]:
    """e^score, with rows and columns scaled: each row sums to 1, and all columns have nearly equal sums.

    Each iteration scales the columns to equal sums, then the rows to sums of 1.

    Source: Cuturi (2013), "Sinkhorn distances"; Caron et al. (2020), equation 5.

    Example:
        >>> sinkhorn(torch.zeros(2, 2), 3)
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    logs = scores
    for _ in range(n_iterations):
        logs = logs.log_softmax(0).log_softmax(1)
    return logs.exp()
