"""Which queries cannot be judged: a threshold on one score, or on two together, at a promised false-flag rate."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.metrics.registry import SCORES
from lam.utils.checks import check_length, check_no_nan

COMBINED = "combined"
"""Two scores as one."""
PAIR = "kappa", "knn"
"""These two."""
FLAGS = (*SCORES, COMBINED)
"""By what a query can be flagged."""


@dataclass(frozen=True, eq=False)
class OodDetector:
    """Scores of in-distribution data; higher means more out of distribution.

    `combined` takes the greater of −κ and the distance to known features: the calibration items are parted by turns,
    the distribution functions F of −κ and G of the distance are learnt from one half, and max(F(−κ), G(distance)) is
    calibrated on the other. It is one score like all others, so that its false-flag rate is promised alike, whatever
    the dependence of the two; Bonferroni's 2·min(p, q) would need no other half, but where both scores flag the same
    items it would flag at half the rate that was asked for.

    Attributes:
        calibrated: by flag, the scores of the calibration items, among them `kappa`; `combined` has those of one half,
            relative to the other.
        ranks: of the other half, −κ and distances, each rising: F and G; None without distances.
    """

    calibrated: dict[str, ConformalScores]
    ranks: tuple[Float[Tensor, " O"], Float[Tensor, " O"]] | None = None

    @classmethod
    def of(cls, scores: Mapping[str, Float[Tensor, " N"]]) -> "OodDetector":
        """Learn from N in-distribution items that nothing was fitted to, in an order that tells nothing.

        Args:
            scores: of these items, by name, as `lam.retrieval.metrics.registry.scores_of` gives them.

        Raises:
            ValueError: for no item, or only one where −κ and distances are combined; without −κ; NaN; or another
                length.
        """
        if "kappa" not in scores:
            raise ValueError(f"scores must hold those of 'kappa', got {', '.join(scores) or 'none'}")
        columns = {name: values.detach().cpu().double() for name, values in scores.items()}
        for name, values in columns.items():
            check_length(name, values, "the values of kappa", len(columns["kappa"]))
        calibrated = {name: ConformalScores.of(values) for name, values in columns.items()}
        if not columns.keys() >= set(PAIR):
            return cls(calibrated)
        if len(columns["kappa"]) < 2:
            raise ValueError(f"kappa and knn are combined from at least 2 items, got {len(columns['kappa'])}")
        one_half, other_half = slice(0, None, 2), slice(1, None, 2)
        one, two = (columns[name][one_half].sort().values for name in PAIR)
        both = _greater_rank((one, two), *(columns[name][other_half] for name in PAIR))
        return cls({**calibrated, COMBINED: ConformalScores.of(both)}, (one, two))

    def known(self, flag: str) -> ConformalScores:
        """The calibration scores of one flag.

        Raises:
            ValueError: for an unknown flag, or one whose evidence the calibration did not have.
        """
        if flag not in FLAGS:
            raise ValueError(f"flag must be one of {', '.join(FLAGS)}, got {flag!r}")
        if flag not in self.calibrated:
            raise ValueError(f"flag {flag!r} needs {_evidence(flag)}, and this calibration had none: use 'kappa'")
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
        names = scores_behind(flag)
        if missing := [name for name in names if name not in scores]:
            raise ValueError(f"flag {flag!r} needs {_evidence(flag)} of every query: there is no {missing[0]!r}")
        for name in names:
            check_no_nan(name, scores[name])
        columns = [scores[name].detach().double() for name in names]
        if flag != COMBINED or self.ranks is None:
            return columns[0]
        return _greater_rank(self.ranks, columns[0].cpu(), columns[1].cpu()).to(columns[0].device)


def needs_reference(flag: str) -> bool:
    """Whether a flag compares with features of known items."""
    return not _needs(flag).keys().isdisjoint(("reference", "labelled"))


def needs_input(flag: str) -> bool:
    """Whether a flag is made of more of a query than its mean and κ."""
    return "variance" in scores_behind(flag) or not _needs(flag).keys().isdisjoint(("features", "parts"))


def needs_hits(flag: str) -> bool:
    """Whether a flag looks at what a query found."""
    return not _needs(flag).keys().isdisjoint(("cosines", "labels"))


def scores_behind(flag: str) -> tuple[str, ...]:
    """The scores that a flag is made of."""
    return PAIR if flag == COMBINED else (flag,)


def _needs(flag: str) -> dict[str, None]:
    """What these are made from, in order; see `lam.retrieval.metrics.registry.Score`."""
    return dict.fromkeys(need for name in scores_behind(flag) for need in SCORES[name].needs)


def _evidence(flag: str) -> str:
    """The same in words."""
    words = {
        "embeddings": "embeddings",
        "parts": "an encoder that has learnt ambiguity",
        "features": "features",
        "reference": "reference features of known items",
        "labelled": "reference features with labels",
        "cosines": "hits",
        "labels": "labels of the hits",
    }
    return " and ".join(words[need] for need in _needs(flag))


def _greater_rank(ranks: tuple[Tensor, Tensor], ood_score: Tensor, distance: Tensor) -> Tensor:
    """max(F, G), and above 1 by how far the item is beyond all that F or G have seen, so that order is kept there."""
    return torch.maximum(_rank(ranks[0], ood_score), _rank(ranks[1], distance))


def _rank(known: Tensor, values: Tensor) -> Tensor:
    """The share of known values below; between two known ones linearly, beyond them by the spread of all."""
    place = torch.searchsorted(known, values.contiguous(), right=True)
    low, high = known[(place - 1).clamp(min=0)], known[place.clamp(max=len(known) - 1)]
    between = ((values - low) / (high - low).clamp(min=torch.finfo(values.dtype).tiny)).clamp(0, 1)
    spread = (known[-1] - known[0]).clamp(min=torch.finfo(values.dtype).tiny)
    beyond = ((values - known[-1]) / spread).clamp(min=0)
    beyond = beyond / (1 + beyond)
    between = torch.where(place == 0, 0.0, torch.where(place == len(known), beyond, between))
    return (place + between) / len(known)
