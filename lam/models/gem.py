"""Generalised-mean pooling, between mean and maximum, with a learned exponent."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lam.utils.checks import check_positive


class GeM(nn.Module):
    """Generalised mean of every channel of a feature map.

    f_c = (1/(HW) Σ_hw max(x_chw, ε)^p)^(1/p); p = 1 is the mean, p → ∞ the maximum. It is computed by logarithms in
    float32 or wider: a large p does not overflow, and a channel without activation has a finite gradient.

    Source: Radenović, Tolias and Chum (2018), "Fine-tuning CNN image retrieval with no human annotation", equation 3.

    Args:
        p: initial exponent, positive; one learned exponent for all channels.
        eps: ε > 0, the floor of activations.

    Example:
        >>> pooled = GeM(p=2.0)(torch.tensor([[[[1.0, 7.0]]]]))
        >>> pooled.shape, round(pooled.item(), 4)
        (torch.Size([1, 1]), 5.0)
    """

    def __init__(self, *, p: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__()
        check_positive("p of GeM", p)
        check_positive("eps of GeM", eps)
        self.p = nn.Parameter(torch.tensor(float(p)))
        self.eps = eps

    def forward(self, maps: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C"]:
        """Generalised means (N, C) of feature maps (N, C, H, W) of any size, in their type."""
        wide = torch.promote_types(maps.dtype, torch.float32)
        p = self.p.to(wide)
        logarithms = maps.to(wide).clamp(min=self.eps).flatten(2).log()
        pooled = (torch.logsumexp(p * logarithms, dim=2) - math.log(logarithms.shape[2])) / p
        return pooled.exp().to(maps.dtype)
