"""Curvatures of SupCon, InfoNCE, AnInfoNCE and VarCon: softmaxes over all candidates, the negatives or centroids."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians.losses.base import required
from lam.hessians.losses.contrastive import cross_sum
from lam.hessians.losses.softmax import SOFTMAX_FIXES, Block, Derivatives, SoftmaxCurvature, Softmaxes, exponential
from lam.hessians.relations import Related, cost_of
from lam.pairs.candidates import Candidates
from lam.pairs.pairs import Pairs, class_centroids
from lam.utils.checks import check_positive


@dataclass(frozen=True)
class SupConCurvature(SoftmaxCurvature):
    """Curvature of −1/|P(a)| Σ_{p ∈ P(a)} log softmax_p(n_a · n_b / τ), averaged over items a with positive pairs P(a).

    n_a is the direction of item a's output. The candidates b are the other items of the batch. Unless `fix` is `full`,
    they can be `lam.pairs.Candidates`, such as a memory bank or second views. A repeated candidate counts twice; a
    candidate that is neither positive nor negative does not count. With second views as candidates, this is the
    curvature of InfoNCE with one view fixed.

    Source: Khosla et al. (2020), equation 2.

    Attributes:
        temperature: τ > 0. In a method's options, None stands for the temperature of its loss.
        split, fix, average: as for `SoftmaxCurvature`.

    Example:
        >>> pairs = Pairs.by_label(torch.tensor([0, 0, 1]))
        >>> SupConCurvature(0.5).diagonal(torch.eye(3), torch.ones(3, 1), pairs)[0]
        tensor([[0., 1., 1.]])
    """

    temperature: float | None = None

    fixes: ClassVar[tuple[str, ...]] = SOFTMAX_FIXES

    @property
    def terms(self) -> dict[str, float]:
        return {"matched item": 1.0}

    def counts(self, pairs: Any) -> tuple[int, ...]:
        return (pairs.n_matched,)

    def normaliser(self, block: Block) -> Float[Tensor, "N 1"]:
        # log 0 = −∞ removes items that are not candidates, such as the item itself, from the sum
        return (block.z + (block.positive + block.negative).log()).logsumexp(1, keepdim=True)

    def sums(self, block: Block, normaliser: Float[Tensor, "N 1"]) -> Float[Tensor, "N J"]:
        """Number of the anchor's positive pairs."""
        return block.positive.sum(1, keepdim=True)

    def derivatives(self, block: Block, normaliser: Float[Tensor, "N 1"], sums: Float[Tensor, "N J"]) -> Derivatives:
        """Derivatives of one cross-entropy, whose target gives equal shares to the positive pairs."""
        matched = (sums > 0).to(normaliser)  # an item without a positive pair has no loss
        p = matched * exponential(block.z - normaliser, block.positive + block.negative)
        return Derivatives(p, p / 2, p, block.positive / sums.where(sums > 0, 1) - p)

    def cross(
        self, inputs: Float[Tensor, "N F"], n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs | Candidates
    ) -> Float[Tensor, "T D F"]:
        """Second derivatives with respect to an anchor and its candidate, and to two candidates of one anchor.

        `lam.hessians.losses.softmax` defines ω, ε and η. For output i let x_ab = ∂z_ab/∂f_a,i and w_ab = ∂z_ab/∂f_b,i.
        With e_a = Σ_b ε x, h_a = Σ_b η x, E_a = Σ_b ε w φ_b and H_a = Σ_b η w φ_b, the sum at the logits is
        Σ_a 2 φ_a (Σ_b ω x w φ_b − e_a H_a − h_a E_a) − 2 E_a H_a: three matmuls.
        """
        items = self.of_batch(n, r, pairs)
        ((block, (weights, first, second, residual)),) = items.derivatives()
        along, total = block.along, inputs.new_empty(n.shape[1], inputs.shape[1])
        for i, (n_i, g_i) in enumerate(zip(n.T[..., None], items.gradients.T[..., None], strict=True)):
            x, w = (g_i.T - along * n_i) / r, (g_i - along * n_i.T) / r.T
            e, h = (first * x).sum(1, keepdim=True), (second * x).sum(1, keepdim=True)
            shared = ((weights * x - e * second - h * first) * w) @ inputs
            total[i] = 2 * (inputs * shared - ((first * w) @ inputs) * ((second * w) @ inputs)).sum(0)
        if self.split == "outputs":  # the gradient in the logits times the second derivative of a cosine
            total += cross_sum(inputs, n, r, (residual + residual.T) / (2 * self.tau))
        return total[None]


class AgainstNegatives:
    """The loss −log e^z_ap/(e^z_ap + Σ_n e^z_an) of each positive pair (a, p), with logits z and the negatives n of a.

    The softmax leaves out other positives. Let π_p be the probability of p, and q the softmax over the negatives alone.
    Let α_p = π_p(1 − π_p), β = Σ_p (1 − π_p) and γ = Σ_p (1 − π_p)². The sum of the losses over p has ω = α + βq,
    η = q, ε = α + γq/2 and t = (1 − π) − βq, as defined in `lam.hessians.losses.softmax`.
    """

    @property
    def terms(self) -> dict[str, float]:
        return {"positive pair": 1.0}

    def counts(self, pairs: Any) -> tuple[int, ...]:
        return (pairs.n_positives,)

    def normaliser(self, block: Block) -> Float[Tensor, "N 1"]:
        return (block.z + block.negative.log()).logsumexp(1, keepdim=True)

    def sums(self, block: Block, normaliser: Float[Tensor, "N 1"]) -> Float[Tensor, "N J"]:
        """β and γ."""
        missed = (normaliser - block.z).sigmoid()  # 1 − π, without the rounding of a difference from 1
        return torch.stack([(block.positive * missed).sum(1), (block.positive * missed.square()).sum(1)], 1)

    def derivatives(self, block: Block, normaliser: Float[Tensor, "N 1"], sums: Float[Tensor, "N J"]) -> Derivatives:
        beta, gamma, odds = sums[:, :1], sums[:, 1:], block.z - normaliser
        q = exponential(odds, block.negative)
        missed = block.positive * (-odds).sigmoid()  # π is a sigmoid: the positive pair against all negatives
        alpha = missed * odds.sigmoid()
        return Derivatives(alpha + beta * q, alpha + gamma / 2 * q, q, missed - beta * q)


@dataclass(frozen=True)
class InfoNCECurvature(AgainstNegatives, SupConCurvature):
    """Curvature of InfoNCE: the mean over positive pairs (a, p) of −log e^z_ap/(e^z_ap + Σ_n e^z_an), z = cosine/τ.

    The sum is over the negatives n of a. If each item has one positive pair, this is the curvature of SupCon.

    Source: van den Oord et al. (2018), equation 4; Chen et al. (2020), equation 1.

    Attributes: as `SupConCurvature`.
    """


@dataclass(frozen=True)
class AnInfoNCECurvature(AgainstNegatives, SoftmaxCurvature):
    """Curvature of AnInfoNCE: `InfoNCECurvature` with the logits z_ab = −Σ_d Λ_d (n_ad − n_bd)².

    n_a is the unit output of item a. The part of z_ab that depends only on n_a cancels in the softmax. The rest is
    n_a · g_b − β_b, with g_b = 2Λ n_b and β_b = Σ_d Λ_d n_bd². If all Λ_d are 1/(2τ), this is the curvature of InfoNCE.

    Source: Rusak et al. (2024), equation 3.

    Attributes:
        concentration: (D,) Λ > 0, the difference Λ⁺ − Λ⁻ of `lam.losses.AnInfoNCE`. In a method's options, None
            stands for the values that its loss learns.
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


@dataclass(frozen=True)
class VarConCurvature(SoftmaxCurvature):
    """Curvature of KL(q ‖ p) − log p_r, averaged over the items, with p the softmax of n · w_c/τ over the classes c.

    n is the item's direction, w_c the centroid of class c, and r the item's class. In the target q, class r is e^(1/τ₂)
    times as likely as each other class, with τ₂ = (τ − ε) + 2ε p_r. The curvature takes targets and centroids as fixed.

    Source: Wang et al. (2025), equations 7 to 13.

    Attributes:
        temperature: τ > 0. In a method's options, None stands for the temperature of its loss.
        epsilon: ε, between −τ and τ; no effect if `split` is `logits`. In a method's options, None stands for the
            value that its loss learns.
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
        self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], relation: Related, *, block_size: int, progress: bool
    ) -> Softmaxes:
        """Softmaxes over the centroids of the classes of a data set, in time linear in the number of items."""
        centroids, own = class_centroids(n, relation.labels)
        classes = torch.arange(len(centroids), device=n.device)

        def block(rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
            positive = own[rows, None] == classes[columns]
            return positive, ~positive

        cost = cost_of(len(n) * len(centroids), n.element_size() * n.numel())
        return Softmaxes(self, n, r.double(), 0, *self.similarity(centroids), block, block_size, cost)

    def counts(self, pairs: Any) -> tuple[int, ...]:
        """Number of items in at least one pair."""
        return (int(pairs.paired.sum()) if isinstance(pairs, Pairs) else pairs.size,)

    def normaliser(self, block: Block) -> Float[Tensor, "N 1"]:
        return block.z.logsumexp(1, keepdim=True)

    def sums(self, block: Block, normaliser: Float[Tensor, "N 1"]) -> Float[Tensor, "N J"]:
        """For each item: p_r, the number of other classes, and whether the item is in a pair (1 or 0)."""
        own, others = exponential(block.z - normaliser, block.positive).sum(1), (1 - block.positive).sum(1)
        return torch.stack([own, others, block.positive.sum(1)], 1)

    def derivatives(self, block: Block, normaliser: Float[Tensor, "N 1"], sums: Float[Tensor, "N J"]) -> Derivatives:
        """Derivatives of the sum of the cross-entropies with q and with the one-hot class y.

        Up to a constant, the loss is this sum. It has ω = 2p, ε = η = p and t = y + q − 2p, as
        `lam.hessians.losses.softmax` defines them.
        """
        temperature, epsilon = self.tau, required("epsilon", self.epsilon)
        _, n_others, counted = sums.split(1, 1)
        p = counted * (block.z - normaliser).exp()
        # The bound keeps 1/τ₂ finite, as in the loss.
        softness = (temperature - epsilon + 2 * epsilon * sums[:, :1]).clamp(min=1e-3 * temperature)
        q_own = (1 / softness - n_others.log()).sigmoid()
        q = torch.where(block.positive > 0, q_own, (1 - q_own) / n_others.clamp(min=1))
        return Derivatives(2 * p, p, p, counted * (block.positive + q) - 2 * p)
