"""Curvature of cross-entropies under a softmax of similarities, the base of SupCon, InfoNCE, VarCon and AnInfoNCE.

Anchor a has the output f_a = r_a n_a, with length r_a and direction n_a. Its logit for a candidate b is
z_ab = n_a · g_b − β_b. For cosines over a temperature τ, g_b = n_b/τ and β_b = 0. The gradient of z_ab in f_a is
u_ab = (I − n_a n_aᵀ) g_b/r_a. Each loss is convex in the logits z_a. With respect to z_a, its gradient is −t_a and its
second derivative is diag(ω_a) − ε_a η_aᵀ − η_a ε_aᵀ, which defines t, ω, ε and η. The Gauss-Newton curvature with
respect to f_a linearises the network, so it depends on where the network ends and the loss begins (the split):

    at the logits     Σ_b ω_ab u_ab u_abᵀ − e_a h_aᵀ − h_a e_aᵀ,  e_a = Σ_b ε_ab u_ab,  h_a = Σ_b η_ab u_ab:
                      positive semi-definite
    at the outputs    the same plus [c_a (I − 3 n_a n_aᵀ) + n_a m_aᵀ + m_a n_aᵀ]/r_a², with m_a = Σ_b t_ab g_b
                      and c_a = n_a · m_a: the whole second derivative

One cross-entropy with probabilities p and targets y that sum to 1 has ω = p, η = p, ε = p/2 and t = y − p. With O
candidates, diagonals take matmuls of (N, O) by (O, D). Only a projected curvature needs larger arrays.

Source: Schraudolph (2002) for the split.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from lam.hessians.losses.base import SliceableItems, SummedByPartners, required
from lam.hessians.losses.contrastive import BLOCK_ELEMENTS, arccos, positive_part
from lam.hessians.relations import Related, cost_of
from lam.pairs.candidates import Candidates
from lam.pairs.pairs import Pairs
from lam.utils.checks import check_choice, check_positive

SoftmaxSplit = Literal["logits", "outputs"]
SoftmaxFix = Literal["fixed", "full", "projected"]
SOFTMAX_SPLITS: tuple[str, ...] = get_args(SoftmaxSplit)
SOFTMAX_FIXES: tuple[str, ...] = get_args(SoftmaxFix)


class Block(NamedTuple):
    """A block of the candidates of N items."""

    columns: slice  # of all candidates
    along: Float[Tensor, "N O"]  # n_a · g_b
    z: Float[Tensor, "N O"]  # the logits
    positive: Float[Tensor, "N O"]  # weights of the candidates that match
    negative: Float[Tensor, "N O"]  # weights of the candidates that do not match


class Derivatives(NamedTuple):
    """Derivatives of each anchor's loss in its logits: diag(ω) − ε ηᵀ − η εᵀ (second), and the negative gradient t."""

    weights: Float[Tensor, "N O"]  # ω
    first: Float[Tensor, "N O"]  # ε
    second: Float[Tensor, "N O"]  # η
    residual: Float[Tensor, "N O"]  # t


class Moments(NamedTuple):
    """Sums over the candidates of each anchor, which determine the diagonal of its curvature."""

    square: Float[Tensor, "N D"]  # Σ_b ω g²
    along: Float[Tensor, "N D"]  # Σ_b ω (n · g) g
    first: Float[Tensor, "N D"]  # Σ_b ε g
    second: Float[Tensor, "N D"]  # Σ_b η g
    residual: Float[Tensor, "N D"]  # m = Σ_b t g


@dataclass(frozen=True, kw_only=True)
class SoftmaxCurvature(SummedByPartners):
    """Base of curvatures of losses with a softmax over candidates.

    A subclass implements `normaliser`, `sums`, `derivatives`, and `similarity` unless logits are cosine/temperature.

    With `fix="fixed"`, derivatives are with respect to each anchor's output, and the candidates are fixed. "full" adds
    derivatives with respect to the candidates' outputs; only SupCon and InfoNCE offer it. "projected" sets the negative
    eigenvalues of each anchor's "fixed" curvature to zero; with `split="logits"`, it equals "fixed".

    Attributes:
        split: end of the network: `logits` or `outputs`. Only `outputs` keeps the whole second derivative.
        fix: terms of the curvature: `fixed`, `full` or `projected`.
        average: whether the curvature is an average, like the loss; if not, it is a plain sum.

    Raises:
        ValueError: for settings out of range.
    """

    split: SoftmaxSplit = "logits"
    fix: SoftmaxFix = "fixed"
    average: bool = True

    fixes: ClassVar[tuple[str, ...]] = ("fixed", "projected")
    takes_candidates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("split", self.split, SOFTMAX_SPLITS)
        check_choice("fix", self.fix, self.fixes)
        check_positive("temperature", getattr(self, "temperature", None))

    @property
    def has_cross_terms(self) -> bool:
        return self.fix == "full"

    @property
    def in_blocks(self) -> bool:
        return not self.has_cross_terms

    @property
    def tau(self) -> float:
        """The temperature."""
        return required("temperature", getattr(self, "temperature", None))

    def similarity(self, directions: Float[Tensor, "O D"]) -> tuple[Float[Tensor, "O D"], Float[Tensor, " O"]]:
        """g_b and β_b of candidates."""
        return directions / self.tau, directions.new_zeros(len(directions))

    @abstractmethod
    def normaliser(self, block: Block) -> Float[Tensor, "N 1"]:
        """Log-sum-exp of the logits of a block; all blocks together give the normaliser of the probabilities."""

    @abstractmethod
    def sums(self, block: Block, normaliser: Float[Tensor, "N 1"]) -> Float[Tensor, "N J"]:
        """J sums over a block of each anchor's candidates; `derivatives` needs the totals over all blocks."""

    @abstractmethod
    def derivatives(self, block: Block, normaliser: Float[Tensor, "N 1"], sums: Float[Tensor, "N J"]) -> Derivatives:
        """Derivatives of each anchor's loss in a block of its logits, from `normaliser` and `sums` over all blocks."""

    def of_batch(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs | Candidates) -> "Softmaxes":
        """Softmaxes over the other items of a batch, or over fixed candidates."""
        held_still = isinstance(pairs, Candidates)
        directions = pairs.directions.to(n) if held_still else n
        if directions.shape[1] != n.shape[1]:
            raise ValueError(f"candidates must have {n.shape[1]} dimensions, got {directions.shape[1]}")
        if held_still and self.has_cross_terms:
            raise ValueError("fix must be fixed or projected for fixed candidates, got 'full'")
        return self.over(directions, n, r, pairs.positive, pairs.negative)

    def over(
        self,
        directions: Float[Tensor, "O D"],
        n: Float[Tensor, "N D"],
        r: Float[Tensor, "N 1"],
        positive: Shaped[Tensor, "N O"],
        negative: Shaped[Tensor, "N O"],
    ) -> "Softmaxes":
        """Softmaxes over O weighted candidates; a candidate that is neither positive nor negative does not count."""

        def block(rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
            return positive[rows, columns], negative[rows, columns]

        return Softmaxes(self, n, r, 0, *self.similarity(directions), block, max(1, *positive.shape))

    def over_dataset(
        self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], relation: Related, *, block_size: int, progress: bool
    ) -> "Softmaxes":
        """Softmaxes over all other items, block by block of items and candidates."""
        (N, D), size = n.shape, min(block_size, len(n))
        n_bytes = n.element_size() * (N * D + 10 * size**2) + 8 * 5 * size * D
        cost = cost_of(N * (N - 1), n_bytes)
        # n keeps its type, in which similarities are fast; r is float64, and so are sums over many blocks.
        return Softmaxes(self, n, r.double(), 0, *self.similarity(n), relation.block, block_size, cost)


@dataclass(frozen=True)
class Softmaxes(SliceableItems):
    """The curvature with respect to each item's output, computed in blocks of items and candidates."""

    curvature: SoftmaxCurvature
    n: Float[Tensor, "N D"]  # unit outputs, in the type of similarities
    r: Float[Tensor, "N 1"]  # their lengths before normalisation, in the type of sums
    start: int  # index of the first item
    gradients: Float[Tensor, "O D"]  # g_b
    offsets: Float[Tensor, " O"]  # β_b
    block: Callable[[slice, slice], tuple[Tensor, Tensor]]  # weights of positive and negative pairs, by slices
    block_size: int  # candidates in a block, and greatest number of items in a block
    cost: str | None = None

    def __getitem__(self, rows: slice) -> "Softmaxes":
        return replace(self, n=self.n[rows], r=self.r[rows], start=self.start + (rows.start or 0))

    def diagonal(self) -> Float[Tensor, "N T D"]:
        if self._projects:
            parts = [part._matrices().diagonal(dim1=1, dim2=2) for part in self._parts(self._rows_of_matrices)]
        else:
            parts = [part._diagonal() for part in self._parts(self._rows)]
        diagonal = torch.cat(parts)[:, None]
        return diagonal + self._as_candidates()[:, None] if self.curvature.has_cross_terms else diagonal

    def in_basis(self, basis: Float[Tensor, "D D"]) -> Float[Tensor, "N T D"]:
        basis = basis.to(self.n)  # Uᵀ H_a U is the curvature of rotated outputs and candidates
        return replace(self, n=self.n @ basis, gradients=self.gradients @ basis).diagonal()

    def matrices(self) -> Float[Tensor, "N T D D"]:
        if self.curvature.has_cross_terms:
            raise ValueError("fix must be fixed or projected for matrices of each item, got 'full': it couples items")
        return torch.cat([part._matrices() for part in self._parts(self._rows_of_matrices)])[:, None]

    def total(self) -> Float[Tensor, "T D D"]:
        if self._projects:
            parts = [part._matrices().sum(0) for part in self._parts(self._rows_of_matrices)]
        else:
            parts = [part._total() for part in self._parts(self._rows)]
        return torch.stack(parts).sum(0, keepdim=True)

    def derivatives(self) -> Iterator[tuple[Block, Derivatives]]:
        """Derivatives of each anchor's loss in all of its logits, a block of candidates at a time.

        A softmax over blocks takes three passes: for the normaliser, for `sums`, and for the derivatives. A single
        block is cached between passes. Several blocks are computed again, to save memory.
        """
        curvature, starts = self.curvature, range(0, max(1, len(self.gradients)), self.block_size)
        block_at = self._block if len(starts) > 1 else cache(self._block)
        normaliser = reduce(torch.logaddexp, map(curvature.normaliser, map(block_at, starts)))
        sums = reduce(torch.add, (curvature.sums(block, normaliser) for block in map(block_at, starts)))
        for block in map(block_at, starts):
            yield block, curvature.derivatives(block, normaliser, sums)

    @property
    def _projects(self) -> bool:
        return self.curvature.fix == "projected" and self.curvature.split == "outputs"

    @property
    def _rows(self) -> int:
        """Number of items compared with a block of candidates at once."""
        return max(1, min(self.block_size, BLOCK_ELEMENTS // max(1, min(self.block_size, len(self.gradients)))))

    @property
    def _rows_of_matrices(self) -> int:
        """Number of items processed at once, if each takes a (D, D) matrix and a (D, O) array for a block."""
        D = self.n.shape[1]
        return max(1, min(self.block_size, BLOCK_ELEMENTS // (D * max(D, min(self.block_size, len(self.gradients))))))

    def _parts(self, size: int) -> "Iterator[Softmaxes]":
        for start in range(0, max(1, len(self.n)), size):  # for no items, one empty part gives results a shape
            yield self[start : start + size]

    def _block(self, start: int) -> Block:
        columns = slice(start, min(start + self.block_size, len(self.gradients)))
        along = self.n @ self.gradients[columns].T
        weights = self.block(slice(self.start, self.start + len(self.n)), columns)
        return Block(columns, along, along - self.offsets[columns], *(part.to(along) for part in weights))

    def _moments(self, second: Callable[[Tensor, Tensor], Tensor]) -> tuple[Moments, Tensor]:
        """Sums over all candidates, and the sum of `second(ω, g)`."""
        sums: list[Any] = [0] * 6
        for block, (weights, *others) in self.derivatives():
            g = self.gradients[block.columns]
            parts = weights @ g.square(), (weights * block.along) @ g, *(other @ g for other in others)
            sums = [total + part.to(self.r) for total, part in zip(sums, (*parts, second(weights, g)), strict=True)]
        return Moments(*sums[:-1]), sums[-1]

    def _diagonal(self) -> Float[Tensor, "N D"]:
        n, r = self.n.to(self.r), self.r
        moments, _ = self._moments(lambda weights, g: g.new_zeros(()))  # a diagonal needs no product of g and g
        squares = projected_squares(n, moments.square, moments.along)
        diagonal = squares - 2 * projected(n, moments.first) * projected(n, moments.second)
        diagonal = diagonal.clamp(min=0) / r.square()  # of a semi-definite matrix: negative only by rounding
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
        """Σ_a of `_matrices`, without an (N, D, D) array.

        With ĝ = g − (n · g) n, Σ_b ω ĝ ĝᵀ = Σ_b ω g gᵀ − n (Σ_b ω (n·g) g)ᵀ − its transpose + (Σ_b ω (n·g)²) n nᵀ.
        """
        n, scale = self.n.to(self.r), self.r.square().reciprocal()
        moments, second = self._moments(lambda weights, g: (weights.T @ scale.to(g) * g).T @ g)
        first, other = (projected(n, mean) for mean in (moments.first, moments.second))
        mixed = (scale * n).T @ moments.along + (scale * first).T @ other
        total = second - mixed - mixed.T + (scale * dot(n, moments.along) * n).T @ n
        if self.curvature.split == "logits":
            return total
        return total + arccos(n, moments.residual * scale).total()

    def _as_candidates(self) -> Float[Tensor, "N D"]:
        """Second derivatives of the anchors' losses with respect to their candidates' outputs; a batch is one block."""
        ((block, (weights, _, _, residual)),) = self.derivatives()
        g, along = self.gradients, block.along  # the items are the candidates, so `along` is symmetric
        diagonal = projected_squares(self.n, weights.T @ g.square(), (weights * along).T @ g) / self.r.square()
        if self.curvature.split == "logits":
            return diagonal
        return diagonal + arccos(self.n, residual.T @ g / self.r.square()).diagonal()


def projected(n: Float[Tensor, "N D"], vectors: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """Each row of `vectors`, multiplied by I − n nᵀ."""
    return vectors - dot(n, vectors) * n


def projected_squares(
    n: Float[Tensor, "N D"], square: Float[Tensor, "N D"], along: Float[Tensor, "N D"]
) -> Float[Tensor, "N D"]:
    """Σ_b w_ab ((I − n_a n_aᵀ) g_b)² from Σ_b w_ab g_b² and Σ_b w_ab (n_a · g_b) g_b."""
    return square - 2 * n * along + n.square() * dot(n, along)


def exponential(x: Float[Tensor, "N O"], weights: Float[Tensor, "N O"]) -> Float[Tensor, "N O"]:
    """w eˣ, with 0 · ∞ = 0."""
    return torch.where(weights > 0, weights * x.exp(), 0)


def dot(one: Float[Tensor, "N D"], other: Float[Tensor, "N D"]) -> Float[Tensor, "N 1"]:
    """Scalar products of rows."""
    return (one * other).sum(1, keepdim=True)
