"""How far features are from those of known items: `Reference`, and the distances to it.

A higher value means more doubt. Only directions count: features enter as unit vectors.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lam.utils.autocast import without_autocast
from lam.utils.checks import check_at_least, check_finite, check_length

NEIGHBOUR = 5
"""The k of the k-NN score, unless another is asked for."""
COMPONENTS = 256
"""To how many principal components wider features are reduced before a covariance is inverted."""
_BLOCK, _PRODUCTS = 512, 2**25  # items and cosines that are held at once, at most
_RIDGE = 1e-7  # of the mean variance, for components in which nothing varies


@dataclass(frozen=True, eq=False)
class Reference:
    """Features of O known items, as unit vectors.

    Attributes:
        unit: (O, P) unit vectors; zeros stay zeros. `Reference.of` makes them.
        labels: (O,) their classes; None where they have none.
    """

    unit: Float[Tensor, "O P"]
    labels: Int[Tensor, " O"] | None = None

    @classmethod
    def of(cls, features: Float[Tensor, "O P"], labels: Int[Tensor, " O"] | None = None) -> "Reference":
        """Take the directions of features.

        Raises:
            ValueError: for no item, features that are not finite, or labels of another length.
        """
        if len(features) == 0:
            raise ValueError("a reference must hold features of at least one item, got none")
        check_finite("reference features", features)
        if labels is not None:
            check_length("labels", labels, "the reference features", len(features))
        return cls(F.normalize(features), labels)

    def __len__(self) -> int:
        return len(self.unit)

    def directions_of(self, features: Float[Tensor, "N P"]) -> Float[Tensor, "N P"]:
        """(N, P) unit vectors of other items' features, to be compared with these.

        Raises:
            ValueError: for features of another width.
        """
        width = self.unit.shape[1]
        if features.shape[1] != width:
            raise ValueError(
                f"the reference has features of width {width}, these have {features.shape[1]}: it is of another "
                "encoder; give features of training items by this one"
            )
        return F.normalize(features)

    @cached_property
    def gaussians(self) -> "Gaussians":
        """The Gaussians of the classes and of all items together."""
        return Gaussians.of(self.unit, self.labels)


@dataclass(frozen=True, eq=False)
class Gaussians:
    """A Gaussian for each class, of one covariance, and one for all items together, in q principal components.

    Attributes:
        center: (P,) mean of all items.
        basis: (P, q) the components.
        means: (C, q) of the classes, whitened by `within`.
        within: (q, q) W with WWᵀ the inverse covariance of items about the means of their classes.
        total: (q, q) the same about the mean of all.
    """

    center: Float[Tensor, " P"]
    basis: Float[Tensor, "P q"]
    means: Float[Tensor, "C q"]
    within: Float[Tensor, "q q"]
    total: Float[Tensor, "q q"]

    @classmethod
    def of(cls, unit: Float[Tensor, "O P"], labels: Int[Tensor, " O"] | None = None) -> "Gaussians":
        """Learn them from items; without labels all items are of one class.

        Covariances are shrunk as Ledoit and Wolf (2004) have it, so that fewer items than components suffice.
        """
        x = unit.detach().cpu().double()
        center = x.mean(0)
        basis = _principal_components(x - center)
        z = (x - center) @ basis
        classes = (
            torch.zeros(len(z), dtype=torch.int64) if labels is None else labels.cpu().unique(return_inverse=True)[1]
        )
        count = classes.bincount().double()
        means = torch.zeros(len(count), z.shape[1], dtype=z.dtype).index_add_(0, classes, z) / count[:, None]
        within = _whitening(z - means[classes])
        return cls(center, basis, means @ within, within, _whitening(z))

    @without_autocast()
    def distances(self, unit: Float[Tensor, "N P"]) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
        """(N,) squared Mahalanobis distances of unit vectors to the nearest class, and (N,) to all items together."""
        z = (unit.detach().cpu().double() - self.center) @ self.basis
        nearest = torch.cdist(z @ self.within, self.means).amin(1).square()
        return nearest, (z @ self.total).square().sum(1)


def knn_distance(features: Float[Tensor, "N P"], reference: Reference, *, k: int = NEIGHBOUR) -> Float[Tensor, " N"]:
    """1 − cosine to the k-th nearest reference feature.

    ½ ‖u − v‖² in float64 for unit vectors u and v, the neighbour v being found in the type of the features: 1 − cosine
    has few digits where the cosine is near 1.

    Source: Sun, Ming, Zhu and Li (2022).

    Args:
        features: (N, P) of the items.
        reference: of O ≥ k known items.
        k: which neighbour, counted from 1.

    Returns:
        (N,) distances in [0, 2], in the type of the features.

    Raises:
        ValueError: where k is below 1, or the reference holds fewer than k items, or is of another width.

    Example:
        >>> reference = Reference.of(torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]]))
        >>> knn_distance(torch.tensor([[3.0, 0.0]]), reference, k=2)
        tensor([1.])
    """
    check_neighbours(k, reference.unit)
    return unit_knn_distance(reference.directions_of(features), reference.unit.to(features), k=k).to(features)


def mahalanobis(features: Float[Tensor, "N P"], reference: Reference) -> Float[Tensor, " N"]:
    """Squared Mahalanobis distance of the unit vector u = φ/‖φ‖ to the nearest class: min_c (u − μ_c)ᵀ Σ⁻¹ (u − μ_c).

    Σ is the covariance of the reference about the means of their classes; where the reference has no labels, all of it
    is one class. More than 256 dimensions are reduced to as many principal components.

    Source: Lee, Lee, Lee and Shin (2018); Mueller and Hein (2025) for the unit vectors (MDS++).

    Returns:
        (N,) distances, in the type of the features.

    Raises:
        ValueError: where the reference is of another width.
    """
    return reference.gaussians.distances(reference.directions_of(features))[0].to(features)


def relative_mahalanobis(features: Float[Tensor, "N P"], reference: Reference) -> Float[Tensor, " N"]:
    """`mahalanobis` less the squared distance to all of the reference as one Gaussian: what the classes alone explain.

    Source: Ren, Fort, Liu, Roy, Padhy and Lakshminarayanan (2021); Mueller and Hein (2025) for the unit vectors
    (RMDS++).

    Returns:
        (N,) differences, in the type of the features.

    Raises:
        ValueError: where the reference is of another width.
    """
    nearest, together = reference.gaussians.distances(reference.directions_of(features))
    return (nearest - together).to(features)


def mahalanobis_knn(to_class: Float[Tensor, " N"], to_item: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Logarithm of the product of `mahalanobis` and `knn_distance`: a product has no scale to choose between the two.

    Source: Rajasekaran, Sajol, Berglind, Mukhopadhyay and Das (2024), CombOOD, for the idea to join a parametric and a
    non-parametric distance.

    Args:
        to_class: (N,) `mahalanobis`.
        to_item: (N,) `knn_distance` of the same items.

    Returns:
        (N,) logarithms, in the type of the distances.
    """
    least = torch.finfo(torch.float64).tiny
    return (to_class.double().clamp(min=least).log() + to_item.double().clamp(min=least).log()).to(to_item)


@without_autocast()
def unit_knn_distance(
    features: Float[Tensor, "N P"], reference: Float[Tensor, "O P"], *, k: int
) -> Float[Tensor, " N"]:
    """1 − cosine of unit vectors of one type to the k-th nearest of the reference, in float64.

    By products of matrices: for one vector as fast as FAISS, for many several times faster.
    """
    parts = []
    for part in features.split(max(1, min(_BLOCK, _PRODUCTS // len(reference)))):
        neighbour = reference[(part @ reference.T).topk(k, dim=1).indices[:, -1]]
        distance = (part.double() - neighbour.double()).square().sum(1) / 2
        directed = part.any(1) & neighbour.any(1)  # the cosine of zero to anything counts as 0
        parts.append(torch.where(directed, distance, 1.0))
    return torch.cat(parts)


def check_neighbours(k: int, reference: Float[Tensor, "O P"]) -> None:
    """Refuse a k that is below 1, or a reference of fewer than k items."""
    check_at_least("k", k, 1)
    if len(reference) < k:
        raise ValueError(f"the reference must hold at least k = {k} items, got {len(reference)}")


def _principal_components(centered: Tensor) -> Tensor:
    """(P, q) the directions of greatest variance; all where they are few, none that is rounding."""
    n_items, width = centered.shape
    if width <= COMPONENTS:
        return torch.eye(width, dtype=centered.dtype)
    from sklearn.utils.extmath import randomized_svd

    n_components = min(COMPONENTS, n_items)
    decompose: Any = randomized_svd
    _, sizes, rows = decompose(centered.float().numpy(), n_components, n_iter=2, random_state=0)
    rank = int((sizes > sizes[0] * width * torch.finfo(torch.float32).eps).sum())  # n items about their mean: n - 1
    return torch.from_numpy(rows[: max(1, rank)].T.copy()).double()


def _whitening(centered: Tensor) -> Tensor:
    """W with WWᵀ the inverse of the shrunk covariance; the identity where there is no spread."""
    from sklearn.covariance import ledoit_wolf

    identity = torch.eye(centered.shape[1], dtype=centered.dtype)
    if not centered.any():
        return identity
    covariance = torch.from_numpy(ledoit_wolf(centered.numpy(), assume_centered=True)[0])
    ridge = _RIDGE * covariance.diagonal().mean()
    return torch.linalg.cholesky(torch.linalg.inv(covariance + ridge * identity))
