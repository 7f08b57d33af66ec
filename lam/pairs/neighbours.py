"""The near pairs of a whole data set of places, found without a matrix of all pairs."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lam.pairs.pairs import check_angles, checked_distances, directions_fit, squared_distance

_MARGIN = 1e-9  # by which a tree looks farther than it must, as it rounds in a way of its own


@dataclass(frozen=True)
class Neighbours:
    """The near pairs among N places, each unordered pair once; every other pair is negative.

    Attributes:
        positive: (E, 2) indices of the positive pairs.
        neither: (F, 2) indices of the pairs that count as neither.
        size: the number of places N.
    """

    positive: Int[Tensor, "E 2"]
    neither: Int[Tensor, "F 2"]
    size: int

    def __post_init__(self) -> None:
        both = torch.cat([self.positive, self.neither])
        if len(both) and not (int(both.min()) >= 0 and int(both.max()) < self.size):
            raise ValueError(
                f"neighbours must be indices in [0, {self.size}), got {int(both.min())} to {int(both.max())}"
            )
        if (both[:, 0] == both[:, 1]).any():
            raise ValueError("an item cannot be its own neighbour")
        low, high = both.min(1).values, both.max(1).values
        if len(torch.unique(low * self.size + high)) < len(both):
            raise ValueError("neighbours must name each unordered pair once, as positive or as neither")

    @classmethod
    def by_distance(
        cls,
        positions: Float[Tensor, "N X"],
        positive_within: float,
        negative_beyond: float | None = None,
        *,
        angles: Float[Tensor, " N"] | None = None,
        angle_within: float | None = None,
    ) -> "Neighbours":
        """Find the near pairs with a k-d tree; the counterpart of `Pairs.by_distance` for a whole data set.

        Args, Raises: as `Pairs.by_distance`.
        """
        from scipy.spatial import KDTree

        beyond = checked_distances(positions, positive_within, negative_beyond)
        points = positions.double().cpu()
        reach = beyond * (1 + _MARGIN)
        found = torch.as_tensor(KDTree(points.numpy()).query_pairs(reach, output_type="ndarray")).long().reshape(-1, 2)
        square = squared_distance(points[found[:, 0]], points[found[:, 1]])
        near, square = found[square <= beyond**2], square[square <= beyond**2]
        first, second = near.T
        is_positive = square <= positive_within**2
        check_angles(angles, angle_within, len(positions))
        if angles is not None and angle_within is not None:
            turned = angles.cpu()
            is_positive &= directions_fit(turned[first], turned[second], angle_within)
        return cls(near[is_positive].to(positions.device), near[~is_positive].to(positions.device), len(positions))
