"""Curvature of AnInfoNCE: InfoNCE with a distance that weights each dimension by its own concentration."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians.losses.base import required
from lam.hessians.losses.softmax import SoftmaxCurvature
from lam.hessians.losses.supcon import AgainstNegatives
from lam.utils.checks import check_positive


@dataclass(frozen=True)
class AnInfoNCECurvature(AgainstNegatives, SoftmaxCurvature):
    """Curvature of the `AgainstNegatives` loss with logits z_ab = −Σ_d Λ_d (n_ad − n_bd)², a mean over positive pairs.

    n_a is the unit output of item a. The part of z_ab that depends only on n_a cancels in the softmax. The rest is
    n_a · g_b − β_b, with g_b = 2Λ n_b and β_b = Σ_d Λ_d n_bd². If all Λ_d are 1/(2τ), this is the curvature of InfoNCE.

    Source: Rusak et al. (2024), equation 3.

    Attributes:
        concentration: (D,) Λ > 0, the difference Λ⁺ − Λ⁻ of `lam.losses.AnInfoNCE`. In a method's options, None means
            the value that the loss learns.
        split, fix, average: as for `SoftmaxCurvature`.

    Example:
        >>> AnInfoNCECurvature((0.5, 5.0)).concentration
        (0.5, 5.0)
    """

    concentration: tuple[float, ...] | list[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.concentration is not None:
            for value in self.concentration:
                check_positive("concentration", value)
            object.__setattr__(self, "concentration", tuple(self.concentration))

    def similarity(self, directions: Float[Tensor, "O D"]) -> tuple[Float[Tensor, "O D"], Float[Tensor, " O"]]:
        """g_b = 2Λ n_b and β_b = n_bᵀ Λ n_b."""
        concentration = required("concentration", self.concentration)
        if len(concentration) != directions.shape[1]:
            n_given, dimension = len(concentration), directions.shape[1]
            raise ValueError(f"concentration must have {dimension} numbers, one for each dimension, got {n_given}")
        weighted = directions * torch.tensor(concentration, dtype=torch.float64).to(directions)
        return 2 * weighted, (weighted * directions).sum(1)
