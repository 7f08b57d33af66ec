"""Choosing the likelihood scale of a posterior on held-out data."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lam.hessians.losses import ContrastiveCurvature
from lam.pairs.relevance import Relevance
from lam.posteriors import Posterior
from lam.retrieval.index.exact import rank
from lam.retrieval.metrics.registry import METRICS, Metric
from lam.retrieval.metrics.reliability import answers_of
from lam.utils.checks import check_at_least
from lam.vmf.embeddings import KAPPA_RANGE

CLIPPED_LIMIT = 0.5
"""Tuning warns where clipped weights make a larger share of the predictive variance than this."""

COSINE_LIMIT = 0.9
"""Tuning warns where the mean of samples points elsewhere than the network: a cosine below this, on average."""

FLAT_DECADES = 3
"""Tuning warns where the held-out data cannot tell scales that are more than so many powers of ten apart."""

_DEPTH = 10

METRICS |= {
    "tuned_scale": Metric("likelihood scale s", "neither", "the largest within one standard error of the best score"),
    "tuned_scale_low": Metric("s, from", "neither", "the least within one standard error of the best score"),
    "tuned_scale_high": Metric("s, to", "neither", "the greatest within one standard error of the best score"),
    "tuned_score": Metric(
        "log score", "lower", "of the votes of sampled networks for the first hits, on the validation split"
    ),
    "tuned_score_behind": Metric("log score, above the best", "lower", "by how much the chosen s is behind the best"),
    "tuned_score_error": Metric("standard error of that", "neither", "of the difference, query by query"),
    "tuned_ece": Metric("ECE, validation", "lower", "mean gap between confidence and accuracy at the chosen s"),
    "tuned_cosine": Metric(
        "cosine of sampled and own direction",
        "higher",
        "below 0.9 the posterior is so wide that the mean of its samples points elsewhere than the network",
    ),
}


@dataclass(frozen=True)
class Trial:
    """One likelihood scale s, judged on held-out data.

    Attributes:
        scale: s.
        score: log score of the votes for the first hits, the mean over the queries; lower is better.
        ece: retrieval ECE, lower is better.
        behind: how far the score is above the best one.
        error: standard error of that difference, query by query.
    """

    scale: float
    score: float
    ece: float
    behind: float
    error: float

    @property
    def within_error(self) -> bool:
        """Whether the held-out data cannot tell this scale from the best one."""
        return self.behind <= self.error


@dataclass(frozen=True)
class Tuning:
    """The likelihood scales that were tried, and the chosen one.

    Attributes:
        likelihood_scale: the scale s that was chosen.
        trials: every s that was tried, in rising order of s.
        direction_cosine: with that s, the mean cosine between the network's direction and that of the mean of samples.
    """

    likelihood_scale: float
    trials: tuple[Trial, ...]
    direction_cosine: float

    @property
    def chosen(self) -> Trial:
        """The trial of the chosen scale."""
        return next(trial for trial in self.trials if trial.scale == self.likelihood_scale)

    @property
    def interval(self) -> tuple[float, float]:
        """The least and the greatest scale that was tried whose score is within one standard error of the best."""
        scales = [trial.scale for trial in self.trials if trial.within_error]
        return scales[0], scales[-1]

    def metrics(self) -> dict[str, float]:
        """Metrics of the chosen scale, by name."""
        low, high = self.interval
        return {
            "tuned_scale": self.likelihood_scale,
            "tuned_scale_low": low,
            "tuned_scale_high": high,
            "tuned_score": self.chosen.score,
            "tuned_score_behind": self.chosen.behind,
            "tuned_score_error": self.chosen.error,
            "tuned_ece": self.chosen.ece,
            "tuned_cosine": self.direction_cosine,
        }


def calibrate_scale(
    posterior: Posterior,
    batches: Sequence[Any],
    relevance: Relevance,
    *,
    n_samples: int = 32,
    least: float = 1.0,
    greatest: float = 1e14,
    refinements: int = 2,
) -> tuple[Posterior, Tuning]:
    """Choose the likelihood scale s whose votes score best on held-out in-distribution data.

    h stays as it is, at the posterior's prior precision; another s costs only sampling. What is retrieved is the same
    for every s; the share of S sampled networks that agree with a first hit is its probability of being right, and s is
    judged by their log score, which is proper. The calibration error alone is as low for a posterior that knows
    nothing, once the queries are few. Chosen is the largest s within one standard error of the best, the error being
    that of the difference query by query: of posteriors that the data cannot tell apart, the one that changes the
    network least. Other scores and other errors were tried on photographs, faces, characters and texts
    (benchmarks/tuning.py).

    First every power of ten is tried, then the neighbourhood of the best and of the ends of what is within its error,
    at half the distance each time. All draws share their noise. Scales at which κ is at the upper end of its range for
    a held-out item are not chosen from.

    Source: the rule of one standard error is that of Breiman, Friedman, Olshen and Stone (1984).

    Args:
        posterior: whose scale is tuned.
        batches: what enters the posterior, such as features, of N held-out items in parts; their nearest neighbours
            among themselves are judged.
        relevance: which of them answer which.
        n_samples: sampled networks S, as many as the evaluation takes: the ECE at a given s depends on S.
        least: the smallest s tried.
        greatest: the largest s tried.
        refinements: how often the distance is halved around the best.

    Returns:
        The posterior with the best scale, and what was tried. One warning says the gravest of what is wrong: weights
        with a clipped, negative curvature, which the scale does not reach, make most of the predictive variance; the
        mean of samples points elsewhere than the network; the data cannot tell scales apart; the chosen scale is at an
        end of the range.

    Raises:
        ValueError: where no item answers another, for a range that is none, or where κ is at its upper end at every s.
    """
    if not relevance.count().any():
        raise ValueError(f"none of {len(relevance.queries)} queries has an answer: there is nothing to calibrate on")
    if not 0 < least < greatest < math.inf:
        raise ValueError(f"likelihood scales must satisfy 0 < least < greatest, got {least} and {greatest}")
    check_at_least("refinements", refinements, 0)
    tuner = _Tuner(posterior, batches, relevance, n_samples)
    exponents = tuner.search(math.log10(least), math.log10(greatest), refinements)
    best = min(exponents, key=tuner.score)
    trials = tuple(tuner.trial(exponent, best) for exponent in sorted(exponents))
    scale = max(trial.scale for trial in trials if trial.within_error)
    chosen = replace(posterior, likelihood_scale=scale)
    tuning = Tuning(scale, trials, _direction_cosine(chosen, batches, n_samples))
    if complaint := _complaint(chosen, batches, tuning):
        warnings.warn(complaint, stacklevel=3)
    return chosen, tuning


class _Tuner:
    """Judges exponents log₁₀ s, each once."""

    def __init__(self, posterior: Posterior, batches: Sequence[Any], relevance: Relevance, n_samples: int) -> None:
        self.posterior, self.batches, self.relevance, self.n_samples = posterior, batches, relevance, n_samples
        own = F.normalize(torch.cat([posterior.outputs(batch) for batch in batches]))
        queries, gallery = relevance.queries.to(own.device), relevance.gallery
        self.hits, _ = rank(own[queries], None if gallery is None else own[gallery.to(own.device)], k=_DEPTH)
        self.evaluated: dict[float, tuple[Tensor, float]] = {}

    def search(self, low: float, high: float, refinements: int) -> list[float]:
        """Every power of ten, and more around the best and around the ends of what cannot be told from it."""
        steps = max(1, round(high - low))
        step = (high - low) / steps
        grid = [low + number * step for number in range(steps + 1)]
        while grid and self._is_capped(grid[-1]):
            grid.pop()
        if not grid:
            raise ValueError(
                f"κ is at the upper end of its range, {KAPPA_RANGE[1]:g}, at every likelihood scale from {10**low:.3g} "
                "on: try smaller ones, or a smaller prior_precision"
            )
        best = min(grid, key=self.score)
        for _ in range(refinements):
            step /= 2
            best = min((max(best - step, grid[0]), best, min(best + step, grid[-1])), key=self.score)
        for side in (min, max):
            for _ in range(refinements):
                known = sorted(self.evaluated)
                end = side(exponent for exponent in known if self.trial(exponent, best).within_error)
                beyond = known.index(end) + (1 if side is max else -1)
                if 0 <= beyond < len(known):
                    self.score((end + known[beyond]) / 2)
        return list(self.evaluated)

    def score(self, exponent: float) -> float:
        """The mean log score."""
        if exponent not in self.evaluated:
            draw = self._posterior(exponent).joint_predictor(n_samples=self.n_samples)
            samples = torch.cat([draw(batch) for batch in self.batches], 1)
            answers = answers_of(samples, self.relevance, self.hits)
            self.evaluated[exponent] = answers.votes_for_first_hit().log_score, answers.votes().binned().expected_error
        return float(self.evaluated[exponent][0].mean())

    def trial(self, exponent: float, best: float) -> Trial:
        scores, ece = self.evaluated[exponent]
        behind = scores - self.evaluated[best][0]
        error = float(behind.var(correction=0) / max(1, len(behind) - 1)) ** 0.5
        return Trial(10.0**exponent, float(scores.mean()), ece, float(behind.mean()), error)

    def _is_capped(self, exponent: float) -> bool:
        predict = self._posterior(exponent).predictor(n_samples=self.n_samples)
        return any(bool((predict(batch).kappa >= KAPPA_RANGE[1]).any()) for batch in self.batches)

    def _posterior(self, exponent: float) -> Posterior:
        return replace(self.posterior, likelihood_scale=10.0**exponent)


def _direction_cosine(posterior: Posterior, batches: Sequence[Any], n_samples: int) -> float:
    """The mean cosine between an item's own direction and that of the mean of its samples."""
    own = F.normalize(torch.cat([posterior.outputs(batch) for batch in batches]))
    predict = posterior.predictor(n_samples=n_samples, mean="sampled")
    sampled = torch.cat([predict(batch).mean for batch in batches])
    return float((own.double() * sampled.double()).sum(1).mean())


def _complaint(posterior: Posterior, batches: Sequence[Any], tuning: Tuning) -> str | None:
    """What keeps κ from being of use, if anything does: the gravest alone, which often causes the others."""
    share = sum(posterior.clipped_variance_share(batch) for batch in batches) / len(batches)
    if share > CLIPPED_LIMIT:
        return (
            f"κ says little: weights with a negative curvature ({posterior.curvature.clipped:.2%} of all) cause "
            f"{share:.0%} of the predictive variance, and no likelihood scale changes that; fit "
            f"{_without_negative(posterior)}with a larger prior_precision"
        )
    chosen, cosine = tuning.likelihood_scale, tuning.direction_cosine
    if cosine < COSINE_LIMIT:
        return (
            f"κ says little: at the best likelihood scale, {chosen:.3g}, the mean of samples points elsewhere than the "
            f"network (mean cosine {cosine:.2f}); fit on more items, or with a larger prior_precision"
        )
    (low, high), ends = tuning.interval, (tuning.trials[0].scale, tuning.trials[-1].scale)
    if math.log10(high / low) >= FLAT_DECADES:
        return (
            f"the held-out data are too few or too easy to tell likelihood scales from {low:.3g} to {high:.3g} apart; "
            "taken is the largest, which changes the network least"
        )
    if chosen in ends:
        return (
            f"the likelihood scale {chosen:.3g} is at an end of the range tried, {ends[0]:.3g} to {ends[1]:.3g}; try "
            "another range, or another prior_precision"
        )
    return None


def _without_negative(posterior: Posterior) -> str:
    """Another curvature of the same loss in which none is negative, where there is one: in Python, and for a run."""
    curvature = posterior.curvature.curvature
    if not isinstance(curvature, ContrastiveCurvature):
        return ""
    name, value = ("fix", "positive") if posterior.structure.takes_cross_terms else ("negative_weight", 0)
    call = f'ContrastiveCurvature({curvature.margin:g}, split="euclidean", {name}={value!r})'
    return f"with curvature={call} (--method.split=euclidean --method.{name}={value}), which has none, or "
