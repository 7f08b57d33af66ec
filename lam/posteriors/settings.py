"""Checks and defaults of the settings of a posterior."""

import operator
from typing import Any

from lam.utils.checks import check_at_least, check_positive

LEAST_PRIOR = 1e-30
"""Least prior precision α. With a smaller α, variances (up to 1/α times squared features) could overflow float32."""

PRIOR_RATIO = 1e-4  # default `Posterior.prior_ratio`; `benchmarks/real.py posteriors` compares values


def check_settings(
    prior_precision: float | None, likelihood_scale: float | None, *, prior_ratio: Any = PRIOR_RATIO, seed: Any = 0
) -> None:
    """Reject settings that are not positive and finite, and a seed that is not an integer."""
    check_positive("prior_precision", prior_precision)
    if prior_precision is not None:
        check_at_least("prior_precision", prior_precision, LEAST_PRIOR)
    if prior_ratio is None:
        raise ValueError("prior_ratio must be positive and finite, got None: without a prior weights are undetermined")
    check_positive("prior_ratio", prior_ratio)
    check_positive("likelihood_scale", likelihood_scale)
    check_seed(seed)


def check_seed(seed: Any) -> None:
    """Reject a seed that is not an integer, or is out of the range of torch's generators."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise ValueError(f"seed must be an integer, got {seed!r}")
    if not -(2**63) <= operator.index(seed) < 2**64:
        raise ValueError(f"seed must be from -2⁶³ to 2⁶⁴ - 1, got {seed}")
