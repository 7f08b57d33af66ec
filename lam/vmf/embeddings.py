"""`Embeddings`, the result of every encoder: directions with their uncertainty."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lam.utils.checks import check_tensor
from lam.vmf.resultant import MeanResultant, mean_resultant_length

Mean = Literal["network", "sampled"]
"""Direction of an embedding: `network` for the network's output, `sampled` for the mean of S samples."""

KAPPA_RANGE = (1e-6, 1e8)
"""Least and greatest κ of an embedding; values outside are clamped."""


@dataclass(frozen=True)
class Embeddings:
    """N points on the unit sphere in R^D with their uncertainty.

    Attributes:
        mean: (N, D) unit vectors that retrieval compares: f/‖f‖ of the network's output f, or 0 if f is 0; see also
            `mean_samples`.
        kappa: (N,) concentration of the von Mises-Fisher distribution, ≥ 0; small means uncertain. If the three parts
            of κ (the last three attributes) are set, `kappa` combines them; see `lam.tuning.ambiguity`.
        resultant: (N,) mean resultant length in [0, 1] of the distribution with `kappa`.
        variance: (N,) predictive variance before normalisation, summed over the D outputs; large means uncertain.
        samples: (S, N, D) sampled unit vectors, if requested.
        mean_samples: S if `mean` is the mean direction of S samples; only means with the same S can be compared.
        kappa_epistemic: (N,) concentration from the method alone: how well the data determine the embedding.
        kappa_aleatoric: (N,) concentration of the item's matches; small for an ambiguous item.
        p_known: (N,) probability in [0, 1] that the item's kind is known.

    Raises:
        ValueError: for shapes that disagree, types that are not floating-point, or only some of the parts of κ.
    """

    mean: Float[Tensor, "N D"]
    kappa: Float[Tensor, " N"]
    resultant: Float[Tensor, " N"]
    variance: Float[Tensor, " N"]
    samples: Float[Tensor, "S N D"] | None = None
    mean_samples: int | None = None
    kappa_epistemic: Float[Tensor, " N"] | None = None
    kappa_aleatoric: Float[Tensor, " N"] | None = None
    p_known: Float[Tensor, " N"] | None = None

    def __post_init__(self) -> None:
        there = [name for name in _PARTS if getattr(self, name) is not None]
        if 0 < len(there) < len(_PARTS):
            raise ValueError(
                f"kappa_epistemic, kappa_aleatoric and p_known belong together, got {', '.join(there)} alone"
            )
        for name, values in self.rows().items():
            check_tensor(name, values)
        if self.mean.ndim != 2:
            raise ValueError(f"mean must have shape (N, D), a row for each item, got {tuple(self.mean.shape)}")
        n = self.mean.shape[0]
        for name, values in self.rows().items():
            if name != "mean" and values.shape != (n,):
                raise ValueError(f"{name} must have shape ({n},), got {tuple(values.shape)}")
            if not values.is_floating_point():
                raise ValueError(f"{name} must be of a floating-point type, got {values.dtype}")
        if self.samples is not None and self.samples.shape[1:] != self.mean.shape:
            raise ValueError(f"samples must have shape (S, {n}, {self.dimension}), got {tuple(self.samples.shape)}")

    def __len__(self) -> int:
        return self.mean.shape[0]

    def __getitem__(self, index: slice | Tensor) -> "Embeddings":
        if isinstance(index, int):
            raise ValueError(f"embeddings are indexed by a slice or a tensor, got {index}: give [{index}:{index + 1}]")
        samples = None if self.samples is None else self.samples[:, index]
        rows = {name: values[index] for name, values in self.rows().items()}
        return replace(self, samples=samples, **rows)

    @property
    def capped(self) -> Bool[Tensor, " N"]:
        """Whether an item's `kappa` is at an end of `KAPPA_RANGE`, for example after clamping."""
        return (self.kappa <= KAPPA_RANGE[0]) | (self.kappa >= KAPPA_RANGE[1])

    @property
    def dimension(self) -> int:
        """Number of embedding dimensions D."""
        return self.mean.shape[1]

    def to(self, device: torch.device | str) -> "Embeddings":
        """The embeddings on a device."""
        samples = None if self.samples is None else self.samples.to(device)
        rows = {name: values.to(device) for name, values in self.rows().items()}
        return replace(self, samples=samples, **rows)

    @property
    def has_parts(self) -> bool:
        """Whether the three parts of κ are set: `kappa_epistemic`, `kappa_aleatoric` and `p_known`."""
        return self.p_known is not None

    def rows(self) -> dict[str, Tensor]:
        """The tensors with one row for each item, by name: all but `samples`."""
        return {name: getattr(self, name) for name in _BY_ITEM} | self.parts()

    def parts(self) -> dict[str, Tensor]:
        """The three parts of κ by name, or an empty dict."""
        return {name: getattr(self, name) for name in _PARTS} if self.has_parts else {}

    @staticmethod
    def from_samples(
        samples: Float[Tensor, "S N D"],
        variance: Float[Tensor, " N"],
        *,
        mean: Float[Tensor, "N _"] | None = None,
        keep: bool = False,
    ) -> "Embeddings":
        """Embeddings from samples: κ from their mean resultant length, corrected for chance.

        Source: Sra (2012).

        Args:
            samples: (S, N, D) unit vectors, S ≥ 2.
            variance: (N,) variance before normalisation; the embeddings get its type.
            mean: (N, D) directions of the embeddings; by default the mean directions of the samples. Without `keep`,
                samples may have another dimension.
            keep: whether the embeddings include the samples.

        Raises:
            ValueError: as `mean_resultant_length`.

        Example:
            >>> samples = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]])
            >>> Embeddings.from_samples(samples, torch.zeros(1)).resultant
            tensor([0.5774])
        """
        length = mean_resultant_length(samples, unbiased=True)
        embeddings = Embeddings.from_resultant(length, variance, mean=mean, n_samples=len(samples))
        return replace(embeddings, samples=samples.to(variance.dtype)) if keep else embeddings

    @staticmethod
    def from_resultant(
        length: MeanResultant,
        variance: Float[Tensor, " N"],
        *,
        mean: Float[Tensor, "N _"] | None = None,
        n_samples: int,
    ) -> "Embeddings":
        """Embeddings from the mean resultant length of S samples; see `from_samples`."""
        lowest, highest = KAPPA_RANGE
        dtype = variance.dtype
        return Embeddings(
            (length.mean if mean is None else mean).to(dtype),
            length.kappa(max_kappa=highest).clamp(min=lowest).to(dtype),
            length.resultant.to(dtype),
            variance,
            mean_samples=n_samples if mean is None else None,
        )

    @staticmethod
    def concatenate(parts: Sequence["Embeddings"]) -> "Embeddings":
        """The items of several batches, in order.

        Args:
            parts: at least one batch. The result has samples if every batch has them.

        Raises:
            ValueError: for no batch, means that are not comparable, or parts of κ in only some batches.
        """
        if not parts:
            raise ValueError("at least one batch of embeddings is needed to concatenate, got none")
        for part in parts:
            check_same_means(part, parts[0].mean_samples)
        if 0 < (n_with := sum(part.has_parts for part in parts)) < len(parts):
            raise ValueError(f"all batches must have parts of kappa, or none, got them in {n_with} of {len(parts)}")
        samples = [part.samples for part in parts if part.samples is not None]
        rows = {name: torch.cat([getattr(part, name) for part in parts]) for name in parts[0].rows()}
        return replace(parts[0], samples=torch.cat(samples, 1) if len(samples) == len(parts) else None, **rows)


_BY_ITEM = ("mean", "kappa", "resultant", "variance")
_PARTS = ("kappa_epistemic", "kappa_aleatoric", "p_known")


def check_embeddings(values: Any) -> None:
    """Reject values that are not `Embeddings`."""
    if not isinstance(values, Embeddings):
        raise ValueError(f"embeddings must be lam.Embeddings, got {type(values).__name__}: give encoder.embed(inputs)")


def check_same_means(embeddings: Embeddings, mean_samples: int | None) -> None:
    """Reject embeddings with another `mean_samples`: their means are not comparable."""
    check_embeddings(embeddings)
    if embeddings.mean_samples != mean_samples:
        kinds = [
            "the network's own directions" if n_samples is None else f"means of {n_samples} samples"
            for n_samples in (embeddings.mean_samples, mean_samples)
        ]
        raise ValueError(f"embeddings that are {kinds[0]} cannot be compared with {kinds[1]}: embed both alike")
