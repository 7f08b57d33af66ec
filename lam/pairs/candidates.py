"""`Candidates`, partners for the items of a batch: a memory bank, a second view, or the texts of images."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from lam.pairs.pairs import check_label_vector
from lam.utils.checks import unit_tolerance

_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Candidates:
    """Pairs of the N items of a batch with O fixed directions, the candidates.

    Attributes:
        directions: (O, D) unit vectors.
        positive: (N, O) weights ≥ 0 of the pairs that match.
        negative: (N, O) weights ≥ 0 of the pairs that do not match.

    Raises:
        ValueError: for weights of a wrong shape, negative or not finite, or directions that are not unit vectors.
    """

    directions: Float[Tensor, "O D"]
    positive: Shaped[Tensor, "N O"]
    negative: Shaped[Tensor, "N O"]

    def __post_init__(self) -> None:
        if not self.positive.shape == self.negative.shape == (len(self.positive), len(self.directions)):
            raise ValueError(
                f"positive and negative must be (N, O) for {len(self.directions)} candidates, "
                f"got {tuple(self.positive.shape)} and {tuple(self.negative.shape)}"
            )
        for weights in (self.positive, self.negative):
            if not (valid := (weights >= 0) & (weights < torch.inf)).all():
                index = tuple((~valid).nonzero()[0].tolist())
                raise ValueError(f"weights must be finite and at least 0, got {weights[index]:g} at {index}")
        length = torch.linalg.vector_norm(self.directions, dim=1)
        is_unit = (length - 1).abs() < unit_tolerance(self.directions.dtype, least=_TOLERANCE)
        if not is_unit.all():
            index = int((~is_unit).nonzero()[0, 0])
            raise ValueError(f"directions must be unit vectors, got a length of {length[index]:.3g} at index {index}")

    @property
    def size(self) -> int:
        """Number of items N."""
        return len(self.positive)

    @property
    def n_positives(self) -> int:
        """Number of positive pairs."""
        return int(self.positive.count_nonzero())

    @property
    def n_matched(self) -> int:
        """Number of items with a matching candidate."""
        return int(self.positive.any(1).sum())

    def check_size(self, size: int) -> None:
        """Reject candidates unless they are for `size` items."""
        if self.size != size:
            raise ValueError(f"candidates must be of the same {size} items, got candidates of {self.size}")

    @classmethod
    def by_label(
        cls, labels: Shaped[Tensor, " N"], directions: Float[Tensor, "O D"], labels_of_directions: Shaped[Tensor, " O"]
    ) -> "Candidates":
        """Candidates from a memory bank: a candidate matches an item if their labels are equal.

        Example:
            >>> bank = Candidates.by_label(torch.tensor([0, 1]), torch.eye(3), torch.tensor([0, 0, 1]))
            >>> bank.positive.tolist()
            [[True, True, False], [False, False, True]]
        """
        check_label_vector(labels)
        check_label_vector(labels_of_directions)
        same = labels[:, None] == labels_of_directions[None, :]
        return cls(directions, same, ~same)

    @classmethod
    def paired(cls, directions: Float[Tensor, "N D"]) -> "Candidates":
        """Candidates such as second views or texts of the items: item a matches only candidate a.

        Example:
            >>> Candidates.paired(torch.eye(2)).positive.tolist()
            [[True, False], [False, True]]
        """
        same = torch.eye(len(directions), dtype=torch.bool, device=directions.device)
        return cls(directions, same, ~same)
