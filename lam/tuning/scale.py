"""The likelihood scale of a posterior, chosen on held-out data."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lam.hessians.losses import ContrastiveCurvature, to_settings
from lam.pairs.relevance import Relevance
from lam.posteriors import Posterior
from lam.retrieval.index.exact import rank
from lam.retrieval.metrics.registry import METRICS, Metric
from lam.retrieval.metrics.votes import answers_of
from lam.utils.checks import check_at_least
from lam.vmf.embeddings import KAPPA_RANGE

CLIPPED_LIMIT = 0.5
"""κ says little if clipped weights make more than this share of the predictive variance."""

COSINE_LIMIT = 0.9
"""Tuning warns below this mean cosine: the mean of samples points elsewhere than the network."""

FLAT_DECADES = 3
"""If scales so many powers of ten apart score alike, held-out data do not determine the posterior's width."""

NEAR_COSINE = 0.99
"""Mean cosine of samples and network from which a posterior counts as narrow; where queries are easy, wide ones vote
as well."""

_DEPTH = 10

METRICS |= {
    "tuned_scale": Metric("likelihood scale s", "neither", "chosen by the log score on the validation split"),
    "tuned_scale_low": Metric("s, from", "neither", "the least within one standard error of the best score"),
    "tuned_scale_high": Metric("s, to", "neither", "the greatest within one standard error of the best score"),
    "tuned_score": Metric(
        "log score", "lower", "of the votes of sampled networks for the first hits, on the validation split"
    ),
    "tuned_score_behind": Metric("log score, above the best", "lower", "log score of the chosen s minus the best one"),
    "tuned_score_error": Metric("standard error of the difference", "neither", "over queries"),
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
        behind: the score minus the best one.
        error: standard error of `behind` over queries.
    """

    scale: float
    score: float
    ece: float
    behind: float
    error: float

    @property
    def within_error(self) -> bool:
        """Whether the held-out data do not separate this scale from the best one."""
        return self.behind <= self.error


@dataclass(frozen=True)
class ReplacedCurvature:
    """A curvature that another replaced, because clipped weights made most of the variance.

    Attributes:
        curvature: its name and settings.
        clipped_share: the share of the predictive variance from clipped weights, at the best scale.
        score: log score at that scale.
    """

    curvature: dict[str, Any]
    clipped_share: float
    score: float


@dataclass(frozen=True)
class Tuning:
    """The tried likelihood scales, and the chosen one.

    Attributes:
        likelihood_scale: the chosen scale s.
        trials: every tried s, in rising order.
        direction_cosine: at that s, the mean cosine between the network's direction and the samples' mean direction.
        clipped_share: at that s, the share of the predictive variance from weights with a negative curvature.
        n_queries: number of held-out queries.
        replaced: the posterior's earlier curvature, if it was replaced.
    """

    likelihood_scale: float
    trials: tuple[Trial, ...]
    direction_cosine: float
    clipped_share: float
    n_queries: int
    replaced: ReplacedCurvature | None = None

    @property
    def chosen(self) -> Trial:
        """The trial of the chosen scale."""
        return next(trial for trial in self.trials if trial.scale == self.likelihood_scale)

    @property
    def interval(self) -> tuple[float, float]:
        """The least and the greatest tried scale with a score within one standard error of the best."""
        scales = [trial.scale for trial in self.trials if trial.within_error]
        return scales[0], scales[-1]

    @property
    def is_flat(self) -> bool:
        """Whether the held-out data do not determine the posterior's width."""
        low, high = self.interval
        return math.log10(high / low) >= FLAT_DECADES or self.likelihood_scale == self.trials[-1].scale

    @property
    def remark(self) -> str | None:
        """Decisions that tuning took by itself and their meaning, in one line; None without any."""
        remarks: list[str] = []
        if self.replaced is not None:
            share = f"{self.replaced.clipped_share:.0%}"
            remarks.append(f"the posterior was refitted, as {share} of its variance did not depend on the data")
        if self.is_flat:
            remarks.append(
                f"{self.n_queries} validation queries do not determine the posterior's width, so κ orders items, "
                "but its size means little"
            )
        return "; ".join(remarks) or None

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


class Tuned(NamedTuple):
    """A posterior at the chosen scale, its tuning, and the log scores of Q held-out queries at that scale."""

    posterior: Posterior
    tuning: Tuning
    scores: Float[Tensor, " Q"]


def calibrate_scale(
    posterior: Posterior,
    batches: Sequence[Any],
    relevance: Relevance,
    *,
    n_samples: int = 32,
    least: float = 1.0,
    greatest: float = 1e14,
    refinements: int = 2,
) -> Tuned:
    """Choose the likelihood scale s by the log score of votes on held-out in-distribution data.

    h stays the same, so another s costs only sampling, and retrieval is the same for every s.
    A first hit is right with a probability equal to the share of S sampled networks that agree with it. The log score
    of these votes is proper; with few queries, a posterior that knows nothing has as low a calibration error. The best
    s is chosen, of equals the smallest with samples near the network's direction. With a `prior_precision` of its own,
    a posterior changes its shape with s. Then the largest s within one standard error of the best, over queries, is
    chosen: it changes the network least.

    All powers of ten are tried first. The neighbourhood of the best, and of both ends of the range within its error,
    follow at half the distance each time. All draws share their noise. Scales at which κ of a held-out item reaches the
    upper end of its range are excluded.

    Source: Breiman, Friedman, Olshen and Stone (1984), for the rule of one standard error.

    Args:
        posterior: to tune.
        batches: inputs of the posterior, such as features, of N held-out items in parts.
        relevance: which items answer which.
        n_samples: sampled networks S, as many as in the evaluation: the ECE at a given s depends on S.
        least: the smallest s tried.
        greatest: the largest s tried.
        refinements: number of times the distance is halved.

    Raises:
        ValueError: if no item answers another, for an empty range, or if κ is at its upper end at every s.
    """
    if not relevance.count().any():
        raise ValueError(f"all {len(relevance.queries)} queries lack an answer: give held-out items with matches")
    if not 0 < least < greatest < math.inf:
        raise ValueError(f"likelihood scales must satisfy 0 < least < greatest, got {least} and {greatest}")
    check_at_least("refinements", refinements, 0)
    tuner = _Tuner(posterior, batches, relevance, n_samples)
    exponents = tuner.search(math.log10(least), math.log10(greatest), refinements)
    best = min(exponents, key=tuner.score)
    trials = tuple(tuner.trial(exponent, best) for exponent in sorted(exponents))
    if posterior.prior_precision is None:  # then s leaves the shape, and κ the order of items
        equal = sorted(exponent for exponent in exponents if tuner.score(exponent) <= tuner.score(best))
        near = (exponent for exponent in equal if tuner.direction_cosine(exponent) >= NEAR_COSINE)
        exponent = next(near, equal[-1])
    else:
        exponent = max(exponent for exponent in exponents if tuner.trial(exponent, best).within_error)
    scale = 10.0**exponent
    chosen = replace(posterior, likelihood_scale=scale)
    clipped = sum(chosen.clipped_variance_share(batch) for batch in batches) / len(batches)
    cosine = _direction_cosine(chosen, batches, n_samples)
    scores = tuner.evaluated[exponent][0]
    return Tuned(chosen, Tuning(scale, trials, cosine, clipped, n_queries=len(relevance.queries)), scores)


def best_posterior(old: Tuned, others: Iterable[Tuned]) -> Tuned:
    """The best of other posteriors tuned on the same data, by log score, with the old curvature as `replaced`.

    Others in which clipped weights make most of the variance are left out. The old posterior stays if no other is
    left, or if the best of them is behind it by more than the standard error. One without positive curvature does not
    stay: it is the prior alone.
    """
    sound = (other for other in others if other.tuning.clipped_share <= CLIPPED_LIMIT)
    new = min(sound, key=lambda other: other.tuning.chosen.score, default=old)
    behind, error = _behind(new.scores, old.scores)
    if new is old or (behind > error and old.posterior.curvature.level > 0):
        return old
    curvature = to_settings(old.posterior.curvature.curvature)
    replaced = ReplacedCurvature(curvature, old.tuning.clipped_share, old.tuning.chosen.score)
    return new._replace(tuning=replace(new.tuning, replaced=replaced))


class _Tuner:
    """Scores of exponents log₁₀ s, each computed once."""

    def __init__(self, posterior: Posterior, batches: Sequence[Any], relevance: Relevance, n_samples: int) -> None:
        self.posterior, self.batches, self.relevance, self.n_samples = posterior, batches, relevance, n_samples
        self.noise = posterior.noise(n_samples)
        own = F.normalize(torch.cat([posterior.outputs(batch) for batch in batches]))
        queries, gallery = relevance.queries.to(own.device), relevance.gallery
        self.hits, _ = rank(own[queries], None if gallery is None else own[gallery.to(own.device)], k=_DEPTH)
        self.evaluated: dict[float, tuple[Tensor, float]] = {}

    def search(self, low: float, high: float, refinements: int) -> list[float]:
        """All powers of ten, and exponents around the best and around both ends of the range within its error."""
        steps = max(1, round(high - low))
        step = (high - low) / steps
        grid = [low + number * step for number in range(steps + 1)]
        while grid and self._kappa_is_capped(grid[-1]):  # κ at its cap no longer orders items, and it rises with s
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
        for side in (min, max):  # the largest s within the error is chosen, so the ends need to be exact
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
            draw = self._posterior(exponent).joint_predictor(self.noise)
            samples = torch.cat([draw(batch) for batch in self.batches], 1)
            answers = answers_of(samples, self.relevance, self.hits)
            self.evaluated[exponent] = answers.votes_for_first_hit().log_score, answers.votes().binned().expected_error
        return float(self.evaluated[exponent][0].mean())

    def trial(self, exponent: float, best: float) -> Trial:
        scores, ece = self.evaluated[exponent]
        return Trial(10.0**exponent, float(scores.mean()), ece, *_behind(scores, self.evaluated[best][0]))

    def direction_cosine(self, exponent: float) -> float:
        """See `_direction_cosine`."""
        return _direction_cosine(self._posterior(exponent), self.batches, self.n_samples)

    def _kappa_is_capped(self, exponent: float) -> bool:
        predict = self._posterior(exponent).predictor(n_samples=self.n_samples)
        return any(bool((predict(batch).kappa >= KAPPA_RANGE[1]).any()) for batch in self.batches)

    def _posterior(self, exponent: float) -> Posterior:
        return replace(self.posterior, likelihood_scale=10.0**exponent)


def _behind(scores: Tensor, best: Tensor) -> tuple[float, float]:
    """Mean difference of the scores of Q queries, and its standard error."""
    behind = scores - best
    return float(behind.mean()), float(behind.var(correction=0) / max(1, len(behind) - 1)) ** 0.5


def _direction_cosine(posterior: Posterior, batches: Sequence[Any], n_samples: int) -> float:
    """Mean cosine between an item's own direction and the mean direction of its samples."""
    own = F.normalize(torch.cat([posterior.outputs(batch) for batch in batches]))
    predict = posterior.predictor(n_samples=n_samples, mean="sampled")
    sampled = torch.cat([predict(batch).mean for batch in batches])
    return float((own.double() * sampled.double()).sum(1).mean())


def complaint(posterior: Posterior, tuning: Tuning, *, others: bool = False) -> str | None:
    """The gravest reason why κ is of little use, which often causes the others; None for a useful κ.

    `others` says whether posteriors with other curvatures were tried.
    """
    if tuning.clipped_share > CLIPPED_LIMIT:
        clipped = f"{tuning.clipped_share:.0%} of the posterior's variance comes from weights of negative curvature"
        if others:
            return f"κ says little: {clipped}, and without them the posterior is worse; more images or texts would help"
        return (
            f"κ says little: {clipped}, which no likelihood scale changes; fit {_without_negative(posterior)}with a "
            "larger prior_precision"
        )
    if tuning.direction_cosine < COSINE_LIMIT:
        return (
            "κ says little: even the best posterior is so wide that its samples point elsewhere than the network "
            f"(mean cosine {tuning.direction_cosine:.2f}); train on more items, or give a larger prior_precision"
        )
    first, last = (tuning.trials[place].scale for place in (0, -1))
    if tuning.likelihood_scale == first:
        return (
            f"the likelihood scale {first:.3g} is at the lower end of the range tried, {first:.3g} to {last:.3g}; try "
            "another range, or a smaller prior_precision"
        )
    return None


def _without_negative(posterior: Posterior) -> str:
    """Advice on a curvature of the same loss that is never negative, in Python and for a run; else empty."""
    curvature = posterior.curvature.curvature
    if not isinstance(curvature, ContrastiveCurvature):
        return ""
    name, value = ("fix", "positive") if posterior.structure.takes_cross_terms else ("negative_weight", 0)
    call = f'ContrastiveCurvature({curvature.margin:g}, split="euclidean", {name}={value!r})'
    return f"with curvature={call} (--method.split=euclidean --method.{name}={value}), which is never negative, or "
