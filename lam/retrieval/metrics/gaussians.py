"""`Gaussians` of classes of features, and the Mahalanobis distances to them."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lam.utils.autocast import without_autocast

COMPONENTS = 256
"""Number of principal components to which wider features are reduced."""
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
