"""Altered images that stand for inputs unlike the training data, and the score that best recognises them."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

COARSE = 7  # number of patches along each side of a blurred image


def is_images(inputs: Any) -> bool:
    """Whether a batch of inputs holds images, (N, C, H, W) floats."""
    return isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.is_floating_point()


def alterations(images: Float[Tensor, "N C H W"], *, seed: int = 0) -> dict[str, Float[Tensor, "N C H W"]]:
    """Altered images by kind: inverted, with pixels permuted alike in all images, and blurred to 7 × 7 patches."""
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    H, W = images.shape[2:]
    order = torch.randperm(H * W, generator=torch.Generator().manual_seed(seed)).to(images.device)
    coarse = F.adaptive_avg_pool2d(images, (min(COARSE, H), min(COARSE, W)))
    return {
        "inverted": low + high - images,
        "permuted": images.flatten(2)[..., order].view_as(images),
        "blurred": F.interpolate(coarse, (H, W), mode="bilinear"),
    }


@dataclass(frozen=True)
class Recommendation:
    """The OOD score that best recognises altered images: κ, or the variance before normalisation.

    Attributes:
        auroc: AUROC of altered against original images, by score and then by kind of alteration.
    """

    auroc: dict[str, dict[str, float]]

    @property
    def means(self) -> dict[str, float]:
        """Mean AUROC of each score over the kinds of alteration."""
        return {score: sum(kinds.values()) / len(kinds) for score, kinds in self.auroc.items()}

    @property
    def score(self) -> str:
        """The score with the highest mean AUROC."""
        return max(self.means, key=lambda score: self.means[score])

    def metrics(self) -> dict[str, float]:
        return {f"{score}_on_altered": mean for score, mean in self.means.items()}
