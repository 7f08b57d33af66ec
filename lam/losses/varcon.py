"""The variational supervised contrastive loss: items against the centroids of their batch's classes."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from lam.losses.base import TrainableLoss
from lam.pairs.pairs import Pairs, check_label_vector
from lam.utils.checks import check_positive


class VarCon(TrainableLoss):
    """Mean over items of KL(q ‖ p) − log p_r, r being an item's class; linear in the number of items.

    p is the softmax of z·w_c/τ₁ over the classes c of the batch, w_c the direction of the mean of class c, without
    gradient. The target q has e^(1/τ₂) to 1 in favour of r, with τ₂ = (τ₁ − ε) + 2ε p_r: the surer an item, the softer
    its target. ε is learned; as τ₁ tanh ρ it lies within ±τ₁, so that τ₂ is positive. A class of one item is its own
    centroid; a class whose mean is shorter than 1e-4 has a shorter reference. Where a miner chose pairs, the
    mean is over the items that stand in one; the centroids are of all items.

    Source: Wang et al. (2025), "Variational supervised contrastive learning", equations 7 to 13 and appendix C.1; of
    its figure 3b, ε = 0.02 is the best at τ₁ = 0.1, where it is fixed.

    Args:
        temperature: τ₁ > 0.
        epsilon: ε at the beginning, within ±τ₁; by default τ₁ / 5.
        learn: whether ε is learned.
        margin: of `TrainableLoss`.

    Raises:
        ValueError: for a temperature that is not positive, a margin outside (0, 2], or an ε outside ±τ₁.

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
        """The settings."""
        learn = self.raw.requires_grad
        return f"temperature={self.temperature}, epsilon={self.start}, learn={learn}, margin={self.margin}"

    def _compute(self, embeddings: Tensor, pairs: Pairs) -> Tensor:
        if pairs.labels is None:
            raise ValueError(
                "varcon takes classes, and pairs by distance, or of indices alone, have none: train on labels"
            )
        pairs.check_positives()
        counted = pairs.paired
        if not counted.any():
            return 0 * embeddings.sum()
        return self.of_labels(embeddings, pairs.labels, counted)

    def of_labels(
        self,
        embeddings: Float[Tensor, "N D"],
        labels: Shaped[Tensor, " N"],
        counted: Bool[Tensor, " N"] | None = None,
    ) -> Float[Tensor, ""]:
        """The loss of unit embeddings and their classes, without any pairs.

        Args:
            embeddings: (N, D) unit rows.
            labels: (N,) their classes.
            counted: (N,) which items the mean is over, at least one; all by default. Centroids are of all of them.

        Raises:
            ValueError: for labels that are not N integers, or no item at all.
        """
        check_label_vector(labels)
        if len(labels) != len(embeddings) or len(labels) == 0:
            raise ValueError(f"labels must be one of each item, at least one, got {len(labels)} for {len(embeddings)}")
        chosen = slice(None) if counted is None else counted
        centroids, own = class_centroids(embeddings, labels)
        log_p = (embeddings @ centroids.to(embeddings).T / self.temperature).log_softmax(1)
        log_own = log_p.gather(1, own[:, None])[:, 0]
        softness = self.temperature - self.epsilon + 2 * self.epsilon * log_own.exp()
        sharpness = 1 / softness.clamp(min=1e-3 * self.temperature)
        n_others = max(len(centroids) - 1, 1)
        log_q_own = -F.softplus(math.log(n_others) - sharpness)  # e^(1/τ₂) overflows where τ₂ is small
        log_q_other = log_q_own - sharpness
        if len(centroids) == 1:
            return -log_own[chosen].mean()
        q_own, q_other = log_q_own.exp(), log_q_other.exp()
        divergence = q_own * (log_q_own - log_own) + q_other * (n_others * log_q_other - (log_p.sum(1) - log_own))
        return (divergence - log_own)[chosen].mean()


def class_centroids(
    embeddings: Float[Tensor, "N D"], labels: Shaped[Tensor, " N"]
) -> tuple[Float[Tensor, "C D"], Shaped[Tensor, " N"]]:
    """Directions of the mean of each class that has items, without gradient, and the number of each item's class."""
    classes, own = labels.unique(return_inverse=True)
    rows = embeddings.detach()
    sums = rows.new_zeros(len(classes), rows.shape[1]).index_add_(0, own, rows)
    return F.normalize(sums / own.bincount(minlength=len(classes))[:, None], eps=1e-4), own
