"""Curvature of the contrastive loss: second derivatives of a pair in closed form, and their sums over pairs.

An output f has length r and direction n = f/r. Two directions with distance d and cosine c have the loss ½ d² = 1 − c.
The Gauss-Newton curvature linearises the network, but not the loss. The normalisation f/r belongs to the network in the
split `euclidean`, and to the loss in the split `arccos`. The curvature of a pair has blocks: H11 and H22 hold second
derivatives with respect to one output, and H12 with respect to both (cross terms). The diagonal for a linear layer
needs only the diagonals of these blocks, such as the entries H12_i. Cross terms take a matmul for each output, or for
each block of pairs if this is cheaper. A pair of items a and b has the weight t_ab; φ_aj is input j of item a.

Source: Warburg et al. (2023), appendix F; the sign of the arccos cross term follows from the derivation there.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from lam.hessians.losses.base import SliceableItems, SummedByPartners, required
from lam.hessians.relations import Related, cost_of
from lam.pairs.pairs import Pairs
from lam.utils.checks import check_choice, check_margin, check_number

Split = Literal["euclidean", "arccos"]
Fix = Literal["positive", "fixed", "full", "projected"]
SPLITS: tuple[str, ...] = get_args(Split)
FIXES: tuple[str, ...] = get_args(Fix)

BLOCK_ELEMENTS = 1 << 22  # number of products φ_aj φ_bj in memory at once
GATHER_COST = 40
"""Cost of a product φ_aj φ_bj, in multiply-adds of a matmul (measured on two cores: 30 to 60)."""


class OuterProducts(NamedTuple):
    """Matrices w_a I + Σ_k (x_ak y_akᵀ + y_ak x_akᵀ) of items a."""

    identity: Float[Tensor, "*B N 1"]  # w
    left: Float[Tensor, "*#B N J D"]  # x
    right: Float[Tensor, "*B N J D"]  # y

    def diagonal(self) -> Float[Tensor, "*B N D"]:
        if self.left.shape[-2] == 1:
            return torch.addcmul(self.identity, self.left[..., 0, :], self.right[..., 0, :], value=2)
        return torch.add(self.identity, (self.left * self.right).sum(-2), alpha=2)

    def matrices(self) -> Float[Tensor, "*B N D D"]:
        products = self.left.mT @ self.right
        matrices = products + products.mT
        matrices.diagonal(dim1=-2, dim2=-1).add_(self.identity)
        return matrices

    def total(self) -> Float[Tensor, "*B D D"]:
        """Sum over the items, by one matmul for all outer products."""
        left, right = (part.flatten(-3, -2)[..., None, :, :] for part in (self.left, self.right))
        return OuterProducts(self.identity.sum(-2, keepdim=True), left, right).matrices().squeeze(-3)


def tangent(n: Float[Tensor, "N D"], weights: Float[Tensor, "*B N 1"]) -> OuterProducts:
    """w_a (I − n_a n_aᵀ): positive or negative semi-definite, depending on the sign of w_a."""
    return OuterProducts(weights, n[:, None], -(weights * n)[..., None, :] / 2)


def arccos(n: Float[Tensor, "N D"], m: Float[Tensor, "*B N D"]) -> OuterProducts:
    """c_a (I − 3 n_a n_aᵀ) + n_a m_aᵀ + m_a n_aᵀ, with c = n · m: r² times the Hessian of −c at f = r n."""
    c = (n * m).sum(-1, keepdim=True)
    return OuterProducts(c, n[:, None], torch.addcmul(m, c, n, value=-1.5)[..., None, :])


def positive_arccos(n: Float[Tensor, "N D"], m: Float[Tensor, "*B N D"]) -> OuterProducts:
    """`positive_part` of the matrices `arccos(n, m)`, without their eigendecomposition.

    With m = c n + q e, e a unit vector orthogonal to n, the matrix is c (I − n nᵀ) + q (n eᵀ + e nᵀ). Its eigenvalues
    orthogonal to n and e are c. In the plane of n and e, one eigenvalue is at most 0; the other is
    λ = (c + √(c² + 4q²))/2, with the eigenvector q n + λ e.
    """
    c = (n * m).sum(-1, keepdim=True)
    across = m - c * n
    q = across.norm(dim=-1, keepdim=True)
    e = across / q.where(q > 0, 1)
    eigenvalue = (c + (c.square() + 4 * q.square()).sqrt()) / 2
    direction = F.normalize(q * n + eigenvalue * e, dim=-1)
    rest = c.clamp(min=0)
    left = torch.stack([n.expand_as(e), e, direction], -2)
    return OuterProducts(rest, left, torch.stack([-rest, -rest, eigenvalue], -2) / 2 * left)


def positive_part(matrices: Float[Tensor, "*B D D"]) -> Float[Tensor, "*B D D"]:
    """Symmetric matrices with negative eigenvalues set to zero.

    An item's curvature is H_a = Σ_i λ_i q_i q_iᵀ, with eigenvalues λ_i and eigenvectors q_i. In a sum over items, the
    negative curvature of one item cancels positive curvature of others. `fix="projected"` avoids this: only the
    positive part Σ_i max(λ_i, 0) q_i q_iᵀ enters the sum.

    Source: Higham (1988), the nearest symmetric positive semi-definite matrix.
    """
    values, vectors = torch.linalg.eigh(matrices)
    return (vectors * values.clamp(min=0)[..., None, :]) @ vectors.mT


@dataclass(frozen=True)
class ContrastiveCurvature(SummedByPartners):
    """Curvature of L = Σ_ab ½ t_ab ‖n_a − n_b‖² over ordered pairs of items a and b with directions n_a and n_b.

    t_ab is 1/n⁺ for positive pairs, −w/n⁻ for negative pairs nearer than the margin, and 0 for other pairs. n⁺ and n⁻
    are the numbers of positive and negative pairs, including pairs beyond the margin. The curvature is
    h = S⁺/n⁺ − w S⁻/n⁻. S⁺ and S⁻ sum the second derivatives of ½ ‖n_a − n_b‖², over positive pairs and over negative
    pairs inside the margin.

    With `fix="fixed"`, derivatives are with respect to one item of a pair, and the other item is fixed. "full" adds
    cross terms, derivatives with respect to both items. "positive" is "full" without negative pairs. "projected" sets
    the negative eigenvalues of each item's "fixed" curvature to zero, and averages the result over the positive pairs.

    Source: Warburg et al. (2023), equations 6 to 9 and appendix F.

    Attributes:
        margin: in (0, 2]; negative pairs at this distance or farther have no curvature. A margin below about 0.01 needs
            float64 features. In a method's options, None stands for the margin of its loss.
        split: whether the normalisation of outputs is linearised (`euclidean`) or not (`arccos`).
        fix: terms of the curvature: `fixed`, `positive`, `full` or `projected`.
        negative_weight: w in [0, 1], the weight of the negative pairs.
        average: whether S⁺ and S⁻ are divided by n⁺ and n⁻; if not, h is the plain sum S⁺ − w S⁻.

    Raises:
        ValueError: for settings out of range.
    """

    margin: float | None
    split: Split = "arccos"
    fix: Fix = "fixed"
    negative_weight: float = 1.0
    average: bool = True

    def __post_init__(self) -> None:
        check_margin(self.margin)
        check_choice("split", self.split, SPLITS)
        check_choice("fix", self.fix, FIXES)
        check_number("negative_weight", self.negative_weight)
        if not 0 <= self.negative_weight <= 1:
            raise ValueError(f"negative_weight must be in [0, 1], got {self.negative_weight}")

    def non_negative(self) -> Iterator["ContrastiveCurvature"]:
        """Curvatures without negative pairs, and with the positive part of each item's curvature."""
        yield replace(self, split="euclidean", fix="positive")
        yield replace(self, split="euclidean", fix="fixed", negative_weight=0.0)
        yield replace(self, fix="projected")

    @property
    def least_cosine(self) -> float:
        """Cosine of two unit vectors at a distance of the margin."""
        return 1 - required("margin", self.margin) ** 2 / 2

    @property
    def terms(self) -> dict[str, float]:
        positive = {"positive pair": 1.0}
        return {**positive, "negative pair": -self.negative_weight} if self.fix in ("fixed", "full") else positive

    @property
    def has_cross_terms(self) -> bool:
        return self.fix in ("positive", "full")

    @property
    def in_blocks(self) -> bool:
        return self.fix != "full"

    def counts(self, pairs: Any) -> tuple[int, ...]:
        return (pairs.n_positives, pairs.n_negatives)[: len(self.terms)]

    def of_batch(self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs) -> "PartnerItems":
        t = torch.stack(self._kinds(n, pairs)).to(n)
        return self._of(n, r, t.sum(2, keepdim=True), t @ n, pairs)

    def cross(
        self, inputs: Float[Tensor, "N F"], n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], pairs: Pairs
    ) -> Float[Tensor, "T D F"]:
        """Σ 2 t_ab H12_i φ_aj φ_bj over ordered pairs, with the diagonal H12 of `cross_curvature`."""
        return torch.stack([cross_sum(inputs, n, r, t.to(n)) for t in self._kinds(n, pairs)])

    def over_dataset(
        self, n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], relation: Related, *, block_size: int, progress: bool
    ) -> "PartnerItems":
        """H_a of each item; positive partners are summed at once, and negative partners in blocks."""
        terms = [relation.positive_partners(n)]
        if self.fix != "positive":
            terms.append(_negative_partners(n, relation, self.least_cosine, block_size, progress))
        count, partners = (torch.stack(part) for part in zip(*terms, strict=True))
        return self._of(n.double(), r.double(), count, partners, relation)

    def _of(self, n: Tensor, r: Tensor, count: Tensor, partners: Tensor, pairs: Any) -> "PartnerItems":
        if self.fix == "projected":
            # One term: negative pairs are scaled, so each has the weight −w/n⁻ after the division by n⁺.
            share = pairs.n_positives / max(pairs.n_negatives, 1) if self.average else 1
            weight = self.negative_weight * share
            count, partners = (part[:1] - weight * part[1:] for part in (count, partners))
        return PartnerItems(self, n, r, count, partners)

    def _kinds(self, n: Tensor, pairs: Pairs) -> list[Tensor]:
        """Weights of the ordered pairs with a curvature: positive pairs, and negative pairs nearer than the margin."""
        if self.fix == "positive":
            return [pairs.positive]
        return [pairs.positive, pairs.negative * (n @ n.T > self.least_cosine)]


@dataclass(frozen=True)
class PartnerItems(SliceableItems):
    """The curvature with respect to each item's output, from sums over the item's partners."""

    curvature: ContrastiveCurvature
    n: Float[Tensor, "N D"]  # unit outputs
    r: Float[Tensor, "N 1"]  # their lengths before normalisation
    count: Float[Tensor, "T N 1"]  # Σ_b t_ab
    partners: Float[Tensor, "T N D"]  # Σ_b t_ab n_b

    def __getitem__(self, rows: slice) -> "PartnerItems":
        count, partners = self.count[:, rows], self.partners[:, rows]
        return replace(self, n=self.n[rows], r=self.r[rows], count=count, partners=partners)

    def diagonal(self) -> Float[Tensor, "N T D"]:
        return self._products.diagonal().movedim(0, 1)

    def matrices(self) -> Float[Tensor, "N T D D"]:
        return self._products.matrices().movedim(0, 1)

    def total(self) -> Float[Tensor, "T D D"]:
        return self._products.total()

    def in_basis(self, basis: Float[Tensor, "D D"]) -> Float[Tensor, "N T D"]:
        basis = basis.to(self.n)  # Uᵀ H_a U is the curvature of rotated outputs
        return replace(self, n=self.n @ basis, partners=self.partners @ basis).diagonal()

    @property
    def _products(self) -> OuterProducts:
        """2 Σ_b t_ab H11; the factor 2 counts each pair in both orders.

        euclidean: H11 = (I − n1 n1ᵀ)/r1²; arccos: H11 = (c (I − 3 n1 n1ᵀ) + n1 n2ᵀ + n2 n1ᵀ)/r1². The partner n2 enters
        at most linearly, so Σ_b t_ab and Σ_b t_ab n_b are enough.
        """
        scale, projected = 2 / self.r.square(), self.curvature.fix == "projected"
        if self.curvature.split == "euclidean":
            weights = self.count * scale
            return tangent(self.n, weights.clamp(min=0) if projected else weights)
        return (positive_arccos if projected else arccos)(self.n, self.partners * scale)


def _negative_partners(
    n: Tensor, relation: Related, cosine: float, block_size: int, progress: bool
) -> tuple[Tensor, Tensor]:
    """For each item, the number of its negative partners nearer than the margin, and the sum of their directions."""
    ordered = n[relation.order]
    summed = _masked_sum(torch.cat([ordered, n.new_ones(len(n), 1)], 1))
    blocks = [slice(i, min(i + block_size, len(n))) for i in range(0, len(n), block_size)]
    total = n.new_zeros(len(n), n.shape[1] + 1, dtype=torch.float64)
    title = cost_of(len(n) * (len(n) - 1) // 2, bytes_of_blocks(n, block_size))
    with tqdm(total=len(blocks) * (len(blocks) + 1) // 2, desc=title, disable=not progress, unit="block") as bar:
        for index, rows in enumerate(blocks):
            for columns in blocks[index:]:  # similarities are symmetric
                bar.update()
                t = (ordered[rows] @ ordered[columns].T).gt_(cosine)
                if not relation.exclude(t, rows, columns):
                    continue
                total[rows] += summed(t, columns)
                if rows != columns:
                    total[columns] += summed(t.T, rows)
    unsorted = torch.empty_like(total)
    unsorted[relation.order] = total
    return unsorted[:, -1:], unsorted[:, :-1]


def _masked_sum(vectors: Float[Tensor, "N F"]) -> Callable[[Tensor, slice], Tensor]:
    """A function that sums the vectors selected by each row of zeros and ones.

    On tensor cores, three bfloat16 addends replace each float32 vector: as precise, and several times as fast.
    """
    on_tensor_cores = vectors.is_cuda and torch.cuda.get_device_capability(vectors.device) >= (8, 0)
    if not on_tensor_cores or vectors.dtype != torch.float32:
        return lambda t, which: t @ vectors[which]
    addends = addends_of(vectors)
    n_columns = addends.shape[1] // 3

    def summed(t: Tensor, which: slice) -> Tensor:
        sums = torch.mm(t.bfloat16(), addends[which], out_dtype=torch.float32)
        return sums.unflatten(1, (3, n_columns)).sum(1)[:, : vectors.shape[1]]

    return summed


def addends_of(vectors: Float[Tensor, "N F"]) -> Float[Tensor, "N _"]:
    """Three bfloat16 addends that sum exactly to float32 vectors, side by side, padded to multiples of 8 columns."""
    addends, rest = [], F.pad(vectors, (0, -vectors.shape[1] % 8))
    for _ in range(3):
        addends.append(rest.bfloat16())
        rest = rest - addends[-1]
    return torch.cat(addends, 1)


def bytes_of_blocks(n: Float[Tensor, "N D"], block_size: int) -> int:
    """Bytes that a pass over the similarities of all pairs takes, without the features."""
    N, D = n.shape
    return n.element_size() * (N * (D + 1) + 2 * min(block_size, N) ** 2) + 8 * N * (D + 1)


def cross_curvature(
    n1: Float[Tensor, "*pairs D"],
    r1: Float[Tensor, "*pairs 1"],
    n2: Float[Tensor, "*pairs D"],
    r2: Float[Tensor, "*pairs 1"],
) -> Float[Tensor, "*pairs D"]:
    """Diagonal of H12 of each pair, −(1 − n1_i² − n2_i² + c n1_i n2_i)/(r1 r2), the same for both splits."""
    cosine = (n1 * n2).sum(-1, keepdim=True)
    return (n1.square() + n2.square() - 1 - cosine * n1 * n2) / (r1 * r2)


def cross_sum(
    inputs: Float[Tensor, "N F"], n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"], t: Float[Tensor, "N N"]
) -> Float[Tensor, "D F"]:
    """Σ 2 t_ab H12_i φ_aj φ_bj over ordered pairs."""
    N, D = n.shape
    first, second = t.triu(1).nonzero(as_tuple=True)
    if len(first) * (2 * D + GATHER_COST) < 2 * D * N * N:
        return cross_sum_over_pairs(inputs, n, r, first, second, t[first, second])
    return _cross_sum_by_output(inputs, n, r, t)


def cross_sum_over_pairs(
    inputs: Float[Tensor, "N F"],
    n: Float[Tensor, "N D"],
    r: Float[Tensor, "N 1"],
    first: Tensor,
    second: Tensor,
    weights: Float[Tensor, " pairs"],
) -> Float[Tensor, "D F"]:
    """Σ 4 t_ab H12_i φ_aj φ_bj over listed unordered pairs, by one matmul for each block of pairs."""
    total = inputs.new_zeros(n.shape[1], inputs.shape[1])
    size = max(1, BLOCK_ELEMENTS // max(inputs.shape[1], n.shape[1]))
    for a, b, t_ab in zip(first.split(size), second.split(size), weights.split(size), strict=True):
        H12 = cross_curvature(n[a], r[a], n[b], r[b]) * (4 * t_ab[:, None])
        total.addmm_(H12.T, inputs[a] * inputs[b])
    return total


def cross_sum_of_class(
    inputs: Float[Tensor, "N F"], n: Float[Tensor, "N D"], r: Float[Tensor, "N 1"]
) -> Float[Tensor, "D F"]:
    """Σ 2 H12_i φ_aj φ_bj over all ordered pairs of one class, from its moments.

    Let ψ = φ/r. The sum over a, b of ψ_aj ψ_bj (1 − n_ai² − n_bi² + c_ab n_ai n_bi) is s_j² − 2 s_j u_ij + Σ_k Γ_kij²,
    where s = Σ_a ψ_a, u_i = Σ_a n_ai² ψ_a and Γ_ki = Σ_a n_ak n_ai ψ_a. The code subtracts the terms with a = b.
    """
    psi, square = inputs / r, n.square()
    s, u = psi.sum(0), square.T @ psi
    moments = torch.zeros_like(u)
    for k in range(n.shape[1]):
        square_of_gamma = ((n[:, k : k + 1] * n[:, k:]).T @ psi).square_()
        moments[k:] += square_of_gamma
        moments[k] += square_of_gamma[1:].sum(0)  # Γ is symmetric in k and i: each is formed once
    itself = (1 - square).T @ psi.square()
    return -2 * (s * (s - 2 * u) + moments - itself)


def _cross_sum_by_output(inputs: Tensor, n: Tensor, r: Tensor, t: Tensor) -> Tensor:
    total = inputs.new_empty(n.shape[1], inputs.shape[1])
    scaled = 2 * t / (r * r.T)
    scaled_cosine = scaled * (n @ n.T)
    for i, n_i in enumerate(n.T):
        square = n_i.square()
        H12 = scaled * (square[:, None] + square[None, :] - 1) - scaled_cosine * n_i[:, None] * n_i[None, :]
        total[i] = (inputs * (H12 @ inputs)).sum(0)
    return total
