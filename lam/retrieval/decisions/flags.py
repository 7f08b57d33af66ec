"""Which queries cannot be judged: a threshold on one score, or on several together, at a promised false-flag rate."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float
from torch import Tensor

from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.density_ratio import MONOTONE_SCORES, monotone_regression
from lam.retrieval.decisions.evidence import Evidence
from lam.retrieval.decisions.probability import MonotoneRegression, Scores
from lam.retrieval.metrics.ood import auroc
from lam.retrieval.metrics.registry import SCORES
from lam.utils.checks import check_choice, check_length, check_no_nan

COMBINED = "combined"
"""Several scores as one: how much they look like those of a stranger."""
FLAGS = (*SCORES, COMBINED)
"""By what a query can be flagged."""
_AS_GOOD = 0.005  # of AUROC, by which a single score must be ahead of the combined one


@dataclass(frozen=True, eq=False)
class OodDetector:
    """Scores of in-distribution data; higher means more out of distribution.

    `combined` is a `MonotoneRegression` of strangers against known queries. The score of each calibration query is what
    the other folds taught, so that none is lost; `lam.retrieval.decisions.acceptance` says what holds of its rate.

    Attributes:
        calibrated: by flag, the scores of the calibration items, among them `kappa`.
        combined: P(known), whose `doubt` is the score; None where nothing was combined.
        ranking: by flag, the AUROC of strangers against known queries, the highest first; empty without strangers.
    """

    calibrated: dict[str, ConformalScores]
    combined: MonotoneRegression | None = None
    ranking: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, scores: Scores) -> "OodDetector":
        """Take each score of N in-distribution items as it is.

        Args:
            scores: of these items, by name, as `lam.retrieval.metrics.registry.scores_of` gives them.

        Raises:
            ValueError: for no item, without −κ, NaN, or another length.
        """
        if "kappa" not in scores:
            raise ValueError(f"scores must hold those of 'kappa', got {', '.join(scores) or 'none'}")
        columns = {name: values.detach().cpu().double() for name, values in scores.items()}
        for name, values in columns.items():
            check_length(name, values, "the values of kappa", len(columns["kappa"]))
        return cls({name: ConformalScores.of(values) for name, values in columns.items()})

    @classmethod
    def fit(cls, evidence: Evidence) -> "OodDetector":
        """Learn to tell strangers from the queries that have a match, too.

        Raises:
            ValueError: as `of`.
        """
        single = cls.of(evidence.queries)
        if not len(evidence.stranger_fold):
            return single

        def doubt(part: Evidence) -> Any:
            regression = monotone_regression(part.known, part.all_strangers or evidence.all_strangers)
            return lambda scores: regression.doubt(scores)[None]

        asked, _, *combined = (values[:, 0] for values in evidence.out_of_fold(doubt))
        kinds = [{**kind, COMBINED: values} for kind, values in zip(evidence.all_strangers, combined, strict=False)]
        ranks = {
            name: sum(auroc(inside[evidence.has_match], kind[name]) for kind in kinds) / len(kinds)
            for name, inside in {**evidence.queries, COMBINED: asked}.items()
        }
        ranking = dict(sorted(ranks.items(), key=lambda rank: (-rank[1], rank[0] == "kappa")))  # of equals κ is last
        return cls(
            {**single.calibrated, COMBINED: ConformalScores.of(asked)},
            monotone_regression(evidence.known, evidence.all_strangers),
            ranking,
        )

    @property
    def best(self) -> str:
        """The flag that tells strangers best: `combined`, unless a single score is ahead by more than 0.005; κ without
        strangers."""
        if COMBINED not in self.ranking:
            return "kappa"
        first = next(iter(self.ranking))
        return COMBINED if self.ranking[COMBINED] >= self.ranking[first] - _AS_GOOD else first

    def conformal_scores(self, flag: str) -> ConformalScores:
        """The calibration scores of one flag.

        Raises:
            ValueError: for an unknown flag, or one whose evidence the calibration did not have.
        """
        check_choice("flag", flag, FLAGS)
        if flag not in self.calibrated:
            raise ValueError(
                f"flag {flag!r} needs {_evidence(components_of(flag))}, and this calibration had none: use 'kappa'"
            )
        return self.calibrated[flag]

    def components(self, flag: str) -> tuple[str, ...]:
        """The scores that a flag is made of here."""
        return self.combined.evidence if flag == COMBINED and self.combined is not None else (flag,)

    def ood_score(self, flag: str, scores: Mapping[str, Float[Tensor, " Q"]]) -> Float[Tensor, " Q"]:
        """The score of new items; they are flagged where it is above a threshold of `conformal_scores(flag)`.

        Args:
            flag: which score.
            scores: of the items, by name.

        Returns:
            (Q,) scores, float64, on their device.

        Raises:
            ValueError: as `conformal_scores`; for a score that is missing; or NaN.
        """
        self.conformal_scores(flag)
        names = self.components(flag)
        if missing := [name for name in names if name not in scores]:
            raise ValueError(f"flag {flag!r} needs {_evidence(names)} of every query: there is no {missing[0]!r}")
        for name in names:
            check_no_nan(name, scores[name])
        if flag == COMBINED and self.combined is not None:
            return self.combined.doubt(scores).to(scores[names[0]].device)
        return scores[flag].detach().double()


def needs_reference(flag: str) -> bool:
    """Whether a flag compares with features of known items."""
    return _is_made_from(flag, "reference", "labelled", "embedded")


def needs_input(flag: str) -> bool:
    """Whether a flag is made of more of a query than its mean and κ."""
    return "variance" in components_of(flag) or _is_made_from(flag, "features", "parts")


def without_input(flag: str, components: Sequence[str] = ()) -> str:
    """The flag in its place for queries that are only a mean and a κ: one that hits give.

    Args:
        flag: in force.
        components: the scores that it is made of; all that it may be made of by default.
    """
    return "mean_cosine" if any(map(needs_input, components or components_of(flag))) else flag


def without_hits(flag: str, components: Sequence[str] = (), known: Container[str] = SCORES) -> str:
    """The flag in its place for queries that found nothing; arguments as of `without_input`.

    It is κ, or in place of several scores the k-NN distance, where that is among the known ones.
    """
    if not any(_is_made_from(name, "cosines", "labels") for name in components or components_of(flag)):
        return flag
    return "knn" if flag == COMBINED and "knn" in known else "kappa"


def without_labels(flag: str, components: Sequence[str] = ()) -> str:
    """The flag in its place where hits have no labels: of one that labels decide the mean cosine of the hits."""
    names = components or components_of(flag)
    looks = any("labels" in (*SCORES[name].needs, *SCORES[name].uses) for name in names)
    return "mean_cosine" if looks else flag


def components_of(flag: str) -> tuple[str, ...]:
    """The scores that a flag is made of."""
    return MONOTONE_SCORES if flag == COMBINED else (flag,)


def _is_made_from(flag: str, *evidence: str) -> bool:
    """Whether any of this is what a flag is made from; see `lam.retrieval.metrics.registry.Score`."""
    return any(need in evidence for name in components_of(flag) for need in SCORES[name].needs)


def _evidence(names: tuple[str, ...]) -> str:
    """What these are made from, in words."""
    words = {
        "embeddings": "embeddings",
        "parts": "an encoder that has learnt ambiguity",
        "features": "features",
        "reference": "reference features of known items",
        "labelled": "reference features with labels",
        "embedded": "reference features with embeddings",
        "cosines": "hits",
        "labels": "labels of the hits",
    }
    needs = dict.fromkeys(need for name in names for need in SCORES[name].needs)
    return " and ".join(words[need] for need in needs)
