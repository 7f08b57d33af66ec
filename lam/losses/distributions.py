"""`DistributionLoss`, the base of losses on von Mises-Fisher distributions; and functions that these losses share."""

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lam.losses.base import weighted_mean
from lam.losses.infonce import log_ratios, log_weighted_sum
from lam.pairs.pairs import Pairs
from lam.utils.autocast import without_autocast
from lam.utils.checks import check_length, check_no_nan
from lam.vmf.distribution import VonMisesFisher
from lam.vmf.embeddings import KAPPA_RANGE


class DistributionLoss(nn.Module, ABC):
    """A loss on von Mises-Fisher distributions and their pairs; any parameters are trained with the network.

    Attributes:
        dimension: D of the means; None for any.
    """

    dimension: int | None = None

    @without_autocast()
    def forward(
        self,
        mean: Float[Tensor, "N D"],
        kappa: Float[Tensor, " N"],
        pairs: Pairs,
        *,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, ""]:
        """Loss of a batch; lower is better.

        Args:
            mean: (N, D) unit rows, the mean directions; half precision is widened to float32, also for κ.
            kappa: (N,) concentrations ≥ 0; outside `KAPPA_RANGE` they are clamped and have no gradient.
            pairs: the pairs among these N items.
            generator: generator of the samples, on the device of `mean`; by default torch's global generator.

        Raises:
            ValueError: for pairs or κ of another number of items, means of another dimension, no positive pair, or a κ
                that is NaN.
        """
        return self._compute(*self._checked(mean, kappa, pairs), pairs, generator)

    def _checked(self, mean: Tensor, kappa: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Means, and κ within its range, float32 or wider."""
        if self.dimension not in (None, mean.shape[1]):
            raise ValueError(f"the loss is made for {self.dimension} dimensions, got means of {mean.shape[1]}")
        pairs.check_size(len(mean))
        pairs.check_positives()
        check_length("kappa", kappa, "the means", len(mean))
        check_no_nan("kappa", kappa)
        mean, kappa = (values.to(torch.promote_types(values.dtype, torch.float32)) for values in (mean, kappa))
        return mean, kappa.clamp(*KAPPA_RANGE)

    def learned(self) -> dict[str, list[float]]:
        """Learned values by the names of the method's options."""
        return {}

    @abstractmethod
    def curvature(self, dimension: int, kappa: float) -> dict[str, Any]:
        """Name and settings of the loss's curvature by the means, or of a similar curvature, for items with this κ."""

    @abstractmethod
    def _compute(self, mean: Tensor, kappa: Tensor, pairs: Pairs, generator: torch.Generator | None) -> Tensor: ...


def samples_of(
    mean: Tensor, kappa: Tensor, n_samples: int, generator: torch.Generator | None
) -> Float[Tensor, "S N D"]:
    """Samples of all items, with gradients."""
    return VonMisesFisher(mean, kappa, validate_args=False).rsample((n_samples,), generator=generator)


def drawn_negatives(pairs: Pairs, n_negatives: int | None, generator: torch.Generator | None) -> Pairs:
    """The pairs with at most `n_negatives` random negatives of each anchor, without replacement; None for all.

    The positive pairs stay the same. The matrix `negative` is no longer symmetric.
    """
    if n_negatives is None or n_negatives >= pairs.size:
        return pairs
    noise = torch.rand(pairs.negative.shape, generator=generator, device=pairs.negative.device)
    order = noise.masked_fill(pairs.negative == 0, -1.0).topk(n_negatives, 1).indices
    kept = torch.zeros_like(pairs.negative).scatter(1, order, pairs.negative.gather(1, order))
    return Pairs(pairs.positive, kept, pairs.n_positives, int(kept.sum()), pairs.labels)


def mean_log_ratio(samples: Float[Tensor, "S N D"], scale: Tensor, pairs: Pairs) -> Float[Tensor, ""]:
    """Mean over positive pairs of log 1/S Σ_s ratio_s, with ratio_s as in `log_ratios`.

    The logits of ratio_s are `scale` times the cosines of the items' s-th samples. If at most half of the items are
    negatives of any anchor, the code computes only the cosines that the ratios need.
    """
    columns = pairs.negative.any(0).nonzero()[:, 0]
    if 2 * len(columns) > pairs.size:
        ratios, weights = log_ratios(scale * (samples @ samples.transpose(1, 2)), pairs)
    else:
        anchor, positive = pairs.positive.nonzero(as_tuple=True)
        rows, row_of_anchor = anchor.unique(return_inverse=True)
        own = scale * (samples[:, anchor] * samples[:, positive]).sum(-1)
        logits = scale * (samples[:, rows] @ samples[:, columns].transpose(1, 2))
        negatives = log_weighted_sum(logits, pairs.negative[rows[:, None], columns])
        ratios, weights = own - torch.logaddexp(own, negatives[:, row_of_anchor]), pairs.positive[anchor, positive]
    return weighted_mean(ratios.logsumexp(0) - math.log(len(samples)), weights)
