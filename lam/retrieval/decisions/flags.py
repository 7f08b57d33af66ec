"""Flags for queries that look like strangers: a threshold on an OOD score, at a promised rate of false flags."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.evidence import Evidence
from lam.retrieval.decisions.match_probability import MONOTONE_SCORES, monotone_regression, reads_labels
from lam.retrieval.decisions.probability import MonotoneRegression
from lam.retrieval.metrics.ood import auroc
from lam.retrieval.metrics.scores import SCORES
from lam.utils.checks import check_choice, check_no_nan

COMBINED = "combined"
"""Name of the score that combines several scores."""
FLAGS = (*SCORES, COMBINED)
"""Scores that can flag a query."""
Missing = Literal["input", "hits", "labels"]
# A single score must beat the combined score by more than this AUROC. With two to four classes of strangers, a smaller
# gain is chance: in 72 draws of eight data sets, a limit of 0.005 chose a single score 18 times and lost 0.003.
_LEAST_GAIN = 0.1


@dataclass(frozen=True, eq=False)
class OodDetector:
    """Computes OOD scores of queries; a higher score means a more unusual query.

    The combined scores of calibration queries are cross-validated, as in `lam.retrieval.decisions.acceptance`.

    Attributes:
        calibrated: scores of the calibration queries by name, `kappa` included.
        combined: regression that separates known queries from strangers; its `doubt` is the combined score. None
            without strangers.
        ranking: AUROC of strangers against known queries by score, the greatest first; empty without strangers.
    """

    calibrated: dict[str, ConformalScores]
    combined: MonotoneRegression | None = None
    ranking: dict[str, float] = field(default_factory=dict)

    @classmethod
    def fit(cls, evidence: Evidence) -> "OodDetector":
        """A detector from evidence; with strangers, it has a combined score."""
        single = {name: ConformalScores.of(values) for name, values in evidence.queries.scores.items()}
        if not len(evidence.strangers):
            return cls(single)

        def doubt(part: Evidence) -> Any:
            regression = monotone_regression(part.known, part.stranger_kinds or evidence.stranger_kinds)
            return lambda scores: regression.doubt(scores)[None]

        queries, _, *strangers = (column[:, 0] for column in evidence.out_of_fold(doubt))
        kinds = [{**kind, COMBINED: values} for kind, values in zip(evidence.stranger_kinds, strangers, strict=False)]
        areas = {
            name: sum(auroc(inside[evidence.has_match], kind[name]) for kind in kinds) / len(kinds)
            for name, inside in {**evidence.queries.scores, COMBINED: queries}.items()
        }
        return cls(
            {**single, COMBINED: ConformalScores.of(queries)},
            monotone_regression(evidence.known, evidence.stranger_kinds),
            dict(sorted(areas.items(), key=lambda area: (-area[1], area[0] == "kappa"))),  # κ is last in a tie
        )

    @property
    def best(self) -> str:
        """The flag with the greatest AUROC, or `combined` if its AUROC is at most 0.1 lower; κ without strangers."""
        if COMBINED not in self.ranking:
            return "kappa"
        first = next(iter(self.ranking))
        return COMBINED if self.ranking[COMBINED] >= self.ranking[first] - _LEAST_GAIN else first

    def conformal_scores(self, flag: str) -> ConformalScores:
        """The calibration scores of one flag.

        Raises:
            ValueError: for an unknown flag, or a flag that the calibration could not compute.
        """
        check_choice("flag", flag, FLAGS)
        if flag not in self.calibrated:
            needs = "strangers" if flag == COMBINED else _evidence((flag,))
            raise ValueError(f"flag {flag!r} needs {needs}: calibrate with these, or use 'kappa'")
        return self.calibrated[flag]

    def components(self, flag: str) -> tuple[str, ...]:
        """Names of the scores from which this detector computes a flag."""
        return self.combined.evidence if flag == COMBINED and self.combined is not None else (flag,)

    def substitute(self, flag: str, *missing: Missing) -> str:
        """The flag, or its substitute for queries without the `missing` evidence.

        Without features or labels, the substitute is the mean cosine of the hits. Without hits, the substitute is κ, or
        the k-NN distance if the flag is `combined` and the calibration has this distance.

        Args:
            flag: a flag of the calibration.
            missing: `input` (all but mean and κ of the query), `hits`, or `labels` of the hits.
        """
        for kind in missing:
            names = self.components(flag)
            if kind == "hits":
                if _needs(names, "cosines", "labels"):
                    flag = "knn" if flag == COMBINED and "knn" in self.calibrated else "kappa"
            elif any(map(needs_input if kind == "input" else reads_labels, names)):
                flag = "mean_cosine"
        return flag

    def ood_score(self, flag: str, scores: Mapping[str, Float[Tensor, " Q"]]) -> Float[Tensor, " Q"]:
        """(Q,) OOD scores of new items by a flag, float64, on the device of `scores`; higher means more OOD.

        Raises:
            ValueError: as for `conformal_scores`; also for a missing score, or NaN.
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
    """Whether a flag compares a query with features of known items."""
    return _needs(components_of(flag), "reference", "labelled", "embedded")


def needs_input(flag: str) -> bool:
    """Whether a flag needs features, variance or parts of κ, beyond mean and κ of a query."""
    return "variance" in components_of(flag) or _needs(components_of(flag), "features", "parts")


def components_of(flag: str) -> tuple[str, ...]:
    """All scores from which a flag may be computed."""
    return MONOTONE_SCORES if flag == COMBINED else (flag,)


def _needs(scores: Sequence[str], *evidence: str) -> bool:
    """Whether a score needs any of this evidence; see `lam.retrieval.metrics.scores.Score`."""
    return any(need in evidence for name in scores for need in SCORES[name].needs)


def _evidence(names: tuple[str, ...]) -> str:
    words = {
        "embeddings": "embeddings",
        "parts": "an encoder that has learned ambiguity",
        "features": "features",
        "reference": "reference features of known items",
        "labelled": "reference features with labels",
        "embedded": "reference features with embeddings",
        "cosines": "hits",
        "labels": "labels of the hits",
    }
    needs = ["features"] if any(map(needs_input, names)) else []
    needs += [need for name in names for need in SCORES[name].needs]
    return " and ".join(words[need] for need in dict.fromkeys(needs))
