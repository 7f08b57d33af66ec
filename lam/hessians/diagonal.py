"""`Diagonal`: the diagonal GGN of a last layer, kept as sums that add up."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lam.hessians.contrastive import Fix, Split


@dataclass(frozen=True)
class Diagonal:
    """The diagonal GGN h = S⁺/n⁺ − w S⁻/n⁻ of the contrastive loss in the weights of a linear layer.

    The four terms are kept unnormalised and signed, so that the Diagonals of batches add and subtract exactly; h is
    formed last. Without the average over each type it is the plain sum, S⁺ − w S⁻. A bias is one more column, that of a
    feature which is always 1.

    Attributes:
        positive: (D, P) or (D, P + 1): S⁺, the sum over ordered positive pairs.
        negative: the same shape: S⁻, the sum over ordered negative pairs inside the margin.
        n_positives: n⁺, how many ordered positive pairs were considered.
        n_negatives: n⁻, how many ordered negative pairs were considered, those outside the margin included.
        has_bias: whether the last column is that of the bias.
        margin: the margin of the loss.
        split: how loss∘network was split.
        fix: which terms were kept.
        negative_weight: w in [0, 1], the weight of the negative pairs.
        average: whether h is averaged over the pairs of each type, or is their plain sum.
    """

    positive: Float[Tensor, "D F"]
    negative: Float[Tensor, "D F"]
    n_positives: int
    n_negatives: int
    has_bias: bool
    margin: float
    split: Split
    fix: Fix
    negative_weight: float
    average: bool = True

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
        """Give h of weights and bias with negative entries set to zero: what a precision uses."""
        bias = self.bias
        return self.weight.relu(), None if bias is None else bias.relu()

    @property
    def h(self) -> Float[Tensor, "D F"]:
        """The signed h of weights and bias together.

        Raises:
            ValueError: where there is no positive pair.
        """
        if self.n_positives < 1:
            raise ValueError(f"there is no positive pair among {self.n_negatives} pairs: the loss has no curvature")
        n_positives, n_negatives = (self.n_positives, self.n_negatives) if self.average else (1, 1)
        h = self.positive / n_positives
        if self.n_negatives and self.fix != "positive":
            h = h - self.negative * (self.negative_weight / n_negatives)
        return h

    def to(self, device: torch.device | str) -> "Diagonal":
        """Move the sums to a device."""
        return replace(self, positive=self.positive.to(device), negative=self.negative.to(device))

    def __add__(self, other: "Diagonal") -> "Diagonal":
        return self._combined(other, 1)

    def __sub__(self, other: "Diagonal") -> "Diagonal":
        return self._combined(other, -1)

    def _combined(self, other: "Diagonal", sign: int) -> "Diagonal":
        mine, yours = self._settings(), other._settings()
        if mine != yours:
            raise ValueError(f"only Diagonals of the same layer and settings add up, got {mine} and {yours}")
        n_positives = self.n_positives + sign * other.n_positives
        n_negatives = self.n_negatives + sign * other.n_negatives
        if n_positives < 0 or n_negatives < 0:
            raise ValueError(
                f"cannot take away {other.n_positives} positive and {other.n_negatives} negative pairs from "
                f"{self.n_positives} and {self.n_negatives}: they were never added"
            )
        return replace(
            self,
            positive=torch.add(self.positive.double(), other.positive.double(), alpha=sign),
            negative=torch.add(self.negative.double(), other.negative.double(), alpha=sign),
            n_positives=n_positives,
            n_negatives=n_negatives,
        )

    def _settings(self) -> dict[str, object]:
        return {
            "shape": tuple(self.positive.shape),
            "has_bias": self.has_bias,
            "margin": self.margin,
            "split": self.split,
            "fix": self.fix,
            "negative_weight": self.negative_weight,
            "average": self.average,
        }
