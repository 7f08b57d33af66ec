"""The likelihood scale of a posterior, chosen on held-out data, or its prior precision, chosen by the evidence."""

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from lam.hessians.losses import ContrastiveCurvature, to_settings
from lam.pairs.relevance import Relevance
from lam.posteriors import Posterior
from lam.retrieval.index.exact import rank
from lam.retrieval.metrics.votes import SampledAnswers
from lam.utils.checks import check_at_least, check_positive
from lam.vmf.embeddings import KAPPA_RANGE

CLIPPED_LIMIT = 0.5
"""Tuning warns if clipped weights (weights of negative curvature) cause more than this share of the variance."""

COSINE_LIMIT = 0.9  # tuning warns if `Tuning.direction_cosine` is lower
FLAT_DECADES = 3
"""The posterior's width is undetermined if the scales in `Tuning.interval` span this many decades."""

NEAR_COSINE = 0.99
"""If scales tie, tuning prefers a scale with at least this `direction_cosine`. Easy queries cause ties."""

_DEPTH = 10
_WITHIN = 1e-7, 1e7  # α in this range is a maximum; `Posterior.with_best_prior` searches ten times as far


@dataclass(frozen=True)
class Trial:
    """One likelihood scale s, judged on held-out data.

    Attributes:
        scale: s.
        score: mean log score of sampled networks' votes for the first hits (`calibrate_scale`); lower is better.
        ece: retrieval ECE; lower is better.
        behind: the score minus the score of the best trial.
        error: standard error of `behind` over queries.
    """

    scale: float
    score: float
    ece: float
    behind: float
    error: float

    @property
    def within_error(self) -> bool:
        """Whether the score is within one standard error of the best score."""
        return self.behind <= self.error


@dataclass(frozen=True)
class ReplacedCurvature:
    """A curvature that tuning replaced, because most of the variance came from clipped weights.

    Attributes:
        curvature: name and settings.
        clipped_share: share of the predictive variance from clipped weights, at this curvature's best scale.
        score: log score at the same scale.
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
        direction_cosine: mean cosine between the network's direction and the mean of the samples, at the chosen s.
        clipped_share: share of the predictive variance from clipped weights, at the chosen s.
        n_queries: number of held-out queries.
        replaced: the posterior's earlier curvature, if it was replaced.
    """

    likelihood_scale: float
    trials: tuple[Trial, ...] = field(repr=False)
    direction_cosine: float
    clipped_share: float
    n_queries: int
    replaced: ReplacedCurvature | None = None

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> "Tuning":
        """A tuning from its fields as JSON."""
        replaced = None if saved["replaced"] is None else ReplacedCurvature(**saved["replaced"])
        return cls(**{**saved, "trials": tuple(Trial(**trial) for trial in saved["trials"]), "replaced": replaced})

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
        """Whether held-out data leave the posterior's width undetermined."""
        low, high = self.interval
        return math.log10(high / low) >= FLAT_DECADES or self.likelihood_scale == self.trials[-1].scale

    @property
    def remark(self) -> str | None:
        """One line on a replaced curvature and an undetermined width; None if neither applies."""
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
    """A posterior at the chosen scale, and its tuning."""

    posterior: Posterior
    tuning: Tuning


def calibrate_scale(
    posterior: Posterior,
    batches: Sequence[Any],
    relevance: Relevance,
    *,
    n_samples: int = 32,
    least: float = 1.0,
    greatest: float = 1e14,
    refinements: int = 2,
    progress: bool = False,
) -> Tuned:
    """Choose the likelihood scale s by the log score of votes on held-out in-distribution data.

    S sampled networks vote on each first hit; the share that agrees estimates the probability that the hit is right.
    The log score of this probability is a proper scoring rule. The ECE is not a proper rule: with few queries, it can
    prefer an uninformative posterior. Curvature and hits are the same for every s, so each s costs only sampling.

    By default, the s with the best score is chosen; in a tie, the smallest s that keeps the samples near the network's
    direction. With a fixed `prior_precision`, the posterior's shape depends on s. Then the largest s that scores within
    one standard error of the best is chosen, because its samples differ least from the network.

    The search begins with steps of about a factor of ten. Then it halves the step around the best s, and around the
    smallest and largest s that score within one standard error of the best. All s share the same noise. An s is
    excluded if κ of a held-out item reaches the upper end of `KAPPA_RANGE`.

    Source: Breiman, Friedman, Olshen and Stone (1984), for the rule of one standard error.

    Args:
        posterior: the posterior to tune.
        batches: inputs of the posterior, such as features, for N held-out items.
        relevance: which items match.
        n_samples: number S of sampled networks. The evaluation should use the same S, because the ECE depends on S.
        least: the smallest s tried.
        greatest: the largest s tried.
        refinements: number of times the step is halved.
        progress: show a progress bar on standard error.

    Raises:
        ValueError: if no query has a match, for an empty range, or if every s is excluded.
    """
    if not relevance.count().any():
        raise ValueError(f"all {len(relevance.queries)} queries lack a match: give held-out items that match others")
    if not 0 < least < greatest < math.inf:
        raise ValueError(f"likelihood scales must satisfy 0 < least < greatest, got {least} and {greatest}")
    check_at_least("refinements", refinements, 0)
    with tqdm(desc="tuning", unit=" scales", disable=not progress) as bar:
        tuner = _Tuner(posterior, batches, relevance, n_samples, bar)
        exponents = tuner.search(math.log10(least), math.log10(greatest), refinements)
    best = min(exponents, key=tuner.score)
    trials = tuple(tuner.trial(exponent, best) for exponent in sorted(exponents))
    if posterior.prior_precision is None:  # then s changes neither the posterior's shape nor the order of items by κ
        equal = sorted(exponent for exponent in exponents if tuner.score(exponent) <= tuner.score(best))
        near = (exponent for exponent in equal if tuner.direction_cosine(exponent) >= NEAR_COSINE)
        exponent = next(near, equal[-1])
    else:
        exponent = max(exponent for exponent in exponents if tuner.trial(exponent, best).within_error)
    scale = 10.0**exponent
    chosen = replace(posterior, likelihood_scale=scale)
    clipped = _clipped_share(chosen, batches)
    tuning = Tuning(scale, trials, tuner.direction_cosine(exponent), clipped, n_queries=len(relevance.queries))
    return Tuned(chosen, tuning)


def best_posterior(old: Tuned, others: Iterable[Tuned]) -> Tuned:
    """The best of `others` by log score; `old` if all others have most of their variance from clipped weights.

    `old` is not a candidate: most of its variance is the prior's, whatever its score. `Tuning.replaced` records it.
    """
    sound = (other for other in others if other.tuning.clipped_share <= CLIPPED_LIMIT)
    new = min(sound, key=lambda other: other.tuning.chosen.score, default=None)
    if new is None:
        return old
    curvature = to_settings(old.posterior.curvature.curvature)
    replaced = ReplacedCurvature(curvature, old.tuning.clipped_share, old.tuning.chosen.score)
    return new._replace(tuning=replace(new.tuning, replaced=replaced))


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


class _Tuner:
    """Searches the exponent log₁₀ s of the likelihood scale, and evaluates each exponent once."""

    def __init__(
        self, posterior: Posterior, batches: Sequence[Any], relevance: Relevance, n_samples: int, bar: tqdm
    ) -> None:
        self.posterior, self.batches, self.relevance, self.n_samples = posterior, batches, relevance, n_samples
        self.bar = bar
        self.noise = posterior.noise(n_samples)
        self.own = own = F.normalize(torch.cat([posterior.outputs(batch) for batch in batches]))
        queries, gallery = relevance.queries.to(own.device), relevance.gallery
        self.hits, _ = rank(own[queries], None if gallery is None else own[gallery.to(own.device)], k=_DEPTH)
        self.evaluated: dict[float, tuple[Tensor, float]] = {}

    def search(self, low: float, high: float, refinements: int) -> list[float]:
        """All evaluated exponents, after the search that `calibrate_scale` describes."""
        steps = max(1, round(high - low))
        step = (high - low) / steps
        grid = [low + number * step for number in range(steps + 1)]
        while grid and self._kappa_is_capped(grid[-1]):  # capped κ no longer orders items; κ rises with s
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
        for side in (min, max):  # the largest s within the error may be chosen, so the ends must be precise
            for _ in range(refinements):
                known = sorted(self.evaluated)
                end = side(exponent for exponent in known if self.trial(exponent, best).within_error)
                beyond = known.index(end) + (1 if side is max else -1)
                if 0 <= beyond < len(known):
                    self.score((end + known[beyond]) / 2)
        return list(self.evaluated)

    def score(self, exponent: float) -> float:
        if exponent not in self.evaluated:
            draw = self._posterior(exponent).joint_predictor(self.noise)
            samples = torch.cat([draw(batch) for batch in self.batches], 1)
            answers = SampledAnswers(samples, self.relevance, self.hits)
            self.evaluated[exponent] = answers.votes_for_first_hit().log_score, answers.votes().binned().expected_error
            self.bar.update()
        return float(self.evaluated[exponent][0].mean())

    def trial(self, exponent: float, best: float) -> Trial:
        scores, ece = self.evaluated[exponent]
        return Trial(10.0**exponent, float(scores.mean()), ece, *_behind(scores, self.evaluated[best][0]))

    def direction_cosine(self, exponent: float) -> float:
        predict = self._posterior(exponent).predictor(n_samples=self.n_samples, mean="sampled")
        sampled = torch.cat([predict(batch).mean for batch in self.batches])
        return float((self.own.double() * sampled.double()).sum(1).mean())

    def _kappa_is_capped(self, exponent: float) -> bool:
        predict = self._posterior(exponent).predictor(n_samples=self.n_samples)
        return any(bool((predict(batch).kappa >= KAPPA_RANGE[1]).any()) for batch in self.batches)

    def _posterior(self, exponent: float) -> Posterior:
        return replace(self.posterior, likelihood_scale=10.0**exponent)


def _clipped_share(posterior: Posterior, batches: Sequence[Any]) -> float:
    """`Posterior.clipped_variance_share` of all batches together: batches with more variance count more."""
    spread = posterior.output_spread()
    totals = torch.tensor([float(spread(batch).total.double().sum()) for batch in batches], dtype=torch.float64)
    shares = totals.new_tensor([posterior.clipped_variance_share(batch) for batch in batches])
    return float(shares @ totals / totals.sum())


def _behind(scores: Tensor, best: Tensor) -> tuple[float, float]:
    """Mean over queries of `scores` minus `best`, and the standard error of this mean."""
    behind = scores - best
    return float(behind.mean()), float(behind.var(correction=0) / max(1, len(behind) - 1)) ** 0.5


def complaint(posterior: Posterior, tuning: Tuning) -> str | None:
    """A warning with the main reason why κ says little, or None."""
    if tuning.clipped_share > CLIPPED_LIMIT:
        clipped = f"{tuning.clipped_share:.0%} of the posterior's variance comes from weights of negative curvature"
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
    """Advice to use a non-negative form of a contrastive curvature; empty for other curvatures."""
    curvature = posterior.curvature.curvature
    if not isinstance(curvature, ContrastiveCurvature):
        return ""
    name, value = ("fix", "positive") if posterior.structure.takes_cross_terms else ("negative_weight", 0)
    call = f'ContrastiveCurvature({curvature.margin:g}, split="euclidean", {name}={value!r})'
    return f"with curvature={call} (--method.split=euclidean --method.{name}={value}), which is never negative, or "
