"""Images made worse in four ways: whether κ falls as answers go wrong.

Noise, blur and low contrast are kinds of Hendrycks and Dietterich (2019); how strong they are is chosen here, blur in
relation to the image, so that any size can be corrupted alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lam.datasets import Dataset
from lam.encoders.base import Encoder
from lam.encoders.evaluation import Evaluation

Kind = Literal["noise", "blur", "contrast", "crop"]
KINDS: tuple[Kind, ...] = get_args(Kind)
STRENGTHS: dict[Kind, tuple[float, ...]] = {
    "noise": (0.05, 0.1, 0.2, 0.3, 0.4),
    "blur": (0.01, 0.02, 0.05, 0.075, 0.1),
    "contrast": (0.75, 0.5, 0.25, 0.15, 0.1),
    "crop": (0.9, 0.8, 0.7, 0.6, 0.5),
}
"""At severities 1 to 5: the standard deviation of Gaussian noise on values in [0, 1]; the standard deviation of a
Gaussian blur, in shorter sides; what is left of each value's distance from the image's mean; and the share of each side
that is left around the centre, enlarged to the size of the image."""

BATCH = 100


def corrupted(
    images: Float[Tensor, "N C H W"], kind: Kind, severity: int, *, generator: torch.Generator
) -> Float[Tensor, "N C H W"]:
    """Images made worse.

    Args:
        images: values in [0, 1].
        kind: how.
        severity: 0 for not at all, up to 5.
        generator: of the noise.

    Returns:
        Images of the same shape, within [0, 1].

    Raises:
        ValueError: for another kind or severity.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if not 0 <= severity <= len(STRENGTHS[kind]):
        raise ValueError(f"severity must be from 0 to {len(STRENGTHS[kind])}, got {severity}")
    if severity == 0:
        return images
    strength = STRENGTHS[kind][severity - 1]
    if kind == "noise":
        worse = images + strength * torch.randn(images.shape, generator=generator).to(images)
    elif kind == "blur":
        from torchvision.transforms.v2.functional import gaussian_blur

        sigma = strength * min(images.shape[-2:])
        worse = gaussian_blur(images, [2 * max(1, round(2 * sigma)) + 1] * 2, [sigma, sigma])
    elif kind == "crop":
        from torchvision.transforms.v2.functional import center_crop, resize

        size = list(images.shape[-2:])
        worse = resize(center_crop(images, [max(1, round(strength * side)) for side in size]), size)
    else:
        mean = images.mean((1, 2, 3), keepdim=True)
        worse = mean + strength * (images - mean)
    return worse.clamp(0, 1)


@dataclass(frozen=True)
class CorruptionCurve:
    """κ and answers of N queries under one kind of corruption, at severities 0 (clean) to V − 1.

    Attributes:
        kappa: (V, N) concentrations.
        correct: (V, N) whether the first hit, in the clean gallery without the query itself, answers the query.
    """

    kappa: Float[Tensor, "V N"]
    correct: Bool[Tensor, "V N"]

    @property
    def recall(self) -> Float[Tensor, " V"]:
        """(V,) recall@1 at each severity."""
        return self.correct.double().mean(1)

    @property
    def trend(self) -> float:
        """Rank correlation (Spearman) of severity and κ, the mean over images; −1 where κ always falls.

        NaN where no κ changes.
        """
        severity = torch.arange(len(self.kappa), dtype=torch.float64)
        severity = (severity - severity.mean())[:, None]
        ranks = _mean_ranks(self.kappa.double())
        ranks = ranks - ranks.mean(0)
        scale = severity.square().sum().sqrt() * ranks.square().sum(0).sqrt()
        return float(((severity * ranks).sum(0) / scale)[scale > 0].mean())


def measure_corruption(
    encoder: Encoder, images: Dataset, evaluation: Evaluation, *, size: int, seed: int = 0
) -> dict[Kind, CorruptionCurve]:
    """κ and first hits of corrupted queries of an evaluated set, in the clean gallery.

    Args:
        encoder: that was evaluated.
        images: the set, whose preprocessing says what pixels its values are.
        evaluation: of the encoder on the set.
        size: how many queries, drawn at random among those that something answers; all where there are no more.
        seed: of the draw and the noise.

    Returns:
        A curve for each kind, all of the same queries; nothing where no query can be answered.
    """
    generator = torch.Generator().manual_seed(seed)
    answerable = evaluation.answerable.nonzero()[:, 0].cpu()
    rows = answerable[torch.randperm(len(answerable), generator=generator)[:size]]
    if len(rows) == 0:
        return {}
    positions = evaluation.queries.cpu()[rows]
    values = torch.stack([images[index][0] for index in positions.tolist()])
    pixels = images.preprocessing.denormalize(values)
    relevant = evaluation.relevance.of_rows(rows)
    is_itself = positions[:, None] == evaluation.candidates.cpu()
    curves: dict[Kind, CorruptionCurve] = {}
    for kind, strengths in STRENGTHS.items():
        kappa: list[Tensor] = []
        correct: list[Tensor] = []
        for severity in range(len(strengths) + 1):
            worse = corrupted(pixels, kind, severity, generator=generator)
            embeddings = encoder.embed(list(images.preprocessing.standardize(worse).split(BATCH)))
            cosines = (embeddings.mean @ evaluation.gallery.mean.T).cpu().masked_fill(is_itself, -torch.inf)
            kappa.append(embeddings.kappa.cpu())
            correct.append(relevant.gather(1, cosines.argmax(1, keepdim=True))[:, 0])
        curves[kind] = CorruptionCurve(torch.stack(kappa), torch.stack(correct))
    return curves


def corruption_metrics(curves: dict[Kind, CorruptionCurve], *, has_kappa: bool = True) -> dict[str, float | None]:
    """The metrics of corruption curves: medians of κ, recall@1, and `trend`, as `corruption_KIND_SEVERITY_...`.

    Args:
        curves: of the same queries.
        has_kappa: whether the encoder's κ says anything.
    """
    metrics: dict[str, float | None] = {}
    for kind, curve in curves.items():
        for name, value in _named(kind, curve, has_kappa):
            metrics[f"corruption_{name}"] = None if value != value else value
    return metrics


def _named(kind: Kind, curve: CorruptionCurve, has_kappa: bool) -> Iterator[tuple[str, float]]:
    for severity in range(len(curve.kappa)):
        name = f"{kind}_{severity}" if severity else "clean"
        yield f"{name}_recall@1", float(curve.recall[severity])
        if has_kappa:
            yield f"{name}_kappa", float(curve.kappa[severity].median())
    if has_kappa:
        yield f"{kind}_trend", curve.trend


def _mean_ranks(values: Float[Tensor, "V N"]) -> Float[Tensor, "V N"]:
    """The rank of each value in its column, equal ones sharing the mean of theirs."""
    below = (values[:, None] > values[None]).double().sum(1)
    return below + (values[:, None] == values[None]).double().sum(1) / 2
