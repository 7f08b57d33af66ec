"""`SummedCurvature`: what a curvature keeps of itself, as sums that add up; `Structure`: that of one linear layer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lam.hessians.losses import Curvature, from_settings, to_settings
from lam.hessians.losses.items import ItemCurvature
from lam.utils import distributed

MAX_MEMORY = 4 << 30
"""Bytes that the sums of a structure may take, unless a call allows others."""

ROUNDING = 1e-6
"""What is negative by less than this, in units of the largest, is zero but for the rounding of float32."""

Same = TypeVar("Same", bound="SummedCurvature")  # typing.Self is refused by the type checks of test runs


@dataclass(frozen=True)
class SummedCurvature(ABC):
    """Curvature h = Σ_t w_t S_t/n_t of a loss in some weights of a network, as sums that add up.

    The T terms are kept unnormalised and signed, so that the sums of batches add and subtract exactly; h is formed
    last. Without the average it is the plain sum Σ_t w_t S_t.

    Attributes:
        sums: (T, ...): S_t.
        counts: n_t, what each term is averaged over. None where h is no sum over batches but a running mean of them:
            then nothing can be added to it or taken out.
        curvature: of the loss, with the weights w_t.
    """

    name: ClassVar[str]
    summed: ClassVar[tuple[str, ...]] = ("sums",)
    shared: ClassVar[tuple[str, ...]] = ()
    alike: ClassVar[str] = ""
    """How two come to have the same of what is `shared`."""
    described: ClassVar[tuple[str, ...]] = ()
    takes_cross_terms: ClassVar[bool] = False

    sums: Tensor
    counts: tuple[int, ...] | None
    curvature: Curvature

    @property
    @abstractmethod
    def clipped(self) -> float:
        """The share of h that is negative and set to zero where a precision is formed."""

    @classmethod
    def check_cross_terms(cls, curvature: Curvature) -> None:
        """Refuse a curvature whose cross terms the structure has no place for."""
        if curvature.has_cross_terms and not cls.takes_cross_terms:
            raise ValueError(
                f'structure="{cls.name}" holds no cross terms of two items, which {curvature} has: '
                'use fix="fixed", or structure="diag"'
            )

    def empty(self: Same) -> Same:
        """The sums over no batch at all, in float64, to which those of this structure can be added."""
        counts = (0,) * len(self.curvature.terms)
        return replace(self._mapped(lambda sums: torch.zeros_like(sums, dtype=torch.float64)), counts=counts)

    @property
    def adds_up(self) -> bool:
        """Whether this is a sum over batches, to which others can be added and from which they can be taken."""
        return self.counts is not None

    @property
    def h(self) -> Tensor:
        """The signed Σ_t w_t S_t/n_t.

        Raises:
            ValueError: where nothing was counted for the first term.
        """
        if self.counts is None:
            return self.sums[0]
        return weighted_by_term(self.sums, self.curvature, self.counts)

    def check_finite(self) -> None:
        """Refuse sums that are not finite.

        Raises:
            ValueError: saying what makes them so.
        """
        if not all(getattr(self, name).sum().isfinite() for name in self.summed):
            raise ValueError(
                f"the curvature of {self.curvature} is not finite: features are too large, outputs or a temperature "
                "too small, or a file is damaged"
            )

    def diagnostics(self) -> dict[str, float]:
        """What an encoder says of its curvature, by name."""
        return {"share_clipped": self.clipped}

    def to(self: Same, device: torch.device | str) -> Same:
        """The same on a device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in (*self.summed, *self.shared)})

    def of_type(self: Same, dtype: torch.dtype) -> Same:
        """The same with sums of another type."""
        return self if self.sums.dtype == dtype else self._mapped(lambda sums: sums.to(dtype))

    def all_reduce(self: Same) -> Same:
        """The total over all processes, the same in each."""
        counts = distributed.all_reduce(torch.tensor(self._counts, device=self.sums.device))
        return replace(self._mapped(distributed.all_reduce), counts=tuple(counts.tolist()))

    def tensors(self) -> dict[str, Tensor]:
        """The sums and what they share, by name."""
        return {name: getattr(self, name) for name in (*self.summed, *self.shared)}

    def settings(self) -> dict[str, Any]:
        """All else, as JSON.

        Raises:
            ValueError: where the loss's curvature is not registered.
        """
        counts = None if self.counts is None else list(self.counts)
        own = {name: getattr(self, name) for name in self.described}
        return {"counts": counts, **own, "loss": to_settings(self.curvature)}

    @classmethod
    def restored(cls: type[Same], tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Same:
        """The structure that has these `tensors` and `settings`."""
        counts = None if settings["counts"] is None else tuple(settings["counts"])
        if counts is not None and not all(isinstance(n, int) and n >= 0 for n in counts):
            raise ValueError(f"counts must be whole numbers of at least 0, got {list(counts)}")
        own = {name: tensors[name] for name in (*cls.summed, *cls.shared)}
        described = {name: settings[name] for name in cls.described}
        return cls(counts=counts, curvature=from_settings(settings["loss"]), **described, **own)

    def __add__(self: Same, other: Same) -> Same:
        return self._combined(other, 1)

    def __sub__(self: Same, other: Same) -> Same:
        return self._combined(other, -1)

    def _combined(self: Same, other: Same, sign: int) -> Same:
        counts, others = self._counts, other._counts
        left, right = (
            (type(part).__name__, part.curvature, tuple(part.sums.shape), *(getattr(part, x) for x in part.described))
            for part in (self, other)
        )
        if left != right:
            got = f"{left[0]}{left[1:]} and {right[0]}{right[1:]}"
            raise ValueError(f"only {left[0]}s of the same layer and settings add up, got {got}")
        for name in self.shared:
            one, another = getattr(self, name), getattr(other, name)
            if not torch.equal(one, another):
                shapes = f"of shapes {tuple(one.shape)} and {tuple(another.shape)}"
                raise ValueError(f"only {left[0]}s with the same {name} add up, got them {shapes}: {self.alike}")
        counts = tuple(n + sign * m for n, m in zip(counts, others, strict=True))
        if min(counts) < 0:
            removed, total = (" and ".join(part._counted()) for part in (other, self))
            raise ValueError(f"cannot take away {removed} from {total}: they were never added")
        sums = {
            name: torch.add(getattr(self, name).double(), getattr(other, name).double(), alpha=sign)
            for name in self.summed
        }
        return replace(self, counts=counts, **sums)

    def _mapped(self: Same, change: Callable[[Tensor], Tensor]) -> Same:
        return replace(self, **{name: change(getattr(self, name)) for name in self.summed})

    @property
    def _counts(self) -> tuple[int, ...]:
        if self.counts is None:
            raise ValueError("a running mean is no sum over batches: nothing can be added to it or taken out")
        return self.counts

    def _counted(self) -> list[str]:
        return counted(self.curvature, self._counts)


@dataclass(frozen=True)
class Structure(SummedCurvature):
    """Curvature in the weights of one linear layer, Σ_a H_a ⊗ φ_a φ_aᵀ or a part of it; see `SummedCurvature`.

    A bias is one more column, that of a feature which is always 1.

    Attributes:
        has_bias: whether the last column is that of the bias.
    """

    described = ("has_bias",)

    has_bias: bool

    @abstractmethod
    def of_items(self: Same, features: Float[Tensor, "N P"], items: ItemCurvature) -> Same:
        """The same structure of N items alone; what is counted is left to the caller."""

    @classmethod
    def check(cls, curvature: Curvature, shape: tuple[int, int], n_bytes: int, max_memory: int) -> None:
        """Refuse sums that take too much memory, and cross terms that the structure has no place for.

        Args:
            curvature: of the loss.
            shape: (D, F) of the layer's weights, those of the bias among them.
            n_bytes: what the sums take.
            max_memory: what they may take.

        Raises:
            ValueError: saying which structure would do.
        """
        cls.check_cross_terms(curvature)
        if n_bytes > max_memory:
            others: dict[str, Any] = {other.name: other for other in Structure.__subclasses__()}
            fit = [
                f'"{name}"'
                for name in ("low_rank", "diag")
                if others[name].n_bytes(len(curvature.terms), *shape) <= max_memory
            ]
            raise ValueError(
                f'structure="{cls.name}" of a layer with {shape[0]} x {shape[1]} weights takes {n_bytes:,} bytes, more '
                f"than max_memory, {max_memory:,}: allow more"
                + (f", or use structure={' or '.join(fit)}" if fit else "")
            )


def with_ones(features: Float[Tensor, "N P"], has_bias: bool) -> Float[Tensor, "N F"]:
    """What a layer's weights and bias are multiplied by: for a bias a column of ones is added."""
    return torch.cat([features, features.new_ones(len(features), 1)], 1) if has_bias else features


def weighted_by_term(sums: Tensor, curvature: Curvature, counts: tuple[int, ...]) -> Tensor:
    """Σ_t w_t S_t/n_t, or without the average Σ_t w_t S_t, over the terms of which something was counted.

    Raises:
        ValueError: where nothing was counted for the first term.
    """
    if counts[0] < 1:
        _, *others = counted(curvature, counts)
        among = f" among {' and '.join(others)}" if others else ""
        raise ValueError(f"there is no {next(iter(curvature.terms))}{among}: the loss has no curvature")
    total: Any = None
    for S, n, w in zip(sums, counts, curvature.terms.values(), strict=True):
        if n:
            n = n if curvature.average else 1
            term = S / n if w == 1 else S * (w / n)
            total = term if total is None else total + term
    return total


def counted(curvature: Curvature, counts: tuple[int, ...]) -> list[str]:
    """What was counted, term by term, such as "12 negative pairs"."""
    return [f"{n} {name}s" for n, name in zip(counts, curvature.terms, strict=True)]


def is_negative(values: Float[Tensor, "*B"]) -> Bool[Tensor, "*B"]:
    """Which of them are negative by more than rounding."""
    return values < -ROUNDING * values.abs().max()


def eigen(matrix: Float[Tensor, "D D"]) -> tuple[Float[Tensor, " D"], Float[Tensor, "D D"]]:
    """Eigenvalues and eigenvectors, as columns, of a symmetric matrix, in float64 and row by row in memory."""
    values, vectors = torch.linalg.eigh(matrix.double())
    return values, vectors.contiguous()
