"""From the body of a request to an image: only JPEG, PNG and WebP, size checked in the header, first frame, upright.

Errors say nothing of what a decoder said. How an image becomes an input is `lam.preprocessing`.
"""

import io

from PIL import Image, ImageOps

from lam.service.errors import ServiceError

FORMATS = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}
CONTENT_TYPES = tuple(FORMATS.values())
_THUMBNAIL = 128
_QUALITY = 85
_SHARP_BELOW = 64  # so few pixels are kept as they are
_GREY = ("1", "L", "LA", "I", "I;16", "F")


def decode(body: bytes, *, max_pixels: int) -> Image.Image:
    """Decode an image that somebody sent.

    Args:
        body: the file.
        max_pixels: more are refused before any is decoded.

    Returns:
        Its first frame, turned as its EXIF data say.

    Raises:
        ServiceError: 400 for nothing or a damaged file, 413 for too many pixels, 415 for anything else than an image of
            the three formats.
    """
    if not body:
        raise ServiceError(400, "the body is empty: there is no image", allowed=list(CONTENT_TYPES))
    too_large = ServiceError(413, f"the image has more than {max_pixels} pixels", allowed={"max_pixels": max_pixels})
    try:
        with Image.open(io.BytesIO(body), formats=tuple(FORMATS)) as image:
            if image.width * image.height > max_pixels:
                raise too_large
            image.load()
            return ImageOps.exif_transpose(image)
    except ServiceError:
        raise
    except Image.UnidentifiedImageError:
        raise ServiceError(415, "the body is no image of an allowed format", allowed=list(CONTENT_TYPES)) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise too_large from None
    except Exception:  # what a decoder raises on damaged bytes has no common class
        raise ServiceError(400, "the image is truncated or damaged", allowed=list(CONTENT_TYPES)) from None


def thumbnail(image: Image.Image) -> bytes:
    """Give a small picture as a new PNG or JPEG, without anything else that the file carried."""
    transparent = image.has_transparency_data
    small = image.convert("RGBA" if transparent else "L" if image.mode in _GREY else "RGB")
    small.thumbnail((_THUMBNAIL, _THUMBNAIL))
    pixels = Image.new(small.mode, small.size)
    pixels.paste(small)
    shown = io.BytesIO()
    if transparent or max(small.size) < _SHARP_BELOW:
        pixels.save(shown, "PNG")
    else:
        pixels.save(shown, "JPEG", quality=_QUALITY)
    return shown.getvalue()


def media_type(picture: bytes) -> str:
    """Tell the type of a thumbnail."""
    return "image/png" if picture.startswith(b"\x89PNG") else "image/jpeg"
