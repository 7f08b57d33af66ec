"""`LowRank`: Kronecker factors for wide layers; the input factor has a low rank plus a diagonal."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians.losses import Curvature
from lam.hessians.losses.base import ItemCurvature
from lam.hessians.structures.base import MAX_MEMORY, Shapes, Structure, eigen, share_negative, with_ones
from lam.utils.checks import check_at_least

RANK = 256
"""Default number of columns of a sketch."""


@dataclass(frozen=True)
class LowRank(Structure):
    """h ⊗ (V diag(λ) Vᵀ + diag(δ)): a `Kron` that approximates A, the mean of φφᵀ, by a sketch A Ω and a diagonal.

    Ω has J columns. V and λ are the eigenvectors and eigenvalues of the Nyström approximation A Ω (Ωᵀ A Ω)⁻¹ (A Ω)ᵀ.
    This never exceeds A, so δ, the rest of A's diagonal, is not negative. Sketches with the same Ω can be added and
    subtracted, because they are linear in A. A sketch takes F J numbers instead of F².

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
        # The shift keeps the core positive definite under rounding; λ subtracts it (algorithm 3 of the source).
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
