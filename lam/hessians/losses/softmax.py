"""Curvature of the losses that are cross-entropies under a softmax of similarities: SupCon, InfoNCE and their kin.

The logits of an anchor a are z_ab = n_a · g_b − β_b over its candidates b, with g_b = n_b/τ for cosines over a
temperature. In the output f_a they have the derivatives u_ab = (I − n_a n_aᵀ) g_b/r_a. A loss that is convex in z has
the second derivative diag(ω_a) − ε_a η_aᵀ − η_a ε_aᵀ in z_a and the gradient −t_a, and so, in f_a, the curvature

    split at the logits     Σ_b ω_ab u_ab u_abᵀ − e_a h_aᵀ − h_a e_aᵀ,  e_a = Σ_b ε_ab u_ab,  h_a = Σ_b η_ab u_ab:
                            positive semi-definite
    split at the outputs    the same and [c_a (I − 3 n_a n_aᵀ) + n_a m_aᵀ + m_a n_aᵀ]/r_a², with m_a = Σ_b t_ab g_b
                            and c_a = n_a · m_a: all of the second derivative

Of one cross-entropy with probabilities p and targets y that sum to 1, ω = p, η = p, ε = p/2 and t = y − p. Diagonals
are matmuls of (N, O) by (O, D): an (N, O, D) or (N, D, D) array is never made.

Source: Schraudolph (2002) for the split; Khosla et al. (2020) and Chen et al. (2020) for the losses.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from lam.hessians.losses.base import Curvature
from lam.hessians.losses.contrastive import BLOCK_ELEMENTS, cross_sum
from lam.hessians.losses.items import ItemCurvature, OfBatch, OfItems
from lam.hessians.losses.outer_products import arccos, positive_part
from lam.hessians.relations import Related, cost_of
from lam.pairs.candidates import Candidates
from lam.pairs.pairs import Pairs
from lam.pairs.relation import Scope
from lam.utils.checks import check_choice, check_positive

SoftmaxSplit = Literal["logits", "outputs"]
SoftmaxFix = Literal["fixed", "full", "projected"]
SOFTMAX_SPLITS: tuple[str, ...] = get_args(SoftmaxSplit)
SOFTMAX_FIXES: tuple[str, ...] = get_args(SoftmaxFix)


class Block(NamedTuple):
    """Some candidates of N items.

    Attributes:
        columns: which of all candidates these are.
        along: (N, O) n_a · g_b.
        z: (N, O) the logits.
        positive: (N, O) weights of the candidates that match.
        negative: (N, O) weights of those that do not.
    """

    columns: slice
    along: Float[Tensor, "N O"]
    z: Float[Tensor, "N O"]
    positive: Float[Tensor, "N O"]
    negative: Float[Tensor, "N O"]


class Derivatives(NamedTuple):
    """The second derivative diag(ω) − ε ηᵀ − η εᵀ of each anchor's loss in its logits, and minus the first, t.

    Attributes:
        weights: (N, O) ω.
        first: (N, O) ε.
        second: (N, O) η.
        residual: (N, O) t.
    """

    weights: Float[Tensor, "N O"]
    first: Float[Tensor, "N O"]
    second: Float[Tensor, "N O"]
    residual: Float[Tensor, "N O"]


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
    loss has it, in the outputs of the candidates, too. `projected` is `fixed` with the positive part of each anchor's
    curvature. Split at the logits nothing is ever negative, and `projected` is `fixed`.

    Attributes:
        split: where loss∘network is split: `logits`; or `outputs`, for the whole second derivative.
        fix: which terms are kept: `fixed`, `full` or `projected`.
        average: whether h is averaged over what the loss is a mean over, or is a plain sum.

    Raises:
        ValueError: for settings outside their range.
    """

    split: SoftmaxSplit = "logits"
    fix: SoftmaxFix = "fixed"
    average: bool = True

    fixes: ClassVar[tuple[str, ...]] = ("fixed", "projected")
    takes_candidates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("split", self.split, SOFTMAX_SPLITS)
        check_choice("fix", self.fix, self.fixes)

    @property
    def has_cross_terms(self) -> bool:
        """Whether candidates are differentiated, too."""
        return self.fix == "full"

    @abstractmethod
    def similarity(self, directions: Float[Tensor, "O D"]) -> tuple[Float[Tensor, "O D"], Float[Tensor, " O"]]:
        """g_b and β_b of candidates."""

    def softmaxes(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs | Candidates) -> "Softmaxes":
        """The softmaxes of a batch: over the other items, or over candidates that are held still."""
        held_still = isinstance(pairs, Candidates)
        directions = pairs.directions.to(n) if held_still else n
        if directions.shape[1] != n.shape[1]:
            raise ValueError(f"candidates must have {n.shape[1]} dimensions, got {directions.shape[1]}")
        if held_still and self.has_cross_terms:
            raise ValueError("fix must be fixed or projected where candidates are held still, got 'full'")
        return self.over(directions, n, r, pairs.positive, pairs.negative)

    def over(
        self,
        directions: Float[Tensor, "O D"],
        n: Float[Tensor, "N D"],
        r: Float[Tensor, "N 1"],
        positive: Shaped[Tensor, "N O"],
        negative: Shaped[Tensor, "N O"],
    ) -> "Softmaxes":
        """Softmaxes over O candidates, of which those match and these do not; one that is in neither does not count."""

        def block(rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
            return positive[rows, columns], negative[rows, columns]

        return Softmaxes(self, n, r, 0, *self.similarity(directions), block, max(1, *positive.shape))

    @abstractmethod
    def normaliser(self, block: Block) -> Float[Tensor, "N 1"]:
        """Logarithm of a sum of exponentials over some candidates of each anchor, which their probabilities need."""

    @abstractmethod
    def sums(self, block: Block, normaliser: Float[Tensor, "N 1"]) -> Float[Tensor, "N J"]:
        """J sums over the candidates of each anchor, which the derivatives need."""

    @abstractmethod
    def derivatives(self, block: Block, normaliser: Float[Tensor, "N 1"], sums: Float[Tensor, "N J"]) -> Derivatives:
        """Derivatives of each anchor's loss in some of its logits, from `normaliser` and `sums` over all of them."""

    def of_batch(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs | Candidates) -> ItemCurvature:
        """H_a of each item's own loss; where candidates are differentiated, too, by `diagonal` alone."""
        return OfBatch(self, n, r, pairs) if self.has_cross_terms else self.softmaxes(n, r, pairs)

    def diagonal(
        self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs | Candidates
    ) -> Float[Tensor, "N T D"]:
        """Second derivatives of each item's own loss, the candidates held still."""
        return self.softmaxes(n, r, pairs).diagonal()

    def matrices(
        self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs | Candidates
    ) -> Float[Tensor, "N T D D"]:
        """The matrices whose diagonals `diagonal` has."""
        if self.has_cross_terms:
            raise ValueError("fix must be fixed for matrices of the outputs of single items, got 'full': it joins them")
        return self.softmaxes(n, r, pairs).matrices()

    def over_dataset(
        self,
        n: Float[Tensor, "N D"],
        r: Float[Tensor, "N 1"],
        relation: Related,
        *,
        block_size: int,
        progress: bool,
    ) -> "Softmaxes":
        """Block by block of the items and their candidates, which are all other items: nothing is kept of a pair."""
        (N, D), size = n.shape, min(block_size, len(n))
        n_bytes = n.element_size() * (N * D + 10 * size**2) + 8 * 5 * size * D
        cost = cost_of(N * (N - 1), n_bytes)
        return Softmaxes(self, n, r.double(), 0, *self.similarity(n), relation.block, block_size, cost)

    @property
    def in_blocks(self) -> bool:
        """Whether candidates are held still."""
        return not self.has_cross_terms

    def check_scope(self, scope: Scope) -> None:
        """Refuse to differentiate all candidates of a data set."""
        if scope == "dataset" and not self.in_blocks:
            raise ValueError('fix must be fixed or projected with pairs="dataset", got full: use pairs="batch"')


@dataclass(frozen=True)
class Softmaxes(OfItems):
    """The curvature of every item's output, block by block of the items and their candidates.

    Attributes:
        curvature: of the loss.
        n: (N, D) unit outputs, in the type of similarities.
        r: (N, 1) their lengths before normalisation, in the type of sums.
        start: the number of the first item.
        gradients: (O, D) g_b.
        offsets: (O,) β_b.
        block: gives the weights of the positive and the negative pairs of some items and some candidates.
        block_size: how many candidates a block has, and how many items at most.
        cost: what forming them takes, where that is long.
    """

    curvature: SoftmaxCurvature
    n: Float[Tensor, "N D"]
    r: Float[Tensor, "N 1"]
    start: int
    gradients: Float[Tensor, "O D"]
    offsets: Float[Tensor, " O"]
    block: Callable[[slice, slice], tuple[Tensor, Tensor]]
    block_size: int
    cost: str | None = None

    def __getitem__(self, rows: slice) -> "Softmaxes":
        """Of some of the items."""
        start = rows.start or 0
        return replace(self, n=self.n[rows], r=self.r[rows], start=self.start + start)

    def diagonal(self) -> Float[Tensor, "N T D"]:
        """The diagonal of each H_a."""
        if self._projects:
            parts = [part._matrices().diagonal(dim1=1, dim2=2) for part in self._parts(self._rows_of_matrices)]
        else:
            parts = [part._diagonal() for part in self._parts(self._rows)]
        return torch.cat(parts)[:, None]

    def in_basis(self, basis: Float[Tensor, "D D"]) -> Float[Tensor, "N T D"]:
        """The diagonal of each Uᵀ H_a U: that of rotated outputs and candidates."""
        basis = basis.to(self.n)
        return replace(self, n=self.n @ basis, gradients=self.gradients @ basis).diagonal()

    def matrices(self) -> Float[Tensor, "N T D D"]:
        """Each H_a."""
        return torch.cat([part._matrices() for part in self._parts(self._rows_of_matrices)])[:, None]

    def total(self) -> Float[Tensor, "T D D"]:
        """Σ_a H_a."""
        if self._projects:
            parts = [part._matrices().sum(0) for part in self._parts(self._rows_of_matrices)]
        else:
            parts = [part._total() for part in self._parts(self._rows)]
        return torch.stack(parts).sum(0, keepdim=True)

    @property
    def _projects(self) -> bool:
        return self.curvature.fix == "projected" and self.curvature.split == "outputs"

    @property
    def _rows(self) -> int:
        """How many items are compared with a block of candidates at once."""
        return max(1, min(self.block_size, BLOCK_ELEMENTS // max(1, min(self.block_size, len(self.gradients)))))

    @property
    def _rows_of_matrices(self) -> int:
        """How many items have so many (D, D) matrices, or gradients of a block of candidates, as are held at once."""
        D = self.n.shape[1]
        return max(1, min(self.block_size, BLOCK_ELEMENTS // (D * max(D, min(self.block_size, len(self.gradients))))))

    def _parts(self, size: int) -> "Iterator[Softmaxes]":
        for start in range(0, max(1, len(self.n)), size):  # of no items, too, there is a part
            yield self[start : start + size]

    def _block(self, start: int) -> Block:
        columns = slice(start, min(start + self.block_size, len(self.gradients)))
        along = self.n @ self.gradients[columns].T
        weights = self.block(slice(self.start, self.start + len(self.n)), columns)
        return Block(columns, along, along - self.offsets[columns], *(part.to(along) for part in weights))

    def derivatives(self) -> Iterator[tuple[Block, Derivatives]]:
        """Those of each anchor's loss in all of its logits, some candidates at a time."""
        curvature, starts = self.curvature, range(0, max(1, len(self.gradients)), self.block_size)
        block_at = self._block if len(starts) > 1 else cache(self._block)  # one is kept, many are formed again
        normaliser = reduce(torch.logaddexp, map(curvature.normaliser, map(block_at, starts)))
        sums = reduce(torch.add, (curvature.sums(block, normaliser) for block in map(block_at, starts)))
        for block in map(block_at, starts):
            yield block, curvature.derivatives(block, normaliser, sums)

    def _moments(self, second: Callable[[Tensor, Tensor], Tensor]) -> tuple[Moments, Tensor]:
        """Sums over all candidates, and that of what `second` gives of ω and g."""
        parts = (self._moments_of(*part, second) for part in self.derivatives())
        *moments, total = reduce(lambda one, other: [x + y for x, y in zip(one, other, strict=True)], parts)
        return Moments(*moments), total

    def _moments_of(
        self, block: Block, derivatives: Derivatives, second: Callable[[Tensor, Tensor], Tensor]
    ) -> list[Tensor]:
        g, (weights, *others) = self.gradients[block.columns], derivatives
        moments = [weights @ g.square(), (weights * block.along) @ g, *(other @ g for other in others)]
        return [part.to(self.r) for part in (*moments, second(weights, g))]

    def _diagonal(self) -> Float[Tensor, "N D"]:
        n, r = self.n.to(self.r), self.r
        moments, _ = self._moments(lambda weights, g: g.new_zeros(()))
        squares = projected_squares(n, moments.square, moments.along)
        diagonal = squares - 2 * projected(n, moments.first) * projected(n, moments.second)
        diagonal = diagonal.clamp(min=0) / r.square()  # below 0 by rounding alone
        if self.curvature.split == "logits":
            return diagonal
        return diagonal + arccos(n, moments.residual / r.square()).diagonal()

    def _matrices(self) -> Float[Tensor, "N D D"]:
        n, r = self.n.to(self.r), self.r
        moments, second = self._moments(lambda weights, g: (weights[:, None] * g.T) @ g)
        mixed = moments.first[:, :, None] * moments.second[:, None]
        projection = torch.eye(n.shape[1]).to(n) - n[:, :, None] * n[:, None]
        matrices = projection @ (second - mixed - mixed.mT) @ projection / r.square()[..., None]
        if self.curvature.split == "logits":
            return matrices
        matrices = matrices + arccos(n, moments.residual / r.square()).matrices()
        return positive_part(matrices) if self._projects else matrices

    def _total(self) -> Float[Tensor, "D D"]:
        n, scale = self.n.to(self.r), self.r.square().reciprocal()
        moments, second = self._moments(lambda weights, g: (weights.T @ scale.to(g) * g).T @ g)
        first, other = (projected(n, mean) for mean in (moments.first, moments.second))
        mixed = (scale * n).T @ moments.along + (scale * first).T @ other
        total = second - mixed - mixed.T + (scale * dot(n, moments.along) * n).T @ n
        if self.curvature.split == "logits":
            return total
        return total + arccos(n, moments.residual * scale).total()


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

    temperature: float | None = None

    fixes: ClassVar[tuple[str, ...]] = SOFTMAX_FIXES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("temperature", self.temperature)

    @property
    def terms(self) -> dict[str, float]:
        """The items with a positive pair."""
        return {"matched item": 1.0}

    def counts(self, pairs: Any) -> tuple[int, ...]:
        """How many items have a positive pair."""
        return (pairs.n_matched,)

    def similarity(self, directions: Float[Tensor, "O D"]) -> tuple[Float[Tensor, "O D"], Float[Tensor, " O"]]:
        """Cosines over the temperature."""
        return directions / self._tau, directions.new_zeros(len(directions))

    def normaliser(self, block: Block) -> Float[Tensor, "N 1"]:
        """Over all candidates."""
        return (block.z + (block.positive + block.negative).log()).logsumexp(1, keepdim=True)

    def sums(self, block: Block, normaliser: Float[Tensor, "N 1"]) -> Float[Tensor, "N J"]:
        """The number of positive pairs."""
        return block.positive.sum(1, keepdim=True)

    def derivatives(self, block: Block, normaliser: Float[Tensor, "N 1"], sums: Float[Tensor, "N J"]) -> Derivatives:
        """Those of one cross-entropy, whose targets are the shares of the positive pairs."""
        matched = (sums > 0).to(normaliser)
        p = matched * exponential(block.z - normaliser, block.positive + block.negative)
        return Derivatives(p, p / 2, p, block.positive / sums.where(sums > 0, 1) - p)

    def diagonal(
        self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs | Candidates
    ) -> Float[Tensor, "N T D"]:
        """Second derivatives of each item's own loss and, with `full`, of those that it is a candidate of."""
        diagonal = super().diagonal(n, r, pairs)
        if not self.has_cross_terms:
            return diagonal
        items = self.softmaxes(n, r, pairs)
        ((block, (weights, _, _, residual)),) = items.derivatives()
        g, along = items.gradients, block.along  # those of the items themselves, so that along is symmetric
        of_others = projected_squares(n, weights.T @ g.square(), (weights * along).T @ g) / r.square()
        if self.split == "outputs":
            of_others = of_others + arccos(n, residual.T @ g / r.square()).diagonal()
        return diagonal + of_others[:, None]

    def cross(
        self, inputs: Float[Tensor, "N F"], n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs | Candidates
    ) -> Float[Tensor, "T D F"]:
        """What anchors share with their candidates, and these with one another.

        With x_ab = ∂z_ab/∂f_a,i, w_ab = ∂z_ab/∂f_b,i, e = Σ_b ε x, h = Σ_b η x, E = Σ_b ε w φ_b and H = Σ_b η w φ_b it
        is, for each output i, Σ_a 2 φ_a (Σ_b ω x w φ_b − e_a H_a − h_a E_a) − 2 E_a H_a: three matmuls.
        """
        items = self.softmaxes(n, r, pairs)
        ((block, (weights, first, second, residual)),) = items.derivatives()
        along, total = block.along, inputs.new_empty(n.shape[1], inputs.shape[1])
        for i, (n_i, g_i) in enumerate(zip(n.T[..., None], items.gradients.T[..., None], strict=True)):
            x, w = (g_i.T - along * n_i) / r, (g_i - along * n_i.T) / r.T
            e, h = (first * x).sum(1, keepdim=True), (second * x).sum(1, keepdim=True)
            shared = ((weights * x - e * second - h * first) * w) @ inputs
            total[i] = 2 * (inputs * shared - ((first * w) @ inputs) * ((second * w) @ inputs)).sum(0)
        if self.split == "outputs":
            total += cross_sum(inputs, n, r, (residual + residual.T) / (2 * self._tau))
        return total[None]

    @property
    def _tau(self) -> float:
        if self.temperature is None:
            raise ValueError("temperature must be positive, got None: give one")
        return self.temperature


class AgainstNegatives:
    """Each positive pair (a, p) as a softmax of its own, −log e^z_ap/(e^z_ap + Σ_n e^z_an), n negatives of a.

    Other positive pairs have no part in it. With π_p the probability of p, q those of the negatives among themselves,
    α_p = π_p(1 − π_p), β = Σ_p (1 − π_p) and γ = Σ_p (1 − π_p)² their sum has ω = α + βq, η = q, ε = α + γq/2 and
    t = (1 − π) − βq.
    """

    @property
    def terms(self) -> dict[str, float]:
        """The positive pairs."""
        return {"positive pair": 1.0}

    def counts(self, pairs: Any) -> tuple[int, ...]:
        """The number of positive pairs."""
        return (pairs.n_positives,)

    def normaliser(self, block: Block) -> Float[Tensor, "N 1"]:
        """Over the negatives."""
        return (block.z + block.negative.log()).logsumexp(1, keepdim=True)

    def sums(self, block: Block, normaliser: Float[Tensor, "N 1"]) -> Float[Tensor, "N J"]:
        """β and γ."""
        missed = (normaliser - block.z).sigmoid()
        return torch.stack([(block.positive * missed).sum(1), (block.positive * missed.square()).sum(1)], 1)

    def derivatives(self, block: Block, normaliser: Float[Tensor, "N 1"], sums: Float[Tensor, "N J"]) -> Derivatives:
        """Those of all positive pairs together."""
        beta, gamma, odds = sums[:, :1], sums[:, 1:], block.z - normaliser
        q = exponential(odds, block.negative)
        missed = block.positive * (-odds).sigmoid()
        alpha = missed * odds.sigmoid()
        return Derivatives(alpha + beta * q, alpha + gamma / 2 * q, q, missed - beta * q)


@dataclass(frozen=True)
class InfoNCECurvature(AgainstNegatives, SupConCurvature):
    """Curvature of the mean over positive pairs (a, p) of −log e^z_ap/(e^z_ap + Σ_n e^z_an), n negatives, z = cos/τ.

    With one positive pair an item it is that of SupCon.

    Source: van den Oord et al. (2018), equation 4; Chen et al. (2020), equation 1.

    Attributes, Raises: as `SupConCurvature`.
    """


def projected(n: Float[Tensor, "N D"], vectors: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """(I − n nᵀ) of vectors."""
    return vectors - dot(n, vectors) * n


def projected_squares(
    n: Float[Tensor, "N D"], square: Float[Tensor, "N D"], along: Float[Tensor, "N D"]
) -> Float[Tensor, "N D"]:
    """Σ_b w_ab ((I − n_a n_aᵀ) g_b)² from Σ_b w_ab g_b² and Σ_b w_ab (n_a · g_b) g_b."""
    return square - 2 * n * along + n.square() * dot(n, along)


def exponential(x: Float[Tensor, "N O"], weights: Float[Tensor, "N O"]) -> Float[Tensor, "N O"]:
    """w eˣ, and 0 where w is 0, whatever x."""
    return torch.where(weights > 0, weights * x.exp(), 0)


def dot(one: Float[Tensor, "N D"], other: Float[Tensor, "N D"]) -> Float[Tensor, "N 1"]:
    """Products of the rows."""
    return (one * other).sum(1, keepdim=True)
