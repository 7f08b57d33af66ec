"""`Acceptance`: the one number that decides whether a first hit is accepted, and how often it accepts what is wrong.

A single score, such as the cosine of the first hit, is the same function whatever the calibration data: a threshold by
counting is then exact (`lam.retrieval.decisions.conformal`). A learnt probability is not. Each calibration query is
therefore scored by what the other folds taught, and new queries by what all taught. This is cross-conformal prediction:
no half of the data is lost, and the rate is promised of scores that learning did not see. What holds for any
distribution is twice the target, if each fold's own function is applied to a new query and the counts are added
(Vovk 2015; Barber, Candès, Ramdas and Tibshirani 2021, theorem 4). With one function for new queries, as here, the
target itself holds as far as leaving out a fold changes no decision; `tests/retrieval/decisions/test_acceptance` draws
2,000 calibration sets and finds no mean rate above it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.evidence import Evidence
from lam.retrieval.decisions.match_probability import MatchProbability
from lam.retrieval.decisions.probability import MIN_PER_OUTCOME, Scores
from lam.retrieval.decisions.selective_risk import control_selective_risk
from lam.retrieval.metrics.ood import auroc
from lam.retrieval.metrics.registry import SCORES

PROBABILITY = "probability"
"""P(known) · P(right | known), see `lam.retrieval.decisions.match_probability`."""
ACCEPTS = (PROBABILITY, *SCORES)
"""By what a first hit can be accepted: the probability, or how little a score doubts."""


@dataclass(frozen=True, eq=False)
class Acceptance:
    """Accepts a first hit where a statistic is above a threshold.

    Attributes:
        accept: the statistic: `probability`, or the name of a score, whose negative it is.
        match_probability: the two factors of the probability.
        false_accepts: of the statistic, for queries without a match.
        right_hits: (R,) of it for queries with a match, −∞ where the first hit is wrong, rising.
        statistics: (S,) of it for all queries of the calibration as they came, and for the strangers that were given.
        is_right: (S,) whether the first hit of each is right; never that of a stranger.
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
        """Learn what decides.

        Args:
            evidence: of the calibration.
            fit: learns an answer from a part of it.
            accept: the statistic; by default the probability, unless a single score tells right hits from queries
                without a match and from strangers better, by more than a standard error of its AUROC, or fewer than
                10 first hits are right.
            of_strangers: whether the rate is promised of the strangers, and not of queries without their matches.
            has_strangers: whether the strangers were given, and are not the queries themselves once more.
            classes: (O,) of the strangers, where the rate is promised of classes.

        Returns:
            What decides, and (N,) P(right | known) of the queries with a match, by cross-validation.

        Raises:
            ValueError: for a statistic without its evidence, or where there is nothing to promise the rate of.
        """
        if accept is not None and accept != PROBABILITY and accept not in evidence.queries:
            raise ValueError(f"accept must be one of {', '.join((PROBABILITY, *evidence.queries))}, got {accept!r}")

        def both(part: Evidence) -> Callable[[Scores], Tensor]:
            learnt = fit(part)
            return lambda scores: torch.stack([learnt(scores), learnt.right(scores)])

        asked, no_match, strangers, made = evidence.out_of_fold(both)
        of_asked, of_no_match, of_stranger = (kind[:, 0] for kind in (asked, no_match, strangers))
        accept = _best(evidence, of_asked, of_no_match, of_stranger, made[:, 0]) if accept is None else accept
        if accept != PROBABILITY:
            of_asked, of_no_match, of_stranger = (
                -kind[accept] for kind in (evidence.queries, evidence.no_match, evidence.strangers)
            )
        unanswerable = of_stranger if of_strangers else of_no_match
        if len(unanswerable) == 0:
            raise ValueError(
                "no query has an item in the gallery that does not match it: there is no false accept to learn"
            )
        right_hits = of_asked.double().masked_fill(~evidence.right, -torch.inf)[evidence.has_match]
        false_accepts = ConformalScores.of(unanswerable, classes if of_strangers else None)
        given = of_stranger if has_strangers else of_stranger[:0]
        learnt = cls(
            accept,
            fit(evidence),
            false_accepts,
            right_hits.sort().values,
            statistics=torch.cat([of_asked, given]).double(),
            is_right=torch.cat([evidence.right, torch.zeros(len(given), dtype=torch.bool)]),
        )
        return learnt, asked[:, 1][evidence.has_match]

    def threshold(self, *, far: float, wrong: float | None = None) -> float:
        """The least threshold that keeps all promises: the greater of two.

        Args:
            far: the share of queries without a match that may be accepted; see `ConformalScores.threshold`.
            wrong: the share of wrong answers among the answers to these queries; see `control_selective_risk`. It
                holds for queries with as many strangers. None promises nothing.

        Returns:
            The threshold; ∞ where none keeps the share of wrong answers, as too many of high statistic are wrong.

        Raises:
            ValueError: where the calibration queries are too few for either.
        """
        above = self.false_accepts.threshold(far)
        if wrong is None:
            return above
        risk = control_selective_risk(self.statistics, ~self.is_right, target=wrong)
        return torch.inf if risk is None else max(above, risk.threshold)

    @property
    def share_without_match(self) -> float:
        """The share of these queries whose first hit cannot be right, as the gallery holds no match."""
        return 1 - len(self.right_hits) / len(self.statistics)

    @cached_property
    def evidence(self) -> frozenset[str]:
        """The scores that it needs."""
        return (
            self.match_probability.evidence
            if self.accept == PROBABILITY
            else self.match_probability.evidence | {self.accept}
        )

    def statistic(self, scores: Scores, probability: Float[Tensor, " Q"]) -> Float[Tensor, " Q"]:
        """What decides, of queries with a `probability`; a hit is accepted where it is above the threshold."""
        return probability if self.accept == PROBABILITY else -scores[self.accept]


def _best(evidence: Evidence, *probability: Tensor) -> str:
    """The statistic that best tells right first hits from queries without a match and from strangers."""

    def separation(asked: Tensor, *unanswerable: Tensor) -> float:
        sides = [auroc(-asked[evidence.right], -kind) for kind in unanswerable if len(kind)]
        return sum(sides) / max(1, len(sides))

    if not evidence.right.any():
        return PROBABILITY
    kinds = evidence.queries, evidence.no_match, *evidence.all_strangers
    single = {name: separation(*(-kind[name] for kind in kinds)) for name in evidence.queries}
    best = max(single, key=lambda name: (single[name], name == "cosine"))
    n_right, area = int(evidence.right.sum()), single[best]
    error = math.sqrt(area * (1 - area) / n_right)  # the best of many scores looks better than it is
    return PROBABILITY if n_right >= MIN_PER_OUTCOME and separation(*probability) >= area - error else best
