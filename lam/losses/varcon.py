"""The variational supervised contrastive loss: items against the centroids of the batch's classes."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.losses.base import TrainableLoss
from lam.pairs.pairs import Pairs, class_centroids
from lam.utils.checks import check_positive


class VarCon(TrainableLoss):
    """Mean over items of KL(q ‖ p) − log p_r, with r the item's class.

    p is the softmax of z·w_c/τ₁ over the classes c of the batch. z is the embedding; the `class_centroids` w_c have no
    gradient. In the target q, class r has odds e^(1/τ₂) against each other class, with τ₂ = (τ₁ − ε) + 2ε p_r. If
    ε > 0, an item with a larger p_r has a softer target. Training learns ρ in ε = τ₁ tanh ρ, so ε lies within ±τ₁, and
    τ₂ is positive. If a miner chose pairs, the mean is over the items in these pairs; centroids are means of all items.

    Source: Wang et al. (2025), "Variational supervised contrastive learning", equations 7 to 13 and appendix C.1. In
    figure 3b, a fixed ε = 0.02 is best at τ₁ = 0.1.

    Args:
        temperature: τ₁ > 0.
        epsilon: initial ε, within ±τ₁; by default τ₁ / 5.
        learn: whether ε is learned.
        margin: as for `TrainableLoss`.

    Raises:
        ValueError: for a setting outside its range.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> loss = VarCon(temperature=1.0, epsilon=0.0)
        >>> loss(embeddings, Pairs.by_label(torch.tensor([0, 0, 1])))
        tensor(0.3133, grad_fn=<MeanBackward0>)
    """

    curvature = "varcon"
    needs_classes = True

    def __init__(
        self, temperature: float = 0.1, epsilon: float | None = None, *, learn: bool = True, margin: float | None = None
    ) -> None:
        super().__init__(margin)
        check_positive("temperature", temperature)
        epsilon = temperature / 5 if epsilon is None else epsilon
        if not abs(epsilon) < temperature:
            raise ValueError(f"epsilon must lie within ±temperature, {temperature}, got {epsilon}")
        self.temperature, self.start = temperature, epsilon
        self.raw = nn.Parameter(torch.tensor(math.atanh(epsilon / temperature)), requires_grad=learn)

    @property
    def epsilon(self) -> Float[Tensor, ""]:
        """ε = τ₁ tanh ρ."""
        return self.temperature * self.raw.tanh()

    def learned(self) -> dict[str, list[float]]:
        """ε."""
        return {"epsilon": [self.epsilon.item()]}

    def extra_repr(self) -> str:
        learn = self.raw.requires_grad
        return f"temperature={self.temperature}, epsilon={self.start}, learn={learn}, margin={self.margin}"

    def _compute(self, embeddings: Tensor, pairs: Pairs) -> Tensor:
        centroids, own = class_centroids(embeddings.detach(), pairs.labels)
        pairs.check_positives()
        counted = pairs.paired
        if not counted.any():
            return 0 * embeddings.sum()
        log_p = (embeddings @ centroids.to(embeddings).T / self.temperature).log_softmax(1)
        log_own = log_p.gather(1, own[:, None])[:, 0]
        softness = self.temperature - self.epsilon + 2 * self.epsilon * log_own.exp()
        sharpness = 1 / softness.clamp(min=1e-3 * self.temperature)
        n_others = max(len(centroids) - 1, 1)
        log_q_own = -F.softplus(math.log(n_others) - sharpness)  # e^(1/τ₂) overflows for a small τ₂
        log_q_other = log_q_own - sharpness
        if len(centroids) == 1:
            return -log_own[counted].mean()
        q_own, q_other = log_q_own.exp(), log_q_other.exp()
        divergence = q_own * (log_q_own - log_own) + q_other * (n_others * log_q_other - (log_p.sum(1) - log_own))
        return (divergence - log_own)[counted].mean()
