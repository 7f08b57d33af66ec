"""Corrupted images: any size, worse at every severity, and the definition of each kind."""

import colorsys
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy.ndimage import convolve, gaussian_filter, zoom

from lam.inputs.corruption import (
    KINDS,
    PUBLISHED_KINDS,
    PUBLISHED_STRENGTHS,
    STRENGTHS,
    corrupt,
    published_kinds,
)

UNEVEN = ("defocus-blur", "glass-blur", "snow", "elastic", "pixelate", "saturate")
"""Kinds in which a higher published severity does not always change the pixels more."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scene(n: int, channels: int, height: int, width: int) -> torch.Tensor:
    """Soft patches of all sizes, as photographs have them."""
    pieces = [torch.rand(n, channels, size, size, generator=generator(size)) for size in (2, 4, 8, 16)]
    layers = [F.interpolate(piece, (height, width), mode="bicubic") for piece in pieces]
    return (sum(layers) / 4).clamp(0, 1)


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (3, 3, 40, 28), (1, 3, 64, 64), (2, 1, 3, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_images_of_any_size_get_worse_step_by_step(kind, shape):
    images = torch.rand(shape, generator=generator())
    if kind == "crop":  # without structure at any scale, all parts differ equally
        images = torch.linspace(0, 1, shape[2])[:, None].expand(shape)
    change = []
    for severity in range(6):
        worse = corrupt(images, kind, severity, generator=generator())
        assert worse.shape == images.shape
        assert ((worse >= 0) & (worse <= 1)).all()
        change.append(float((worse - images).square().mean()))
    assert change[0] == 0
    assert change == sorted(change)
    assert change[-1] > change[1] or min(shape[2:]) < 8


def test_noise_and_contrast_are_what_they_say():
    images = torch.full((1, 1, 200, 200), 0.5)
    noise = corrupt(images, "noise", 1, generator=generator()) - images
    assert float(noise.std()) == pytest.approx(STRENGTHS["noise"][0], rel=0.02)
    images = torch.rand(2, 3, 9, 9)
    for severity, left in enumerate(STRENGTHS["contrast"], start=1):
        flat = corrupt(images, "contrast", severity, generator=generator())
        torch.testing.assert_close(flat.std((1, 2, 3)), left * images.std((1, 2, 3)))
        torch.testing.assert_close(flat.mean((1, 2, 3)), images.mean((1, 2, 3)))


def test_blur_is_that_of_scipy_away_from_the_border():
    image = torch.rand(1, 1, 60, 60, generator=generator())
    blurred = corrupt(image, "blur", 2, generator=generator())[0, 0]
    twin = gaussian_filter(image[0, 0].numpy(), 0.02 * 60, mode="reflect", truncate=2 * 1.0)
    np.testing.assert_allclose(blurred[8:-8, 8:-8], twin[8:-8, 8:-8], atol=0.01)


def test_a_crop_is_the_centre_enlarged():
    image = torch.zeros(1, 1, 100, 60)
    image[..., 25:75, 15:45] = 1
    assert torch.equal(corrupt(image, "crop", 5, generator=generator()), torch.ones(1, 1, 100, 60))
    ramp = torch.linspace(0, 1, 101).expand(1, 1, 101, 101)
    half = corrupt(ramp, "crop", 5, generator=generator())
    assert float(half.max() - half.min()) == pytest.approx(0.5, abs=0.02)
    assert float(half.mean()) == pytest.approx(0.5, abs=0.01)


def test_bad_kinds_and_severities_are_refused():
    with pytest.raises(ValueError, match="noise, blur, contrast, crop, gaussian-noise, .*saturate.*'rain'"):
        corrupt(torch.rand(1, 1, 8, 8), "rain", 1, generator=generator())
    with pytest.raises(ValueError, match="severity.*0 to 5.*6"):
        corrupt(torch.rand(1, 1, 8, 8), "noise", 6, generator=generator())


def test_greys_have_no_colours_to_change() -> None:
    assert published_kinds(3) == PUBLISHED_KINDS
    assert (
        set(PUBLISHED_KINDS) - set(published_kinds(1)) == {"saturate"} == set(PUBLISHED_KINDS) - set(published_kinds(4))
    )
    for severity in (0, 3):
        with pytest.raises(ValueError, match="saturate.*3 channels.*1: .* pixelate, jpeg$"):
            corrupt(torch.rand(2, 1, 8, 8), "saturate", severity, generator=generator())


@pytest.mark.parametrize("shape", [(3, 3, 32, 32), (2, 1, 64, 48)])
@pytest.mark.parametrize("kind", PUBLISHED_KINDS)
def test_published_kinds_get_worse_and_the_generator_repeats_them(kind: str, shape: tuple[int, ...]) -> None:
    if kind not in published_kinds(shape[1]):
        shape = (shape[0], 3, *shape[2:])
    images = scene(*shape)
    change = [0.0]
    for severity in range(1, 6):
        worse = corrupt(images, kind, severity, generator=generator())
        assert torch.equal(worse, corrupt(images, kind, severity, generator=generator()))
        assert worse.shape == images.shape
        assert worse.dtype == images.dtype
        assert ((worse >= 0) & (worse <= 1)).all()
        change.append(float((worse - images).square().mean()))
    assert min(change[1:]) > 0
    assert change == sorted(change) or kind in UNEVEN


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (1, 4, 5, 3), (1, 3, 1, 1), (0, 3, 8, 8), (1, 2, 33, 100)])
@pytest.mark.parametrize("kind", PUBLISHED_KINDS)
def test_published_kinds_take_any_size_and_channels(kind: str, shape: tuple[int, ...]) -> None:
    if kind not in published_kinds(shape[1]):
        shape = (shape[0], 3, *shape[2:])
    for images in (torch.rand(shape, generator=generator()), torch.zeros(shape), torch.ones(shape).double()):
        worse = corrupt(images, kind, 5, generator=generator())
        assert worse.shape == images.shape
        assert worse.dtype == images.dtype
        assert ((worse >= 0) & (worse <= 1)).all()


@pytest.mark.parametrize("kind", ["gaussian-noise", "snow", "fog", "motion-blur", "elastic", "glass-blur"])
def test_what_is_random_differs_between_images_and_seeds(kind: str) -> None:
    images = scene(1, 1, 32, 32).expand(2, -1, -1, -1)
    worse = corrupt(images, kind, 3, generator=generator())
    assert not torch.equal(worse[0], worse[1])
    assert not torch.equal(worse, corrupt(images, kind, 3, generator=generator(1)))


def test_noises_have_the_published_size() -> None:
    grey = torch.full((1, 1, 300, 300), 0.5)
    for kind, deviation in (
        ("gaussian-noise", PUBLISHED_STRENGTHS["gaussian-noise"][2]),
        ("shot-noise", (0.5 / PUBLISHED_STRENGTHS["shot-noise"][2]) ** 0.5),
        ("speckle-noise", 0.5 * PUBLISHED_STRENGTHS["speckle-noise"][2]),
    ):
        noise = corrupt(grey, kind, 3, generator=generator()) - grey
        assert float(noise.std()) == pytest.approx(deviation, rel=0.02)
        assert float(noise.mean()) == pytest.approx(0, abs=0.01)
    salted = corrupt(grey, "impulse-noise", 5, generator=generator())
    assert float((salted != grey).double().mean()) == pytest.approx(0.07, abs=0.005)
    assert float((salted == 1).double().mean()) == pytest.approx(0.035, abs=0.005)


def test_blurs_are_those_of_scipy_at_any_size() -> None:
    image = scene(1, 1, 64, 64)  # lengths are twice as large as for 32 pixels
    blurred = corrupt(image, "gaussian-blur", 5, generator=generator())[0, 0]
    np.testing.assert_allclose(blurred, gaussian_filter(image[0, 0].numpy(), 2.0, mode="nearest"), atol=1e-5)
    places = np.arange(-5, 6)
    disk = (places[:, None] ** 2 + places**2 <= 3.0**2).astype(float)
    kernel = gaussian_filter(disk / disk.sum(), 0.2, radius=2, mode="constant")
    blurred = corrupt(image, "defocus-blur", 5, generator=generator())[0, 0]
    np.testing.assert_allclose(blurred, convolve(image[0, 0].numpy(), kernel, mode="nearest"), atol=1e-5)


def test_a_movement_smears_a_point_one_way() -> None:
    image = torch.zeros(20, 1, 101, 101)
    image[..., 50, 50] = 1
    smeared = corrupt(image, "motion-blur", 5, generator=generator())[:, 0]
    torch.testing.assert_close(smeared.sum((1, 2)), torch.ones(20), atol=1e-3, rtol=0)
    places = torch.arange(101.0) - 50
    right, down = (smeared.sum(axis) @ places for axis in (1, 2))
    assert (right > 3).all()
    angles = torch.atan2(down, right).rad2deg()
    assert angles.abs().max() < 46
    assert angles.max() - angles.min() > 45


def test_a_zoom_is_the_mean_of_enlargements() -> None:
    image = scene(1, 1, 64, 64)[0, 0].double()
    total = image.clone()
    for step in range(26):
        enlarged = zoom(image.numpy(), 1 + step / 100, order=1, grid_mode=True, mode="nearest")
        first = (len(enlarged) - 64) // 2
        total += torch.from_numpy(enlarged[first : first + 64, first : first + 64])
    blurred = corrupt(image[None, None], "zoom-blur", 5, generator=generator())[0, 0]
    torch.testing.assert_close(blurred, total / 27, atol=0.03, rtol=0)


def test_brightness_is_the_value_of_hsv_and_contrast_is_by_channel() -> None:
    image = torch.rand(1, 3, 6, 6, generator=generator())
    image[0, :, 0, 0] = 0
    lighter = corrupt(image, "brightness", 4, generator=generator())
    for pixel, worse in zip(image[0].flatten(1).T.tolist(), lighter[0].flatten(1).T.tolist(), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        assert worse == pytest.approx(colorsys.hsv_to_rgb(hue, saturation, min(1, value + 0.2)), abs=1e-5)
    flat = corrupt(image, "low-contrast", 3, generator=generator())
    torch.testing.assert_close(flat.std((2, 3)), 0.4 * image.std((2, 3)))
    torch.testing.assert_close(flat.mean((2, 3)), image.mean((2, 3)))


@pytest.mark.parametrize("severity", range(1, 6))
def test_saturation_is_that_of_hsv_and_greys_turn_red(severity: int) -> None:
    image = torch.rand(1, 3, 6, 6, generator=generator())
    image[0, :, 0, :3] = torch.tensor([0.0, 0.4, 1.0])
    worse = corrupt(image, "saturate", severity, generator=generator())
    factor, added = PUBLISHED_STRENGTHS["saturate"][severity - 1]
    for pixel, changed in zip(image[0].flatten(1).T.tolist(), worse[0].flatten(1).T.tolist(), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        assert changed == pytest.approx(colorsys.hsv_to_rgb(hue, min(1, factor * saturation + added), value), abs=1e-5)
    assert torch.equal(worse[0, :, 0, 1], image[0, :, 0, 1]) == (added == 0)


def test_coarse_pixels_and_jpeg_are_those_of_pillow() -> None:
    image = scene(1, 3, 32, 32)
    picture = Image.fromarray(image[0].mul(255).round().byte().movedim(0, 2).numpy())
    coarse = picture.resize((20, 20), Image.Resampling.BOX).resize((32, 32), Image.Resampling.BOX)
    worse = corrupt(image, "pixelate", 5, generator=generator())[0].movedim(0, 2)
    np.testing.assert_allclose(worse, np.array(coarse) / 255, atol=1.5 / 255)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=40)
    worse = corrupt(image, "jpeg", 5, generator=generator())[0].movedim(0, 2)
    np.testing.assert_allclose(worse, np.array(Image.open(buffer)) / 255, atol=1e-6)


def test_an_elastic_image_is_moved_by_no_more_than_it_says() -> None:
    ramp = torch.linspace(0, 1, 64).expand(40, 1, 64, 64)
    moved = (corrupt(ramp, "elastic", 1, generator=generator()) - ramp)[..., 32, 32]  # an affine movement alone
    assert float(moved.abs().max()) < 0.08 * 64 / 63
    assert float(moved.std()) > 0.02


def test_fog_is_smooth_and_lightens_what_is_dark() -> None:
    dark = torch.full((4, 1, 64, 64), 0.3)
    dark[..., 0, 0] = 1.0
    foggy = corrupt(dark, "fog", 1, generator=generator())[..., 1:, 1:]
    assert (foggy.mean((1, 2, 3)) > 0.3).all()
    steps = (foggy[..., 1:] - foggy[..., :-1]).abs().mean()
    assert float(steps) < float(foggy.std()) / 3
