"""Small pictures of images, without their metadata."""

import io
from pathlib import Path

from PIL import Image

from lam.inputs.decoding import DEEP_MODES, GREY_MODES, open_image, to_mode

SIZE = 128
_QUALITY = 85
_LOSSLESS_BELOW = 64  # pixels of a side


def thumbnail(image: Image.Image, side: int = SIZE) -> bytes:
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


def thumbnail_of_file(path: str | Path, side: int = SIZE) -> bytes | None:
    """The thumbnail of an image file; None without a readable image."""
    if not Path(path).is_file():
        return None
    try:
        return thumbnail(open_image(path, 2 * side), side)
    except ValueError:
        return None
