"""`Relation`, the definition of positive and negative pairs."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from lam.pairs.mining import ALL_PAIRS, MinerName, Mining
from lam.pairs.pairs import Neighbours, Pairs, check_angle_within, check_not_missing
from lam.utils.checks import check_choice

Scope = Literal["batch", "dataset"]
SCOPES: tuple[str, ...] = get_args(Scope)


@dataclass(frozen=True)
class Relation:
    """The definition of positive and negative pairs, within batches or over a data set.

    Attributes:
        scope: `batch` for pairs within batches; `dataset` for all pairs of the data set.
        positive_within: greatest distance of a positive pair of places, in metres; None if targets are labels.
        negative_beyond: distance above which pairs of places are negative, in metres; by default `positive_within`.
        angle_within: greatest difference of compass angles in a positive pair of places, in degrees. A near pair with a
            greater difference is neither positive nor negative. If set, the last column of the targets holds the
            angles; NaN means unknown, and matches any angle.
        miner, max_pairs: choice of a batch's pairs for the curvature; see `lam.pairs.Mining`.
        triplet_margin: margin of the miner's triplets; by default `lam.fit` uses the loss's margin.

    Raises:
        ValueError: for a setting out of range, or settings that exclude each other.
    """

    scope: Scope = "batch"
    positive_within: float | None = None
    negative_beyond: float | None = None
    angle_within: float | None = None
    miner: MinerName = "all"
    max_pairs: int | None = None
    triplet_margin: float | None = None

    def __post_init__(self) -> None:
        if self.triplet_margin is not None and not self.triplet_margin > 0:
            raise ValueError(f"triplet_margin must be positive, got {self.triplet_margin}")
        check_choice("scope", self.scope, SCOPES)
        if self.positive_within is None and self.negative_beyond is not None:
            raise ValueError("negative_beyond needs positive_within: both are distances between places")
        if self.mining != ALL_PAIRS and self.scope == "dataset":
            raise ValueError("pairs are mined within batches: over a whole data set all of them count")
        if self.angle_within is not None:
            if self.positive_within is None:
                raise ValueError("angle_within needs positive_within: both are for places")
            check_angle_within(self.angle_within)

    @property
    def mining(self) -> Mining:
        """The choice of pairs in a batch."""
        return Mining(self.miner, self.max_pairs)

    @property
    def in_batches(self) -> bool:
        """Whether pairs lie within batches, so that a curvature is a sum over batches."""
        return self.scope == "batch"

    def pairs(self, targets: Tensor) -> Pairs:
        """Pairs of a batch, from integer labels (N,) ≥ 0 or positions (N, X), with or without a column of angles."""
        if self.positive_within is None:
            pairs = Pairs.by_label(targets)
            check_not_missing(targets)
            return pairs
        return Pairs.by_distance(**self._by_distance(targets))

    def neighbours(self, targets: Tensor) -> Neighbours:
        """Near pairs of a data set of places; targets as in `pairs`."""
        return Neighbours.by_distance(**self._by_distance(targets))

    def positions(self, targets: Tensor) -> Tensor:
        """Positions (N, X) of places: the targets without the column of angles."""
        return targets if self.angle_within is None else targets[..., :-1]

    def _by_distance(self, targets: Tensor) -> dict[str, Any]:
        return {
            "positions": self.positions(targets),
            "positive_within": self.positive_within,
            "negative_beyond": self.negative_beyond,
            "angles": None if self.angle_within is None else targets[..., -1],
            "angle_within": self.angle_within,
        }
