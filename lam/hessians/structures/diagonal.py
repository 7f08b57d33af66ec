"""`Diagonal`: the diagonal GGN of a last layer, kept as sums that add up."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians.losses import Curvature, from_settings, to_settings
from lam.utils import distributed


@dataclass(frozen=True)
class Diagonal:
    """The diagonal GGN h = Σ_t w_t S_t/n_t of a loss in the weights of a linear layer.

    The T terms are kept unnormalised and signed, so that the Diagonals of batches add and subtract exactly; h is formed
    last. Without the average it is the plain sum Σ_t w_t S_t. A bias is one more column, that of a feature which is
    always 1.

    Attributes:
        sums: (T, D, P) or (T, D, P + 1): S_t.
        counts: n_t, what each term is averaged over. None where h is no sum over batches but a running mean of them,
            (1, D, F): then nothing can be added to it or taken out.
        curvature: of the loss, with the weights w_t.
        has_bias: whether the last column is that of the bias.
    """

    sums: Float[Tensor, "T D F"]
    counts: tuple[int, ...] | None
    curvature: Curvature
    has_bias: bool

    @classmethod
    def zeros(cls, weight: Float[Tensor, "D P"], curvature: Curvature, *, has_bias: bool) -> "Diagonal":
        """The sums over no batch at all, float64."""
        n_terms, (D, P) = len(curvature.terms), weight.shape
        sums = weight.new_zeros(n_terms, D, P + has_bias, dtype=torch.float64)
        return cls(sums, (0,) * n_terms, curvature, has_bias)

    @property
    def adds_up(self) -> bool:
        """Whether this is a sum over batches, to which others can be added and from which they can be taken."""
        return self.counts is not None

    @property
    def weights(self) -> tuple[float, ...]:
        """w_t."""
        return (1.0,) if self.counts is None else tuple(self.curvature.terms.values())

    @property
    def h(self) -> Float[Tensor, "D F"]:
        """The signed h of weights and bias together.

        Raises:
            ValueError: where nothing was counted for the first term.
        """
        if self.counts is None:
            return self.sums[0]
        if self.counts[0] < 1:
            _, *others = self._counted()
            among = f" among {' and '.join(others)}" if others else ""
            raise ValueError(f"there is no {next(iter(self.curvature.terms))}{among}: the loss has no curvature")
        h: Any = None
        for S, n, w in zip(self.sums, self.counts, self.weights, strict=True):
            if n:
                n = n if self.curvature.average else 1
                term = S / n if w == 1 else S * (w / n)
                h = term if h is None else h + term
        return h

    @property
    def weight(self) -> Float[Tensor, "D P"]:
        """The signed h of the weights."""
        h = self.h
        return h[:, :-1] if self.has_bias else h

    @property
    def bias(self) -> Float[Tensor, " D"] | None:
        """The signed h of the bias, or None."""
        return self.h[:, -1] if self.has_bias else None

    @property
    def clipped(self) -> float:
        """The share of entries that `relu` sets to zero because they are negative."""
        return float((self.h < 0).double().mean())

    def relu(self) -> tuple[Float[Tensor, "D P"], Float[Tensor, " D"] | None]:
        """h of weights and bias with negative entries set to zero: what a precision uses."""
        bias = self.bias
        return self.weight.relu(), None if bias is None else bias.relu()

    def to(self, device: torch.device | str) -> "Diagonal":
        """The same sums on a device."""
        return replace(self, sums=self.sums.to(device))

    def all_reduce(self) -> "Diagonal":
        """The total over all processes, the same in each."""
        counts = distributed.all_reduce(torch.tensor(self._counts, device=self.sums.device))
        return replace(self, sums=distributed.all_reduce(self.sums), counts=tuple(counts.tolist()))

    def tensors(self) -> dict[str, Tensor]:
        """The sums, by name."""
        return {"sums": self.sums}

    def settings(self) -> dict[str, Any]:
        """All else, as JSON.

        Raises:
            ValueError: where the loss's curvature is not registered.
        """
        counts = None if self.counts is None else list(self.counts)
        return {"counts": counts, "has_bias": self.has_bias, "loss": to_settings(self.curvature)}

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> "Diagonal":
        """The structure that has these `tensors` and `settings`."""
        counts = None if settings["counts"] is None else tuple(settings["counts"])
        return cls(tensors["sums"], counts, from_settings(settings["loss"]), settings["has_bias"])

    def __add__(self, other: "Diagonal") -> "Diagonal":
        return self._combined(other, 1)

    def __sub__(self, other: "Diagonal") -> "Diagonal":
        return self._combined(other, -1)

    def _combined(self, other: "Diagonal", sign: int) -> "Diagonal":
        counts, others = self._counts, other._counts
        left, right = ((term.curvature, tuple(term.sums.shape), term.has_bias) for term in (self, other))
        if left != right:
            raise ValueError(f"only Diagonals of the same layer and settings add up, got {left} and {right}")
        counts = tuple(n + sign * m for n, m in zip(counts, others, strict=True))
        if min(counts) < 0:
            removed, total = (" and ".join(term._counted()) for term in (other, self))
            raise ValueError(f"cannot take away {removed} from {total}: they were never added")
        return replace(self, sums=torch.add(self.sums.double(), other.sums.double(), alpha=sign), counts=counts)

    @property
    def _counts(self) -> tuple[int, ...]:
        if self.counts is None:
            raise ValueError("a running mean is no sum over batches: nothing can be added to it or taken out")
        return self.counts

    def _counted(self) -> list[str]:
        """What was counted, term by term, such as "12 negative pairs"."""
        return [f"{n} {name}s" for n, name in zip(self._counts, self.curvature.terms, strict=True)]
