"""Which queries cannot be judged: thresholds on κ, on a k-NN distance, or on both, at a promised false-flag rate."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from lam.retrieval.decisions.conformal import ConformalScores
from lam.utils.checks import check_length, check_no_nan

Flag = Literal["kappa", "knn", "combined"]
FLAGS: tuple[Flag, ...] = get_args(Flag)


@dataclass(frozen=True, eq=False)
class OodDetector:
    """OOD scores of in-distribution data, of each kind; higher means more out of distribution.

    `kappa` is −κ and `knn` the distance to known features. `combined` takes the greater of the two: the
    calibration items are parted by turns, the distribution functions F of −κ and G of the distance are learnt from one
    half, and max(F(−κ), G(distance)) is calibrated on the other. It is one score like the two others, so that its
    false-flag rate is promised alike, whatever the dependence of the two; Bonferroni's 2·min(p, q) would need no other
    half, but where both scores flag the same items it would flag at half the rate that was asked for.

    Attributes:
        kappa: −κ of the calibration items.
        knn: their distances; None without features.
        combined: of one half of them, relative to the other.
        ranks: of the other half, −κ and distances, each rising: F and G.
    """

    kappa: ConformalScores
    knn: ConformalScores | None = None
    combined: ConformalScores | None = None
    ranks: tuple[Float[Tensor, " M"], Float[Tensor, " M"]] | None = None

    @classmethod
    def of(cls, kappa: Float[Tensor, " N"], distance: Float[Tensor, " N"] | None = None) -> "OodDetector":
        """Learn from N in-distribution items that nothing was fitted to, in an order that tells nothing.

        Args:
            kappa: (N,) concentrations.
            distance: (N,) k-NN distances of the same items, where there are any.

        Raises:
            ValueError: for no item, or only one where there are distances; NaN; or another length.
        """
        ood_score = -kappa.detach().cpu().double()
        if distance is None:
            return cls(ConformalScores.of(ood_score))
        check_length("distance", distance, "the values of kappa", len(kappa))
        if len(kappa) < 2:
            raise ValueError(f"kappa and distance are combined from at least 2 items, got {len(kappa)}")
        distance = distance.detach().cpu().double()
        one_half, other_half = slice(0, None, 2), slice(1, None, 2)
        ranks = ood_score[one_half].sort().values, distance[one_half].sort().values
        combined = ConformalScores.of(_greater_rank(ranks, ood_score[other_half], distance[other_half]))
        return cls(ConformalScores.of(ood_score), ConformalScores.of(distance), combined, ranks)

    def known(self, flag: Flag) -> ConformalScores:
        """The calibration scores of one kind.

        Raises:
            ValueError: for an unknown flag, or one that needs distances where there were none.
        """
        if flag not in FLAGS:
            raise ValueError(f"flag must be one of {', '.join(FLAGS)}, got {flag!r}")
        scores = {"kappa": self.kappa, "knn": self.knn, "combined": self.combined}[flag]
        if scores is None:
            raise ValueError(f"flag {flag!r} needs k-NN distances, and this calibration has none: use 'kappa'")
        return scores

    def ood_score(
        self, flag: Flag, kappa: Float[Tensor, " Q"], distance: Float[Tensor, " Q"] | None = None
    ) -> Float[Tensor, " Q"]:
        """OOD scores of new items; they are flagged where it is above a threshold of `known(flag)`.

        Args:
            flag: which score.
            kappa: (Q,) concentrations.
            distance: (Q,) k-NN distances, which `knn` and `combined` need.

        Returns:
            (Q,) scores, float64, on the device of kappa.

        Raises:
            ValueError: as `known`; for a distance that is missing or of another length; or NaN.
        """
        self.known(flag)
        check_no_nan("kappa", kappa)
        ood_score = -kappa.detach().double()
        if flag == "kappa":
            return ood_score
        if distance is None:
            raise ValueError(f"flag {flag!r} needs the distance of every query to the reference features")
        check_length("distance", distance, "the values of kappa", len(kappa))
        check_no_nan("distance", distance)
        distance = distance.detach().double().to(kappa.device)
        if flag == "knn" or self.ranks is None:
            return distance
        return _greater_rank(self.ranks, ood_score.cpu(), distance.cpu()).to(kappa.device)


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
