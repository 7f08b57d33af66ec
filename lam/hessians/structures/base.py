"""`SummedCurvature`, a curvature as sums over batches, and `Structure`, the sums of one linear layer."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lam.hessians.losses import Curvature, from_settings, to_settings
from lam.hessians.losses.base import ItemCurvature
from lam.utils import distributed

MAX_MEMORY = 4 << 30  # default limit in bytes on the sums of a structure
ROUNDING = 1e-6
"""A negative value smaller than this share of the largest absolute value counts as a rounding error of float32."""

Same = TypeVar("Same", bound="SummedCurvature")  # the type checks of test runs reject typing.Self
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class SummedCurvature(ABC):
    """Curvature of a loss with respect to weights of a network, h = Σ_t w_t S_t/n_t, with sums S_t over batches.

    A loss has T terms t, such as positive and negative pairs. Term t has the weight w_t and n_t summands. Sums of
    batches can be added and subtracted. If the curvature is not averaged, h is Σ_t w_t S_t.

    Attributes:
        sums: (T, ...) sums S_t.
        counts: divisors n_t of the terms; None for a running mean of h. No batch can be subtracted from such a mean.
        curvature: curvature of the loss, with the weights w_t.
        name: the structure's name in files.
        sum_fields: names of the fields that are sums over batches.
        shared_fields: names of the fields that must be equal in two structures to add them.
        shared_within: tolerance for the entries of these fields.
        shared_hint: advice in the error for two structures with different `shared_fields`.
        setting_fields: names of the fields that are settings.
        takes_cross_terms: whether the sums can hold cross terms; see `Curvature.has_cross_terms`.
    """

    name: ClassVar[str]
    sum_fields: ClassVar[tuple[str, ...]] = ("sums",)
    shared_fields: ClassVar[tuple[str, ...]] = ()
    shared_within: ClassVar[float] = 0.0
    shared_hint: ClassVar[str] = ""
    setting_fields: ClassVar[tuple[str, ...]] = ()
    takes_cross_terms: ClassVar[bool] = False

    sums: Tensor
    counts: tuple[int, ...] | None
    curvature: Curvature

    @property
    @abstractmethod
    def clipped(self) -> float:
        """Share of h's entries or eigenvalues that are negative; they count as zero in the posterior precision."""

    @property
    @abstractmethod
    def level(self) -> float:
        """Mean eigenvalue of h over all weights, after negative eigenvalues are set to zero."""

    @classmethod
    def check_cross_terms(cls, curvature: Curvature) -> None:
        """Reject a curvature with cross terms that the sums cannot hold."""
        if curvature.has_cross_terms and not cls.takes_cross_terms:
            raise ValueError(
                f'structure="{cls.name}" holds no cross terms of two items, which {curvature} has: '
                'use fix="fixed", or structure="diag"'
            )

    @classmethod
    def _of_zeros(cls: type[Same], sums: Shapes, curvature: Curvature, device: torch.device, **fields: Any) -> Same:
        zeros = {name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in sums.items()}
        return cls(counts=(0,) * len(curvature.terms), curvature=curvature, **fields, **zeros)

    def empty(self: Same) -> Same:
        """This structure with all sums zero, in float64."""
        counts = (0,) * len(self.curvature.terms)
        return replace(self._mapped(lambda sums: torch.zeros_like(sums, dtype=torch.float64)), counts=counts)

    @property
    def adds_up(self) -> bool:
        """Whether this is a sum over batches, not a running mean."""
        return self.counts is not None

    @property
    def h(self) -> Tensor:
        """Σ_t w_t S_t/n_t, including negative values; a `ValueError` if the first n_t is 0."""
        if self.counts is None:
            return self.sums[0]
        return weighted_by_term(self.sums, self.curvature, self.counts)

    def check_finite(self) -> None:
        """Reject sums that are not finite; the error names possible causes."""
        if not all(getattr(self, name).sum().isfinite() for name in self.sum_fields):
            raise ValueError(
                f"the curvature of {self.curvature} is not finite: features are too large, outputs or a temperature "
                "too small, or a file is damaged"
            )

    def diagnostics(self) -> dict[str, float]:
        """Metrics of the curvature by name, for an encoder."""
        return {"share_clipped": self.clipped}

    def to(self: Same, device: torch.device | str) -> Same:
        """The curvature on a device; the same object, with cached results, if it is on this device already."""
        if self.sums.device == torch.device(device):
            return self
        return replace(self, **{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def of_type(self: Same, dtype: torch.dtype) -> Same:
        """The curvature with its sums converted to another type."""
        return self if self.sums.dtype == dtype else self._mapped(lambda sums: sums.to(dtype))

    def all_reduce(self: Same) -> Same:
        """The sum over all processes, in each of them."""
        counts = distributed.all_reduce(torch.tensor(self._counts, device=self.sums.device))
        return replace(self._mapped(distributed.all_reduce), counts=tuple(counts.tolist()))

    def tensors(self) -> dict[str, Tensor]:
        """Sums and shared fields, by name."""
        return {name: getattr(self, name) for name in (*self.sum_fields, *self.shared_fields)}

    def settings(self) -> dict[str, Any]:
        """All fields that are not tensors, as JSON; a `ValueError` for a curvature that is not registered."""
        counts = None if self.counts is None else list(self.counts)
        own = {name: getattr(self, name) for name in self.setting_fields}
        return {"counts": counts, **own, "loss": to_settings(self.curvature)}

    @classmethod
    def restored(cls: type[Same], tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Same:
        """The structure with these `tensors` and `settings`."""
        counts = None if settings["counts"] is None else tuple(settings["counts"])
        if counts is not None and not all(isinstance(n, int) and n >= 0 for n in counts):
            raise ValueError(f"counts must be whole numbers of at least 0, got {list(counts)}")
        own = {name: tensors[name] for name in (*cls.sum_fields, *cls.shared_fields)}
        described = {name: settings[name] for name in cls.setting_fields}
        return cls(counts=counts, curvature=from_settings(settings["loss"]), **described, **own)

    def __add__(self: Same, other: Same) -> Same:
        return self._combined(other, 1)

    def __sub__(self: Same, other: Same) -> Same:
        return self._combined(other, -1)

    def _combined(self: Same, other: Same, sign: int) -> Same:
        counts, others = self._counts, other._counts
        kind, another_kind = type(self).__name__, type(other).__name__
        if (kind, self._identity) != (another_kind, other._identity):
            got = f"{kind}{self._identity} and {another_kind}{other._identity}"
            raise ValueError(f"only {kind}s of the same layer and settings add up, got {got}")
        for name in self.shared_fields:
            one, another = getattr(self, name), getattr(other, name)
            if one.shape != another.shape or not torch.allclose(one, another, rtol=0, atol=self.shared_within):
                shapes = f"of shapes {tuple(one.shape)} and {tuple(another.shape)}"
                raise ValueError(f"only {kind}s with the same {name} add up, got them {shapes}: {self.shared_hint}")
        counts = tuple(n + sign * m for n, m in zip(counts, others, strict=True))
        if min(counts) < 0:
            removed, total = (" and ".join(counted(part.curvature, part._counts)) for part in (other, self))
            raise ValueError(f"cannot subtract {removed} from {total}: they were never added")
        sums = {
            name: torch.add(getattr(self, name).double(), getattr(other, name).double(), alpha=sign)
            for name in self.sum_fields
        }
        return replace(self, counts=counts, **sums)

    def _mapped(self: Same, change: Callable[[Tensor], Tensor]) -> Same:
        return replace(self, **{name: change(getattr(self, name)) for name in self.sum_fields})

    @property
    def _identity(self) -> tuple[Any, ...]:
        """Values that must be equal in two summands, besides `shared_fields`."""
        return (self.curvature, tuple(self.sums.shape), *(getattr(self, name) for name in self.setting_fields))

    @property
    def _counts(self) -> tuple[int, ...]:
        if self.counts is None:
            raise ValueError("a running mean is not a sum over batches: batches cannot be added to it or subtracted")
        return self.counts


@dataclass(frozen=True)
class Structure(SummedCurvature):
    """Curvature with respect to the weights of one linear layer: Σ_a H_a ⊗ φ_a φ_aᵀ, or an approximation.

    φ_a are the features of item a, and H_a is the curvature with respect to the item's output. A bias is the last of
    the F columns; its feature is 1. A subclass implements `shapes`, `of_items`, `clipped` and `level`.

    Attributes:
        has_bias: whether the last column belongs to the bias.
    """

    setting_fields = ("has_bias",)

    has_bias: bool

    @classmethod
    @abstractmethod
    def shapes(cls, T: int, D: int, F: int) -> Shapes:
        """Shapes of the sums of T terms, by name, for a layer with D outputs and F inputs, including the bias."""

    @classmethod
    def n_bytes(cls, T: int, D: int, F: int) -> int:
        """Bytes that the sums of T terms take, for a layer with D outputs and F inputs."""
        return 8 * sum(math.prod(shape) for shape in cls.shapes(T, D, F).values() if shape)

    @classmethod
    def zeros(
        cls: type[Same],
        weight: Float[Tensor, "D P"],
        curvature: Curvature,
        *,
        has_bias: bool,
        max_memory: int = MAX_MEMORY,
    ) -> Same:
        """The structure with all sums zero, in float64, for a layer with this weight; errors as in `check`."""
        structure: Any = cls
        T, D, F = len(curvature.terms), len(weight), weight.shape[1] + has_bias
        structure.check(curvature, (D, F), structure.n_bytes(T, D, F), max_memory)
        return structure._of_zeros(structure.shapes(T, D, F), curvature, weight.device, has_bias=has_bias)

    @abstractmethod
    def of_items(self: Same, features: Float[Tensor, "N P"], items: ItemCurvature) -> Same:
        """The structure with the sums of N items; the caller sets the counts."""

    @property
    def spectrum(self) -> Tensor:
        """Eigenvalues of h, or of its approximation, including negative values."""
        return self.h

    @property
    def level(self) -> float:
        return float(self.spectrum.relu().mean())

    @property
    def clipped(self) -> float:
        return share_negative(self.spectrum)

    @classmethod
    def check(cls, curvature: Curvature, shape: tuple[int, int], n_bytes: int, max_memory: int) -> None:
        """Reject cross terms that the sums cannot hold, and sums of more than `max_memory` bytes.

        `shape` is the shape (D, F) of the layer's weights with its bias. The error names structures that fit.
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
    """Inputs of a layer, with a column of ones for a bias."""
    return torch.cat([features, features.new_ones(len(features), 1)], 1) if has_bias else features


def split_bias(
    theta: Float[Tensor, "*S D F"], has_bias: bool
) -> tuple[Float[Tensor, "*S D P"], Float[Tensor, "*S D"] | None]:
    """Weights and biases of layers; a bias is the last column."""
    return (theta[..., :-1], theta[..., -1]) if has_bias else (theta, None)


def weighted_by_term(sums: Tensor, curvature: Curvature, counts: tuple[int, ...]) -> Tensor:
    """Σ_t w_t S_t/n_t (Σ_t w_t S_t if not averaged) over terms with n_t > 0; a `ValueError` if the first n_t is 0."""
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
    """The count of each term as text, such as "12 negative pairs"."""
    return [f"{n} {name}s" for n, name in zip(counts, curvature.terms, strict=True)]


def is_negative(values: Float[Tensor, "*B"]) -> Bool[Tensor, "*B"]:
    """Whether values are negative by more than rounding."""
    return values < -ROUNDING * values.abs().max()


def share_negative(values: Float[Tensor, "*B"]) -> float:
    """Share of the values that are negative by more than rounding."""
    return float(is_negative(values).double().mean())


def eigen(matrix: Float[Tensor, "D D"]) -> tuple[Float[Tensor, " D"], Float[Tensor, "D D"]]:
    """Eigenvalues of a symmetric matrix, and its eigenvectors as columns, in float64 and contiguous in memory."""
    values, vectors = torch.linalg.eigh(matrix.double())
    return values, vectors.contiguous()
