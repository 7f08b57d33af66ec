"""`Embeddings`: directions with their uncertainty, the result of every encoder. Also mean resultant lengths."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lam.utils.checks import check_tensor, unit_tolerance
from lam.vmf.bessel import check_all, check_floating, kappa_from_resultant

_BLOCKS = 16  # greatest number of blocks of samples; one block after the other is summed

Mean = Literal["network", "sampled"]
"""Direction of an embedding: `network` for the network's output, `sampled` for the mean of S samples."""

KAPPA_RANGE = (1e-6, 1e8)
"""Least and greatest κ of an embedding; values outside are clamped."""

_BY_ITEM = ("mean", "kappa", "resultant", "variance")
_PARTS = ("kappa_epistemic", "kappa_aleatoric", "p_known")


@dataclass(frozen=True, eq=False)
class MeanResultant:
    """Direction and length of the mean of samples.

    Attributes:
        mean: mean directions (*B, D), unit vectors, in the type of the samples.
        resultant: lengths R (*B) in [0, 1], float64.
        one_minus_resultant: 1 - R, float64, precise also near R = 1.
    """

    mean: Float[Tensor, "*B D"]
    resultant: Float[Tensor, "*B"]
    one_minus_resultant: Float[Tensor, "*B"]

    def kappa(self, *, max_kappa: float = 1e8) -> Float[Tensor, "*B"]:
        """Concentration of the resultant length, float64, at most `max_kappa`; see `kappa_from_resultant`."""
        one_minus, dimension = self.one_minus_resultant, self.mean.shape[-1]
        return kappa_from_resultant(self.resultant, dimension, one_minus_resultant=one_minus, max_kappa=max_kappa)


def mean_resultant_length(samples: Float[Tensor, "S *B D"], *, unbiased: bool) -> MeanResultant:
    """Mean direction and mean resultant length of unit vectors over the first axis.

    R = ||sum_s x_s|| / S and 1 - R = sum_s ||x_s - mean||^2 / (2 S). By chance alone, S uniform directions have an R
    of about 1 / sqrt(S). Corrected for chance, the squared length is max(0, (S R^2 - 1) / (S - 1)).

    Source: Mardia and Jupp (2000), section 9.2.1.

    Args:
        samples: unit vectors (S, *B, D), D >= 2, S >= 1.
        unbiased: whether R is corrected for chance, which needs S >= 2.

    Returns:
        Mean directions, R and 1 - R.

    Raises:
        ValueError: for too few samples, samples of an integer type or not of unit length, or samples with a sum of 0.

    Example:
        >>> moments = mean_resultant_length(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), unbiased=False)
        >>> moments.mean, moments.resultant
        (tensor([0.7071, 0.7071]), tensor(0.7071, dtype=torch.float64))
    """
    n_samples = len(samples)
    if unbiased and n_samples < 2:
        raise ValueError(f"the unbiased length needs at least 2 samples, got {n_samples}; pass unbiased=False")
    moments = weighted_mean_resultant(samples, None)
    if not unbiased:
        return moments
    shortfall = moments.one_minus_resultant * (1 + moments.resultant)
    return _corrected_for_chance(moments.mean, moments.resultant.square(), shortfall, n_samples)


def projected_resultant(
    center: Float[Tensor, "N D"], variances: Float[Tensor, "N D"], noise: Float[Tensor, "S D"]
) -> MeanResultant:
    """Mean resultant length, corrected for chance, of the directions of S samples f + √v ∘ ε.

    Three matrix products replace an array of (S, N, D) samples. The output f = r n has length r and direction n. With
    u = n·(√v ∘ ε) and q = v·ε², a sample has the length ρ = √(r² + 2 r u + q), and ρ − r is e = (2 r u + q)/(ρ + r).
    The sampled directions have a mean m; n·m − 1 is the mean of (u e − q)/(ρ (ρ + r)). The result equals
    `mean_resultant_length(normalize(f + √v ∘ ε), unbiased=True)`, in float64.

    Args:
        center: f, the outputs; a row may be zero.
        variances: v, the variances of the coordinates; at least one in each row is positive.
        noise: ε, standard normal, the same for all items; S ≥ 2.

    Example:
        >>> noise = torch.tensor([[0.0, 1.0], [0.0, -1.0]])
        >>> projected_resultant(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]]), noise).mean
        tensor([[1., 0.]], dtype=torch.float64)
    """
    n_samples = len(noise)
    f, v, noise = center.double(), variances.double(), noise.double()
    spread = v.sqrt()
    r = torch.linalg.vector_norm(f, dim=1, keepdim=True)
    n = torch.where(r > 0, f / r, torch.eye(1, f.shape[1], dtype=f.dtype, device=f.device))  # any direction for zeros
    u, q = (n * spread) @ noise.T, v @ noise.square().T
    change = torch.addcmul(q, r, u, value=2)  # ρ² − r²
    rho = (r.square() + change).clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    both, weight = rho + r, 1 / (n_samples * rho)
    along = (weight * (u * (change / both) - q) / both).sum(1, keepdim=True)  # n·m − 1
    sideways = spread * (weight @ noise)
    sideways = sideways - n * (n * sideways).sum(1, keepdim=True)
    across = sideways.square().sum(1, keepdim=True)
    squared, shortfall = (1 + along).square() + across, -along * (2 + along) - across
    check_all(
        squared[:, 0] > torch.finfo(torch.float64).eps,
        "samples of an item must have a mean of positive length",
        squared[:, 0],
    )
    mean = (n * (1 + along) + sideways) / squared.sqrt()
    return _corrected_for_chance(mean, squared[:, 0], shortfall[:, 0], n_samples)


def _corrected_for_chance(mean: Tensor, squared: Tensor, shortfall: Tensor, n_samples: int) -> MeanResultant:
    """Unbiased R and 1 − R from `squared` = R² and `shortfall` = 1 − R² of S samples."""
    squared = (n_samples * squared - 1) / (n_samples - 1)
    resultant = squared.clamp(min=0).sqrt()
    shortfall = n_samples / (n_samples - 1) * shortfall
    return MeanResultant(mean, resultant, shortfall.clamp(0, 1) / (1 + resultant))


def weighted_mean_resultant(samples: Float[Tensor, "S *B D"], weights: Float[Tensor, "S *#B"] | None) -> MeanResultant:
    """Mean direction and mean resultant length of weighted samples; see `mean_resultant_length`.

    A first pass over blocks of samples computes the mean direction. A second pass computes the mean of
    ||x - mean||^2 / 2, which is 1 - R for unit vectors.

    Errors as in `mean_resultant_length`; weights must have the samples' shape, be finite, ≥ 0 and not all 0.
    """
    check_floating(samples=samples)
    if samples.ndim < 2 or len(samples) < 1 or samples.shape[-1] < 2:
        raise ValueError(f"samples must have shape (S, ..., D) with S >= 1 and D >= 2, got {tuple(samples.shape)}")
    if weights is None:
        weights = samples.new_full((len(samples), *[1] * (samples.ndim - 2)), 1 / len(samples), dtype=torch.float64)
    else:
        check_tensor("weights", weights)
        if weights.shape != samples.shape[:-1]:
            raise ValueError(f"weights must have shape {tuple(samples.shape[:-1])}, got {tuple(weights.shape)}")
        check_all((weights >= 0) & weights.isfinite(), "weights must be finite and at least 0", weights)
        sums = weights.double().sum(0)
        check_all(sums > 0, "weights must have a positive sum over the samples", sums)
        weights = weights.double() / sums
    size = -(-len(samples) // _BLOCKS)
    totals = torch.zeros_like(samples[:size], dtype=torch.float64)
    for block, weight in zip(samples.split(size), weights[..., None].split(size), strict=True):
        totals[: len(block)].addcmul_(block, weight)
    total = totals[0] if size == 1 else totals.sum(0)
    length = torch.linalg.vector_norm(total, dim=-1)
    vanishes = length <= torch.finfo(samples.dtype).eps
    check_all(~vanishes, "samples of an item must have a mean of positive length", length)
    mean = total / length[..., None]
    spreads = torch.zeros_like(totals[..., 0])
    for block, weight in zip(samples.split(size), weights.split(size), strict=True):
        spreads[: len(block)].addcmul_(weight, torch.linalg.vector_norm(block - mean, dim=-1).square(), value=0.5)
    spread = spreads.sum(0)
    square = 2 * (spread + length) - 1
    is_unit = (square - 1).abs() <= unit_tolerance(samples.dtype)
    check_all(is_unit, "samples of an item must have a mean squared length of 1", square)
    return MeanResultant(mean.to(samples.dtype), torch.where(length < 0.5, length, 1 - spread), spread)


@dataclass(frozen=True)
class Embeddings:
    """N points on the unit sphere in R^D with their uncertainty.

    Attributes:
        mean: (N, D) directions, unit vectors: f/‖f‖ for the network's output f, or 0 if f is 0. If `mean_samples` is
            set, mean directions of samples.
        kappa: (N,) concentration of the von Mises-Fisher distribution, ≥ 0; small means uncertain. If the three parts
            of κ (the last three attributes) are set, `kappa` combines them; see `lam.tuning.ambiguity`.
        resultant: (N,) mean resultant length in [0, 1] of the distribution with `kappa`.
        variance: (N,) predictive variance before normalisation, summed over the D outputs; large means uncertain.
        mean_samples: S if `mean` is the mean direction of S samples, else None. Compare only means with the same S.
        kappa_epistemic: (N,) concentration from the method alone: how well the data determine the embedding.
        kappa_aleatoric: (N,) concentration of the item's matches; small for an ambiguous item.
        p_known: (N,) probability in [0, 1] that the item is in-distribution.

    Raises:
        ValueError: for shapes that disagree, types that are not floating-point, or only some of the parts of κ.
    """

    mean: Float[Tensor, "N D"]
    kappa: Float[Tensor, " N"]
    resultant: Float[Tensor, " N"]
    variance: Float[Tensor, " N"]
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

    def __len__(self) -> int:
        return self.mean.shape[0]

    def __getitem__(self, index: slice | Tensor) -> "Embeddings":
        if isinstance(index, int):
            raise ValueError(f"embeddings are indexed by a slice or a tensor, got {index}: give [{index}:{index + 1}]")
        return replace(self, **{name: values[index] for name, values in self.rows().items()})

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
        return replace(self, **{name: values.to(device) for name, values in self.rows().items()})

    @property
    def has_parts(self) -> bool:
        """Whether the three parts of κ are set: `kappa_epistemic`, `kappa_aleatoric` and `p_known`."""
        return self.p_known is not None

    def rows(self) -> dict[str, Tensor]:
        """The tensors by name; each has one row for each item."""
        return {name: getattr(self, name) for name in _BY_ITEM} | self.parts()

    def parts(self) -> dict[str, Tensor]:
        """The three parts of κ by name, or an empty dict."""
        return {name: getattr(self, name) for name in _PARTS} if self.has_parts else {}

    @staticmethod
    def from_samples(
        samples: Float[Tensor, "S N D"], variance: Float[Tensor, " N"], *, mean: Float[Tensor, "N _"] | None = None
    ) -> "Embeddings":
        """Embeddings from samples: κ from their mean resultant length, corrected for chance.

        Source: Sra (2012).

        Args:
            samples: (S, N, D) unit vectors, S ≥ 2.
            variance: (N,) variance before normalisation; the embeddings get its type.
            mean: (N, D) directions of the embeddings, possibly of another dimension than the samples; by default the
                mean directions of the samples.

        Raises:
            ValueError: as `mean_resultant_length`.

        Example:
            >>> samples = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 0.0]]])
            >>> Embeddings.from_samples(samples, torch.zeros(1)).resultant
            tensor([0.5774])
        """
        length = mean_resultant_length(samples, unbiased=True)
        return Embeddings.from_resultant(length, variance, mean=mean, n_samples=len(samples))

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
            parts: at least one batch.

        Raises:
            ValueError: for no batch, means that are not comparable, or parts of κ in only some batches.
        """
        if not parts:
            raise ValueError("at least one batch of embeddings is needed to concatenate, got none")
        for part in parts:
            check_same_means(part, parts[0].mean_samples)
        if 0 < (n_with := sum(part.has_parts for part in parts)) < len(parts):
            raise ValueError(f"all batches must have parts of kappa, or none, got them in {n_with} of {len(parts)}")
        rows = {name: torch.cat([getattr(part, name) for part in parts]) for name in parts[0].rows()}
        return replace(parts[0], **rows)


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
