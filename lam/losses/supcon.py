"""The supervised contrastive loss of Khosla et al."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lam.losses.base import TemperatureLoss, weighted_mean
from lam.losses.infonce import log_weighted_sum
from lam.pairs.pairs import Pairs


class SupCon(TemperatureLoss):
    """Mean over anchors a of −1/|P(a)| Σ_p log softmax_p(z_a·z_b / τ), with the softmax over all other items b.

    z_a is the embedding of a, and P(a) are the items p that match a; an item without a match is not an anchor.

    Source: Khosla et al. (2020), equation 2.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> SupCon(temperature=1.0)(embeddings, Pairs.by_label(torch.tensor([0, 0, 1])))
        tensor(0.3133)
    """

    curvature = "supcon"

    def _compute(self, embeddings: Tensor, pairs: Pairs) -> Tensor:
        pairs.check_positives()
        return weighted_mean(*self.of_anchors(embeddings, pairs))

    def of_anchors(
        self, embeddings: Float[Tensor, "N D"], pairs: Pairs
    ) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]:
        """The loss of each item, and whether the item has a loss; only items with a positive pair have one."""
        logits = embeddings @ embeddings.T / self.temperature
        positive = pairs.positive.to(logits.dtype)
        others = positive + pairs.negative.to(logits.dtype)
        log_probability = logits - log_weighted_sum(logits, others)[:, None]
        counts = positive.sum(1)
        return -(positive * log_probability).sum(1) / torch.where(counts > 0, counts, 1), counts > 0
