"""`Pairs` of a batch, with weights; `Neighbours`, near places of a data set; checks of labels and positions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int, Real, Shaped
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from lam.utils.checks import check_finite, check_tensor, is_real

_MARGIN = 1e-9  # the search radius is larger by this share, because a k-d tree rounds differently


@dataclass(frozen=True)
class Pairs:
    """The positive and the negative pairs among the N items of a batch.

    The weight of an ordered pair (a, b) says how often this pair counts. After `by_label`, the first read of
    `positive` or `negative` computes both. So a loss that reads only `labels` takes time linear in N.

    Attributes:
        positive: (N, N) weights of the positive pairs, symmetric, non-negative, with zero diagonal.
        negative: (N, N) weights of the negative pairs, of the same form, including pairs beyond a loss's margin.
        n_positives: n⁺, the number of ordered positive pairs; for n⁺ and n⁻ after mining see `lam.pairs.mining`.
        n_negatives: n⁻, the number of ordered negative pairs.
        labels: (N,) classes of all items of the batch; None for pairs by distance.
    """

    positive: Shaped[Tensor, "N N"]
    negative: Shaped[Tensor, "N N"]
    n_positives: int
    n_negatives: int
    labels: Shaped[Tensor, " N"] | None = None

    @property
    def size(self) -> int:
        """Number of items N."""
        return len(self.positive if self.labels is None else self.labels)

    @property
    def paired(self) -> Bool[Tensor, " N"]:
        """Whether each item is in a pair; a miner may leave items out."""
        if self.labels is not None and "positive" not in vars(self):
            return torch.full_like(self.labels, self.size > 1, dtype=torch.bool)
        return self.positive.any(1) | self.negative.any(1)

    @property
    def n_matched(self) -> int:
        """Number of items with a positive pair."""
        return int(self.positive.any(1).sum())

    def check_size(self, size: int) -> None:
        """Raise a `ValueError` unless the pairs are among `size` items."""
        if self.size != size:
            raise ValueError(f"pairs must be of the same {size} items, got pairs of {self.size}")

    def check_positives(self) -> None:
        """Raise a `ValueError` if n⁺ is 0."""
        if self.n_positives == 0:
            raise ValueError(f"no pair in a batch of {self.size} is positive: skip it, or raise its size or per_class")

    @classmethod
    def by_label(cls, labels: Shaped[Tensor, " N"]) -> "Pairs":
        """All pairs of a batch: positive if the two labels are equal, else negative.

        Args:
            labels: (N,) integer label of each item; other types raise a `ValueError`.

        Example:
            >>> pairs = Pairs.by_label(torch.tensor([0, 0, 1]))
            >>> pairs.n_positives, pairs.n_negatives
            (2, 4)
        """
        check_label_vector(labels)
        sizes = labels.unique(return_counts=True)[1]
        n_positives = int((sizes * (sizes - 1)).sum())
        n_negatives = len(labels) * (len(labels) - 1) - n_positives
        pairs = object.__new__(cls)  # without the matrices, which `__getattr__` forms
        vars(pairs).update(n_positives=n_positives, n_negatives=n_negatives, labels=labels)
        return pairs

    def __getattr__(self, name: str) -> Tensor:
        labels = vars(self).get("labels")
        if labels is None or name not in ("positive", "negative"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        different = labels[:, None] != labels[None, :]
        formed = {"positive": (~different).fill_diagonal_(False), "negative": different}
        if not is_functorch_wrapped_tensor(different):  # tensors in a torch.func transform are invalid after it
            vars(self).update(formed)
        return formed[name]

    @classmethod
    def by_distance(
        cls,
        positions: Real[Tensor, "N X"],
        positive_within: float,
        negative_beyond: float | None = None,
        *,
        angles: Real[Tensor, " N"] | None = None,
        angle_within: float | None = None,
    ) -> "Pairs":
        """Pairs of places: positive if they are near, negative if they are far.

        Distances above `positive_within` and up to `negative_beyond` give no pair. Near places whose compass angles
        differ too much form no pair either, because their photographs show different things.

        Args:
            positions: (N, X) coordinates of each item, in metres.
            positive_within: greatest distance of a positive pair, in metres.
            negative_beyond: distance above which pairs are negative, in metres; `positive_within` by default.
            angles: (N,) compass angles in degrees; NaN means unknown, and matches any angle.
            angle_within: greatest difference of the angles of a positive pair, in (0, 180] degrees.

        Raises:
            ValueError: for positions that are not finite, distances that break 0 < positive_within ≤ negative_beyond,
                infinite angles, an `angle_within` out of range, or `angles` or `angle_within` alone.

        Example:
            >>> pairs = Pairs.by_distance(torch.tensor([[0.0], [8.0], [20.0], [90.0]]), 10.0, 25.0)
            >>> pairs.n_positives, pairs.n_negatives
            (2, 6)
        """
        beyond = negative_distance(positions, positive_within, negative_beyond)
        square = squared_distance(positions[:, None], positions[None])
        positive = (square <= positive_within**2).fill_diagonal_(False)
        check_angles(angles, angle_within, len(positions))
        if angles is not None and angle_within is not None:
            positive &= directions_match(angles[:, None], angles[None, :], angle_within)
        negative = square > beyond**2
        return cls(positive, negative, int(positive.sum()), int(negative.sum()))

    @classmethod
    def from_tuples(
        cls,
        tuples: Sequence[Tensor],
        size: int,
        *,
        n_positives: int,
        n_negatives: int,
        labels: Shaped[Tensor, " N"] | None = None,
    ) -> "Pairs":
        """Pairs chosen by a miner of pytorch-metric-learning.

        The miner's pairs are ordered and may repeat. If a matrix M counts them, the weights are (M + Mᵀ)/2. They are
        symmetric and give the same loss.

        Args:
            tuples: (anchors, positives, negatives), or (anchors, positives, anchors, negatives), of item indices.
            size: number of items N.
            n_positives: number of ordered positive pairs before the miner's choice.
            n_negatives: number of ordered negative pairs before the miner's choice.
            labels: (N,) classes of the items, if any.

        Raises:
            ValueError: for a wrong number of tensors or indices, an index outside [0, N), an item paired with itself,
                or more different pairs than before the choice.

        Example:
            >>> triplet = (torch.tensor([0]), torch.tensor([1]), torch.tensor([2]))
            >>> Pairs.from_tuples(triplet, 3, n_positives=2, n_negatives=4).positive
            tensor([[0.0000, 0.5000, 0.0000],
                    [0.5000, 0.0000, 0.0000],
                    [0.0000, 0.0000, 0.0000]])
        """
        count = len(tuples) if hasattr(tuples, "__len__") else type(tuples).__name__
        if count not in (3, 4):
            raise ValueError(f"tuples must hold 3 or 4 index tensors, as a miner returns them, got {count}")
        for indices in tuples:
            check_tensor("indices", indices)
        anchor, positive, negative = tuples[0], tuples[1], tuples[-1]
        positives = _count_directed(anchor, positive, size)
        negatives = _count_directed(tuples[2] if len(tuples) == 4 else anchor, negative, size)
        _check_considered("n_positives", n_positives, positives)
        _check_considered("n_negatives", n_negatives, negatives)
        return cls(positives, negatives, n_positives, n_negatives, labels)


def as_targets(targets: Any) -> Tensor:
    """Targets of a data loader as a tensor of int64 or floats. Other targets, such as names, raise a `ValueError`."""
    if hasattr(targets, "to_numpy"):  # in a pandas Series, torch would look for the index 0
        targets = np.array(targets)
    if isinstance(targets, np.ndarray) and targets.dtype == object:  # Python's numbers, or names
        targets = targets.tolist()
    try:
        tensor = torch.as_tensor(as_native(targets) if isinstance(targets, np.ndarray) else targets)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"labels must be integers, and positions numbers, got {next(iter(targets), targets)!r}: number the "
            "classes, such as with names = sorted(set(labels)) and names.index(label)"
        ) from error
    if tensor.is_complex():
        raise ValueError(f"labels must be integers, and positions numbers, got {tensor.dtype}")
    return tensor if tensor.is_floating_point() else tensor.long()


def targets_of(items: Tensor, targets: Any) -> Tensor:
    """Targets as a tensor on the device of `items`, see `as_targets`; each item must have one target."""
    if targets is None:
        raise ValueError(
            "a posterior needs a loader that yields batches of inputs with targets, such as [(inputs, labels)]"
        )
    targets = as_targets(targets).to(items.device)
    if len(targets) != len(items):
        raise ValueError(f"there are {len(items)} items and {len(targets)} labels")
    return targets


def as_native(array: np.ndarray) -> np.ndarray:
    """An array in this machine's byte order, with strides of at least 0, and writable; torch reads no others well."""
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return array.copy() if min(array.strides, default=0) < 0 or not array.flags.writeable else array


def check_label_vector(labels: Tensor) -> None:
    """Require a vector of integer labels."""
    if not isinstance(labels, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        as_targets(labels)  # has advice for names
    check_tensor("labels", labels)
    if labels.ndim != 1 or labels.is_floating_point():
        advice = "labels.flatten()" if labels[:1].numel() == 1 else "labels.argmax(1) of one-hot labels"
        raise ValueError(
            f"labels must be integers of shape (N,), got {labels.dtype} of shape {tuple(labels.shape)}: give "
            f"{'labels.long()' if labels.ndim == 1 else advice}, or pairs=lam.pairs.Relation(positive_within=...) for "
            "positions"
        )


def class_centroids(
    embeddings: Float[Tensor, "N D"], labels: Shaped[Tensor, " N"] | None
) -> tuple[Float[Tensor, "C D"], Shaped[Tensor, " N"]]:
    """Direction of the mean of each class, and the index of each item's class.

    A mean shorter than 1e-4 has no reliable direction. It is divided by 1e-4 instead of its length, so that the
    centroid stays shorter than 1.
    """
    if labels is None:
        raise ValueError("varcon needs classes, got pairs by distance or indices: use labels")
    classes, own, sizes = labels.unique(return_inverse=True, return_counts=True)
    sums = embeddings.new_zeros(len(classes), embeddings.shape[1]).index_add_(0, own, embeddings)
    return F.normalize(sums / sizes[:, None].to(embeddings), eps=1e-4), own


def negative_distance(positions: Tensor, positive_within: float, negative_beyond: float | None) -> float:
    """Check positions and distances; return `negative_beyond`, by default `positive_within`."""
    beyond = positive_within if negative_beyond is None else negative_beyond
    if not 0 < positive_within <= beyond:
        raise ValueError(
            "positive_within and negative_beyond must satisfy 0 < positive_within <= negative_beyond, "
            f"got {positive_within} and {beyond}"
        )
    if positions.ndim != 2 or positions.shape[1] == 0 or not is_real(positions):
        raise ValueError(f"positions must be numbers of shape (N, X), got {positions.dtype} {tuple(positions.shape)}")
    check_finite("positions", positions)
    return beyond


def squared_distance(one: Real[Tensor, "*#B X"], other: Real[Tensor, "*#B X"]) -> Float64[Tensor, "*B"]:
    """Squared distances of places in float64, summed one coordinate at a time: bitwise the same in every batch.

    Compare these with the square of a limit d, because a root may round a distance slightly above d to d.
    """
    one, other = (places.double().movedim(-1, 0).contiguous() for places in (one, other))  # faster with many columns
    squares = ((x - y).square() for x, y in zip(one, other, strict=True))
    return sum(squares, start=next(squares))  # keeps the squares of one coordinate at a time


def check_angles(angles: Tensor | None, angle_within: float | None, size: int) -> None:
    """Reject angles without `angle_within`, `angle_within` without angles, and values out of range."""
    if (angles is None) != (angle_within is None):
        raise ValueError("angles and angle_within belong together: give both or neither")
    if angles is None or angle_within is None:
        return
    check_angle_within(angle_within)
    if angles.shape != (size,) or not is_real(angles):
        raise ValueError(f"angles must be numbers of shape ({size},), got {angles.dtype} {tuple(angles.shape)}")
    if (infinite := angles.isinf().nonzero()).numel():
        raise ValueError(f"angles must be degrees, or NaN if unknown, got infinity at index {int(infinite[0])}")


def check_angle_within(angle_within: float) -> None:
    """Reject a difference of compass angles outside (0, 180]."""
    if not 0 < angle_within <= 180:
        raise ValueError(f"angle_within must be more than 0 and at most 180 degrees, got {angle_within}")


def directions_match(one: Real[Tensor, "*#B"], other: Real[Tensor, "*#B"], within: float) -> Bool[Tensor, "*B"]:
    """Whether two compass angles differ by at most `within` degrees, modulo 360; NaN matches any angle."""
    difference = (one.double() - other.double()).remainder(360)
    return ~(torch.minimum(difference, 360 - difference) > within)


def _count_directed(first: Tensor, second: Tensor, size: int) -> Tensor:
    if first.shape != second.shape or first.ndim != 1 or first.is_floating_point() or second.is_floating_point():
        raise ValueError(
            "a pair needs two integer indices, got tensors of "
            f"{first.dtype} {tuple(first.shape)} and {second.dtype} {tuple(second.shape)}"
        )
    indices = torch.stack([first, second])
    outside = (indices < 0) | (indices >= size)
    if outside.any():
        raise ValueError(f"indices must lie in [0, {size}), got {int(indices[outside][0])}")
    if (first == second).any():
        raise ValueError(f"an item cannot be its own pair, got ({int(first[first == second][0])}, itself)")
    counts = torch.zeros(size, size, device=first.device)
    counts.index_put_((first, second), torch.ones(len(first), device=first.device), accumulate=True)
    return (counts + counts.T) / 2


def _check_considered(name: str, n_considered: int, weights: Tensor) -> None:
    n_chosen = int((weights > 0).sum())
    if n_considered < n_chosen:
        raise ValueError(
            f"{name} must be the number of ordered pairs that the miner chose from, "
            f"got {n_considered} for {n_chosen} different chosen pairs"
        )


def check_labels(labels: Tensor) -> None:
    """Reject labels that give no positive or no negative pair, and negative labels."""
    check_label_vector(labels)
    check_not_missing(labels)
    if len(labels) < 2:
        raise ValueError(f"at least 2 items are needed to form a pair, got {len(labels)}")
    classes = len(labels.unique())
    if classes == 1:
        raise ValueError(f"all {len(labels)} items have one label: there is no negative pair")
    if classes == len(labels):
        raise ValueError(f"no two of {classes} items share a label: there is no positive pair")


def check_not_missing(labels: Tensor) -> None:
    """Reject negative labels, which usually stand for missing labels."""
    if (n_negative := int((labels < 0).sum())) > 0:
        raise ValueError(
            f"labels must not be negative, got {int(labels.min())}, {n_negative} in all: such items usually have no "
            "label, and would match each other; leave them out, or number the classes from 0"
        )


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
