"""The prior precision α of a posterior, chosen by the Laplace evidence."""

import warnings

from lam.posteriors import Posterior
from lam.utils.checks import check_positive

_WITHIN = 1e-7, 1e7
"""Range of α that counts as a maximum; `Posterior.with_best_prior` searches ten times as far on both sides."""


def tune_prior(posterior: Posterior, step: float | None) -> Posterior:
    """The posterior with the best α, or after one step of size `step` in log α; the likelihood scale stays.

    Warns if the evidence has no maximum, for example without positive curvature; α is then at an end of its range.

    Raises:
        ValueError: for a step that is not positive.
    """
    check_positive("step", step)
    if step is not None:
        return posterior.with_prior_step(step)
    best = posterior.with_best_prior()
    if not _WITHIN[0] < best.alpha < _WITHIN[1]:
        warnings.warn(
            f"κ says little: the evidence has no maximum, so the prior precision went to {best.alpha:.2g}, an end of "
            "its range; tune by calibration, or fit with a prior_precision, on data with more pairs",
            stacklevel=3,
        )
    return best
