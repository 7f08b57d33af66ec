"""`Acceptance`: the statistic that decides whether a first hit is accepted, and the rate of false accepts.

A single score, such as the cosine of the first hit, is not learned from calibration data. So its threshold keeps the
target exactly (`lam.retrieval.decisions.conformal`). A probability is learned from these data, so they are split into
folds. Each calibration query gets its probability from a function learned on the other folds. For a new query, this
function is learned on all folds. This is a form of cross-conformal prediction.

The rate of false accepts is at most the target if leaving out a fold changes no decision. (If each new query used the
functions of all folds in turn, the rate would be at most twice the target for any distribution; Vovk 2015; Barber,
Candès, Ramdas and Tibshirani 2021, theorem 4.) In `tests/retrieval/decisions/test_acceptance`, mean rates exceed the
target by no more than chance.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lam.retrieval.decisions.conformal import ConformalScores, control_selective_risk
from lam.retrieval.decisions.evidence import Evidence
from lam.retrieval.decisions.match_probability import MatchProbability
from lam.retrieval.decisions.probability import MIN_PER_OUTCOME, Scores
from lam.retrieval.metrics.ood import auroc
from lam.retrieval.metrics.scores import SCORES
from lam.utils.checks import check_choice

PROBABILITY = "probability"
"""P(known) · P(right | known), see `lam.retrieval.decisions.match_probability`."""
ACCEPTS = (PROBABILITY, *SCORES)
"""Statistics that can accept a first hit: the probability, or minus a score."""


@dataclass(frozen=True, eq=False)
class Acceptance:
    """Accepts a first hit if its statistic is above a threshold.

    Attributes:
        accept: `probability`, or the name of a score. For a score, the statistic is minus the score.
        match_probability: computes the probability.
        false_accepts: statistics of strangers, or of calibration queries searched without their matches.
        right_hits: (R,) sorted statistics of the queries with a match; −∞ if the first hit is wrong.
        statistics: (S,) statistics of all calibration queries, in the whole gallery, and of separate strangers; in a
            calibration, one stranger of each class.
        is_right: (S,) whether each query's first hit is right; False for a stranger.
    """

    accept: str
    match_probability: MatchProbability
    false_accepts: ConformalScores
    right_hits: Float[Tensor, " R"]
    statistics: Float[Tensor, " S"]
    is_right: Bool[Tensor, " S"]

    @classmethod
    def fit(
        cls,
        evidence: Evidence,
        fit: Callable[[Evidence], MatchProbability],
        *,
        accept: str | None = None,
        of_strangers: bool = False,
        has_strangers: bool = False,
        classes: Int[Tensor, " O"] | None = None,
    ) -> tuple["Acceptance", Float[Tensor, " N"]]:
        """Learn an acceptance; also returns the cross-validated (N,) P(right | known) of the queries with a match.

        Args:
            evidence: scores of the calibration queries and strangers.
            fit: learns a probability from a part of the evidence.
            accept: name of the statistic; by default `probability`. The best single score replaces it if only 1 to 9
                first hits are right, or if the score's AUROC is higher by over a standard error. The AUROC is for right
                first hits against strangers and queries without a match. A score is left out if over 10 % of strangers
                or of queries without a match tie at its best value.
            of_strangers: whether the bound is for strangers; if not, for queries searched without their matches.
            has_strangers: whether the strangers are separate queries, not the calibration queries themselves.
            classes: (O,) classes of the strangers; the bound is then for a random item of a new class.
        """
        scores = evidence.queries.scores
        if accept is not None:
            check_choice("accept", accept, (PROBABILITY, *scores))

        def both_factors(part: Evidence) -> Callable[[Scores], Tensor]:
            probability = fit(part)
            return lambda scores: torch.stack([probability(scores), probability.right(scores)])

        columns = evidence.out_of_fold(both_factors)
        accept = _best(evidence, *(column[:, 0] for column in columns)) if accept is None else accept
        kinds = evidence.queries, evidence.no_match, evidence.strangers
        queries, no_match, strangers = (
            column[:, 0] if accept == PROBABILITY else -kind.scores[accept]
            for column, kind in zip(columns, kinds, strict=False)  # without the column of simulated strangers
        )
        unanswerable = strangers if of_strangers else no_match
        if len(unanswerable) == 0:
            raise ValueError(
                "the bound on false accepts needs queries without a match, got none: add other classes to the gallery"
            )
        right_hits = queries.double().masked_fill(~evidence.right, -torch.inf)[evidence.has_match]
        separate = strangers if has_strangers else strangers[:0]
        acceptance = cls(
            accept,
            fit(evidence),
            ConformalScores.of(unanswerable, classes if of_strangers else None),
            right_hits.sort().values,
            statistics=torch.cat([queries, separate]).double(),
            is_right=torch.cat([evidence.right, torch.zeros(len(separate), dtype=torch.bool)]),
        )
        return acceptance, columns[0][:, 1][evidence.has_match]

    def threshold(self, *, far: float, wrong: float | None = None) -> float:
        """The least threshold that keeps all promises; ∞ if too many answers with a high statistic are wrong.

        Args:
            far: greatest share of accepted first hits among queries without a match; see `ConformalScores.threshold`.
            wrong: greatest share of wrong answers among the answers, if strangers are as frequent as in calibration;
                see `control_selective_risk`. None for no promise.
        """
        above = self.false_accepts.threshold(far)
        if wrong is None:
            return above
        return max(above, control_selective_risk(self.statistics, ~self.is_right, target=wrong))

    @cached_property
    def evidence(self) -> frozenset[str]:
        """Names of the scores that the acceptance needs."""
        return self.match_probability.evidence | ({self.accept} - {PROBABILITY})

    def statistic(self, scores: Scores, probability: Float[Tensor, " Q"]) -> Float[Tensor, " Q"]:
        """The statistic of queries with these scores and probabilities."""
        return probability if self.accept == PROBABILITY else -scores[self.accept]


def _best(evidence: Evidence, *probability: Tensor) -> str:
    """The default statistic; see `Acceptance.fit`."""

    def separation(queries: Tensor, *unanswerable: Tensor) -> float:
        sides = [auroc(-queries[evidence.right], -kind) for kind in unanswerable if len(kind)]
        return sum(sides) / max(1, len(sides))

    if not evidence.right.any():
        return PROBABILITY
    kinds = evidence.queries.scores, evidence.no_match.scores, *evidence.stranger_kinds
    names = [name for name in kinds[0] if not any(_ties_at_best(kind[name]) for kind in kinds[1:])] or list(kinds[0])
    single = {name: separation(*(-kind[name] for kind in kinds)) for name in names}
    best = max(single, key=lambda name: (single[name], name == "cosine"))
    n_right, area = int(evidence.right.sum()), single[best]
    error = math.sqrt(area * (1 - area) / n_right)  # the greatest of many AUROCs is too high by chance
    return PROBABILITY if n_right >= MIN_PER_OUTCOME and separation(*probability) >= area - error else best


def _ties_at_best(score: Tensor) -> bool:
    """Whether over 10 % of unanswerable queries tie at the best score, so that a rate up to 10 % accepts nothing."""
    return int((score == score.min()).sum()) > max(1, len(score) / 10) if len(score) else False
