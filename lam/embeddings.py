"""Embeddings: what every encoder returns and everything downstream takes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lam.vmf import mean_resultant_length

KAPPA_RANGE = (1e-6, 1e8)
"""Concentrations outside this range are reported as its nearest end."""


@dataclass(frozen=True)
class Embeddings:
    """N points on the unit sphere in R^D, each with what is known of its uncertainty.

    Attributes:
        mean: (N, D) unit vectors: the mean direction.
        kappa: (N,) concentration of the von Mises-Fisher distribution, ≥ 0; small means uncertain.
        resultant: (N,) mean resultant length in [0, 1] of the samples behind `kappa`.
        variance: (N,) predictive variance before normalisation, summed over the D outputs; large means uncertain.
        samples: (S, N, D) unit vectors, where samples were asked for.

    Raises:
        ValueError: where the shapes disagree, or numbers are not of a floating-point type.
    """

    mean: Float[Tensor, "N D"]
    kappa: Float[Tensor, " N"]
    resultant: Float[Tensor, " N"]
    variance: Float[Tensor, " N"]
    samples: Float[Tensor, "S N D"] | None = None

    def __post_init__(self) -> None:
        if self.mean.ndim != 2:
            raise ValueError(f"mean must have shape (N, D), a row for each item, got {tuple(self.mean.shape)}")
        n = self.mean.shape[0]
        for name in ("mean", "kappa", "resultant", "variance"):
            values = getattr(self, name)
            if name != "mean" and values.shape != (n,):
                raise ValueError(f"{name} must have shape ({n},), got {tuple(values.shape)}")
            if not values.is_floating_point():
                raise ValueError(f"{name} must be of a floating-point type, got {values.dtype}")
        if self.samples is not None and self.samples.shape[1:] != self.mean.shape:
            raise ValueError(f"samples must have shape (S, {n}, {self.dimension}), got {tuple(self.samples.shape)}")

    def __len__(self) -> int:
        return self.mean.shape[0]

    def __getitem__(self, index: slice | Tensor) -> "Embeddings":
        samples = None if self.samples is None else self.samples[:, index]
        return Embeddings(self.mean[index], self.kappa[index], self.resultant[index], self.variance[index], samples)

    @property
    def capped(self) -> Bool[Tensor, " N"]:
        """Which items have a `kappa` at an end of `KAPPA_RANGE`: it is a bound, not an estimate."""
        return (self.kappa <= KAPPA_RANGE[0]) | (self.kappa >= KAPPA_RANGE[1])

    @property
    def dimension(self) -> int:
        """The number of embedding dimensions D."""
        return self.mean.shape[1]

    def to(self, device: torch.device | str) -> "Embeddings":
        """Move every tensor to a device."""
        samples = None if self.samples is None else self.samples.to(device)
        return Embeddings(
            self.mean.to(device), self.kappa.to(device), self.resultant.to(device), self.variance.to(device), samples
        )

    @staticmethod
    def from_samples(
        samples: Float[Tensor, "S N D"], variance: Float[Tensor, " N"], *, keep: bool = False
    ) -> "Embeddings":
        """Summarise samples: their mean direction, and κ from their mean resultant length, corrected for chance.

        Source: Sra (2012).

        Args:
            samples: (S, N, D) unit vectors, S ≥ 2.
            variance: (N,) before normalisation; its type is that of the embeddings.
            keep: keep the samples.

        Returns:
            One record of N items.

        Raises:
            ValueError: as `lam.vmf.mean_resultant_length`.

        Example:
            >>> samples = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]])
            >>> Embeddings.from_samples(samples, torch.zeros(1)).resultant
            tensor([0.5774])
        """
        length = mean_resultant_length(samples, unbiased=True)
        least, most = KAPPA_RANGE
        dtype = variance.dtype
        return Embeddings(
            length.mean.to(dtype),
            length.kappa(max_kappa=most).clamp(min=least).to(dtype),
            length.resultant.to(dtype),
            variance,
            samples.to(dtype) if keep else None,
        )

    @staticmethod
    def concatenate(parts: Sequence["Embeddings"]) -> "Embeddings":
        """Join batches of embeddings, in order.

        Args:
            parts: at least one; either all with samples, of the same number, or none.

        Returns:
            One record of all items.

        Raises:
            ValueError: for no part at all.
        """
        if not parts:
            raise ValueError("nothing to concatenate: give at least one batch of embeddings")
        if any(part.samples is None for part in parts):
            samples = None
        else:
            samples = torch.cat([part.samples for part in parts if part.samples is not None], 1)
        return Embeddings(
            torch.cat([part.mean for part in parts]),
            torch.cat([part.kappa for part in parts]),
            torch.cat([part.resultant for part in parts]),
            torch.cat([part.variance for part in parts]),
            samples,
        )
