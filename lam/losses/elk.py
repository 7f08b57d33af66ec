"""The expected likelihood kernel of two von Mises-Fisher distributions as the similarity of InfoNCE."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lam.losses.distributions import DistributionLoss
from lam.losses.infonce import mean_cross_entropy
from lam.pairs.pairs import Pairs
from lam.utils.checks import check_positive
from lam.vmf.bessel import log_normalizer


class ELK(DistributionLoss):
    """InfoNCE with the similarity κ_pos log ∫ vMF(z; μ₁, κ₁) vMF(z; μ₂, κ₂) dz, without sampling.

    Source: Kirchhof, Kasneci and Oh (2023), equation 55; Kirchhof et al. (2022), "A non-isotropic probabilistic take on
    proxy-based deep metric learning", for the closed form.

    Args:
        kappa_pos: factor of the similarity, > 0: the inverse of a temperature.

    Example:
        >>> mean, kappa = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([8.0, 8.0, 8.0])
        >>> ELK(kappa_pos=1.0)(mean, kappa, Pairs.by_label(torch.tensor([0, 0, 1])))
        tensor(0.0109)
    """

    def __init__(self, kappa_pos: float = 1.0) -> None:
        super().__init__()
        check_positive("kappa_pos", kappa_pos)
        self.kappa_pos = kappa_pos

    def curvature(self, dimension: int, kappa: float) -> dict[str, Any]:
        """The curvature of InfoNCE at 1/τ = κ κ_pos/2, a close pair's derivative of similarity by cosine at large κ."""
        return {"name": "infonce", "temperature": 2 / (self.kappa_pos * kappa)}

    def _compute(self, mean: Tensor, kappa: Tensor, pairs: Pairs, generator: torch.Generator | None) -> Tensor:
        first, second = ((pairs.positive != 0) | (pairs.negative != 0)).nonzero(as_tuple=True)
        similarity = log_expected_likelihood(mean[first], kappa[first], mean[second], kappa[second])
        logits = similarity.new_zeros(len(mean), len(mean)).index_put((first, second), self.kappa_pos * similarity)
        return mean_cross_entropy(logits, pairs)


def log_expected_likelihood(
    mean: Float[Tensor, "*#B D"],
    kappa: Float[Tensor, "*#B"],
    other_mean: Float[Tensor, "*#B D"],
    other_kappa: Float[Tensor, "*#B"],
) -> Float[Tensor, "*B"]:
    """log ∫ vMF(z; μ₁, κ₁) vMF(z; μ₂, κ₂) dz = log C(κ₁) + log C(κ₂) − log C(‖κ₁μ₁ + κ₂μ₂‖), computed in float64.

    C is the density's normaliser. With κ₃ = ‖κ₁μ₁ + κ₂μ₂‖ and L = log C + κ, the code computes
    L₁ + L₂ − L₃ − κ₁κ₂‖μ₁ − μ₂‖² / (κ₁ + κ₂ + κ₃), in which no large terms cancel.
    """
    dimension, dtype = mean.shape[-1], torch.promote_types(mean.dtype, kappa.dtype)
    first, second = kappa.double(), other_kappa.double()
    square = (mean.double() - other_mean.double()).square().sum(-1)
    total = ((first + second).square() - first * second * square).clamp(min=1e-12).sqrt()
    gap = first * second * square / (first + second + total)
    normalizers = [log_normalizer(dimension, k, scaled=True) for k in (first, second, total)]
    return (normalizers[0] + normalizers[1] - normalizers[2] - gap).to(dtype)
