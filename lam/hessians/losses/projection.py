"""The positive part of an item's curvature: the nearest matrix without negative eigenvalues.

What is clipped from the diagonal of a sum loses more: a positive direction that is no axis counts less there for every
negative one beside it. Here each H_a = Σ_i λ_i q_i q_iᵀ becomes Σ_i max(λ_i, 0) q_i q_iᵀ before anything is summed.

Source: Higham (1988), the nearest symmetric positive semi-definite matrix.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


def positive_part(matrices: Float[Tensor, "*B D D"]) -> Float[Tensor, "*B D D"]:
    """Symmetric matrices with their negative eigenvalues set to zero."""
    values, vectors = torch.linalg.eigh(matrices)
    return (vectors * values.clamp(min=0)[..., None, :]) @ vectors.mT


class OuterProducts(NamedTuple):
    """Matrices w_a I + Σ_k s_ak x_ak x_akᵀ.

    Attributes:
        identity: (N, 1) w.
        scales: (N, J) s.
        vectors: (N, J, D) x.
    """

    identity: Float[Tensor, "N 1"]
    scales: Float[Tensor, "N J"]
    vectors: Float[Tensor, "N J D"]

    def diagonal(self) -> Float[Tensor, "N D"]:
        """The diagonal of each."""
        return self.identity + (self.scales[..., None] * self.vectors.square()).sum(1)

    def matrices(self) -> Float[Tensor, "N D D"]:
        """Each of them."""
        identity = torch.eye(self.vectors.shape[-1]).to(self.vectors)
        return self.identity[..., None] * identity + (self.scales[..., None] * self.vectors).mT @ self.vectors

    def total(self) -> Float[Tensor, "D D"]:
        """Their sum."""
        identity = torch.eye(self.vectors.shape[-1]).to(self.vectors)
        return self.identity.sum() * identity + (self.scales[..., None] * self.vectors).flatten(0, 1).T @ (
            self.vectors.flatten(0, 1)
        )


def positive_tangent(n: Float[Tensor, "N D"], weights: Float[Tensor, "N 1"]) -> OuterProducts:
    """Positive part of w_a (I − n_a n_aᵀ)."""
    weights = weights.clamp(min=0)
    return OuterProducts(weights, -weights, n[:, None])


def positive_arccos(n: Float[Tensor, "N D"], m: Float[Tensor, "N D"]) -> OuterProducts:
    """Positive part of c_a (I − 3 n_a n_aᵀ) + n_a m_aᵀ + m_a n_aᵀ, with c = n · m, without eigenvalues of any (D, D).

    With m = c n + q e, e a unit vector across n, it is c (I − n nᵀ) + q (n eᵀ + e nᵀ): c where both are zero, and in
    their plane a positive and a negative eigenvalue, of which λ = (c + √(c² + 4q²))/2 has the direction q n + λ e.
    """
    c = (n * m).sum(1, keepdim=True)
    across = m - c * n
    q = across.norm(dim=1, keepdim=True)
    e = across / q.where(q > 0, 1)
    eigenvalue = (c + (c.square() + 4 * q.square()).sqrt()) / 2
    direction = torch.nn.functional.normalize(q * n + eigenvalue * e)
    rest = c.clamp(min=0)
    return OuterProducts(rest, torch.cat([-rest, -rest, eigenvalue], 1), torch.stack([n, e, direction], 1))
