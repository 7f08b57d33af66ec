"""Hedged instance embeddings (HIB) on the sphere: two samples match with a probability that grows with their cosine."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lam.losses.base import weighted_mean
from lam.losses.distributions import DistributionLoss, drawn_negatives, samples_of
from lam.pairs.pairs import Pairs
from lam.utils.checks import check_at_least, check_positive
from lam.vmf.bessel import bessel_ratio


class HIB(DistributionLoss):
    """Mean of −log p(match) over positive pairs plus mean of −log(1 − p(match)) over negative pairs.

    p(match) = 1/S Σ_s sigmoid(a z_s·z'_s + b), with z_s and z'_s the s-th samples of the two items. The paper's KL
    term is left out. For the original, on Gaussians and distances, see `soft_contrastive`.

    Source: Kirchhof, Kasneci and Oh (2023), equation 54, after Oh et al. (2019); a = 1 and b = 0 are the best values in
    table 7.

    Args:
        n_samples: S ≥ 1.
        scale: a > 0.
        offset: b.
        n_negatives: random negatives of each item, at least 1; None for all in the batch.

    Raises:
        ValueError: for a setting outside its range.

    Example:
        >>> mean, kappa = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.full((2,), torch.inf)
        >>> round(float(HIB()(mean, kappa, Pairs.by_label(torch.tensor([0, 0])))), 3)
        0.313
    """

    def __init__(
        self, n_samples: int = 16, scale: float = 1.0, offset: float = 0.0, n_negatives: int | None = None
    ) -> None:
        super().__init__()
        check_at_least("n_samples", n_samples, 1)
        check_at_least("n_negatives", n_negatives, 1)
        check_positive("scale", scale)
        if not math.isfinite(offset):
            raise ValueError(f"offset must be finite, got {offset}")
        self.n_samples, self.scale, self.offset, self.n_negatives = n_samples, scale, offset, n_negatives

    def curvature(self, dimension: int, kappa: float) -> dict[str, Any]:
        """The positive part of InfoNCE's second derivative; 1/τ is the slope of HIB's logits over cosines of means."""
        slope = self.scale * float(bessel_ratio(dimension, torch.tensor(kappa).double())) ** 2
        return {"name": "infonce", "temperature": 1 / slope, "split": "outputs", "fix": "projected"}

    def _compute(self, mean: Tensor, kappa: Tensor, pairs: Pairs, generator: torch.Generator | None) -> Tensor:
        samples = samples_of(mean, kappa, self.n_samples, generator)
        cosines = samples @ samples.transpose(1, 2)
        kinds = pairs.positive, drawn_negatives(pairs, self.n_negatives, generator).negative
        terms = []
        for kind, sign in zip(kinds, (1, -1), strict=True):
            first, second = kind.nonzero(as_tuple=True)
            log_matches = F.logsigmoid(sign * (self.scale * cosines[:, first, second] + self.offset))
            terms.append(weighted_mean(log_matches.logsumexp(0) - math.log(self.n_samples), kind[first, second]))
        return -terms[0] - terms[1]
