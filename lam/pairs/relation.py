"""What makes two items a positive or a negative pair, and among which items pairs are formed."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from lam.pairs.mining import ALL_PAIRS, MinerName, Mining
from lam.pairs.neighbours import Neighbours
from lam.pairs.pairs import Pairs, check_angle_within
from lam.utils.checks import check_choice

Scope = Literal["batch", "dataset"]
SCOPES: tuple[str, ...] = get_args(Scope)


@dataclass(frozen=True)
class Relation:
    """What makes two items a positive or a negative pair, and among which items pairs are formed.

    Attributes:
        scope: `batch`, where pairs never cross batches; or `dataset`, where all pairs of the data set count.
        positive_within: for places: the largest distance of a positive pair, in metres. None means that targets are
            labels, not positions.
        negative_beyond: for places: negative pairs are farther apart than this, in metres.
        angle_within: for places: the largest difference of the compass angles of a positive pair, in degrees; near
            pairs that differ more are neither positive nor negative. With it the last column of the targets is the
            angle, NaN where it is unknown, which fits any other; None means that all columns are coordinates.
        miner: which pairs of a batch count for the curvature; see `lam.pairs.Mining`.
        max_pairs: at most so many triplets of the kind, or, of all pairs, so many of each type.
        triplet_margin: of the miner's triplets; by default `lam.fit` takes that of the loss.
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
        """How the pairs of a batch are chosen."""
        return Mining(self.miner, self.max_pairs)

    @property
    def in_batches(self) -> bool:
        """Whether the curvature is a sum over batches, which can be added and taken back."""
        return self.scope == "batch"

    def pairs(self, targets: Tensor) -> Pairs:
        """Pairs of a batch, from its labels (N,) or positions (N, X), with angles or without."""
        if self.positive_within is None:
            return Pairs.by_label(targets)
        return Pairs.by_distance(**self._by_distance(targets))

    def neighbours(self, targets: Tensor) -> Neighbours:
        """Near pairs of a whole data set of places, from their positions (N, X), with angles or without."""
        return Neighbours.by_distance(**self._by_distance(targets))

    def positions(self, targets: Tensor) -> Tensor:
        """Positions among the targets of places: all columns, or all but the angle."""
        return targets if self.angle_within is None else targets[..., :-1]

    def _by_distance(self, targets: Tensor) -> dict[str, Any]:
        return {
            "positions": self.positions(targets),
            "positive_within": self.positive_within,
            "negative_beyond": self.negative_beyond,
            "angles": None if self.angle_within is None else targets[..., -1],
            "angle_within": self.angle_within,
        }
