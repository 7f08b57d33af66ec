"""Distances from features to the features of known items (`Reference`); a higher value means more doubt.

Distances are between unit vectors, except in `radial_mahalanobis`.
"""

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lam.utils.autocast import without_autocast
from lam.utils.blocks import row_blocks
from lam.utils.checks import check_at_least, check_finite, check_length

NEIGHBOUR = 5  # default k of the k-NN score
LAYER_NEIGHBOURS = 3  # default k of `layer_change`
EXPONENTS = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Candidates for β of `radial_mahalanobis`, from unit vectors to raw features; the first wins a tie."""

_BLOCK, _PRODUCTS = 512, 2**25  # greatest numbers of items and of cosines in memory at once
_SAME_LENGTH = 1e-5  # a smaller relative spread of lengths is a rounding error
_SAME_DIRECTION = 1e-5  # a smaller difference between embeddings and features is a rounding error
COMPONENTS = 256  # number of principal components to which wider features are reduced
_RIDGE = 1e-7  # share of the mean variance, added to every variance because some components are constant


@dataclass(frozen=True, eq=False)
class Gaussians:
    """A Gaussian for each class, with a common covariance, and one for all items, in q principal components.

    Attributes:
        center: (P,) mean of all items.
        basis: (P, q) the principal components.
        classes: (C,) labels of the classes, in rising order.
        means: (C, q) class means, whitened by `within`.
        within: (q, q) W such that WWᵀ is the inverse of the covariance about the class means.
        total: (q, q) W such that WWᵀ is the inverse of the covariance about the mean of all items.
    """

    center: Float[Tensor, " P"]
    basis: Float[Tensor, "P q"]
    classes: Int[Tensor, " C"]
    means: Float[Tensor, "C q"]
    within: Float[Tensor, "q q"]
    total: Float[Tensor, "q q"]

    @classmethod
    def of(cls, unit: Float[Tensor, "O P"], labels: Int[Tensor, " O"] | None = None) -> "Gaussians":
        """Fit to O items, with the shrunk covariance of Ledoit and Wolf (2004); without labels, there is one class."""
        x = unit.detach().cpu().double()
        center = x.mean(0)
        basis = _principal_components(x - center)
        z = (x - center) @ basis
        names, classes = (torch.zeros(len(z)).long() if labels is None else labels.cpu()).unique(return_inverse=True)
        count = classes.bincount().double()
        means = torch.zeros(len(count), z.shape[1], dtype=z.dtype).index_add_(0, classes, z) / count[:, None]
        within = _whitening(z - means[classes])
        return cls(center, basis, names, means @ within, within, _whitening(z))

    @without_autocast()
    def distances(
        self, unit: Float[Tensor, "N P"], excluded: Int[Tensor, " N"] | None = None
    ) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """(N,) squared Mahalanobis distances to the nearest class, and (N,) to the Gaussian of all items.

        `excluded` holds the class to leave out for each item; if there is only one class, no class is left out.
        """
        z = (unit.detach().cpu().double() - self.center) @ self.basis
        to_classes = torch.cdist(z @ self.within, self.means)
        if excluded is not None and len(self.classes) > 1:
            to_classes = to_classes.masked_fill(excluded.cpu()[:, None] == self.classes, torch.inf)
        return to_classes.amin(1).square(), (z @ self.total).square().sum(1)


def _principal_components(centered: Tensor) -> Tensor:
    """(P, q) up to 256 directions of greatest variance, above rounding errors; the identity for P ≤ 256."""
    n_items, width = centered.shape
    if width <= COMPONENTS:
        return torch.eye(width, dtype=centered.dtype)
    from sklearn.utils.extmath import randomized_svd

    n_components = min(COMPONENTS, n_items)
    decompose: Any = randomized_svd
    _, sizes, rows = decompose(centered.float().numpy(), n_components, n_iter=2, random_state=0)
    rank = int((sizes > sizes[0] * width * torch.finfo(torch.float32).eps).sum())  # n centred rows: at most n - 1
    return torch.from_numpy(rows[: max(1, rank)].T.copy()).double()


def _whitening(centered: Tensor) -> Tensor:
    """W such that WWᵀ is the inverse of the shrunk covariance; the identity for rows without spread."""
    from sklearn.covariance import ledoit_wolf

    identity = torch.eye(centered.shape[1], dtype=centered.dtype)
    if not centered.any():
        return identity
    covariance = torch.from_numpy(ledoit_wolf(centered.numpy(), assume_centered=True)[0])
    ridge = _RIDGE * covariance.diagonal().mean()
    return torch.linalg.cholesky(torch.linalg.inv(covariance + ridge * identity))


@dataclass(frozen=True, eq=False)
class Reference:
    """Features of O known items, as unit vectors and lengths.

    Attributes:
        unit: (O, P) unit vectors; zeros stay zeros.
        labels: (O,) classes of the items; None without classes.
        lengths: (O,) lengths of the features; None if unknown.
        embeddings: (O, D) unit vectors after the network's last layer; None if unknown, or equal to `unit`.
        excluded: (N,) the class to leave out for each of N compared items, see `excluding`; None to compare with all.
    """

    unit: Float[Tensor, "O P"]
    labels: Int[Tensor, " O"] | None = None
    lengths: Float[Tensor, " O"] | None = None
    embeddings: Float[Tensor, "O D"] | None = None
    excluded: Int[Tensor, " N"] | None = None

    @classmethod
    def of(
        cls,
        features: Float[Tensor, "O P"],
        labels: Int[Tensor, " O"] | None = None,
        *,
        embeddings: Float[Tensor, "_ D"] | None = None,
    ) -> "Reference":
        """A reference from features, labels and embeddings of O items."""
        if len(features) == 0:
            raise ValueError("a reference must hold features of at least one item, got none")
        check_finite("reference features", features)
        features = features.detach().to(torch.promote_types(features.dtype, torch.float32))
        if labels is not None:
            check_length("labels", labels, "the reference features", len(features))
        unit = F.normalize(features)
        if embeddings is not None:
            if len(embeddings) != len(features):
                raise ValueError(f"embeddings must have a row for each of {len(features)} items, got {len(embeddings)}")
            check_finite("reference embeddings", embeddings)
            embeddings = F.normalize(embeddings)
            if embeddings.shape == unit.shape and (embeddings - unit.to(embeddings)).abs().max() <= _SAME_DIRECTION:
                embeddings = None
        return cls(unit, labels, features.norm(dim=1), embeddings)

    def excluding(self, classes: Int[Tensor, " N"]) -> "Reference":
        """The reference for N items that are compared only with items of other classes, as if their class were unseen.

        Covariances and the mean of all items still include the class. A class that `labels` lacks has no effect.
        """
        excluding = copy(self)  # with the cached Gaussians
        vars(excluding)["excluded"] = classes
        return excluding

    def is_excluded(self, rows: slice) -> Bool[Tensor, "R O"] | None:
        """Mask of the reference items to leave out for R compared items; None to compare with all."""
        if self.excluded is None or self.labels is None:
            return None
        return self.excluded[rows, None].to(self.labels.device) == self.labels

    def __len__(self) -> int:
        return len(self.unit)

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(part.nbytes for part in (self.unit, self.labels, self.lengths, self.embeddings) if part is not None)

    def directions_of(self, features: Float[Tensor, "N P"]) -> Float[Tensor, "N P"]:
        """(N, P) features of other items as unit vectors."""
        width = self.unit.shape[1]
        if features.shape[1] != width:
            raise ValueError(
                f"the reference has features of width {width}, these have {features.shape[1]}: give a reference by "
                "the same encoder"
            )
        return F.normalize(features)

    @cached_property
    def gaussians(self) -> "Gaussians":
        """The Gaussians of the classes and of all items together."""
        return Gaussians.of(self.unit, self.labels)

    @cached_property
    def exponent(self) -> float:
        """β of `radial_mahalanobis`; 1 if lengths are unknown or equal, or for fewer than 4 items."""
        if self.lengths is None or len(self) < 4:
            return 1.0
        if float(self.lengths.std(correction=0)) <= _SAME_LENGTH * float(self.lengths.mean()):
            return 1.0
        is_first = torch.randperm(len(self), generator=torch.Generator().manual_seed(0)) < len(self) // 2
        return min(EXPONENTS, key=lambda exponent: self._misfit(exponent, is_first))

    @cached_property
    def radial_gaussians(self) -> "Gaussians":
        """The Gaussians of φ/‖φ‖^β, with features φ and β = `exponent`."""
        return self.gaussians if self.exponent == 1 else Gaussians.of(self._scaled(self.exponent), self.labels)

    def _scaled(self, exponent: float) -> Tensor:
        lengths = torch.ones(len(self)) if self.lengths is None else self.lengths
        return self.unit * lengths.to(self.unit)[:, None] ** (1 - exponent)

    def _misfit(self, exponent: float, is_first: Tensor) -> float:
        """|log r|, with r = q/2 · variance/mean² of the squared distances between the halves; χ²_q has r = 1."""
        x, ratios = self._scaled(exponent), []
        for half in (is_first, ~is_first):
            gaussians = Gaussians.of(x[half], None if self.labels is None else self.labels[half])
            distances = gaussians.distances(x[~half])[0]
            ratio = distances.var(correction=0) / distances.mean().square().clamp(min=torch.finfo(x.dtype).tiny)
            ratios.append(float(ratio) * gaussians.basis.shape[1] / 2)
        return abs(math.log(max(sum(ratios) / 2, torch.finfo(torch.float64).tiny)))


def knn_distance(features: Float[Tensor, "N P"], reference: Reference, *, k: int = NEIGHBOUR) -> Float[Tensor, " N"]:
    """1 − cosine between an item's features and the k-th nearest reference features.

    For unit vectors u and v, it equals ½ ‖u − v‖², which keeps the digits that 1 − cosine loses near cosine 1.

    Source: Sun, Ming, Zhu and Li (2022).
    """
    check_neighbours(k, reference.unit)
    unit = reference.directions_of(features)
    return unit_knn_distance(unit, reference.unit.to(features), k=k, is_excluded=reference.is_excluded).to(features)


def mahalanobis(features: Float[Tensor, "N P"], reference: Reference) -> Float[Tensor, " N"]:
    """Squared Mahalanobis distance of u = φ/‖φ‖, for features φ, to the nearest class: min_c (u − μ_c)ᵀ Σ⁻¹ (u − μ_c).

    Σ is the covariance of the reference about the class means μ_c; without labels there is one class. More than 256
    dimensions are reduced to 256 principal components.

    Source: Lee, Lee, Lee and Shin (2018); Mueller and Hein (2025) for the unit vectors (MDS++).
    """
    return reference.gaussians.distances(reference.directions_of(features), reference.excluded)[0].to(features)


def relative_mahalanobis(features: Float[Tensor, "N P"], reference: Reference) -> Float[Tensor, " N"]:
    """`mahalanobis` minus `global_mahalanobis`, so that variation independent of the class cancels.

    Source: Ren, Fort, Liu, Roy, Padhy and Lakshminarayanan (2021); Mueller and Hein (2025) for the unit vectors
        (RMDS++).
    """
    nearest, together = reference.gaussians.distances(reference.directions_of(features), reference.excluded)
    return (nearest - together).to(features)


def global_mahalanobis(features: Float[Tensor, "N P"], reference: Reference) -> Float[Tensor, " N"]:
    """Squared Mahalanobis distance of u = φ/‖φ‖, for features φ, to the whole reference: (u − μ)ᵀ Σ⁻¹ (u − μ).

    μ and Σ are the mean and covariance of all reference items; labels are not needed.

    Source: Barkley, Culbertson and Fridovich-Keil (2026), arXiv 2605.05638; Mueller and Hein (2025) for the unit
        vectors.
    """
    return reference.gaussians.distances(reference.directions_of(features), reference.excluded)[1].to(features)


def radial_mahalanobis(features: Float[Tensor, "N P"], reference: Reference) -> Float[Tensor, " N"]:
    """`mahalanobis` of z = φ/‖φ‖^β: min_c (z − μ_c)ᵀ Σ⁻¹ (z − μ_c), with β from 0 (raw features) to 1 (unit vectors).

    The reference alone determines β (`Reference.exponent`), among 0, ¼, ½, ¾ and 1. For Gaussian data in q dimensions,
    the squared distance of an item to its class follows χ²_q, with a ratio variance / mean² of 2/q. lam chooses the β
    whose ratio is nearest to 2/q, for distances from each half of the reference to the classes of the other half.

    Source: Janiak, Binkowski and Kajdanowicz (2025), arXiv 2510.15202: the exponent, chosen by the spectrum and the
        local dimension of the features. Mueller and Hein (2025) show that varying lengths spoil the Gaussian.
    """
    lengths = features.norm(dim=1, keepdim=True)
    scaled = reference.directions_of(features) * lengths ** (1 - reference.exponent)
    return reference.radial_gaussians.distances(scaled, reference.excluded)[0].to(features)


@without_autocast()
def layer_change(
    features: Float[Tensor, "N P"],
    embeddings: Float[Tensor, "N D"],
    reference: Reference,
    *,
    k: int = LAYER_NEIGHBOURS,
) -> Float[Tensor, " N"]:
    """How much the network's last layer changes which items are near.

    The score is mean_(j ∈ E) cos(e, e_j) − mean_(j ∈ F) cos(e, e_j), for the item's embedding e and the embeddings e_j
    of the reference. E holds the k nearest reference items by embedding, F the k nearest by features.

    Source: Ozgur et al. (2026), arXiv 2601.05741, for the idea that the representation of a good face image changes
        little from layer to layer. They compare layers of one width; comparing neighbours allows any widths.

    Example:
        >>> reference = Reference.of(torch.eye(3), embeddings=torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))
        >>> layer_change(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.6, 0.8]]), reference, k=1)
        tensor([0.2000])
    """
    check_at_least("k", k, 1)
    if reference.embeddings is None:
        raise ValueError("the reference has no embeddings: give them to Reference.of, or leave this score out")
    if embeddings.shape[1] != (width := reference.embeddings.shape[1]):
        raise ValueError(f"the reference has embeddings of dimension {width}, these have {embeddings.shape[1]}")
    unit, k = reference.directions_of(features), min(k, len(reference))
    known, after, parts = reference.unit.to(unit), reference.embeddings.to(embeddings), []
    for rows in row_blocks(len(unit), len(reference), elements=_PRODUCTS, most=_BLOCK):
        item, cosines, products = unit[rows], embeddings[rows] @ after.T, unit[rows] @ known.T
        if (excluded := reference.is_excluded(rows)) is not None:
            cosines, products = cosines.masked_fill(excluded, -1.0), products.masked_fill(excluded, -torch.inf)
        before = cosines.gather(1, products.topk(k, dim=1).indices).sort(dim=1, descending=True).values
        change = cosines.topk(k, dim=1).values.double().mean(1) - before.double().mean(1)
        parts.append(change.clamp(min=0).masked_fill(item.isnan().any(1), torch.nan))
    return torch.cat(parts).to(features)


def mahalanobis_knn(to_class: Float[Tensor, " N"], to_item: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Logarithm of the product of `mahalanobis` and `knn_distance` of the same items.

    Source: Rajasekaran, Sajol, Berglind, Mukhopadhyay and Das (2024), CombOOD, for the idea to join a parametric and a
        non-parametric distance.
    """
    least = torch.finfo(torch.float64).tiny
    return (to_class.double().clamp(min=least).log() + to_item.double().clamp(min=least).log()).to(to_item)


@without_autocast()
def unit_knn_distance(
    features: Float[Tensor, "N P"],
    reference: Float[Tensor, "O P"],
    *,
    k: int,
    is_excluded: Callable[[slice], Tensor | None] = lambda rows: None,
) -> Float[Tensor, " N"]:
    """1 − cosine of unit vectors to the k-th nearest reference vector, float64; 2 if exclusion leaves fewer than k."""
    parts = []
    for rows in row_blocks(len(features), len(reference), elements=_PRODUCTS, most=_BLOCK):
        part, excluded = features[rows], is_excluded(rows)
        cosines = part @ reference.T
        cosines = cosines if excluded is None else cosines.masked_fill(excluded, -torch.inf)
        nearest = cosines.topk(k, dim=1)
        neighbour = reference[nearest.indices[:, -1]]
        distance = (part.double() - neighbour.double()).square().sum(1) / 2
        directed = part.any(1) & neighbour.any(1)  # the cosine of a zero vector counts as 0
        parts.append(torch.where(directed, distance, 1.0).masked_fill(nearest.values[:, -1] == -torch.inf, 2.0))
    return torch.cat(parts)


def check_neighbours(k: int, reference: Float[Tensor, "O P"]) -> None:
    """Reject a k below 1 or above the number of reference items."""
    check_at_least("k", k, 1)
    if len(reference) < k:
        raise ValueError(f"the reference must hold at least k = {k} items, got {len(reference)}")
