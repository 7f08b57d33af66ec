"""Pairs of near places in a data set, found without a matrix of all pairs."""

from dataclasses import dataclass

import torch
from jaxtyping import Int, Real
from torch import Tensor

from lam.pairs.pairs import check_angles, directions_match, negative_distance, squared_distance

_MARGIN = 1e-9  # the search radius is larger by this share, because a k-d tree rounds differently


@dataclass(frozen=True)
class Neighbours:
    """Near pairs among N places, each unordered pair once. All other pairs of places are negative.

    Attributes:
        positive: (n, 2) indices of the positive pairs.
        neither: (n, 2) indices of the near pairs that are neither positive nor negative.
        size: number of places N.

    Raises:
        ValueError: for an index outside [0, N), an item paired with itself, or a repeated pair.
    """

    positive: Int[Tensor, "_ 2"]
    neither: Int[Tensor, "_ 2"]
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
        positions: Real[Tensor, "N X"],
        positive_within: float,
        negative_beyond: float | None = None,
        *,
        angles: Real[Tensor, " N"] | None = None,
        angle_within: float | None = None,
    ) -> "Neighbours":
        """Near pairs by the rule of `Pairs.by_distance`, with the same arguments and errors, from a k-d tree."""
        from scipy.spatial import KDTree

        beyond = negative_distance(positions, positive_within, negative_beyond)
        points = positions.double().cpu()
        reach = beyond * (1 + _MARGIN)
        indices = KDTree(points.numpy()).query_pairs(reach, output_type="ndarray")
        pairs = torch.as_tensor(indices).long().reshape(-1, 2)
        square = squared_distance(points[pairs[:, 0]], points[pairs[:, 1]])
        near, square = pairs[square <= beyond**2], square[square <= beyond**2]
        is_positive = square <= positive_within**2
        check_angles(angles, angle_within, len(positions))
        if angles is not None and angle_within is not None:
            one, other = angles.cpu()[near].T
            is_positive &= directions_match(one, other, angle_within)
        return cls(near[is_positive].to(positions.device), near[~is_positive].to(positions.device), len(positions))
