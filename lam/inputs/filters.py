"""Operations on images (N, C, H, W) for corruptions: noise, blurs, shifts and clouds."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

PUBLISHED_SIDE = 32  # side, in pixels, of the images for which published corruptions are defined


def pixel(images: Tensor) -> float:
    """Length that one pixel of a 32-pixel image has here; at least 1, because a smaller blur has no effect."""
    return max(1.0, min(images.shape[-2:]) / PUBLISHED_SIDE)


def normal(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers with the type and device of `like`."""
    return torch.randn(shape, generator=generator).to(like)


def uniform(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform numbers in [0, 1) with the type and device of `like`."""
    return torch.rand(shape, generator=generator).to(like)


def pixels(picture: Any) -> Tensor:
    """A Pillow image as float32."""
    import numpy as np

    return torch.from_numpy(np.array(picture)).float()


def bell(reach: int, sigma: float) -> Float[Tensor, " K"]:
    """Gaussian weights at −reach, ..., reach, with sum 1."""
    places = torch.arange(-reach, reach + 1, dtype=torch.float64)
    weights = (-places.square() / (2 * max(sigma, 1e-6) ** 2)).exp()
    return weights / weights.sum()


def smooth(images: Tensor, sigma: float, *, reach: float) -> Tensor:
    """A Gaussian blur, cut at `reach` standard deviations."""
    weights = bell(max(1, round(reach * sigma)), sigma)
    return convolve(convolve(images, weights[None]), weights[:, None])


def convolve(images: Tensor, weights: Float[Tensor, "K L"]) -> Tensor:
    """Filter each channel, with repeated borders."""
    height, width = weights.shape
    n_channels = images.shape[1]
    padded = F.pad(images, [width // 2, width // 2, height // 2, height // 2], mode="replicate")
    kernel = weights.to(images).expand(n_channels, 1, height, width)
    return F.conv2d(padded, kernel, groups=n_channels)


def identity_grid(images: Tensor) -> Float[Tensor, "N H W 2"]:
    """The grid with which `sample` returns the images unchanged."""
    same = torch.eye(2, 3, device=images.device, dtype=images.dtype).expand(len(images), 2, 3)
    return F.affine_grid(same, list(images.shape), align_corners=False)


def sample(images: Tensor, grid: Tensor, border: str = "reflection") -> Tensor:
    """The images, interpolated at a grid."""
    return F.grid_sample(images, grid, padding_mode=border, align_corners=False)


def zoom(images: Tensor, enlargement: float) -> Tensor:
    """The centre, enlarged to the size of the image."""
    return sample(images, identity_grid(images) / enlargement)


def smear(
    images: Tensor, radius: int, sigma: float, degrees: tuple[float, float], generator: torch.Generator
) -> Tensor:
    """Smear each image in a random direction within `degrees`, with weights of half a Gaussian cut at `radius`."""
    length = pixel(images)
    steps = 2 * max(1, round(radius * length)) + 1
    weights = bell(steps - 1, sigma * length)[steps - 1 :]
    low, high = degrees
    angles = (low + (high - low) * uniform((len(images),), images, generator)).deg2rad()
    size = images.new_tensor([images.shape[-1], images.shape[-2]])
    direction = 2 * torch.stack([angles.cos(), angles.sin()], 1) / size
    grid, total = identity_grid(images), torch.zeros_like(images)
    for step, weight in enumerate((weights / weights.sum()).tolist()):
        total += weight * sample(images, grid - step * direction[:, None, None], "border")
    return total


def plasma(n: int, side: int, decay: float, generator: torch.Generator) -> Float[Tensor, "N S S"]:
    """Clouds in [0, 1] by the diamond-square algorithm; each step halves the length and divides noise by `decay`."""
    cloud, step, noise = torch.zeros(n, side, side), side, 100.0

    def disturbed(total: Tensor) -> Tensor:
        return total / 4 + noise * noise * (2 * torch.rand(total.shape, generator=generator) - 1)

    while step >= 2:
        half = step // 2
        corners = cloud[:, ::step, ::step]
        squares = corners + corners.roll(-1, 1)
        cloud[:, half::step, half::step] = disturbed(squares + squares.roll(-1, 2))
        centres, corners = cloud[:, half::step, half::step], cloud[:, ::step, ::step]
        cloud[:, ::step, half::step] = disturbed(centres + centres.roll(1, 1) + corners + corners.roll(-1, 2))
        cloud[:, half::step, ::step] = disturbed(centres + centres.roll(1, 2) + corners + corners.roll(-1, 1))
        step, noise = half, noise / decay
    low, high = cloud.amin((1, 2), keepdim=True), cloud.amax((1, 2), keepdim=True)
    return (cloud - low) / (high - low).clamp(min=1e-12)
