"""Which queries cannot be judged: a threshold on one score, or on several together, at a promised false-flag rate."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.probability import RankOdds, joint_surprise, random_order
from lam.retrieval.metrics.registry import SCORES
from lam.utils.checks import check_choice, check_length, check_no_nan

COMBINED = "combined"
"""Several scores as one."""
TOGETHER = "knn", "relative_mahalanobis", "cosine", "mean_cosine"
"""These, as far as there is evidence for them: what features say, and what was found. Chosen by AUROC on validation
parts, with intents left out and outsiders made of images; κ beside them changes little (`benchmarks/combined.py`)."""
FLAGS = (*SCORES, COMBINED)
"""By what a query can be flagged."""


@dataclass(frozen=True, eq=False)
class OodDetector:
    """Scores of in-distribution data; higher means more out of distribution.

    `combined` is `joint_surprise`, a mean of p over several scores: the calibration items are parted, one half
    gives each score its p, the share of items above it, and the means of the other half are calibrated. It is one score
    like all others, so that its false-flag rate is promised alike, whatever the dependence of its parts.

    Attributes:
        calibrated: by flag, the scores of the calibration items, among them `kappa`; `combined` has those of one half,
            relative to the other.
        ranks: of the other half, by score of `combined`; empty where there are not two.
    """

    calibrated: dict[str, ConformalScores]
    ranks: dict[str, RankOdds] = field(default_factory=dict)

    @classmethod
    def of(cls, scores: Mapping[str, Float[Tensor, " N"]]) -> "OodDetector":
        """Learn from N in-distribution items that nothing was fitted to.

        Args:
            scores: of these items, by name, as `lam.retrieval.metrics.registry.scores_of` gives them.

        Raises:
            ValueError: for no item, or only one where scores are combined; without −κ; NaN; or another length.
        """
        if "kappa" not in scores:
            raise ValueError(f"scores must hold those of 'kappa', got {', '.join(scores) or 'none'}")
        columns = {name: values.detach().cpu().double() for name, values in scores.items()}
        for name, values in columns.items():
            check_length(name, values, "the values of kappa", len(columns["kappa"]))
        calibrated = {name: ConformalScores.of(values) for name, values in columns.items()}
        together = [name for name in TOGETHER if name in columns]
        if len(together) < 2:
            return cls(calibrated)
        if len(columns["kappa"]) < 2:
            raise ValueError(f"scores are combined from at least 2 items, got {len(columns['kappa'])}")
        order = random_order(len(columns["kappa"]))
        ranks = {name: RankOdds.of(columns[name][order[::2]]) for name in together}
        combined = joint_surprise(ranks, {name: columns[name][order[1::2]] for name in together})
        return cls({**calibrated, COMBINED: ConformalScores.of(combined)}, ranks)

    def known(self, flag: str) -> ConformalScores:
        """The calibration scores of one flag.

        Raises:
            ValueError: for an unknown flag, or one whose evidence the calibration did not have.
        """
        check_choice("flag", flag, FLAGS)
        if flag not in self.calibrated:
            raise ValueError(
                f"flag {flag!r} needs {_evidence(scores_behind(flag))}, and this calibration had none: use 'kappa'"
            )
        return self.calibrated[flag]

    def ood_score(self, flag: str, scores: Mapping[str, Float[Tensor, " Q"]]) -> Float[Tensor, " Q"]:
        """The score of new items; they are flagged where it is above a threshold of `known(flag)`.

        Args:
            flag: which score.
            scores: of the items, by name.

        Returns:
            (Q,) scores, float64, on their device.

        Raises:
            ValueError: as `known`; for a score that is missing; or NaN.
        """
        self.known(flag)
        names = tuple(self.ranks) if flag == COMBINED else (flag,)
        if missing := [name for name in names if name not in scores]:
            raise ValueError(f"flag {flag!r} needs {_evidence(names)} of every query: there is no {missing[0]!r}")
        for name in names:
            check_no_nan(name, scores[name])
        if flag == COMBINED:
            return joint_surprise(self.ranks, scores).to(scores[names[0]].device)
        return scores[flag].detach().double()


def needs_reference(flag: str) -> bool:
    """Whether a flag compares with features of known items."""
    return _is_made_from(flag, "reference", "labelled", "embedded")


def needs_input(flag: str) -> bool:
    """Whether a flag is made of more of a query than its mean and κ."""
    return "variance" in scores_behind(flag) or _is_made_from(flag, "features", "parts")


def without_input(flag: str) -> str:
    """The flag in its place for queries that are but a mean and a κ: κ, or of several scores one that hits give."""
    if not needs_input(flag):
        return flag
    return "mean_cosine" if flag == COMBINED else "kappa"


def without_hits(flag: str) -> str:
    """The flag in its place for queries that found nothing: κ, or of several scores one that features give."""
    if not _is_made_from(flag, "cosines", "labels"):
        return flag
    return "knn" if flag == COMBINED else "kappa"


def without_labels(flag: str) -> str:
    """The flag in its place where hits have no labels: of one that labels decide the mean cosine of the hits."""
    looks = any("labels" in (*SCORES[name].needs, *SCORES[name].uses) for name in scores_behind(flag))
    return "mean_cosine" if looks else flag


def scores_behind(flag: str) -> tuple[str, ...]:
    """The scores that a flag is made of."""
    return TOGETHER if flag == COMBINED else (flag,)


def _is_made_from(flag: str, *evidence: str) -> bool:
    """Whether any of this is what a flag is made from; see `lam.retrieval.metrics.registry.Score`."""
    return any(need in evidence for name in scores_behind(flag) for need in SCORES[name].needs)


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
