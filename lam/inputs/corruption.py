"""Corruptions of images: four kinds of lam, and 17 of the 19 kinds of CIFAR-10-C (the published kinds).

Lengths in lam's kinds are shares of the image's side. Published kinds have the severities of CIFAR-10-C, with lengths
in pixels of a 32-pixel image; lengths grow with the shorter side of a larger image. Two kinds are left out: `frost`
needs photographs of ice, and `spatter` needs OpenCV's edge detector.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lam.inputs import filters
from lam.utils.checks import check_choice

STRENGTHS: dict[str, tuple[float, ...]] = {}
"""lam's kinds, with their strengths at severities 1 to 5; the function of a kind explains the strengths."""

PUBLISHED_STRENGTHS: dict[str, tuple[Any, ...]] = {}  # published kinds, with their strengths at severities 1 to 5
Corruption = Callable[[Tensor, Any, torch.Generator], Tensor]
_CORRUPTIONS: dict[str, Corruption] = {}
_COLOURED = "saturate"
_FALL = -135.0, -45.0  # range of directions of falling snow, in degrees
_SWEEP = -45.0, 45.0  # range of directions of camera movement, in degrees
_GREY = 0.299, 0.587, 0.114


def published_kinds(n_channels: int) -> tuple[str, ...]:
    """The published kinds for images with this number of channels: `saturate` needs 3."""
    return tuple(kind for kind in PUBLISHED_STRENGTHS if n_channels == 3 or kind != _COLOURED)


def corrupt(
    images: Float[Tensor, "N C H W"], kind: str, severity: int, *, generator: torch.Generator
) -> Float[Tensor, "N C H W"]:
    """Images in [0, 1], corrupted by a kind of `KINDS` or `PUBLISHED_KINDS` at a severity from 0 (unchanged) to 5.

    Differences from the published code: `glass-blur` takes each pixel from a random position nearby; the published code
    swaps pixels one after the other. Movements by parts of a pixel are interpolated, not rounded. `jpeg` compresses
    each channel separately unless there are 1 or 3 channels.

    As published, `brightness` raises the lightest channel (the value of HSV) and keeps the ratios of the channels. Grey
    pixels have the hue of red, so severities 4 and 5 of `saturate` make them redder; severities 1 and 2 weaken colours.
    Not every severity of `defocus-blur`, `glass-blur`, `snow`, `elastic`, `pixelate` and `saturate` changes the pixels
    more than the severity before.

    Source: Hendrycks and Dietterich (2019), "Benchmarking neural network robustness to common corruptions and
    perturbations", and their published code for CIFAR-10-C.

    Raises:
        ValueError: for another kind or severity, or for `saturate` without 3 channels.

    Example:
        >>> image = torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])
        >>> corrupt(image, "contrast", 2, generator=torch.Generator())
        tensor([[[[0.2500, 0.7500],
                  [0.2500, 0.7500]]]])
    """
    strength = strength_of(STRENGTHS | PUBLISHED_STRENGTHS, kind, severity)
    if kind == _COLOURED and images.shape[1] != 3:
        raise ValueError(
            f"{kind} needs images of 3 channels, got {images.shape[1]}: allowed are "
            f"{', '.join((*KINDS, *published_kinds(images.shape[1])))}"
        )
    if strength is None or not images.numel():
        return images
    return _CORRUPTIONS[kind](images, strength, generator).clamp(0, 1)


def strength_of(strengths: Mapping[Any, Sequence[Any]], kind: str, severity: int) -> Any:
    """The strength of a severity; None for severity 0."""
    check_choice("kind", kind, strengths)
    if not 0 <= severity <= len(strengths[kind]):
        raise ValueError(f"severity must be from 0 to {len(strengths[kind])}, got {severity}")
    return strengths[kind][severity - 1] if severity else None


def _register(table: dict[str, tuple[Any, ...]], kind: str, *strengths: Any) -> Callable[[Corruption], Corruption]:
    """Register a function as a kind, with strengths at severities 1 to 5."""

    def register(corruption: Corruption) -> Corruption:
        table[kind], _CORRUPTIONS[kind] = strengths, corruption
        return corruption

    return register


_of_lam, _published = partial(_register, STRENGTHS), partial(_register, PUBLISHED_STRENGTHS)


@_of_lam("noise", 0.05, 0.1, 0.2, 0.3, 0.4)
@_published("gaussian-noise", 0.04, 0.06, 0.08, 0.09, 0.1)
def _noise(images: Tensor, deviation: float, generator: torch.Generator) -> Tensor:
    """Gaussian noise of this standard deviation."""
    return images + deviation * filters.normal(images.shape, images, generator)


@_of_lam("blur", 0.01, 0.02, 0.05, 0.075, 0.1)
def _blur(images: Tensor, share: float, _: torch.Generator) -> Tensor:
    """A Gaussian blur, whose standard deviation is this share of the shorter side."""
    from torchvision.transforms.v2.functional import gaussian_blur

    sigma = share * min(images.shape[-2:])
    return gaussian_blur(images, [2 * max(1, round(2 * sigma)) + 1] * 2, [sigma, sigma])


@_of_lam("contrast", 0.75, 0.5, 0.25, 0.15, 0.1)
def _contrast(images: Tensor, left: float, _: torch.Generator) -> Tensor:
    """Keeps this share of each value's distance from the image's mean."""
    mean = images.mean((1, 2, 3), keepdim=True)
    return mean + left * (images - mean)


@_of_lam("crop", 0.9, 0.8, 0.7, 0.6, 0.5)
def _crop(images: Tensor, share: float, _: torch.Generator) -> Tensor:
    """Crops this share of each side around the centre, and enlarges it to the size of the image."""
    from torchvision.transforms.v2.functional import center_crop, resize

    size = list(images.shape[-2:])
    return resize(center_crop(images, [max(1, round(share * side)) for side in size]), size)


@_published("shot-noise", 500, 250, 100, 75, 50)
def _shot_noise(images: Tensor, photons: int, generator: torch.Generator) -> Tensor:
    """Poisson noise with this number of photons for the value 1."""
    return torch.poisson((images.clamp(0, 1) * photons).cpu(), generator).to(images) / photons


@_published("impulse-noise", 0.01, 0.02, 0.03, 0.05, 0.07)
def _impulse_noise(images: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Turns this share of values black or white."""
    hit = filters.uniform(images.shape, images, generator) < share
    return torch.where(hit, (filters.uniform(images.shape, images, generator) < 0.5).to(images), images)


@_published("speckle-noise", 0.06, 0.1, 0.12, 0.16, 0.2)
def _speckle_noise(images: Tensor, deviation: float, generator: torch.Generator) -> Tensor:
    """Gaussian noise of this standard deviation relative to the value."""
    return images + images * deviation * filters.normal(images.shape, images, generator)


@_published("gaussian-blur", 0.4, 0.6, 0.7, 0.8, 1.0)
def _gaussian_blur(images: Tensor, sigma: float, _: torch.Generator) -> Tensor:
    """A Gaussian blur of this standard deviation, in pixels."""
    return filters.smooth(images, sigma * filters.pixel(images), reach=4.0)


@_published("defocus-blur", (0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))
def _defocus_blur(images: Tensor, strength: tuple[float, float], _: torch.Generator) -> Tensor:
    """A blur by a disk of this radius; its border is softened by this standard deviation."""
    radius, softness = (length * filters.pixel(images) for length in strength)
    ring = max(1, round(filters.pixel(images)))
    reach = math.floor(radius) + ring
    places = torch.arange(-reach, reach + 1, dtype=torch.float64)
    disk = (places[:, None].square() + places.square() <= radius**2).double()
    soft = filters.bell(ring, softness)
    disk = F.conv2d((disk / disk.sum())[None, None], soft[:, None] * soft[None, None, None], padding="same")
    return filters.convolve(images, disk[0, 0])


@_published("glass-blur", (0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))
def _glass_blur(images: Tensor, strength: tuple[float, int], generator: torch.Generator) -> Tensor:
    """Moves pixels in this number of rounds, with a blur of this standard deviation before and after."""
    deviation, rounds = strength
    sigma, reach = deviation * filters.pixel(images), max(1, round(filters.pixel(images)))
    n, channels, height, width = images.shape
    worse = filters.smooth(images, sigma, reach=4.0)
    for _ in range(rounds):
        shift = torch.randint(-reach, reach, (2, n, height, width), generator=generator).to(images.device)
        rows = (shift[0] + torch.arange(height, device=images.device)[:, None]).clamp(0, height - 1)
        columns = (shift[1] + torch.arange(width, device=images.device)).clamp(0, width - 1)
        places = (rows * width + columns).flatten(1)[:, None].expand(-1, channels, -1)
        worse = worse.flatten(2).gather(2, places).view_as(images)
    return filters.smooth(worse, sigma, reach=4.0)


@_published("motion-blur", (6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))
def _motion_blur(images: Tensor, strength: tuple[int, float], generator: torch.Generator) -> Tensor:
    """A motion blur of this reach and standard deviation."""
    return filters.smear(images, *strength, _SWEEP, generator)


@_published("zoom-blur", 0.06, 0.11, 0.16, 0.21, 0.26)
def _zoom_blur(images: Tensor, largest: float, _: torch.Generator) -> Tensor:
    """Mean of the image and its enlargements by factors from 1 to 1 plus this share."""
    enlargements = [1 + step / 100 for step in range(round(100 * largest))]
    return (images + sum(filters.zoom(images, enlargement) for enlargement in enlargements)) / (len(enlargements) + 1)


@_published(
    "snow",
    (0.1, 0.2, 1.0, 0.6, 8.0, 3.0, 0.95),
    (0.1, 0.2, 1.0, 0.5, 10.0, 4.0, 0.9),
    (0.15, 0.3, 1.75, 0.55, 10.0, 4.0, 0.9),
    (0.25, 0.3, 2.25, 0.6, 12.0, 6.0, 0.85),
    (0.3, 0.3, 1.25, 0.65, 14.0, 12.0, 0.8),
)
def _snow(images: Tensor, strength: tuple[float, ...], generator: torch.Generator) -> Tensor:
    """Adds flakes. `strength` holds their mean, deviation, zoom, least value, reach, blur, and the image's weight."""
    mean, deviation, enlargement, least, radius, sigma, left = strength
    flakes = mean + deviation * filters.normal((len(images), 1, *images.shape[-2:]), images, generator)
    flakes = filters.zoom(flakes, enlargement)
    flakes = torch.where(flakes < least, 0, flakes).clamp(0, 1)
    flakes = filters.smear(flakes, int(radius), sigma, _FALL, generator)
    weights = images.new_tensor(_GREY if images.shape[1] == 3 else [1 / images.shape[1]] * images.shape[1])
    grey = (images * weights[:, None, None]).sum(1, keepdim=True)
    whiter = left * images + (1 - left) * torch.maximum(images, 1.5 * grey + 0.5)
    return whiter + flakes + flakes.flip(2, 3)


@_published("fog", (0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))
def _fog(images: Tensor, strength: tuple[float, float], generator: torch.Generator) -> Tensor:
    """Adds clouds of this amount and smoothness."""
    amount, decay = strength
    height, width = images.shape[-2:]
    side = 1 << (max(height, width) - 1).bit_length()
    haze = filters.plasma(len(images), max(side, 2), decay, generator)[:, None, :height, :width].to(images)
    lightest = images.amax((1, 2, 3), keepdim=True)
    return (images + amount * haze) * lightest / (lightest + amount)


@_published("brightness", 0.05, 0.1, 0.15, 0.2, 0.3)
def _brightness(images: Tensor, added: float, _: torch.Generator) -> Tensor:
    """Adds this value to the lightest channel, and keeps the ratios of the others to it."""
    value = images.amax(1, keepdim=True)
    lighter = (value + added).clamp(max=1)
    return torch.where(value > 0, images * (lighter / value.clamp(min=1e-12)), lighter)


@_published("low-contrast", 0.75, 0.5, 0.4, 0.3, 0.15)
def _low_contrast(images: Tensor, left: float, _: torch.Generator) -> Tensor:
    """Keeps this share of each value's distance from the channel's mean."""
    means = images.mean((2, 3), keepdim=True)
    return means + left * (images - means)


@_published("elastic", (0.0, 0.0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))
def _elastic(images: Tensor, strength: tuple[float, float, float], generator: torch.Generator) -> Tensor:
    """Moves three corners, then shifts pixels. `strength` is the shift, the shift's smoothness and the movement."""
    shift, smoothness, movement = strength
    n, side = len(images), min(images.shape[-2:])
    scale = images.new_tensor([side / images.shape[-1], side / images.shape[-2]])
    corners = images.new_tensor([[2 / 3, 2 / 3], [2 / 3, -2 / 3], [-2 / 3, -2 / 3]]) * scale  # in coordinates [-1, 1]
    moved = corners + 2 * movement * scale * (2 * filters.uniform((n, 3, 2), images, generator) - 1)
    homogeneous = torch.cat([moved, moved.new_ones(n, 3, 1)], 2)
    back = torch.linalg.solve(homogeneous.double(), corners.double().expand(n, 3, 2)).mT.to(images)
    worse = filters.sample(images, F.affine_grid(back, list(images.shape), align_corners=False))
    if not shift:
        return worse
    field = 2 * filters.uniform((n, 2, *images.shape[-2:]), images, generator) - 1
    field = 2 * shift * scale[:, None, None] * filters.smooth(field, smoothness * side, reach=3.0)
    return filters.sample(worse, filters.identity_grid(images) + field.movedim(1, 3))


@_published("pixelate", 0.95, 0.9, 0.85, 0.75, 0.65)
def _pixelate(images: Tensor, left: float, _: torch.Generator) -> Tensor:
    """Reduces each side to this share of its pixels, and enlarges it again."""
    from PIL import Image

    height, width = images.shape[-2:]
    few = max(1, int(left * width)), max(1, int(left * height))

    def coarser(channel: Tensor) -> Tensor:
        picture = Image.fromarray(channel.float().numpy(), "F").resize(few, Image.Resampling.BOX)
        return filters.pixels(picture.resize((width, height), Image.Resampling.BOX))

    channels = images.cpu().flatten(0, 1)
    return torch.stack([coarser(channel) for channel in channels]).view(images.shape).to(images)


@_published("jpeg", 80, 65, 58, 50, 40)
def _jpeg(images: Tensor, quality: int, _: torch.Generator) -> Tensor:
    """JPEG compression of this quality."""
    from PIL import Image

    pictures = images if images.shape[1] in (1, 3) else images.flatten(0, 1)[:, None]
    values = pictures.clamp(0, 1).mul(255).round().byte().cpu().movedim(1, 3)

    def compressed(picture: Tensor) -> Tensor:
        buffer = io.BytesIO()
        Image.fromarray(picture.squeeze(2).numpy()).save(buffer, "JPEG", quality=quality)
        decoded = filters.pixels(Image.open(buffer)) / 255
        return decoded[None] if decoded.ndim == 2 else decoded.movedim(2, 0)

    return torch.stack([compressed(picture) for picture in values]).view(images.shape).to(images)


@_published("saturate", (0.3, 0.0), (0.1, 0.0), (1.5, 0.0), (2.0, 0.1), (2.5, 0.2))
def _saturate(images: Tensor, strength: tuple[float, float], _: torch.Generator) -> Tensor:
    """Multiplies the saturation by the first number and adds the second."""
    factor, added = strength
    value = images.amax(1, keepdim=True)
    spread = value - images.amin(1, keepdim=True)
    red = images.new_tensor([0.0, 1.0, 1.0])[:, None, None]
    hue = torch.where(spread > 0, (value - images) / spread.clamp(min=1e-12), red)  # 0 lightest, 1 darkest channel
    saturation = (factor * spread / value.clamp(min=1e-12) + added).clamp(max=1)
    return value * (1 - saturation * hue)


KINDS, PUBLISHED_KINDS = tuple(STRENGTHS), tuple(PUBLISHED_STRENGTHS)
