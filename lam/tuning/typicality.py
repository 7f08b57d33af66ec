"""`Typicality`: the probability p_known that an input is of a known kind, from its features alone.

A single one-sided score rates some corrupted inputs as better known than known ones: noise lengthens features, blur and
low contrast shorten them, and some of it moves them towards the training data. So two scores are joined. One is the
distance to the nearest known features. The other, two-sided, is the deviation of the features' length and spread from
the usual. Both are learnt from known items alone.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lam.tuning.tensors import TensorRecord

COMPONENTS = 64
"""Largest number of principal components that compare features; also at most one for every ten items."""

QUANTILES = 0.98, 0.99
"""Quantiles of distance and shape over known items at which the score alone gives p_known = ½."""

DISTANCE_WIDTH = 1 / 20
SHAPE_WIDTHS = 1 / 5, 1 / 2, 1.0
"""Widths of the fall of p_known, in interquartile ranges of the score; shape takes one of three, narrowest first."""

_PCA_ITEMS = 2000
_LEAST, _ALIKE = 1e-12, 1e-9
_BLOCK = 512


@dataclass(frozen=True)
class Components(TensorRecord):
    """Principal components of unit rows.

    Attributes:
        centre: (P,) mean of the unit rows.
        axes: (q, P) orthonormal.
    """

    centre: Float[Tensor, " P"]
    axes: Float[Tensor, "q P"]

    def __call__(self, rows: Float[Tensor, "N P"]) -> tuple[Float[Tensor, "N q"], Float[Tensor, " N"]]:
        """Coordinates of rows scaled to length one, and the squared length outside the components."""
        centred = F.normalize(rows.to(self.axes)) - self.centre
        coordinates = centred @ self.axes.T
        return coordinates, (centred.square().sum(1) - coordinates.square().sum(1)).clamp(min=0)

    @staticmethod
    def of(rows: Float[Tensor, "N P"], most: int, *, seed: int) -> "Components":
        """The first components of at most 2,000 random rows; at most `most`, and at most one for ten rows."""
        from sklearn.decomposition import PCA

        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:_PCA_ITEMS]
        units = F.normalize(rows[chosen.to(rows.device)]).double()
        count = max(1, min(most, rows.shape[1], len(units) // 10))
        fitted = PCA(count, random_state=seed).fit(units.cpu().numpy())
        centre, axes = (torch.from_numpy(array).to(rows) for array in (fitted.mean_, fitted.components_))
        return Components(centre, axes)


@dataclass(frozen=True)
class Typicality(TensorRecord):
    """The probability that features are of a known kind.

    p = 1 / (1 + Σ_j u_j²), u_j = softplus((s_j − t_j)/w_j) / log 2, over two scores s_j. Each alone gives ½ at t_j. Far
    below it p is 1; far above it p falls with the squared distance, so that very far items keep their order.

    Attributes:
        centre, axes: of the components of unit features.
        reference: (O, q) coordinates of known features, for the distance to the nearest.
        rest: (O,) their squared length outside the components.
        shape_mean: (3,) mean of `shape_of` over known items.
        shape_whitening: (3, 3) scales their deviations to variance 1.
        thresholds: (2,) t of distance and shape.
        widths: (2,) w of each.
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
        """Distance and shape, float64, higher for less known items."""
        if not torch.compiler.is_exporting() and len(features) > _BLOCK:  # blocks limit the memory of distances
            return torch.cat([self.scores(part) for part in features.split(_BLOCK)])
        components = Components(self.centre, self.axes)
        distance = nearest_distance(components(features), (self.reference, self.rest))
        return torch.stack([distance, unusual(shape_of(features), self.shape_mean, self.shape_whitening)], 1)


def p_known(
    scores: Float[Tensor, "N 2"], thresholds: Float[Tensor, "2"], widths: Float[Tensor, "2"]
) -> Float[Tensor, " N"]:
    """1 / (1 + Σ_j u_j²), u_j = softplus((s_j − t_j)/w_j) / log 2.

    Example:
        >>> p_known(torch.tensor([[-9.0, -9.0], [0.0, -99.0], [9.0, 0.0]]), torch.zeros(2), torch.ones(2))
        tensor([1.0000, 0.5000, 0.0059])
    """
    beyond = F.softplus((scores - thresholds) / widths) / math.log(2)
    return 1 / (1 + beyond.square().sum(1))


def nearest_distance(
    items: tuple[Float[Tensor, "N q"], Float[Tensor, " N"]], reference: tuple[Float[Tensor, "O q"], Float[Tensor, " O"]]
) -> Float[Tensor, " N"]:
    """log ½‖u − v‖² to the nearest of O unit rows v, given as coordinates and squared lengths outside the components.

    The parts outside are taken as orthogonal, which nearly holds in many dimensions.
    """
    (coordinates, rest), (others, other_rest) = items, reference
    nearest = (others.square().sum(1) + other_rest - 2 * coordinates @ others.T).argmin(1)
    # differences do not cancel, unlike the expanded square above
    apart = (coordinates.double() - others[nearest].double()).square().sum(1)
    return ((apart + rest + other_rest[nearest]) / 2).clamp(min=_LEAST).log()


def shape_of(features: Float[Tensor, "N P"]) -> Float[Tensor, "N 3"]:
    """log ‖φ‖; log ‖φ‖₁/‖φ‖, greatest for equal features; and the share of features ≤ 0; float64.

    Example:
        >>> shape_of(torch.tensor([[3.0, 0.0, 4.0, 0.0]]))
        tensor([[1.6094, 0.3365, 0.5000]], dtype=torch.float64)
    """
    length = features.double().norm(dim=1).clamp(min=_LEAST)
    evenness = (features.double().abs().sum(1) / length).clamp(min=_LEAST)
    return torch.stack([length.log(), evenness.log(), (features <= 0).double().mean(1)], 1)


def unusual(
    shape: Float[Tensor, "N 3"], mean: Float[Tensor, "3"], whitening: Float[Tensor, "3 3"]
) -> Float[Tensor, " N"]:
    """Mahalanobis distance of shapes from the mean shape of known items."""
    return ((shape - mean) @ whitening).norm(dim=1)


def learn_typicality(
    features: Float[Tensor, "N P"], folds: Int[Tensor, " N"], *, reference: Tensor | None, seed: int
) -> tuple[list[Typicality], Float[Tensor, "N 2"]]:
    """Learn p_known from known items (N, P) that the network was not trained on; each is scored by other folds.

    `reference` (O, P) adds known features for the distance to the nearest. Returns one typicality for each width of
    shape, narrowest first, and the scores.
    """

    def learnt(known: Tensor) -> Typicality:
        components = Components.of(known, COMPONENTS, seed=seed)
        coordinates, rest = components(known if reference is None else torch.cat([known, reference]))
        shape = shape_of(known)
        values, vectors = torch.linalg.eigh(torch.cov(shape.T))
        inverse = torch.where(values > _ALIKE, values.clamp(min=_ALIKE).rsqrt(), 0.0)  # a constant part is left out
        blank = shape.new_zeros(2)
        return Typicality(
            **components.tensors(),
            reference=coordinates,
            rest=rest,
            shape_mean=shape.mean(0),
            shape_whitening=vectors * inverse,
            thresholds=blank,
            widths=blank,
        )

    scores = features.new_zeros(len(features), 2, dtype=torch.float64)
    for fold in range(int(folds.max()) + 1):
        others = learnt(features[folds != fold])
        scores[folds == fold] = others.scores(features[folds == fold])
    low, high = scores.quantile(scores.new_tensor([0.25, 0.75]), 0)
    flat = high - low < _ALIKE  # a constant score says nothing: p_known is then about 1 at its value
    thresholds = torch.stack([scores[:, column].quantile(level) for column, level in enumerate(QUANTILES)])
    whole = replace(learnt(features), thresholds=thresholds + flat.double())
    widths = [
        torch.where(flat, 0.05, (high - low) * scores.new_tensor([DISTANCE_WIDTH, width])) for width in SHAPE_WIDTHS
    ]
    return [replace(whole, widths=width) for width in widths], scores
