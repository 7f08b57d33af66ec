"""SimSiam and BYOL: one view predicts the other view; the target has no gradient, so positive pairs are enough."""

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.losses.alignment import Explicit
from lam.losses.base import weighted_mean
from lam.losses.distributions import DistributionLoss
from lam.pairs.pairs import Pairs
from lam.utils.checks import check_at_least
from lam.utils.random import seeded


class Siamese(DistributionLoss):
    """Loss of the cosine between the prediction h(μ₁) from an item and the target of its match.

    A target is a direction without gradient. The predictor h has one hidden layer with batch norm. `explicit` uses the
    same cosines, in both directions of a pair: without targets, all means would collapse into one.

    Args:
        dimension: D.
        hidden: units of the predictor's hidden layer.
        explicit: the alignment and its regulariser; None for only the base loss.
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

    def forward(
        self,
        mean: Float[Tensor, "N D"],
        kappa: Float[Tensor, " N"],
        pairs: Pairs,
        *,
        generator: torch.Generator | None = None,
        targets: Float[Tensor, "N D"] | None = None,
    ) -> Float[Tensor, ""]:
        """Loss of a batch; see `DistributionLoss`.

        Args:
            mean, kappa, pairs, generator: as for `DistributionLoss`.
            targets: (N, D) unit rows of a second network; by default the means.
        """
        mean, kappa = self._checked(mean, kappa, pairs)
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

    def _compute(self, mean: Tensor, kappa: Tensor, pairs: Pairs, generator: torch.Generator | None) -> Tensor:
        return self(mean, kappa, pairs)


class SimSiam(Siamese):
    """Mean over matches, in both directions, of −cos(h(μ₁), μ₂), without a gradient through μ₂; see `Siamese`.

    Source: Chen and He (2021), "Exploring simple Siamese representation learning", equations 1 to 4.

    Example:
        >>> loss = SimSiam(2).eval()
        >>> -1 <= loss(torch.eye(2), torch.ones(2), Pairs.by_label(torch.tensor([0, 0]))).item() <= 1
        True
    """

    def _base(self, cosine: Tensor) -> Tensor:
        return -cosine


class BYOL(Siamese):
    """Mean over matches of ‖h(μ₁) − ξ₂‖² = 2 − 2 cos, summed over both directions; a slower second network gives ξ₂.

    Source: Grill et al. (2020), "Bootstrap your own latent", equation 2.

    Example:
        >>> loss = BYOL(2).eval()
        >>> 0 <= loss(torch.eye(2), torch.ones(2), Pairs.by_label(torch.tensor([0, 0]))).item() <= 8
        True
    """

    def _base(self, cosine: Tensor) -> Tensor:
        return 4 - 4 * cosine
