"""`Typicality`: the probability p_known that an input is of a known kind, from its features.

p_known combines two scores, learned from known items. The first is the distance to the nearest known features. Some
corruption moves features towards the training data, so this distance is not enough. The second score is the distance
between the shape of the features (`shape_of`) and the mean shape of known items. Noise lengthens features; blur and
low contrast shorten features.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

Record = TypeVar("Record", bound="TensorRecord")

COMPONENTS = 64  # greatest number of principal components for distances
QUANTILES = 0.98, 0.99
"""Quantiles of the two scores, distance and shape, over known items: the thresholds t_j of `Typicality`."""

DISTANCE_WIDTH = 1 / 20
SHAPE_WIDTHS = 1 / 5, 1 / 2, 1.0
"""The widths w_j of `Typicality`, in interquartile ranges of the score; three candidates for shape, narrowest first."""

_PCA_ITEMS = 2000
_LEAST, _ALIKE = 1e-12, 1e-9
_BLOCK = 512


@dataclass(frozen=True)
class TensorRecord:
    """Base of records of tensors, with methods to move, save and load all tensors at once."""

    def to(self: Record, device: torch.device | str) -> Record:
        """The record with every tensor on a device."""
        return replace(self, **{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def restored(cls: type[Record], tensors: Mapping[str, Tensor]) -> Record:
        """Rebuild the record from the result of `tensors`; other names are ignored."""
        return cls(**{field.name: tensors[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class Typicality(TensorRecord):
    """The probability that features are of a known kind.

    p = 1 / (1 + Σ_j u_j²) with u_j = softplus((s_j − t_j)/w_j) / log 2, for two scores s_j, thresholds t_j and widths
    w_j. If one score is at its threshold and the other far below, p is ½. Far below both thresholds, p is near 1. Far
    above a threshold, p falls as 1/s_j², so that very far items keep their order.

    Attributes:
        centre, axes: `principal_components` of unit features.
        reference: (O, q) coordinates of known features.
        rest: (O,) squared length of each known item's residual; see `coordinates_of`.
        shape_mean: (3,) mean of `shape_of` over known items.
        shape_whitening: (3, 3) matrix that whitens deviations from `shape_mean`.
        thresholds: (2,) t_j of distance and shape.
        widths: (2,) w_j of distance and shape.
    """

    centre: Float[Tensor, " P"]
    axes: Float[Tensor, "q P"]
    reference: Float[Tensor, "O q"]
    rest: Float[Tensor, " O"]
    shape_mean: Float[Tensor, "3"]
    shape_whitening: Float[Tensor, "3 3"]
    thresholds: Float[Tensor, "2"]
    widths: Float[Tensor, "2"]

    def __call__(self, features: Float[Tensor, "N P"]) -> Float[Tensor, " N"]:
        """p_known in (0, 1], float64."""
        return p_known(self.scores(features), self.thresholds, self.widths)

    def scores(self, features: Float[Tensor, "N P"]) -> Float[Tensor, "N 2"]:
        """Scores of distance and shape, float64; higher means less known."""
        if not torch.compiler.is_exporting() and len(features) > _BLOCK:  # blocks limit the memory of distances
            return torch.cat([self.scores(part) for part in features.split(_BLOCK)])
        distance = nearest_distance(coordinates_of(features, self.centre, self.axes), (self.reference, self.rest))
        unusual = ((shape_of(features) - self.shape_mean) @ self.shape_whitening).norm(dim=1)  # a Mahalanobis distance
        return torch.stack([distance, unusual], 1)


def principal_components(rows: Float[Tensor, "N P"], *, seed: int) -> tuple[Float[Tensor, " P"], Float[Tensor, "q P"]]:
    """Mean and orthonormal components of at most 2,000 random unit rows: one for every ten rows, from 1 to 64."""
    from sklearn.decomposition import PCA

    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:_PCA_ITEMS]
    units = F.normalize(rows[chosen.to(rows.device)]).double()
    count = max(1, min(COMPONENTS, rows.shape[1], len(units) // 10))
    # torch takes seeds of 64 bits, also negative ones; scikit-learn only of 32 bits
    fitted = PCA(count, random_state=seed % 2**32).fit(units.cpu().numpy())
    return torch.from_numpy(fitted.mean_).to(rows), torch.from_numpy(fitted.components_).to(rows)


def coordinates_of(
    rows: Float[Tensor, "N P"], centre: Float[Tensor, " P"], axes: Float[Tensor, "q P"]
) -> tuple[Float[Tensor, "N q"], Float[Tensor, " N"]]:
    """Coordinates of the normalised rows along the axes, and squared lengths of the rows' residuals."""
    centred = F.normalize(rows.to(axes)) - centre
    coordinates = centred @ axes.T
    return coordinates, (centred.square().sum(1) - coordinates.square().sum(1)).clamp(min=0)


def p_known(
    scores: Float[Tensor, "N 2"], thresholds: Float[Tensor, "2"], widths: Float[Tensor, "2"]
) -> Float[Tensor, " N"]:
    """p_known from the scores of distance and shape; `Typicality` has the formula.

    Example:
        >>> p_known(torch.tensor([[-9.0, -9.0], [0.0, -99.0], [9.0, 0.0]]), torch.zeros(2), torch.ones(2))
        tensor([1.0000, 0.5000, 0.0059])
    """
    beyond = F.softplus((scores - thresholds) / widths) / math.log(2)
    return 1 / (1 + beyond.square().sum(1))


def nearest_distance(
    items: tuple[Float[Tensor, "N q"], Float[Tensor, " N"]], reference: tuple[Float[Tensor, "O q"], Float[Tensor, " O"]]
) -> Float[Tensor, " N"]:
    """log ½‖u − v‖² from each of N unit rows u to the nearest of O unit rows v; rows come from `coordinates_of`.

    The residuals of u and v count as orthogonal to each other, which nearly holds in many dimensions.
    """
    (coordinates, rest), (others, other_rest) = items, reference
    nearest = (others.square().sum(1) + other_rest - 2 * coordinates @ others.T).argmin(1)
    # differences keep the digits that the expanded square above loses
    apart = (coordinates.double() - others[nearest].double()).square().sum(1)
    return ((apart + rest + other_rest[nearest]) / 2).clamp(min=_LEAST).log()


def shape_of(features: Float[Tensor, "N P"]) -> Float[Tensor, "N 3"]:
    """Shape of feature vectors φ, float64: log ‖φ‖, the evenness log(‖φ‖₁/‖φ‖), and the share of features ≤ 0.

    Example:
        >>> shape_of(torch.tensor([[3.0, 0.0, 4.0, 0.0]]))
        tensor([[1.6094, 0.3365, 0.5000]], dtype=torch.float64)
    """
    length = features.double().norm(dim=1).clamp(min=_LEAST)
    evenness = (features.double().abs().sum(1) / length).clamp(min=_LEAST)
    return torch.stack([length.log(), evenness.log(), (features <= 0).double().mean(1)], 1)


def learn_typicality(
    features: Float[Tensor, "N P"], folds: Int[Tensor, " N"], *, reference: Tensor | None, seed: int
) -> tuple[list[Typicality], Float[Tensor, "N 2"]]:
    """Learn p_known from features of N known items that the network was not trained on.

    Returns a `Typicality` for each of `SHAPE_WIDTHS`, and the scores of each item by a model of the other folds.
    `reference` (O, P) holds further known features for the distance.
    """

    def learned(known: Tensor) -> Typicality:
        centre, axes = principal_components(known, seed=seed)
        everything = known if reference is None else torch.cat([known, reference])
        shape = shape_of(known)
        values, vectors = torch.linalg.eigh(torch.cov(shape.T))
        inverse = torch.where(values > _ALIKE, values.clamp(min=_ALIKE).rsqrt(), 0.0)  # leaves out constant directions
        blank = shape.new_zeros(2)
        coordinates, rest = coordinates_of(everything, centre, axes)
        return Typicality(
            centre=centre,
            axes=axes,
            reference=coordinates,
            rest=rest,
            shape_mean=shape.mean(0),
            shape_whitening=vectors * inverse,
            thresholds=blank,
            widths=blank,
        )

    scores = features.new_zeros(len(features), 2, dtype=torch.float64)
    for fold in range(int(folds.max()) + 1):
        others = learned(features[folds != fold])
        scores[folds == fold] = others.scores(features[folds == fold])
    low, high = scores.quantile(scores.new_tensor([0.25, 0.75]), 0)
    flat = high - low < _ALIKE  # a constant score carries no information: p_known is then about 1 at its value
    thresholds = torch.stack([scores[:, column].quantile(level) for column, level in enumerate(QUANTILES)])
    whole = replace(learned(features), thresholds=thresholds + flat.double())
    widths = [
        torch.where(flat, 0.05, (high - low) * scores.new_tensor([DISTANCE_WIDTH, width])) for width in SHAPE_WIDTHS
    ]
    return [replace(whole, widths=width) for width in widths], scores
