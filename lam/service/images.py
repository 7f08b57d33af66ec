"""Reads the image in the body of a request: the first frame of a JPEG, PNG or WebP file, upright.

Error messages do not quote decoders. `lam.inputs` turns images into inputs and thumbnails.
"""

import io

from PIL import Image

from lam.inputs.decoding import decode, decoding_bytes, reduction
from lam.inputs.parts import TooManyPartsError, check_parts
from lam.service.errors import ServiceError
from lam.service.settings import MEBIBYTE, ServiceSettings

FORMATS = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}
CONTENT_TYPES = tuple(FORMATS.values())
_ALWAYS = 2 * MEBIBYTE  # bytes that decoding any image takes


def read_image(body: bytes, settings: ServiceSettings, *, least: int | None = None) -> Image.Image:
    """The first frame of an image file, turned upright (EXIF); `least` as in `decode`.

    The limits on pixels and bytes are checked from the header, before decoding. A `ServiceError` has the status 400 for
    an empty or damaged file, 413 for a file that is too large or has too many parts, 415 for another format.
    """
    if not body:
        raise ServiceError(400, "the body is empty: there is no image", allowed=list(CONTENT_TYPES))
    try:
        check_parts(body)
        with Image.open(io.BytesIO(body), formats=tuple(FORMATS)) as image:
            _refuse_large(image, settings, least)
            return decode(image, least)
    except ServiceError:
        raise
    except TooManyPartsError as error:
        raise ServiceError(413, f"the image has {error}") from None
    except Image.UnidentifiedImageError:
        raise ServiceError(415, "the body is no image of an allowed format", allowed=list(CONTENT_TYPES)) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels(settings.max_pixels) from None
    except Exception:  # errors of decoders have no common class
        raise ServiceError(400, "the image is truncated or damaged", allowed=list(CONTENT_TYPES)) from None


def _too_many_pixels(most: int) -> ServiceError:
    return ServiceError(413, f"the image has more than {most} pixels", allowed={"max_pixels": most})


def _refuse_large(image: Image.Image, settings: ServiceSettings, least: int | None) -> None:
    """Refuse an image if its header states too many pixels, or if decoding needs too much memory."""
    if image.width * image.height > settings.max_pixels:
        raise _too_many_pixels(settings.max_pixels)
    if max(image.size) > settings.max_side:
        most = settings.max_side
        raise ServiceError(413, f"the image has a side of more than {most} pixels", allowed={"max_side": most})
    needed = _ALWAYS + decoding_bytes(image, least)
    needed += 2 * 4 * image.width * image.height // reduction(image, least) ** 2  # two copies of the reduced image
    if needed > settings.max_decoded:
        raise ServiceError(
            413,
            f"the image would take {needed} bytes to decode",
            allowed={
                "max_decoded_bytes": settings.max_decoded,
                "or": "a smaller image, or a JPEG that is not progressive",
            },
        )
