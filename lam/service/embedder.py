"""Turns images and texts into queries: decodes them and applies the network, without HTTP and threads.

Error messages do not quote decoders. `lam.inputs` turns images into inputs and thumbnails.
"""

import io
import logging
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from lam.gallery.embed import is_cut
from lam.gallery.refusal import Refusal, busy
from lam.inputs import Preprocessing, TextPreprocessing
from lam.inputs.decoding import decode, decoding_bytes, reduction, thumbnail
from lam.inputs.parts import TooManyPartsError, check_parts
from lam.retrieval.index.checks import unit_vectors
from lam.runs.finished import Run
from lam.service.queries import Query
from lam.service.settings import MEBIBYTE, ServiceSettings
from lam.vmf.embeddings import KAPPA_RANGE, Embeddings

FORMATS = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}
CONTENT_TYPES = tuple(FORMATS.values())
_ALWAYS = 2 * MEBIBYTE  # bytes that decoding any image takes
_LOG = logging.getLogger(__name__)
Decoded = tuple[Tensor, dict[str, Any]]  # an input of the network, and fields of its `Query`: thumbnail, text, text_cut


class Embedder:
    """The encoder of a run. A missing device raises a `ValueError`; after a GPU has failed, `device` is the CPU."""

    def __init__(self, run: Run, settings: ServiceSettings, device: str) -> None:
        self._run, self._settings, self.device = run, settings, device
        try:
            self.encoder = run.encoder.to(device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"the network cannot be moved to device {device!r}: {error}") from None

    @property
    def blank(self) -> Tensor | None:
        """An input of zeros; None if the shape of inputs is unknown."""
        preprocessing = self.encoder.preprocessing
        if preprocessing is None or preprocessing.shape is None:
            return None
        dtype = torch.uint8 if isinstance(preprocessing, TextPreprocessing) else torch.float32
        return torch.zeros(*preprocessing.shape, dtype=dtype)

    def decode(self, jobs: Sequence[tuple[bytes | str, bool]]) -> list[Decoded]:
        """The network's input for one image or text, with a thumbnail if wanted; a `Refusal` for bad content."""
        ((body, with_thumbnail),) = jobs  # the worker's batches hold one job, so an error belongs to one request
        preprocessing = self.encoder.preprocessing
        if isinstance(body, str) or isinstance(preprocessing, TextPreprocessing):
            return [self._read_text(body)]
        if not isinstance(preprocessing, Preprocessing):
            raise Refusal(422, "this run has no preprocessing for images", allowed="embeddings")
        image = read_image(body, self._settings, least=preprocessing.reduced_to)
        try:
            return [(preprocessing(image), {"thumbnail": thumbnail(image) if with_thumbnail else None})]
        except ValueError as error:
            raise Refusal(422, f"the image cannot become an input: {error}", allowed="an ordinary photograph") from None

    def _read_text(self, text: bytes | str) -> Decoded:
        preprocessing = self.encoder.preprocessing
        if not isinstance(preprocessing, TextPreprocessing):
            raise no_texts()
        if isinstance(text, bytes):
            raise Refusal(422, "this run takes no images", allowed='{"text": "..."} or embeddings')
        try:
            cut = is_cut(self.encoder.network, preprocessing, text)
            return preprocessing(text), {"text": preprocessing.kept(text), "text_cut": cut}
        except ValueError as error:
            raise Refusal(422, str(error), allowed="a text that is not empty") from None

    def embed(self, tensors: Sequence[Tensor]) -> list[Query | Exception]:
        """The query of each input, or its error."""
        results: dict[int, Query | Exception] = {}
        for shape in {tensor.shape for tensor in tensors}:
            rows = [row for row, tensor in enumerate(tensors) if tensor.shape == shape]
            results |= zip(rows, self._embedded(torch.stack([tensors[row] for row in rows])), strict=True)
        return [results[row] for row in range(len(tensors))]

    def _embedded(self, batch: Tensor) -> list[Query | Exception]:
        try:
            prediction = self.encoder.predict(batch.to(self.device))
        except ValueError:
            if len(batch) > 1:
                raise  # the worker then tries each job alone
            return [_no_embedding()]
        except RuntimeError as error:
            raise self._lost(error) from error
        embeddings, features = prediction.embeddings.to("cpu"), prediction.features.cpu()
        return [_query(embeddings[row : row + 1], features[row : row + 1]) for row in range(len(batch))]

    def _lost(self, error: RuntimeError) -> Exception:
        """The error that a batch reports when its device fails; after a GPU fails, the network runs on the CPU."""
        if self.device != "cpu":
            _LOG.error("the network moves to the CPU, because %s failed: %s", self.device, error)
            self.encoder, self.device = Run(self._run.folder).encoder, "cpu"
            return busy("the device of the network failed; the network now runs on the CPU")
        if "memory" in str(error):
            return busy("there is not enough memory for this batch")
        return error


def embedding_of(mean: Tensor, kappa: float) -> Embeddings:
    """Embedding of one item from a unit vector (D,) and κ, clamped to `KAPPA_RANGE`."""
    values = [[min(max(kappa, KAPPA_RANGE[0]), KAPPA_RANGE[1])], [1.0], [0.0]]
    clamped, resultant, variance = torch.tensor(values, dtype=torch.float64)
    return Embeddings(mean[None], clamped, resultant, variance)


def _query(embedding: Embeddings, features: Tensor) -> Query | Exception:
    try:
        unit_vectors(embedding, embedding.dimension)
    except ValueError:
        return _no_embedding()
    return Query(embedding, features)


def no_texts() -> Refusal:
    """The refusal of a text by a run on images."""
    return Refusal(422, "this run takes no texts", allowed="images or embeddings")


def _no_embedding() -> Refusal:
    return Refusal(422, "the input has no finite embedding with a direction", allowed="an ordinary input")


def read_image(body: bytes, settings: ServiceSettings, *, least: int | None = None) -> Image.Image:
    """The first frame of an image file, turned upright (EXIF); `least` as in `decode`.

    The limits on pixels and bytes are checked from the header, before decoding. A `Refusal` has the status 400 for
    an empty or damaged file, 413 for a file that is too large or has too many parts, 415 for another format.
    """
    if not body:
        raise Refusal(400, "the body is empty: there is no image", allowed=list(CONTENT_TYPES))
    try:
        check_parts(body)
        with Image.open(io.BytesIO(body), formats=tuple(FORMATS)) as image:
            _refuse_large(image, settings, least)
            return decode(image, least)
    except Refusal:
        raise
    except TooManyPartsError as error:
        raise Refusal(413, f"the image has {error}") from None
    except Image.UnidentifiedImageError:
        raise Refusal(415, "the body is not an image of an allowed format", allowed=list(CONTENT_TYPES)) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels(settings.max_pixels) from None
    except Exception:  # errors of decoders have no common class
        raise Refusal(400, "the image is truncated or damaged", allowed=list(CONTENT_TYPES)) from None


def _too_many_pixels(most: int) -> Refusal:
    return Refusal(413, f"the image has more than {most} pixels", allowed={"max_pixels": most})


def _refuse_large(image: Image.Image, settings: ServiceSettings, least: int | None) -> None:
    """Refuse an image if its header states too many pixels, or if decoding needs too much memory."""
    if image.width * image.height > settings.max_pixels:
        raise _too_many_pixels(settings.max_pixels)
    if max(image.size) > settings.max_side:
        most = settings.max_side
        raise Refusal(413, f"the image has a side of more than {most} pixels", allowed={"max_side": most})
    needed = _ALWAYS + decoding_bytes(image, least)
    needed += 2 * 4 * image.width * image.height // reduction(image, least) ** 2  # two copies of the reduced image
    if needed > settings.max_decoded:
        smaller = "a smaller image, or a JPEG that is not progressive"
        allowed = {"max_decoded_bytes": settings.max_decoded, "or": smaller}
        raise Refusal(413, f"the image would take {needed} bytes to decode", allowed=allowed)
