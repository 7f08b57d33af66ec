"""Curvatures of items as multiples of the identity plus outer products, and their positive parts.

In a sum over items, the negative curvature of one item cancels positive curvature of other items. `fix="projected"`
avoids this. An item's curvature is H_a = Σ_i λ_i q_i q_iᵀ, with eigenvalues λ_i and eigenvectors q_i; only its positive
part Σ_i max(λ_i, 0) q_i q_iᵀ enters the sum.

Source: Higham (1988), the nearest symmetric positive semi-definite matrix.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


class OuterProducts(NamedTuple):
    """Matrices w_a I + Σ_k (x_ak y_akᵀ + y_ak x_akᵀ) of items a."""

    identity: Float[Tensor, "*B N 1"]  # w
    left: Float[Tensor, "*#B N J D"]  # x
    right: Float[Tensor, "*B N J D"]  # y

    def diagonal(self) -> Float[Tensor, "*B N D"]:
        if self.left.shape[-2] == 1:
            return torch.addcmul(self.identity, self.left[..., 0, :], self.right[..., 0, :], value=2)
        return torch.add(self.identity, (self.left * self.right).sum(-2), alpha=2)

    def matrices(self) -> Float[Tensor, "*B N D D"]:
        products = self.left.mT @ self.right
        matrices = products + products.mT
        matrices.diagonal(dim1=-2, dim2=-1).add_(self.identity)
        return matrices

    def total(self) -> Float[Tensor, "*B D D"]:
        """Sum over the items, by one matmul for all outer products."""
        left, right = (part.flatten(-3, -2)[..., None, :, :] for part in (self.left, self.right))
        return OuterProducts(self.identity.sum(-2, keepdim=True), left, right).matrices().squeeze(-3)


def tangent(n: Float[Tensor, "N D"], weights: Float[Tensor, "*B N 1"]) -> OuterProducts:
    """w_a (I − n_a n_aᵀ): positive or negative semi-definite, depending on the sign of w_a."""
    return OuterProducts(weights, n[:, None], -(weights * n)[..., None, :] / 2)


def arccos(n: Float[Tensor, "N D"], m: Float[Tensor, "*B N D"]) -> OuterProducts:
    """c_a (I − 3 n_a n_aᵀ) + n_a m_aᵀ + m_a n_aᵀ, with c = n · m: r² times the second derivative of −c by f = r n."""
    c = (n * m).sum(-1, keepdim=True)
    return OuterProducts(c, n[:, None], torch.addcmul(m, c, n, value=-1.5)[..., None, :])


def positive_arccos(n: Float[Tensor, "N D"], m: Float[Tensor, "*B N D"]) -> OuterProducts:
    """`positive_part` of the matrices `arccos(n, m)`, without their eigendecomposition.

    With m = c n + q e, e a unit vector orthogonal to n, the matrix is c (I − n nᵀ) + q (n eᵀ + e nᵀ). Its eigenvalues
    orthogonal to n and e are c. In the plane of n and e, one eigenvalue is at most 0; the other is
    λ = (c + √(c² + 4q²))/2, with the eigenvector q n + λ e.
    """
    c = (n * m).sum(-1, keepdim=True)
    across = m - c * n
    q = across.norm(dim=-1, keepdim=True)
    e = across / q.where(q > 0, 1)
    eigenvalue = (c + (c.square() + 4 * q.square()).sqrt()) / 2
    direction = F.normalize(q * n + eigenvalue * e, dim=-1)
    rest = c.clamp(min=0)
    left = torch.stack([n.expand_as(e), e, direction], -2)
    return OuterProducts(rest, left, torch.stack([-rest, -rest, eigenvalue], -2) / 2 * left)


def positive_part(matrices: Float[Tensor, "*B D D"]) -> Float[Tensor, "*B D D"]:
    """Symmetric matrices with negative eigenvalues set to zero."""
    values, vectors = torch.linalg.eigh(matrices)
    return (vectors * values.clamp(min=0)[..., None, :]) @ vectors.mT
