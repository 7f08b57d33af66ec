"""GGN of a last layer: `Diagonal` and `Full` are exact, `Kron`, `Ekfac` and `LowRank` use Kronecker factors."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians.losses import Curvature
from lam.hessians.losses.base import ItemCurvature
from lam.hessians.structures.base import MAX_MEMORY, Shapes, Structure, eigen, share_negative, with_ones
from lam.utils.checks import check_at_least

BLOCK = 1 << 16  # number of squared features in memory at once
_SAME = 1e-5  # tolerance relative to A, above the error of eigenvectors that were rounded to float32
RANK = 256  # default number of columns of a sketch


@dataclass(frozen=True)
class Diagonal(Structure):
    """The diagonal GGN: sums (T, D, F) of H_a,ii φ_aj², plus the loss's cross terms, if any; see `Structure`."""

    name = "diag"
    takes_cross_terms = True

    sums: Float[Tensor, "T D F"]

    @classmethod
    def shapes(cls, T: int, D: int, F: int) -> Shapes:
        return {"sums": (T, D, F)}

    @torch.no_grad()
    def of_items(self, features: Float[Tensor, "N P"], items: ItemCurvature) -> "Diagonal":
        """Σ_a H_a,ii φ_aj² by one matmul, or by blocks of features if all squares take more memory than the sums."""
        (N, P), own = features.shape, items.diagonal().flatten(1).to(features).T
        sums = features.new_empty(len(own), P + self.has_bias)
        size = max(1, BLOCK // N if len(own) < N else P)
        for start in range(0, P, size):
            some = slice(start, min(start + size, P))
            torch.mm(own, features[:, some].square(), out=sums[:, some])
        if self.has_bias:
            torch.sum(own, 1, out=sums[:, P])
        return replace(self, sums=sums.view_as(self.sums))

    @property
    def spectrum(self) -> Float[Tensor, "D F"]:
        return self.h.double()

    @property
    def clipped(self) -> float:
        return float((self.h < 0).double().mean())


@dataclass(frozen=True)
class Full(Structure):
    """The exact matrix Σ_a H_a ⊗ φ_a φ_aᵀ; weight (i, j) of the layer has the index i F + j.

    `Structure` defines H_a and φ_a. In the posterior precision, negative eigenvalues count as zero.

    Attributes:
        sums: (T, D F, D F) the sum for each of the T terms of the loss.
    """

    name = "full"

    sums: Float[Tensor, "T DF DF"]

    @classmethod
    def shapes(cls, T: int, D: int, F: int) -> Shapes:
        return {"sums": (T, D * F, D * F)}

    def of_items(self, features: Float[Tensor, "N P"], items: ItemCurvature) -> "Full":
        inputs = with_ones(features, self.has_bias)
        matrices, F = items.matrices().to(inputs), inputs.shape[1]
        n_terms, D = matrices.shape[1:3]
        sums = inputs.new_empty(n_terms, D, F, D, F)
        for term in range(n_terms):
            for i in range(D):
                for k in range(i, D):
                    block = (inputs * matrices[:, term, i, k, None]).T @ inputs
                    sums[term, i, :, k] = sums[term, k, :, i] = block
        return replace(self, sums=sums.reshape(self.sums.shape))

    @cached_property
    def eigenbasis(self) -> tuple[Float[Tensor, " DF"], Float[Tensor, "DF DF"]]:
        """Eigenvalues of h, including negative values, and its eigenvectors as columns."""
        return eigen(self.h)

    @property
    def spectrum(self) -> Float[Tensor, " DF"]:
        return self.eigenbasis[0]


@dataclass(frozen=True)
class Kron(Structure):
    """h ⊗ A approximates Σ_a H_a ⊗ φ_a φ_aᵀ: h = Σ_t w_t S_t/n_t with S_t = Σ_a H_a, and A is the mean of φφᵀ.

    `Structure` and its base class define the symbols. The product is exact if all items have the same features, or the
    same H_a. In the posterior precision, negative eigenvalues of h count as zero. A saved posterior includes the
    eigenvectors of A, which take F³ steps to compute.

    Source: Martens and Grosse (2015), KFAC, for a linear layer.

    Attributes:
        sums: (T, D, D) S_t.
        inputs: (F, F) sum of φφᵀ over the items.
        n_items: number of items in this sum.
    """

    name = "kron"
    sum_fields = ("sums", "inputs", "n_items")

    sums: Float[Tensor, "T D D"]
    inputs: Float[Tensor, "F F"]
    n_items: Float[Tensor, ""]

    @classmethod
    def shapes(cls, T: int, D: int, F: int) -> Shapes:
        return {"sums": (T, D, D), "inputs": (F, F), "n_items": ()}

    def of_items(self, features: Float[Tensor, "N P"], items: ItemCurvature) -> "Kron":
        """Σ_a H_a and Σ_a φ_a φ_aᵀ."""
        inputs = with_ones(features, self.has_bias)
        n_items = torch.full_like(self.n_items, len(inputs))
        return replace(self, sums=items.total(), inputs=inputs.T @ inputs, n_items=n_items)

    @cached_property
    def eigenbasis(self) -> tuple[Float[Tensor, "D D"], Float[Tensor, "F F"]]:
        """Eigenvectors of h and of A, as columns."""
        return self._outputs[1], self.input_eigen[1]

    @property
    def spectrum(self) -> Float[Tensor, "D F"]:
        """Eigenvalues of h ⊗ A, including negative values, for products of the eigenvectors in `eigenbasis`."""
        return self._outputs[0][:, None] * self.input_eigen[0]

    def with_input_eigen(self, values: Float[Tensor, " F"], vectors: Float[Tensor, "F F"]) -> "Kron":
        """This curvature with an `input_eigen` from a file; eigenvectors of another matrix raise a `ValueError`."""
        A = self.inputs.double() / self.n_items
        if values.shape != A.shape[:1] or vectors.shape != A.shape:
            shapes = tuple(values.shape), tuple(vectors.shape)
            raise ValueError(
                f"the eigenvectors of {len(A)} inputs have shapes ({len(A)},) and {tuple(A.shape)}, got {shapes}"
            )
        probe = torch.ones_like(A[0])
        error = A @ probe - vectors.double() @ (values * (vectors.double().T @ probe))
        if not error.norm() <= _SAME * A.norm() * probe.norm():
            raise ValueError("these are eigenvectors of other inputs")
        curvature = replace(self)
        vars(curvature)["input_eigen"] = values, vectors
        return curvature

    def to(self, device: torch.device | str) -> "Kron":
        """The curvature on a device, with `input_eigen` if it is known."""
        moved = super().to(device)
        if moved is not self and "input_eigen" in vars(self):
            vars(moved)["input_eigen"] = tuple(part.to(device) for part in self.input_eigen)
        return moved

    @property
    def clipped(self) -> float:
        return share_negative(self._outputs[0])

    @cached_property
    def _outputs(self) -> tuple[Tensor, Tensor]:
        return eigen(self.h)

    @cached_property
    def input_eigen(self) -> tuple[Float[Tensor, " F"], Float[Tensor, "F F"]]:
        """Eigenvalues of A, and its eigenvectors as columns."""
        values, vectors = eigen(self.inputs / self.n_items)
        return values.clamp(min=0), vectors


@dataclass(frozen=True)
class EkfacBasis(Kron):
    """The result of an `Ekfac`'s first pass: a `Kron` whose eigenvectors are the basis of the second pass."""


@dataclass(frozen=True)
class Ekfac(Structure):
    """Exact diagonal of (U_B ⊗ U_A)ᵀ (Σ_a H_a ⊗ φ_a φ_aᵀ) (U_B ⊗ U_A), with the eigenvectors U_B and U_A of a `Kron`.

    `Structure` defines H_a and φ_a. A fit takes two passes over the data, one for the basis and one for the diagonal.
    Only sums of one fit can be added and subtracted, because each fit has its own basis. In the posterior precision,
    negative entries count as zero.

    Source: George et al. (2018), eigenvalue-corrected Kronecker factors.

    Attributes:
        sums: (T, D, F) Σ_a (U_Bᵀ H_a U_B)_ii (U_Aᵀ φ_a)_j².
        output_basis: (D, D) U_B, orthonormal columns.
        input_basis: (F, F) U_A, orthonormal columns.
    """

    name = "ekfac"
    shared_fields = ("output_basis", "input_basis")
    shared_hint = 'each fit has a basis of its own, so fit with structure="kron", or accumulate both from one `empty()`'

    sums: Float[Tensor, "T D F"]
    output_basis: Float[Tensor, "D D"]
    input_basis: Float[Tensor, "F F"]

    @classmethod
    def zeros(
        cls, weight: Float[Tensor, "D P"], curvature: Curvature, *, has_bias: bool, max_memory: int = MAX_MEMORY
    ) -> Any:
        """An `EkfacBasis` with all sums zero, for the first pass; errors as in `check`."""
        T, D, F = len(curvature.terms), len(weight), weight.shape[1] + has_bias
        cls.check(curvature, (D, F), cls.n_bytes(T, D, F), max_memory)
        return EkfacBasis.zeros(weight, curvature, has_bias=has_bias, max_memory=max_memory)

    @classmethod
    def in_basis_of(cls, kron: Kron) -> "Ekfac":
        """An `Ekfac` with all sums zero, in float64, in the eigenbasis of a fitted `Kron`."""
        (U_B, U_A), T = kron.eigenbasis, len(kron.curvature.terms)
        return cls(U_A.new_zeros(T, len(U_B), len(U_A)), (0,) * T, kron.curvature, kron.has_bias, U_B, U_A)

    @classmethod
    def shapes(cls, T: int, D: int, F: int) -> Shapes:
        return {"sums": (T, D, F)}

    @classmethod
    def n_bytes(cls, T: int, D: int, F: int) -> int:
        """Bytes that the sums of T terms and the two bases take."""
        return super().n_bytes(T, D, F) + 8 * (D * D + F * F)

    def of_items(self, features: Float[Tensor, "N P"], items: ItemCurvature) -> "Ekfac":
        inputs = with_ones(features, self.has_bias)
        rotated = (inputs @ self.input_basis.to(inputs)).square_()
        sums = items.in_basis(self.output_basis).flatten(1).to(inputs).T @ rotated
        return replace(self, sums=sums.view_as(self.sums))

    @property
    def eigenbasis(self) -> tuple[Float[Tensor, "D D"], Float[Tensor, "F F"]]:
        """U_B and U_A."""
        return self.output_basis, self.input_basis


@dataclass(frozen=True)
class LowRank(Structure):
    """h ⊗ (V diag(λ) Vᵀ + diag(δ)): a `Kron` that approximates A, the mean of φφᵀ, by a sketch A Ω and a diagonal.

    `Kron` and its base classes define h, H_a and φ. Ω has J columns. V and λ are the eigenvectors and eigenvalues of
    the Nyström approximation A Ω (Ωᵀ A Ω)⁻¹ (A Ω)ᵀ. The approximation never exceeds A, so δ, the rest of A's diagonal,
    is not negative. Sketches with the same Ω can be added and subtracted, because they are linear in A. A sketch takes
    F J numbers instead of F².

    Source: Tropp, Yurtsever, Udell and Cevher (2017), algorithm 3.

    Attributes:
        sums: (T, D, D) S_t = Σ_a H_a.
        sketch: (F, J) sum of φφᵀ Ω over the items.
        squares: (F,) sum of φ² over the items.
        n_items: number of items in these sums.
        probes: (F, J) Ω, random orthonormal columns from a fixed seed.
    """

    name = "low_rank"
    sum_fields = ("sums", "sketch", "squares", "n_items")
    shared_fields = ("probes",)
    shared_within = 1e-5  # the number of threads and the processor change the rounding of Ω
    shared_hint = "fit both with one rank"

    sums: Float[Tensor, "T D D"]
    sketch: Float[Tensor, "F J"]
    squares: Float[Tensor, " F"]
    n_items: Float[Tensor, ""]
    probes: Float[Tensor, "F J"]

    @classmethod
    def zeros(
        cls,
        weight: Float[Tensor, "D P"],
        curvature: Curvature,
        *,
        has_bias: bool,
        max_memory: int = MAX_MEMORY,
        rank: int = RANK,
    ) -> "LowRank":
        """The structure with all sums zero, in float64, and a sketch of at most `rank` columns."""
        check_at_least("rank", rank, 1)
        T, D, F = len(curvature.terms), len(weight), weight.shape[1] + has_bias
        J = min(rank, F)
        cls.check(curvature, (D, F), cls.n_bytes(T, D, F, J), max_memory)
        normal = torch.randn(F, J, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        probes = torch.linalg.qr(normal)[0].to(weight.device)
        return cls._of_zeros(cls.shapes(T, D, F, J), curvature, weight.device, has_bias=has_bias, probes=probes)

    @classmethod
    def shapes(cls, T: int, D: int, F: int, J: int = RANK) -> Shapes:
        return {"sums": (T, D, D), "sketch": (F, J), "squares": (F,), "n_items": ()}

    @classmethod
    def n_bytes(cls, T: int, D: int, F: int, J: int = RANK) -> int:
        """Bytes that the sums of T terms and at most J float32 probes take."""
        return 8 * (T * D * D + F) + 12 * F * min(J, F)

    def of_items(self, features: Float[Tensor, "N P"], items: ItemCurvature) -> "LowRank":
        """Σ_a H_a, Σ_a φ_a (φ_aᵀ Ω) and Σ_a φ_a²."""
        inputs = with_ones(features, self.has_bias)
        return replace(
            self,
            sums=items.total(),
            sketch=inputs.T @ (inputs @ self.probes.to(inputs)),
            squares=inputs.square().sum(0),
            n_items=torch.full_like(self.n_items, len(inputs)),
        )

    @cached_property
    def output_eigen(self) -> tuple[Float[Tensor, " D"], Float[Tensor, "D D"]]:
        """Eigenvalues of h, including negative values, and its eigenvectors as columns."""
        return eigen(self.h)

    @cached_property
    def factor(self) -> Float[Tensor, "F J"]:
        """V diag(λ)^½, a root of the Nyström approximation."""
        # The shift keeps the core positive definite under rounding; λ subtracts it (algorithm 3 of Tropp et al.).
        probes, sketch = self.probes.double(), self.sketch.double() / self.n_items
        shift = torch.finfo(self.probes.dtype).eps * torch.linalg.matrix_norm(sketch)
        shifted = sketch + shift * probes
        core = probes.T @ shifted
        values, vectors = eigen((core + core.T) / 2)
        kept = values > shift
        left, roots, _ = torch.linalg.svd(shifted @ (vectors[:, kept] / values[kept].sqrt()), full_matrices=False)
        return (left * (roots.square() - shift).clamp(min=0).sqrt()).contiguous()

    @property
    def rest(self) -> Float[Tensor, " F"]:
        """δ, the part of A's diagonal that the low rank leaves out."""
        return (self.squares.double() / self.n_items - self.factor.square().sum(1)).clamp(min=0)

    def diagnostics(self) -> dict[str, float]:
        """Metrics of `SummedCurvature`, and the share of A's trace that δ holds."""
        left = float(self.rest.sum() / (self.squares.double().sum() / self.n_items))
        return {**super().diagnostics(), "share_left": left}

    @property
    def level(self) -> float:
        diagonal = self.squares.double() / self.n_items
        return float(self.output_eigen[0].relu().mean() * diagonal.mean())

    @property
    def clipped(self) -> float:
        return share_negative(self.output_eigen[0])
