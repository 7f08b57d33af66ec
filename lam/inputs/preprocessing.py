"""`Preprocessing` turns an image or an image file into an input of a network; `TextPreprocessing` does so for a text.

Encoders save these records. Reading images needs only Pillow, NumPy and torch, so a saved encoder reads images the same
way on every machine. Texts become UTF-8 bytes; `lam.models.sentences` turns bytes into tokens.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from lam.inputs.decoding import decode, open_image, to_mode
from lam.utils.checks import check_choice

_CHANNELS = {"L": 1, "RGB": 3}
_RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
MAX_INPUT = 8_192  # pixels of a side
_OVERSAMPLING = 2  # a reduced image has at least this many times the final size, so resizing loses no quality
_LEAST_SIDE = 256  # least pixels of the shorter side of a reduced image

MAX_BYTES = 4096


@dataclass(frozen=True)
class Preprocessing:
    """Resize, centre crop, scale to [0, 1] and normalise, in this order.

    First, the image is turned upright (EXIF), transparency becomes white, and colours are converted to `mode`. In grey
    images of 16 bits, white is 2**b − 1 for the fewest bits b (8, 10, 12, 14 or 16) that hold all pixels. An image with
    a shorter side of at least twice `reduced_to` is reduced by a whole factor; a JPEG is reduced during decoding. Then
    antialiased resizing follows.

    Args:
        mode: "L" for one grey channel, "RGB" for three.
        size: pixels of the shorter side after resizing, or the exact (height, width), or None to keep the size.
        crop: (height, width) of the centre crop, one number for a square, or None for no crop.
        mean: a number for each channel, subtracted after scaling to [0, 1]; or None.
        std: a positive number for each channel, the divisor after the subtraction; or None.
        resampling: "bilinear" or "bicubic".

    Raises:
        ValueError: for an invalid field, or a crop larger than the size.

    Example:
        >>> preprocessing = Preprocessing.imagenet(size=64)
        >>> preprocessing(Image.new("L", (300, 200))).shape
        torch.Size([3, 64, 64])
        >>> Preprocessing.from_json(preprocessing.to_json()) == preprocessing
        True
    """

    mode: Literal["L", "RGB"] = "RGB"
    size: int | tuple[int, int] | None = None
    crop: int | tuple[int, int] | None = None
    mean: tuple[int | float, ...] | None = None
    std: tuple[int | float, ...] | None = None
    resampling: Literal["bilinear", "bicubic"] = "bilinear"

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, tuple(_CHANNELS))
        check_choice("resampling", self.resampling, tuple(_RESAMPLING))
        for name in ("size", "crop"):
            _check_extent(name, getattr(self, name))
        for name in ("mean", "std"):
            _check_per_channel(name, getattr(self, name), self.mode)
        if self.crop is not None and self.size is not None:
            size, crop = _pair(self.size), _pair(self.crop)
            if crop[0] > size[0] or crop[1] > size[1]:
                raise ValueError(f"crop must fit into size, got crop={self.crop} with size={self.size}; enlarge size")

    @classmethod
    def imagenet(cls, size: int = 224) -> "Preprocessing":
        """Preprocessing for ImageNet weights: resize the shorter side to 8/7 of `size`, then crop the centre."""
        mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        return cls(mode="RGB", size=round(size * 256 / 224), crop=size, mean=mean, std=std)

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """(C, H, W) of every result; None if the shape depends on the image."""
        extent = self.crop if self.crop is not None else self.size if isinstance(self.size, tuple) else None
        return None if extent is None else (_CHANNELS[self.mode], *_pair(extent))

    @property
    def reduced_to(self) -> int | None:
        """Least length, in pixels, of the shorter side after reduction by a whole factor; None for no reduction."""
        return None if self.size is None else max(_OVERSAMPLING * max(_pair(self.size)), _LEAST_SIDE)

    def __call__(self, image: Image.Image | str | Path) -> Float[Tensor, "C H W"]:
        """The float32 tensor of a Pillow image, or of an image file.

        Raises:
            ValueError: as `open_image`; also if the image cannot be converted, would become too large, or is smaller
                than the crop and not resized.
        """
        if isinstance(image, Image.Image):
            return self._tensor(decode(image, self.reduced_to))
        if not isinstance(image, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"an image must be a path or a Pillow image, got {type(image).__name__}: give Image.fromarray(pixels)"
            )
        decoded = open_image(image, self.reduced_to)
        try:
            return self._tensor(decoded)
        except ValueError as error:
            raise ValueError(f"{image}: {error}") from error

    def normalize(self, pixels: UInt8[Tensor, "*N C H W"]) -> Float[Tensor, "*N C H W"]:
        """Scale 8-bit pixels to [0, 1] and normalise them, in float32."""
        return self.standardize(pixels.to(torch.float32).div_(255))

    def standardize(self, values: Float[Tensor, "*N C H W"]) -> Float[Tensor, "*N C H W"]:
        """Subtract `mean` from values in [0, 1] and divide by `std`."""
        values = values.clone()
        for operation, numbers in ((values.sub_, self.mean), (values.div_, self.std)):
            if numbers is not None:
                operation(torch.tensor(numbers, dtype=torch.float32, device=values.device)[:, None, None])
        return values

    def denormalize(self, values: Float[Tensor, "*N C H W"]) -> Float[Tensor, "*N C H W"]:
        """The inverse of `standardize`, clamped to [0, 1]."""
        values = values.clone()
        for operation, numbers in ((values.mul_, self.std), (values.add_, self.mean)):
            if numbers is not None:
                operation(torch.tensor(numbers, dtype=values.dtype, device=values.device)[:, None, None])
        return values.clamp_(0, 1)

    def to_json(self) -> dict[str, Any]:
        """The fields for JSON, with lists for tuples."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls, fields: object) -> "Preprocessing":
        """The preprocessing from fields of `to_json`; missing fields have defaults, unknown fields raise an error."""
        if not isinstance(fields, Mapping):
            raise ValueError(f"preprocessing must be a mapping of its fields, got {fields!r}")
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(set(map(str, fields)) - set(known)):
            raise ValueError(f"preprocessing has no field {', '.join(unknown)}; allowed: {', '.join(known)}")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return cls(**values)

    @classmethod
    def of(cls, fields: object, size: int = 224) -> "Preprocessing":
        """The preprocessing for `fields`: `imagenet(size)` for None, or ImageNet's with these fields replaced.

        A `Preprocessing` is returned unchanged. A single number for `size` without `crop` gives a square: the shorter
        side is resized to `size`, and the centre is cropped. With `crop` alone, the shorter side is first resized to
        8/7 of the crop's longer side, except with `"size": None`. Grey images have no `mean` and no `std` unless
        `fields` has them.

        Raises:
            ValueError: as `from_json`.

        Example:
            >>> Preprocessing.of({"size": 32}).shape, Preprocessing.of({"size": [32, 48]}).shape
            ((3, 32, 32), (3, 32, 48))
            >>> Preprocessing.of({"crop": 112}) == Preprocessing.imagenet(112)
            True
        """
        if fields is None or isinstance(fields, Preprocessing):
            return fields or cls.imagenet(size)
        if not isinstance(fields, Mapping):
            return cls.from_json(fields)
        imagenet = cls.imagenet()
        defaults: dict[str, Any] = {} if fields.get("mode") == "L" else {"mean": imagenet.mean, "std": imagenet.std}
        if "size" not in fields:
            crop = cls.from_json({"crop": fields.get("crop", imagenet.crop)}).crop
            defaults |= {"crop": crop, "size": None if crop is None else cls.imagenet(max(_pair(crop))).size}
        elif "crop" not in fields and isinstance(fields["size"], int):
            defaults["crop"] = fields["size"]
        return cls.from_json({**defaults, **fields})

    def _tensor(self, image: Image.Image) -> Float[Tensor, "C H W"]:
        pixels = torch.from_numpy(np.array(self._resize_and_crop(to_mode(image, self.mode)), ndmin=3))
        return self.normalize(pixels if self.mode == "L" else pixels.permute(2, 0, 1)).contiguous()

    def _resize_and_crop(self, image: Image.Image) -> Image.Image:
        # Only the cropped part is computed: resizing a whole 1 x 10,000 strip would give 224 x 2,240,000 pixels.
        width, height = image.size
        if self.size is None:
            resized = (height, width)
        elif isinstance(self.size, tuple):
            resized = self.size
        else:
            shorter = min(height, width)
            resized = (self.size * height // shorter, self.size * width // shorter)
        crop = resized if self.crop is None else _pair(self.crop)
        if crop[0] > resized[0] or crop[1] > resized[1]:
            raise ValueError(
                f"the image is {height} x {width}, too small for crop={self.crop}; set a size to resize to"
            )
        if Image.MAX_IMAGE_PIXELS is not None and crop[0] * crop[1] > Image.MAX_IMAGE_PIXELS:
            raise ValueError(f"an image of {height} x {width} would become {crop[0]} x {crop[1]}; set a crop")
        top, left = (round((whole - part) / 2) for whole, part in zip(resized, crop, strict=True))
        bottom, right = top + crop[0], left + crop[1]
        if resized == (height, width):
            return image.crop((left, top, right, bottom))
        down, across = height / resized[0], width / resized[1]
        box = (left * across, top * down, min(right * across, width), min(bottom * down, height))
        return image.resize((crop[1], crop[0]), _RESAMPLING[self.resampling], box=box)


def _pair(extent: int | tuple[int, int]) -> tuple[int, int]:
    return extent if isinstance(extent, tuple) else (extent, extent)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_extent(name: str, value: object) -> None:
    extents = value if isinstance(value, tuple) and len(value) == 2 else (value,)
    if value is not None and not all(type(extent) is int and 0 < extent <= MAX_INPUT for extent in extents):
        raise ValueError(
            f"{name} must be a positive number of pixels, a (height, width) or None, of at most {MAX_INPUT:,}, "
            f"got {value!r}"
        )


def _check_per_channel(name: str, value: object, mode: str) -> None:
    if value is None:
        return
    if not isinstance(value, tuple) or len(value) != _CHANNELS[mode] or not all(map(_is_number, value)):
        raise ValueError(f"{name} must have {_CHANNELS[mode]} finite number(s) for mode {mode}, got {value!r}")
    if name == "std" and min(value) <= 0:
        raise ValueError(f"std must be positive, got {value!r}")


@dataclass(frozen=True)
class TextPreprocessing:
    """Map a text to its UTF-8 bytes, cut between characters or padded with zeros to a fixed length.

    Zero bytes and surrounding spaces are removed; lone surrogates become question marks.

    Args:
        max_bytes: length L, at least 4.

    Example:
        >>> preprocessing = TextPreprocessing(max_bytes=8)
        >>> preprocessing("né ").tolist(), texts_of(preprocessing("né")[None])
        ([110, 195, 169, 0, 0, 0, 0, 0], ['né'])
    """

    max_bytes: int = MAX_BYTES

    def __post_init__(self) -> None:
        if type(self.max_bytes) is not int or self.max_bytes < 4:
            raise ValueError(f"max_bytes must be a number of bytes, at least 4, got {self.max_bytes!r}")

    @property
    def shape(self) -> tuple[int]:
        """(L,), the shape of every result."""
        return (self.max_bytes,)

    def __call__(self, text: str) -> UInt8[Tensor, " L"]:
        """The tensor of one text; a `ValueError` for an empty text."""
        content = self.kept(text).encode()
        if not content:
            raise ValueError("the text is empty: give at least one character other than a space")
        return torch.from_numpy(np.frombuffer(content.ljust(self.max_bytes, b"\0"), np.uint8).copy())

    def kept(self, text: str) -> str:
        """The text, or the beginning that fits."""
        return _content(text)[: self.max_bytes].decode(errors="ignore").rstrip()

    def is_cut(self, text: str) -> bool:
        """Whether only the beginning of a text fits."""
        return len(_content(text)) > self.max_bytes

    def to_json(self) -> dict[str, Any]:
        """The fields for JSON; `max_bytes` distinguishes them from the fields for images."""
        return {"max_bytes": self.max_bytes}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "TextPreprocessing":
        """The preprocessing from the fields of `to_json`; a `ValueError` for an unknown field or value."""
        if unknown := sorted(set(fields) - {"max_bytes"}):
            raise ValueError(f"the preprocessing of texts has no field {', '.join(unknown)}; allowed: max_bytes")
        return cls(**fields)


def _content(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError(f"a text must be a string, got {text!r}: leave out missing ones, and give str of others")
    return text.replace("\0", "").strip().encode(errors="replace")


def texts_of(inputs: UInt8[Tensor, "N L"]) -> list[str]:
    """The texts of a batch of inputs; a `TypeError` for other tensors, such as one text or features."""
    if inputs.ndim != 2 or inputs.dtype != torch.uint8:
        raise TypeError(
            f"texts must be a batch of bytes, uint8 (N, L), got {str(inputs.dtype)[6:]} {tuple(inputs.shape)}: give "
            "torch.stack([encoder.preprocessing(text) for text in texts])"
        )
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in inputs.cpu().numpy()]
