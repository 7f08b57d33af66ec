"""Curvature of VarCon, which compares items with fixed centroids of classes."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians.losses.base import required
from lam.hessians.losses.softmax import Block, Derivatives, SoftmaxCurvature, Softmaxes, exponential
from lam.hessians.relations import Related, cost_of
from lam.pairs.candidates import Candidates
from lam.pairs.pairs import Pairs, class_centroids


@dataclass(frozen=True)
class VarConCurvature(SoftmaxCurvature):
    """Curvature of KL(q ‖ p) − log p_r, averaged over the items, with p the softmax of n · w_c/τ over the classes c.

    n is the item's direction, w_c the centroid of class c, and r the item's class. In the target q, class r has odds
    e^(1/τ₂) against each other class, with τ₂ = (τ − ε) + 2ε p_r. Target and centroids are fixed. So, up to a constant,
    the loss sums the cross-entropies with q and with the one-hot class y: ω = 2p, ε = η = p and t = y + q − 2p.

    Source: Wang et al. (2025), equations 7 to 13.

    Attributes:
        temperature: τ > 0. In a method's options, None means the temperature of the loss.
        epsilon: ε, between −τ and τ; no effect if `split` is `logits`. In a method's options, None means the value that
            the loss learns.
        split, fix, average: as for `SoftmaxCurvature`.

    Example:
        >>> pairs = Pairs.by_label(torch.tensor([0, 0, 1]))
        >>> VarConCurvature(0.5, 0.1).diagonal(torch.eye(3), torch.ones(3, 1), pairs).shape
        torch.Size([3, 1, 3])
    """

    temperature: float | None = None
    epsilon: float | None = None

    takes_candidates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature is not None and self.epsilon is not None and not abs(self.epsilon) < self.temperature:
            raise ValueError(f"epsilon must lie within ±temperature, {self.temperature}, got {self.epsilon}")

    def of_batch(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs | Candidates) -> Softmaxes:
        """Softmaxes over the centroids of the classes of a batch."""
        centroids, own = class_centroids(n, getattr(pairs, "labels", None))
        positive = (own[:, None] == torch.arange(len(centroids), device=n.device)).to(n)
        counted = pairs.paired[:, None].to(n) if isinstance(pairs, Pairs) else 1.0
        return self.over(centroids, n, r, counted * positive, counted * (1 - positive))

    def over_dataset(
        self,
        n: Float[Tensor, "N D"],
        r: Float[Tensor, "N 1"],
        relation: Related,
        *,
        block_size: int,
        progress: bool,
    ) -> Softmaxes:
        """Softmaxes over the centroids of the classes of a data set: linear in the number of items."""
        centroids, own = class_centroids(n, relation.labels)
        classes = torch.arange(len(centroids), device=n.device)

        def block(rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
            positive = own[rows, None] == classes[columns]
            return positive, ~positive

        cost = cost_of(len(n) * len(centroids), n.element_size() * n.numel())
        return Softmaxes(self, n, r.double(), 0, *self.similarity(centroids), block, block_size, cost)

    def counts(self, pairs: Any) -> tuple[int, ...]:
        """Number of items that belong to any pair."""
        return (int(pairs.paired.sum()) if isinstance(pairs, Pairs) else pairs.size,)

    def normaliser(self, block: Block) -> Float[Tensor, "N 1"]:
        return block.z.logsumexp(1, keepdim=True)

    def sums(self, block: Block, normaliser: Float[Tensor, "N 1"]) -> Float[Tensor, "N J"]:
        """p_r, the number of other classes, and 1 if the item belongs to any pair, else 0."""
        own, others = exponential(block.z - normaliser, block.positive).sum(1), (1 - block.positive).sum(1)
        return torch.stack([own, others, block.positive.sum(1)], 1)

    def derivatives(self, block: Block, normaliser: Float[Tensor, "N 1"], sums: Float[Tensor, "N J"]) -> Derivatives:
        """Derivatives of the sum of two cross-entropies; see the class."""
        temperature, epsilon = self.tau, required("epsilon", self.epsilon)
        _, n_others, counted = sums.split(1, 1)
        p = counted * (block.z - normaliser).exp()
        # The bound keeps 1/τ₂ finite, as in the loss.
        softness = (temperature - epsilon + 2 * epsilon * sums[:, :1]).clamp(min=1e-3 * temperature)
        q_own = (1 / softness - n_others.log()).sigmoid()
        q = torch.where(block.positive > 0, q_own, (1 - q_own) / n_others.clamp(min=1))
        return Derivatives(2 * p, p, p, counted * (block.positive + q) - 2 * p)
