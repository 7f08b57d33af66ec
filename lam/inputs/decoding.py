"""Decoding of image files, upright, in bounded memory and in the mode that a network needs, and thumbnails."""

import io
import math
import mmap
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import ExifTags, Image, TiffImagePlugin
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import TiffImageFile

from lam.inputs.parts import check_parts
from lam.utils.extras import install_command

_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF", "AVIF")  # decoded without other programs
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_STORED = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2}  # bytes for each pixel; 4 in other modes
_DECODER = {"WEBP": 12, "AVIF": 10, "HEIF": 8}  # greatest bytes for each pixel in the decoder
_MOST = 8  # bytes that decoding may take for each pixel of Pillow's limit
MAX_SIDE = 65_535  # pixels of the longest side of a JPEG
_DEPTHS = (8, 10, 12, 14, 16)  # bits of a grey pixel in cameras and scanners
DEEP_MODES = ("I", "I;16", "I;16L", "I;16B", "I;16N")
GREY_MODES = ("1", "L", "LA", "La", "F", *DEEP_MODES)
_STRIP = 2**17  # pixels
_TELLING_ORIENTATION = ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp")
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

THUMBNAIL_SIDE = 128  # pixels
_QUALITY = 85
_LOSSLESS_BELOW = 64  # pixels of a side


def open_image(path: str | Path, least: int | None = None) -> Image.Image:
    """The first frame of an image file, turned upright (EXIF), as `decode` returns it for `least`.

    Formats are JPEG, PNG, WebP, BMP, GIF, PPM, TIFF and AVIF, or HEIC with the extra `heic`.

    Raises:
        ValueError: if the file is missing, damaged or not an image, or needs an extra that is not installed. Also for a
            side over `MAX_SIDE`, too many parts (`check_parts`), more than `PIL.Image.MAX_IMAGE_PIXELS` pixels, or
            more bytes for decoding than 8 times this number.
    """
    try:
        if Path(path).stat().st_size:
            with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                check_parts(content)
        with Image.open(path, formats=_formats(path)) as image:
            limit = Image.MAX_IMAGE_PIXELS
            if limit is not None and image.width * image.height > limit:  # Pillow only warns up to twice the limit
                raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels, more than {limit}")
            if max(image.size) > MAX_SIDE:  # millions of rows of one pixel cost seconds and a gigabyte
                raise ValueError(f"{image.width} x {image.height} pixels, a side of more than {MAX_SIDE:,}")
            if limit is not None and (needed := decoding_bytes(image, least)) > _MOST * limit:
                raise ValueError(f"it would take {needed} bytes to decode, more than {_MOST * limit}: save it as JPEG")
            return decode(_scale_ppm(image), least)
    except FileNotFoundError as error:
        raise ValueError(f"there is no image {path}") from error
    except Image.UnidentifiedImageError as error:
        raise ValueError(f"{path} is not an image; allowed formats: {', '.join(_FORMATS)}") from error
    except Exception as error:  # errors of decoders have no common class
        raise ValueError(f"{path} cannot be read as an image: {error}") from error


def _formats(path: str | Path) -> tuple[str, ...]:
    with Path(path).open("rb") as file:
        head = file.read(12)
    if head[4:8] != b"ftyp" or head[8:] not in _HEIC_BRANDS:
        return _FORMATS
    try:
        from pillow_heif import register_heif_opener
    except ImportError as error:
        raise ValueError(f"it is HEIC ({error}): {install_command('heic')}, or save it as JPEG") from None
    register_heif_opener()
    return ("HEIF",)


def decoding_bytes(image: Image.Image, least: int | None = None) -> int:
    """Bytes that `decode` needs before it reduces the image."""
    pixels, decoder = image.width * image.height, _DECODER.get(image.format or "", 0)
    if isinstance(image, JpegImageFile) and image.info.get("progressive"):
        shares = [across * down for _, across, down, _ in image.layer]
        decoder = 2 * sum(shares) / max(shares)
    elif isinstance(image, TiffImageFile):  # its decoder holds a strip, sometimes the whole image
        decoder = sum(image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,))) / 8
    reduction(image, least)  # a JPEG now has its reduced size
    return int(pixels * decoder) + image.width * image.height * _STORED.get(image.mode, 4)


def _scale_ppm(image: Image.Image) -> Image.Image:
    """A PPM image, scaled by its white value in strips (Pillow's loop over pixels is slow); others unchanged."""
    if not isinstance(image, PpmImageFile) or image.tile[0].codec_name != "ppm":
        return image
    _, _, offset, (_, white) = cast(Any, image.tile[0])
    file: Any = image.fp
    deep = white > 255 and image.mode == "I"
    scaled = Image.new("I;16" if deep else image.mode, image.size)
    kind, bands = np.dtype("u1" if white < 256 else ">u2"), len(image.getbands())
    rows = max(1, _STRIP // image.width)
    file.seek(offset)
    for top in range(0, image.height, rows):
        shape = (min(rows, image.height - top), image.width, bands)
        strip = file.read(math.prod(shape) * kind.itemsize)
        if len(strip) < math.prod(shape) * kind.itemsize:
            raise OSError("image file is truncated")
        values = np.frombuffer(strip, kind).reshape(shape[: 2 + (bands > 1)])
        most = 65535 if deep else 255
        pixels = np.minimum(np.round(values / white * most), most).astype(np.uint16 if deep else np.uint8)
        scaled.paste(Image.fromarray(pixels), (0, top))
    return scaled


def decode(image: Image.Image, least: int | None = None) -> Image.Image:
    """Decode an opened image and turn it upright (EXIF); a large image is reduced with little extra memory.

    An image with a shorter side of at least twice `least` pixels is reduced by a whole factor to at least `least`; its
    mode is then grey or RGB, with white instead of transparency. Other images keep their mode.

    Raises:
        ValueError: if a large image cannot be converted. Errors of Pillow are raised unchanged.
    """
    factor = reduction(image, least)
    image.load()
    orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    if factor > 1:
        image = to_mode(image, "L" if image.mode in GREY_MODES else "RGB", factor)
    if (turn := _UPRIGHT.get(orientation)) is None:
        return image
    image = image.transpose(turn)
    for name in _TELLING_ORIENTATION:
        image.info.pop(name, None)
    return image


def reduction(image: Image.Image, least: int | None) -> int:
    """Factor of the reduction in `decode`. Side effect: an opened JPEG is set to decode at a reduced size."""
    if least is None:
        return 1
    image.draft(None, (least, least))
    return max(1, min(image.size) // least)


def to_mode(image: Image.Image, mode: str, factor: int = 1) -> Image.Image:
    """The image in another mode, reduced by a factor; converted in strips, because a whole copy doubles the memory."""
    if 0 in image.size:
        raise ValueError(f"the image has no pixels: {image.height} x {image.width}")
    if factor == 1 and image.mode == mode and not image.has_transparency_data:
        return image
    width, height = image.size
    rows = factor * max(1, _STRIP // (width * factor))
    strips = [(0, top, width, min(top + rows, height)) for top in range(0, height, rows)]
    white = max(_white(image.crop(strip)) for strip in strips) if image.mode in DEEP_MODES else 255
    converted = Image.new(mode, (-(-width // factor), -(-height // factor)))
    for strip in strips:
        converted.paste(_convert(image.crop(strip), mode, white).reduce(factor), (0, strip[1] // factor))
    return converted


def _white(image: Image.Image) -> int:
    """Value of white: 2**b − 1 for the fewest bits b that hold all pixels; files do not state b."""
    values = np.asarray(image)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(f"grey values must be within 0 and 65535, got {values.min()} to {values.max()}")
    return next(2**bits - 1 for bits in _DEPTHS if values.max() < 2**bits)


def _convert(image: Image.Image, mode: str, white: int) -> Image.Image:
    if image.mode in DEEP_MODES:
        image = Image.fromarray(np.round(np.asarray(image) * (255 / white)).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    try:
        if image.mode == "F":
            raise ValueError("floating-point pixels have no known range")
        return image.convert(mode)
    except ValueError as error:
        raise ValueError(f"cannot convert pixels of mode {image.mode} to {mode} ({error}); save it as RGB") from error


def thumbnail(image: Image.Image, side: int = THUMBNAIL_SIDE) -> bytes:
    """A PNG or JPEG of the image, with sides of at most `side` pixels."""
    transparent = image.has_transparency_data and image.mode not in DEEP_MODES
    small = image.convert("RGBA") if transparent else to_mode(image, "L" if image.mode in GREY_MODES else "RGB")
    small = small.copy() if small is image else small
    small.thumbnail((side, side))
    pixels = Image.new(small.mode, small.size)
    pixels.paste(small)
    file = io.BytesIO()
    if transparent or max(small.size) < _LOSSLESS_BELOW:
        pixels.save(file, "PNG")
    else:
        pixels.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def media_type(picture: bytes) -> str:
    """The content type of a thumbnail."""
    return "image/png" if picture.startswith(b"\x89PNG") else "image/jpeg"


def thumbnail_of_file(path: str | Path, side: int = THUMBNAIL_SIDE) -> bytes | None:
    """The thumbnail of an image file; None without a readable image."""
    if not Path(path).is_file():
        return None
    try:
        return thumbnail(open_image(path, 2 * side), side)
    except ValueError:
        return None
