"""Curvature of the losses that are cross-entropies under a softmax of similarities: SupCon, InfoNCE and their kin.

The logits of an anchor a are z_ab = n_a · g_b − β_b over its candidates b, with g_b = n_b/τ for cosines over a
temperature. In the output f_a they have the derivatives u_ab = (I − n_a n_aᵀ) g_b/r_a. A loss that is convex in z has
the second derivative diag(ω_a) − ε_a η_aᵀ − η_a ε_aᵀ in z_a and the gradient −t_a, and so, in f_a, the curvature

    split at the logits     Σ_b ω_ab u_ab u_abᵀ − e_a h_aᵀ − h_a e_aᵀ,  e_a = Σ_b ε_ab u_ab,  h_a = Σ_b η_ab u_ab:
                            positive semi-definite
    split at the outputs    the same and [c_a (I − 3 n_a n_aᵀ) + n_a m_aᵀ + m_a n_aᵀ]/r_a², with m_a = Σ_b t_ab g_b
                            and c_a = n_a · m_a: all of the second derivative

Of one cross-entropy with probabilities p and targets y that sum to 1, ω = p, η = p, ε = p/2 and t = y − p. Diagonals
are matmuls of (N, M) by (M, D): an (N, M, D) or (N, D, D) array is never made.

Source: Schraudolph (2002) for the split; Khosla et al. (2020) and Chen et al. (2020) for the losses.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians.losses.base import Curvature
from lam.hessians.losses.contrastive import BLOCK_ELEMENTS, cross_sum, own_curvature, own_matrices, own_total
from lam.pairs.candidates import Candidates
from lam.pairs.pairs import Pairs
from lam.utils.checks import check_choice, check_positive

SoftmaxSplit = Literal["logits", "outputs"]
SoftmaxFix = Literal["fixed", "full"]
SOFTMAX_SPLITS: tuple[str, ...] = get_args(SoftmaxSplit)
SOFTMAX_FIXES: tuple[str, ...] = get_args(SoftmaxFix)


@dataclass(frozen=True)
class Logits:
    """What the logits z_ab = n_a · g_b − β_b of a batch are made of.

    Attributes:
        gradients: (M, D) g_b.
        offsets: (M,) β_b.
        positive: (N, M) weights of the candidates that match.
        negative: (N, M) weights of those that do not; one that is in neither does not count.
    """

    gradients: Float[Tensor, "M D"]
    offsets: Float[Tensor, " M"]
    positive: Float[Tensor, "N M"]
    negative: Float[Tensor, "N M"]


class Derivatives(NamedTuple):
    """The second derivative diag(ω) − ε ηᵀ − η εᵀ of each anchor's loss in its logits, and minus the first, t.

    Attributes:
        weights: (N, M) ω.
        first: (N, M) ε.
        second: (N, M) η.
        residual: (N, M) t.
    """

    weights: Float[Tensor, "N M"]
    first: Float[Tensor, "N M"]
    second: Float[Tensor, "N M"]
    residual: Float[Tensor, "N M"]


class Moments(NamedTuple):
    """Sums over the candidates of each anchor, from which the diagonal of its curvature follows.

    Attributes:
        square: (N, D) Σ_b ω g².
        along: (N, D) Σ_b ω (n · g) g.
        first: (N, D) Σ_b ε g.
        second: (N, D) Σ_b η g.
        residual: (N, D) m = Σ_b t g.
    """

    square: Float[Tensor, "N D"]
    along: Float[Tensor, "N D"]
    first: Float[Tensor, "N D"]
    second: Float[Tensor, "N D"]
    residual: Float[Tensor, "N D"]


@dataclass(frozen=True, kw_only=True)
class SoftmaxCurvature(Curvature):
    """What the curvatures of all losses with a softmax over candidates share; see the module.

    `fixed` differentiates the loss of each anchor in its own output, with the candidates held still; `full`, where a
    loss has it, in the outputs of the candidates, too. Split at the logits nothing is ever negative.

    Attributes:
        split: where loss∘network is split: `logits`; or `outputs`, for the whole second derivative.
        fix: which terms are kept: `fixed` or `full`.
        average: whether h is averaged over what the loss is a mean over, or is a plain sum.

    Raises:
        ValueError: for settings outside their range.
    """

    split: SoftmaxSplit = "logits"
    fix: SoftmaxFix = "fixed"
    average: bool = True

    fixes: ClassVar[tuple[str, ...]] = ("fixed",)

    def __post_init__(self) -> None:
        check_choice("split", self.split, SOFTMAX_SPLITS)
        check_choice("fix", self.fix, self.fixes)

    @property
    def has_cross_terms(self) -> bool:
        """Whether candidates are differentiated, too."""
        return self.fix == "full"

    @abstractmethod
    def logits(self, n: Float[Tensor, "N D"], pairs: Pairs | Candidates) -> Logits:
        """What the softmax of N unit outputs is over."""

    @abstractmethod
    def normaliser(
        self, z: Float[Tensor, "N M"], positive: Float[Tensor, "N M"], negative: Float[Tensor, "N M"]
    ) -> Float[Tensor, "N 1"]:
        """Logarithm of a sum of exponentials over some candidates of each anchor, which their probabilities need."""

    @abstractmethod
    def sums(
        self, z: Float[Tensor, "N M"], normaliser: Float[Tensor, "N 1"], positive: Float[Tensor, "N M"]
    ) -> Float[Tensor, "N K"]:
        """K sums over the candidates of each anchor, which the derivatives need."""

    @abstractmethod
    def derivatives(
        self,
        z: Float[Tensor, "N M"],
        normaliser: Float[Tensor, "N 1"],
        sums: Float[Tensor, "N K"],
        positive: Float[Tensor, "N M"],
        negative: Float[Tensor, "N M"],
    ) -> Derivatives:
        """Derivatives of each anchor's loss in some of its logits, from `normaliser` and `sums` over all of them."""

    def diagonal(
        self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs | Candidates
    ) -> Float[Tensor, "N T D"]:
        """Second derivatives of each item's own loss, the candidates held still."""
        return self.of_moments(n, r, self._moments(n, self.logits(n, pairs))[0])[:, None]

    def in_basis(
        self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs | Candidates, basis: Float[Tensor, "D D"]
    ) -> Float[Tensor, "N T D"]:
        """The diagonal of rotated outputs and candidates."""
        self._check_matrices()
        logits, turned = self.logits(n, pairs), n @ basis
        moments, _ = self._moments(turned, replace(logits, gradients=logits.gradients @ basis))
        return self.of_moments(turned, r, moments)[:, None]

    def matrices(
        self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs | Candidates
    ) -> Float[Tensor, "N T D D"]:
        """The matrices whose diagonals `diagonal` has."""
        self._check_matrices()
        logits = self.logits(n, pairs)
        moments, derivatives = self._moments(n, logits)
        g = logits.gradients
        blocks = derivatives.weights.split(max(1, BLOCK_ELEMENTS // g.numel()))
        second = torch.cat([(weights[:, None] * g.T) @ g for weights in blocks])
        mixed = moments.first[:, :, None] * moments.second[:, None]
        projection = torch.eye(n.shape[1]).to(n) - n[:, :, None] * n[:, None]
        matrices = projection @ (second - mixed - mixed.mT) @ projection / r.square()[..., None]
        if self.split == "outputs":
            matrices = matrices + own_matrices("arccos", n, r, r, moments.residual)
        return matrices[:, None]

    def total(
        self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs | Candidates
    ) -> Float[Tensor, "T D D"]:
        """Σ_a H_a, from arrays of (N, M), (N, D), (M, D) and (D, D) alone."""
        self._check_matrices()
        logits = self.logits(n, pairs)
        moments, derivatives = self._moments(n, logits)
        g, scale = logits.gradients, r.square().reciprocal()
        first, second = (projected(n, mean) for mean in (moments.first, moments.second))
        mixed = (scale * n).T @ moments.along + (scale * first).T @ second
        total = (derivatives.weights.T @ scale * g).T @ g - mixed - mixed.T
        total = total + (scale * dot(n, moments.along) * n).T @ n
        if self.split == "outputs":
            total = total + own_total("arccos", n, r, r, moments.residual)
        return total[None]

    def of_moments(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], moments: Moments) -> Float[Tensor, "N D"]:
        """The diagonal of each anchor's curvature."""
        squares = projected_squares(n, moments.square, moments.along)
        diagonal = squares - 2 * projected(n, moments.first) * projected(n, moments.second)
        diagonal = diagonal.clamp(min=0) / r.square()  # below 0 by rounding alone
        if self.split == "logits":
            return diagonal
        return diagonal + own_curvature("arccos", n, r, r, moments.residual)

    def _derivatives(self, n: Tensor, logits: Logits) -> tuple[Derivatives, Float[Tensor, "N M"]]:
        """The derivatives, and n_a · g_b."""
        along = n @ logits.gradients.T
        z, positive, negative = along - logits.offsets, logits.positive, logits.negative
        normaliser = self.normaliser(z, positive, negative)
        return self.derivatives(z, normaliser, self.sums(z, normaliser, positive), positive, negative), along

    def _moments(self, n: Tensor, logits: Logits) -> tuple[Moments, Derivatives]:
        derivatives, along = self._derivatives(n, logits)
        return moments_of(derivatives, along, logits.gradients), derivatives

    def _check_matrices(self) -> None:
        if self.fix == "full":
            raise ValueError("fix must be fixed for matrices of the outputs of single items, got 'full': it joins them")


@dataclass(frozen=True)
class SupConCurvature(SoftmaxCurvature):
    """Curvature of the mean over items a with positive pairs of −1/|P(a)| Σ_{p ∈ P(a)} log softmax_p(n_a · n / τ).

    Candidates are the other items of the batch, or, with `fixed`, `lam.pairs.Candidates`: a memory bank, a second view.
    One that is listed twice counts twice, one that is neither a positive nor a negative pair does not count. With
    the second view of each item, this is the curvature of InfoNCE with one side held still, as in CLIP.

    Source: Khosla et al. (2020), equation 2.

    Attributes:
        temperature: τ > 0. None in the options of a method: that of the loss.
        split, fix, average: of `SoftmaxCurvature`.

    Raises:
        ValueError: for settings outside their range.

    Example:
        >>> pairs = Pairs.by_label(torch.tensor([0, 0, 1]))
        >>> SupConCurvature(0.5).diagonal(torch.eye(3), torch.ones(3, 1), pairs)[0]
        tensor([[0., 1., 1.]])
    """

    temperature: float | None

    fixes: ClassVar[tuple[str, ...]] = SOFTMAX_FIXES
    takes_candidates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("temperature", self.temperature)

    @property
    def terms(self) -> dict[str, float]:
        """The items with a positive pair."""
        return {"matched item": 1.0}

    def counts(self, pairs: Pairs | Candidates) -> tuple[int, ...]:
        """How many items have a positive pair."""
        return (pairs.n_matched,)

    def logits(self, n: Float[Tensor, "N D"], pairs: Pairs | Candidates) -> Logits:
        """Cosines over the temperature."""
        held_still = isinstance(pairs, Candidates)
        directions = pairs.directions.to(n) if held_still else n
        if directions.shape[1] != n.shape[1]:
            raise ValueError(f"candidates must have {n.shape[1]} dimensions, got {directions.shape[1]}")
        if held_still and self.fix == "full":
            raise ValueError("fix must be fixed where candidates are held still, got 'full'")
        offsets = n.new_zeros(len(directions))
        return Logits(directions / self._tau, offsets, pairs.positive.to(n), pairs.negative.to(n))

    def normaliser(
        self, z: Float[Tensor, "N M"], positive: Float[Tensor, "N M"], negative: Float[Tensor, "N M"]
    ) -> Float[Tensor, "N 1"]:
        """Over all candidates."""
        return (z + (positive + negative).log()).logsumexp(1, keepdim=True)

    def sums(
        self, z: Float[Tensor, "N M"], normaliser: Float[Tensor, "N 1"], positive: Float[Tensor, "N M"]
    ) -> Float[Tensor, "N K"]:
        """The number of positive pairs."""
        return positive.sum(1, keepdim=True)

    def derivatives(
        self,
        z: Float[Tensor, "N M"],
        normaliser: Float[Tensor, "N 1"],
        sums: Float[Tensor, "N K"],
        positive: Float[Tensor, "N M"],
        negative: Float[Tensor, "N M"],
    ) -> Derivatives:
        """Those of one cross-entropy, whose targets are the shares of the positive pairs."""
        matched = (sums > 0).to(z)
        p = matched * exponential(z - normaliser, positive + negative)
        return Derivatives(p, p / 2, p, positive / sums.where(sums > 0, 1) - p)

    def diagonal(
        self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs | Candidates
    ) -> Float[Tensor, "N T D"]:
        """Second derivatives of each item's own loss and, with `full`, of those that it is a candidate of."""
        diagonal = super().diagonal(n, r, pairs)
        if not self.has_cross_terms:
            return diagonal
        logits = self.logits(n, pairs)
        (weights, _, _, residual), along = self._derivatives(n, logits)
        g = logits.gradients  # those of the items themselves, so that along is symmetric
        of_others = projected_squares(n, weights.T @ g.square(), (weights * along).T @ g) / r.square()
        if self.split == "outputs":
            of_others = of_others + own_curvature("arccos", n, r, r, residual.T @ g)
        return diagonal + of_others[:, None]

    def cross(
        self, inputs: Float[Tensor, "N F"], n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs | Candidates
    ) -> Float[Tensor, "T D F"] | None:
        """What anchors share with their candidates, and these with one another; None where they are held still.

        With x_ab = ∂z_ab/∂f_a,i, w_ab = ∂z_ab/∂f_b,i, e = Σ_b ε x, h = Σ_b η x, E = Σ_b ε w φ_b and H = Σ_b η w φ_b it
        is, for each output i, Σ_a 2 φ_a (Σ_b ω x w φ_b − e_a H_a − h_a E_a) − 2 E_a H_a: three matmuls.
        """
        if not self.has_cross_terms:
            return None
        logits = self.logits(n, pairs)
        (weights, first, second, residual), along = self._derivatives(n, logits)
        total = inputs.new_empty(n.shape[1], inputs.shape[1])
        for i, (n_i, g_i) in enumerate(zip(n.T[..., None], logits.gradients.T[..., None], strict=True)):
            x, w = (g_i.T - along * n_i) / r, (g_i - along * n_i.T) / r.T
            e, h = (first * x).sum(1, keepdim=True), (second * x).sum(1, keepdim=True)
            shared = ((weights * x - e * second - h * first) * w) @ inputs
            total[i] = 2 * (inputs * shared - ((first * w) @ inputs) * ((second * w) @ inputs)).sum(0)
        if self.split == "outputs":
            total += cross_sum(inputs, n, r, (residual + residual.T) / (2 * self._tau))
        return total[None]

    def working_dtype(self, features: Tensor) -> torch.dtype:
        """The type to compute in: where the cross terms cancel most of the rest, float32 would lose its digits."""
        return super().working_dtype(features) if self.fix == "fixed" else torch.float64

    @property
    def _tau(self) -> float:
        if self.temperature is None:
            raise ValueError("temperature must be positive, got None: give one")
        return self.temperature


@dataclass(frozen=True)
class InfoNCECurvature(SupConCurvature):
    """Curvature of the mean over positive pairs (a, p) of −log e^z_ap/(e^z_ap + Σ_n e^z_an), n negatives.

    Each positive pair is a softmax of its own, in which other positive pairs have no part. With π_p the probability of
    p, q that of the negatives among themselves, α_p = π_p(1 − π_p), β = Σ_p (1 − π_p) and γ = Σ_p (1 − π_p)² it has
    ω = α + βq, η = q, ε = α + γq/2 and t = (1 − π) − βq. With one positive pair an item it is that of SupCon.

    Source: van den Oord et al. (2018), equation 4; Chen et al. (2020), equation 1.

    Attributes, Raises: as `SupConCurvature`.
    """

    @property
    def terms(self) -> dict[str, float]:
        """The positive pairs."""
        return {"positive pair": 1.0}

    def counts(self, pairs: Pairs | Candidates) -> tuple[int, ...]:
        """The number of positive pairs."""
        return (pairs.n_positives,)

    def normaliser(
        self, z: Float[Tensor, "N M"], positive: Float[Tensor, "N M"], negative: Float[Tensor, "N M"]
    ) -> Float[Tensor, "N 1"]:
        """Over the negatives."""
        return (z + negative.log()).logsumexp(1, keepdim=True)

    def sums(
        self, z: Float[Tensor, "N M"], normaliser: Float[Tensor, "N 1"], positive: Float[Tensor, "N M"]
    ) -> Float[Tensor, "N K"]:
        """β and γ."""
        missed = (normaliser - z).sigmoid()
        return torch.stack([(positive * missed).sum(1), (positive * missed.square()).sum(1)], 1)

    def derivatives(
        self,
        z: Float[Tensor, "N M"],
        normaliser: Float[Tensor, "N 1"],
        sums: Float[Tensor, "N K"],
        positive: Float[Tensor, "N M"],
        negative: Float[Tensor, "N M"],
    ) -> Derivatives:
        """Those of all positive pairs together."""
        beta, gamma = sums[:, :1], sums[:, 1:]
        q = exponential(z - normaliser, negative)
        missed = positive * (normaliser - z).sigmoid()
        alpha = missed * (z - normaliser).sigmoid()
        return Derivatives(alpha + beta * q, alpha + gamma / 2 * q, q, missed - beta * q)


def moments_of(derivatives: Derivatives, along: Float[Tensor, "N M"], gradients: Float[Tensor, "M D"]) -> Moments:
    """Sums over the candidates, from derivatives and n_a · g_b."""
    weights, *others = derivatives
    square, along = weights @ gradients.square(), (weights * along) @ gradients
    return Moments(square, along, *(other @ gradients for other in others))


def projected(n: Float[Tensor, "N D"], vectors: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """(I − n nᵀ) of vectors."""
    return vectors - dot(n, vectors) * n


def projected_squares(
    n: Float[Tensor, "N D"], square: Float[Tensor, "N D"], along: Float[Tensor, "N D"]
) -> Float[Tensor, "N D"]:
    """Σ_b w_ab ((I − n_a n_aᵀ) g_b)² from Σ_b w_ab g_b² and Σ_b w_ab (n_a · g_b) g_b."""
    return square - 2 * n * along + n.square() * dot(n, along)


def exponential(x: Float[Tensor, "N M"], weights: Float[Tensor, "N M"]) -> Float[Tensor, "N M"]:
    """w eˣ, and 0 where w is 0, whatever x."""
    return torch.where(weights > 0, weights * x.exp(), 0)


def dot(one: Float[Tensor, "N D"], other: Float[Tensor, "N D"]) -> Float[Tensor, "N 1"]:
    """Products of the rows."""
    return (one * other).sum(1, keepdim=True)
