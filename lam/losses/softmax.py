"""Losses with a softmax of similarities, and the log ratios of positive pairs to negatives that they share."""

import math
from collections.abc import Sequence
from numbers import Real

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from lam.losses.base import TemperatureLoss, TrainableLoss, weighted_mean
from lam.pairs.pairs import Pairs, class_centroids
from lam.utils.autocast import without_autocast
from lam.utils.checks import check_at_least, check_positive


class InfoNCE(TemperatureLoss):
    """Mean over positive pairs (a, p) of −log e^(z_a·z_p/τ) / (e^(z_a·z_p/τ) + Σ_n e^(z_a·z_n/τ)).

    z_a is the embedding of a, and the sum is over the negatives n of a. With two views of each item, this is NT-Xent.
    Unlike in SupCon, the denominator leaves out other items of the pair's class.

    Source: Chen et al. (2020), "A simple framework for contrastive learning of visual representations", equation 1;
    van den Oord, Li and Vinyals (2018).

    Attributes: as in `lam.losses.TemperatureLoss`.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> InfoNCE(temperature=1.0)(embeddings, Pairs.by_label(torch.tensor([0, 0, 1])))
        tensor(0.3133)
    """

    curvature = "infonce"

    def _compute(self, embeddings: Tensor, pairs: Pairs) -> Tensor:
        pairs.check_positives()
        return mean_cross_entropy(embeddings @ embeddings.T / self.temperature, pairs)


def mean_cross_entropy(logits: Float[Tensor, "N N"], pairs: Pairs) -> Float[Tensor, ""]:
    """Mean over positive pairs of minus `log_ratios`; zero without a positive pair."""
    ratios, weights = log_ratios(logits, pairs)
    return -weighted_mean(ratios, weights)


def log_ratios(
    logits: Float[Tensor, "*S N N"], pairs: Pairs
) -> tuple[Float[Tensor, "*S pairs"], Shaped[Tensor, " pairs"]]:
    """log e^l_ap / (e^l_ap + Σ_n w_an e^l_an) of all positive pairs (a, p), and the weights of these pairs.

    l are the logits. The sum is over the negatives n of a, with their weights w; without negatives the ratio is 1.
    """
    negatives = log_weighted_sum(logits, pairs.negative)
    anchor, positive = pairs.positive.nonzero(as_tuple=True)
    own = logits[..., anchor, positive]
    return own - torch.logaddexp(own, negatives[..., anchor]), pairs.positive[anchor, positive]


def log_weighted_sum(logits: Float[Tensor, "*S R N"], weights: Shaped[Tensor, "R N"]) -> Float[Tensor, "*S R"]:
    """log Σ_n w_an e^l_an of each row a; if all weights are 0, a low finite number whose exponential rounds to 0."""
    nothing = torch.finfo(logits.dtype).min / 2  # finite: the gradient of −∞ − (−∞) is NaN
    log_weights = weights.to(logits).clamp(min=1e-30).log()
    return torch.where(weights > 0, logits + log_weights, nothing).logsumexp(-1)


class SupCon(TemperatureLoss):
    """Mean over anchors a of −1/|P(a)| Σ_p log softmax_p(z_a·z_b / τ), with the softmax over all other items b.

    z_a is the embedding of a, and P(a) are the items p that match a; an item without a match is not an anchor.

    Source: Khosla et al. (2020), equation 2.

    Attributes: as in `lam.losses.TemperatureLoss`.

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
        """Loss of each item, and whether the item has one: it needs a positive pair."""
        logits = embeddings @ embeddings.T / self.temperature
        positive = pairs.positive.to(logits.dtype)
        others = positive + pairs.negative.to(logits.dtype)
        log_probability = logits - log_weighted_sum(logits, others)[:, None]
        counts = positive.sum(1)
        return -(positive * log_probability).sum(1) / torch.where(counts > 0, counts, 1), counts > 0


class AnInfoNCE(TrainableLoss):
    """InfoNCE with the similarity −Σ_d Λ_d (x_d − y_d)² of embeddings x and y, with a learned Λ.

    If the embeddings are a rotation of the latent variables, Λ_d is the concentration of positive pairs along d. For
    unit embeddings and Λ_d = 1/(2τ), the loss is InfoNCE at temperature τ. Λ = Λ⁺ − Λ⁻: Λ⁺ > 0 is the learned
    concentration of positive pairs, and Λ⁻ is the fixed concentration of negatives near their anchor. An ensemble sums
    the losses of M members; each member has its own Λ and its own pairs of the same items.

    Source: Rusak et al. (2024), "InfoNCE: identifying the gap between theory and practice", equation 3, corollaries B.1
    and B.2.

    Args:
        dimension: embedding dimensions D.
        concentration: initial Λ⁺ of all dimensions.
        n_members: number of members M.
        negatives: (D,) Λ⁻ ≥ 0, below `concentration`. The default 0 is for negatives drawn evenly from all items.
        margin: as for `TrainableLoss`.

    Raises:
        ValueError: for a setting outside its range or of another length.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> loss = AnInfoNCE(2, concentration=0.5)
        >>> loss(embeddings, Pairs.by_label(torch.tensor([0, 0, 1]))).detach()
        tensor(0.3133)
    """

    curvature = "aninfonce"

    def __init__(
        self,
        dimension: int,
        concentration: float = 5.0,
        *,
        n_members: int = 1,
        negatives: Tensor | None = None,
        margin: float | None = None,
    ) -> None:
        super().__init__(margin)
        check_at_least("dimension", dimension, 1)
        check_at_least("n_members", n_members, 1)
        if not isinstance(concentration, Real):
            raise ValueError(f"concentration must be one number, initially for all dimensions, got {concentration}")
        check_positive("concentration", concentration)
        negatives = torch.zeros(dimension) if negatives is None else negatives
        if negatives.shape != (dimension,) or not (negatives.isfinite() & (negatives >= 0)).all():
            raise ValueError(f"negatives must be {dimension} concentrations, finite and at least 0, got {negatives}")
        if (negatives >= concentration).any():
            raise ValueError(f"negatives must be below concentration, {concentration:g}, got {negatives.tolist()}")
        self.start = concentration
        self.log_concentration = nn.Parameter(torch.full((n_members, dimension), concentration).log())
        self.register_buffer("negatives", negatives.to(self.log_concentration))

    @property
    def concentration(self) -> Float[Tensor, "M D"]:
        """Λ⁺ of each member."""
        return self.log_concentration.exp()

    @classmethod
    def configured(cls, *, margin: float, temperature: float, dimension: int | None) -> "AnInfoNCE":
        """The loss that starts as InfoNCE at this temperature: Λ = 1/(2τ)."""
        if dimension is None:
            raise ValueError("aninfonce has a weight for each dimension: give dimension=D of the embeddings")
        check_positive("temperature", temperature)
        return cls(dimension, 1 / (2 * temperature), margin=margin)

    def learned(self) -> dict[str, list[float]]:
        """Λ = Λ⁺ − Λ⁻ of all members, one after the other."""
        return {"concentration": (self.concentration - self.get_buffer("negatives")).flatten().tolist()}

    def extra_repr(self) -> str:
        n_members, dimension = self.log_concentration.shape
        negatives = self.get_buffer("negatives").tolist()
        return f"{dimension}, {self.start}, n_members={n_members}, negatives={negatives}, margin={self.margin}"

    def _compute(self, embeddings: Tensor, pairs: Pairs) -> Tensor:
        return self.of_members(embeddings, [pairs])

    def of_members(self, embeddings: Float[Tensor, "N D"], pairs: Sequence[Pairs]) -> Float[Tensor, ""]:
        """Sum of the losses of all members, each with its own pairs of the same items.

        Raises:
            ValueError: for another number of members, items or dimensions, or a member without a positive pair.
        """
        n_members = len(self.log_concentration)
        if len(pairs) != n_members:
            raise ValueError(f"pairs must be given for each of {n_members} members, got {len(pairs)}: call of_members")
        for pairs_of_member in pairs:
            pairs_of_member.check_positives()
        terms = [self.of_member(embeddings, pairs_of_member, number) for number, pairs_of_member in enumerate(pairs)]
        return torch.stack(terms).sum()

    @without_autocast()
    def of_member(self, embeddings: Float[Tensor, "N D"], pairs: Pairs, number: int) -> Float[Tensor, ""]:
        """Loss of the member `number`, counted from 0, for pairs of these items; 0 without a positive pair."""
        embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        dimension = self.log_concentration.shape[1]
        if embeddings.shape[1] != dimension:
            raise ValueError(f"embeddings must have {dimension} dimensions, as Λ has, got {embeddings.shape[1]}")
        pairs.check_size(len(embeddings))
        weight = (self.concentration[number] - self.get_buffer("negatives")).to(embeddings)
        square = (embeddings.square() * weight).sum(1)
        cross = (embeddings * weight) @ embeddings.T
        return mean_cross_entropy(2 * cross - square[:, None] - square, pairs)


class VarCon(TrainableLoss):
    """Mean over items of KL(q ‖ p) − log p_r, with r the item's class.

    p is the softmax of z·w_c/τ₁ over the classes c of the batch, with the embedding z and the centroids w_c, which have
    no gradient. In the target q, class r is e^(1/τ₂) times as likely as each other class, with τ₂ = (τ₁ − ε) + 2ε p_r.
    If ε > 0, an item with a larger p_r has a softer target. Training learns ρ in ε = τ₁ tanh ρ, so ε lies within ±τ₁,
    and τ₂ is positive. If a miner chose pairs, the mean is over the items in these pairs; the centroids use all items.

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
