"""`Spread`: covariances of the outputs of N items under a posterior."""

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lam.vmf.embeddings import projected_resultant

LEAST_VARIANCE = 1e-20
"""Least variance of samples, in units of the output's squared length (1 for an output of length zero). It gives samples
of a zero output random directions; variances of posteriors are far larger."""


class Spread(ABC):
    """The `covariance` (N, D, D) of the outputs of N items."""

    @property
    @abstractmethod
    def variance(self) -> Float[Tensor, "N D"]:
        """Diagonals of the covariance matrices."""

    @property
    def total(self) -> Float[Tensor, " N"]:
        """Traces of the covariance matrices."""
        return self.variance.sum(1)

    @abstractmethod
    def samples(self, center: Float[Tensor, "N D"], noise: Float[Tensor, "S 1 D"], least: Float[Tensor, "N 1"]) -> Any:
        """Samples (S, N, D) of the outputs, float64, or the `MeanResultant` of their directions.

        The samples are made from `noise`, with a variance ≥ `least` in every direction.
        """


@dataclass(frozen=True)
class AxisSpread(Spread):
    """U diag(v) Uᵀ: variances along axes that all items share."""

    variances: Float[Tensor, "N D"]  # v
    axes: Float[Tensor, "D D"] | None = None  # U, orthonormal columns; None for the coordinate axes

    @property
    def covariance(self) -> Float[Tensor, "N D D"]:
        if self.axes is None:
            return torch.diag_embed(self.variances)
        return (self.axes * self.variances[:, None]) @ self.axes.T

    @property
    def variance(self) -> Float[Tensor, "N D"]:
        return self.variances if self.axes is None else self.variances @ self.axes.square().T

    @property
    def total(self) -> Float[Tensor, " N"]:
        return self.variances.sum(1)

    def samples(self, center: Float[Tensor, "N D"], noise: Float[Tensor, "S 1 D"], least: Float[Tensor, "N 1"]) -> Any:
        # In these axes covariances are diagonal, so `projected_resultant` needs no (S, N, D) samples; rotated noise
        # makes the result independent of the axes' signs.
        axes = None if self.axes is None else self.axes.double()
        center = center.double() if axes is None else center.double() @ axes
        noise = noise[:, 0] if axes is None else noise[:, 0] @ axes
        length = projected_resultant(center, torch.maximum(self.variances.double(), least), noise)
        return length if axes is None else replace(length, mean=length.mean @ axes.T)


@dataclass(frozen=True)
class FullSpread(Spread):
    """Arbitrary covariances."""

    covariance: Float[Tensor, "N D D"]  # float64

    @property
    def variance(self) -> Float[Tensor, "N D"]:
        return self.covariance.diagonal(dim1=1, dim2=2)

    def samples(self, center: Float[Tensor, "N D"], noise: Float[Tensor, "S 1 D"], least: Float[Tensor, "N 1"]) -> Any:
        least = least[:, 0] + 1e-14 * self.total  # rounding could leave a singular covariance without a Cholesky factor
        factor = torch.linalg.cholesky(self.covariance + torch.diag_embed(least[:, None].expand_as(self.variance)))
        return center.double() + torch.einsum("nij,sj->sni", factor, noise[:, 0])


def sum_along(
    slopes: Float[Tensor, "K N D"], inputs: Float[Tensor, "K N F"], variance: Float[Tensor, "D F"]
) -> Float[Tensor, " N"]:
    """Variance of Σ_k g_kᵀ θ φ_k for independent weights θ with variances v: Σ_ij v_ij (Σ_k g_ki φ_kj)², float64."""
    slopes, inputs, variance = slopes.double(), inputs.double(), variance.double()
    total = inputs.new_zeros(inputs.shape[1])
    for k, m in itertools.product(range(len(slopes)), repeat=2):
        total += (((inputs[k] * inputs[m]) @ variance.T) * slopes[k] * slopes[m]).sum(1)
    return total.clamp(min=0)


def share_of(contributions: Float[Tensor, "*B"], chosen: Bool[Tensor, "*B"]) -> float:
    """Sum of the chosen contributions over the sum of all; contributions are ≥ 0, and 0/0 counts as 0."""
    least = torch.finfo(contributions.dtype).tiny
    return float(contributions[chosen].sum() / contributions.sum().clamp(min=least))


def least_variance(f: Float[Tensor, "N D"]) -> Float[Tensor, "N 1"]:
    """`LEAST_VARIANCE` times each output's squared length; `LEAST_VARIANCE` for an output of length zero."""
    square = f.double().square().sum(1, keepdim=True)
    return LEAST_VARIANCE * square.where(square > 0, 1)
