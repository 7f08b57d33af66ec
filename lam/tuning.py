"""Choosing the likelihood scale of a posterior on held-out data."""

import math
import warnings
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from lam.calibration import calibration_of
from lam.posterior import LastLayerPosterior
from lam.relevance import Relevance

CLIPPED_LIMIT = 0.5
"""Tuning warns where clipped weights make a larger share of the predictive variance than this."""


@dataclass(frozen=True)
class Tuning:
    """What was tried and what was chosen.

    Attributes:
        likelihood_scale: the scale s with the least calibration error.
        ece: its retrieval ECE on the held-out data.
        tried: every s that was tried, with its ECE, in rising order of s.
    """

    likelihood_scale: float
    ece: float
    tried: tuple[tuple[float, float], ...]


def calibrate_scale(
    posterior: LastLayerPosterior,
    features: Float[Tensor, "N P"],
    relevance: Relevance,
    *,
    n_samples: int = 32,
    least: float = 1.0,
    greatest: float = 1e14,
    refinements: int = 2,
) -> tuple[LastLayerPosterior, Tuning]:
    """Minimise the retrieval ECE on held-out in-distribution data over log s, at the posterior's prior precision.

    h stays as it is; another s costs only sampling. First every power of ten is tried, then the neighbourhood of the
    best, at half the distance each time. All draws share their noise.

    Args:
        posterior: whose scale is tuned.
        features: (N, P) held-out features; their nearest neighbours among themselves are judged.
        relevance: which of them answer which.
        n_samples: sampled networks S.
        least: the smallest s tried.
        greatest: the largest s tried.
        refinements: how often the distance is halved around the best.

    Returns:
        The posterior with the best scale, and what was tried. Warnings say where the best is at an end of the range,
        and where weights whose negative curvature was clipped, which the scale does not reach, make most of the
        predictive variance.

    Raises:
        ValueError: where no item answers another, or for a range that is none.
    """
    if not relevance.count().any():
        raise ValueError(f"none of {len(relevance.queries)} queries has an answer: there is nothing to calibrate on")
    if not 0 < least < greatest < math.inf:
        raise ValueError(f"likelihood scales must satisfy 0 < least < greatest, got {least} and {greatest}")
    if refinements < 0:
        raise ValueError(f"refinements must be at least 0, got {refinements}")
    errors: dict[float, float] = {}

    def error(exponent: float) -> float:
        if exponent not in errors:
            candidate = replace(posterior, likelihood_scale=10.0**exponent)
            errors[exponent] = sampled_ece(candidate, features, relevance, n_samples=n_samples)
        return errors[exponent]

    low, high = math.log10(least), math.log10(greatest)
    steps = max(1, round(high - low))
    step = (high - low) / steps
    best = min((low + i * step for i in range(steps + 1)), key=error)
    for _ in range(refinements):
        step /= 2
        best = min((max(best - step, low), best, min(best + step, high)), key=error)
    if best in (low, high):
        warnings.warn(
            f"the best likelihood scale, {10.0**best:.3g}, is at an end of the range tried, {least:.3g} to "
            f"{greatest:.3g}: choose another range, or look at the prior precision",
            stacklevel=3,
        )
    chosen = replace(posterior, likelihood_scale=10.0**best)
    share = chosen.clipped_variance_share(features)
    if share > CLIPPED_LIMIT:
        warnings.warn(
            f"{share:.0%} of the predictive variance is due to the {posterior.curvature.clipped:.2%} of the weights "
            "whose curvature is negative: they keep the prior's variance, which no likelihood scale changes. Fit with "
            'split="euclidean", fix="positive", which has none, or with a larger prior_precision',
            stacklevel=3,
        )
    tried = tuple((10.0**exponent, errors[exponent]) for exponent in sorted(errors))
    return chosen, Tuning(10.0**best, errors[best], tried)


def sampled_ece(
    posterior: LastLayerPosterior, features: Float[Tensor, "N P"], relevance: Relevance, *, n_samples: int
) -> float:
    """Give the retrieval ECE under sampled networks."""
    return calibration_of(posterior.sampled_embeddings(features, n_samples=n_samples), relevance).expected_error
