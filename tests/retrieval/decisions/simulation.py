"""Queries of known distributions, as evidence to calibrate on and as any number of new ones."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lam.retrieval.decisions.acceptance import Acceptance
from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.evidence import Evidence, Group, folds_of
from lam.retrieval.decisions.flags import COMBINED, OodDetector
from lam.retrieval.decisions.match_probability import MatchProbability

NAMES = "kappa", "cosine", "knn"


@dataclass(frozen=True)
class World:
    """The distribution of scores. Scores of known queries are standard normal, with a common part.

    Attributes:
        no_match: increase of a query's score `cosine` if its matches are removed from the gallery.
        stranger: increase of each score for strangers.
        told: how well `cosine` separates right first hits from wrong ones; a coefficient of log odds.
        share_right: approximate share of right first hits, for queries with a match.
    """

    no_match: float
    stranger: tuple[float, float, float]
    told: float
    share_right: float = 0.7

    def known(
        self, n: int, generator: torch.Generator
    ) -> tuple[dict[str, Float[Tensor, " N"]], Bool[Tensor, " N"], dict[str, Float[Tensor, " N"]]]:
        """Scores of n queries, whether their first hits are right, and scores without their matches."""
        common, *own = torch.randn(1 + len(NAMES), n, generator=generator, dtype=torch.float64)
        scores = {name: 0.6 * common + 0.8 * values for name, values in zip(NAMES, own, strict=True)}
        odds = torch.tensor(self.share_right).logit() - self.told * scores["cosine"]
        right = torch.rand(n, generator=generator) < odds.sigmoid()
        less = 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)
        return scores, right, {**scores, "cosine": scores["cosine"] + self.no_match + less}

    def strangers(self, classes: Int[Tensor, " O"], generator: torch.Generator) -> dict[str, Float[Tensor, " O"]]:
        """Scores of strangers; half of the variance lies between classes."""
        scores = {}
        for name, gain in zip(NAMES, self.stranger, strict=True):
            own = torch.randn(len(classes), generator=generator, dtype=torch.float64)
            of_class = torch.randn(int(classes.max()) + 1, generator=generator, dtype=torch.float64)
            scores[name] = gain + (own + of_class[classes]) / 2**0.5
        return scores

    def evidence(self, n: int, generator: torch.Generator) -> tuple[Evidence, Int[Tensor, " O"]]:
        """Evidence of n queries, a tenth of them without a match, and of n classes of 1 to 5 strangers."""
        scores, right, without = self.known(n, generator)
        classes = torch.arange(n).repeat_interleave(torch.randint(1, 6, (n,), generator=generator))
        has_match = torch.arange(n) % 10 != 9
        asked = {name: torch.where(has_match, scores[name], without[name]) for name in NAMES}
        fold = folds_of(torch.arange(n))
        evidence = Evidence(
            Group(asked, fold),
            has_match,
            right & has_match,
            no_match=Group(without, fold),
            strangers=Group(self.strangers(classes, generator), folds_of(classes)),
        )
        return evidence, classes


WORLDS = {
    "useful": World(no_match=1.5, stranger=(0.2, 0.8, 1.5), told=1.5),
    "useless": World(no_match=0.0, stranger=(0.0, 0.0, 0.0), told=0.0),
    "perfect": World(no_match=30.0, stranger=(0.0, 30.0, 0.0), told=0.5, share_right=0.95),
}


NO_MATCH, STRANGERS, FLAGS = "accepted without a match", "accepted strangers", "flagged"
DEFAULT = "default"
ACCEPTS = DEFAULT, "probability", "cosine"


def rates(
    world: World, n: int, targets: tuple[float, ...], generator: torch.Generator, *, new: int = 1000
) -> tuple[dict[tuple[str, str, float], float], str]:
    """Calibrate on one set of n queries, and measure on new queries and on strangers of new classes.

    Returns:
        The rate of each event, by accept statistic and by target; and the default statistic.
    """
    evidence, classes = world.evidence(n, generator)
    answers: list[MatchProbability] = []

    def fit(part: Evidence) -> MatchProbability:
        answers.append(MatchProbability.fit(part))
        return answers[-1]

    def fit_again() -> Callable[[Evidence], MatchProbability]:
        learned = iter(answers)  # of the same parts, in the same order
        return lambda _: next(learned)

    scores, _, without = world.known(new, generator)
    has_match = torch.arange(new) % 10 != 9
    asked = {name: torch.where(has_match, scores[name], without[name]) for name in NAMES}
    foreign = world.strangers(torch.arange(new), generator)
    found = {}
    chosen = Acceptance.fit(evidence, fit)[0].accept
    for accept in ACCEPTS:
        for event, queries in ((NO_MATCH, without), (STRANGERS, foreign)):
            options = {"of_strangers": event == STRANGERS, "classes": classes}
            by = None if accept == DEFAULT else accept
            learned, _ = Acceptance.fit(evidence, fit_again(), accept=by, **options)
            statistic = learned.statistic(queries, learned.match_probability(queries))
            found |= {(event, accept, at): _share_above(statistic, learned.false_accepts, at) for at in targets}
    detector = OodDetector.fit(evidence)
    ood_score = detector.ood_score(COMBINED, asked)
    found |= {(FLAGS, COMBINED, at): _share_above(ood_score, detector.conformal_scores(COMBINED), at) for at in targets}
    return found, chosen


def _share_above(values: Tensor, known: ConformalScores, target: float) -> float:
    return float((values > known.threshold(target)).double().mean())
