"""From the body of a request to a query, at a bounded cost. `lam.service.models` defines the allowed JSON."""

import base64
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from pydantic_core import from_json

from lam.gallery.item import metadata_json, normalize_label
from lam.service.answers import Query
from lam.service.engine import embedding_of, no_texts
from lam.service.errors import ServiceError
from lam.service.models import (
    JSON,
    EmbeddingRequest,
    FeedbackRequest,
    ImageRequest,
    ItemRequest,
    PairRequest,
    PatchRequest,
    TextItemRequest,
    TextRequest,
    kind_of,
    schema_of,
    validate,
)
from lam.service.watch import Feedback

_OF_AN_IMAGE: dict[str, str] = dict.fromkeys(
    ("image/jpg", "image/pjpeg", "image/x-png", "application/octet-stream"), "image/jpeg"
)
_UNIT_TOLERANCE = 1e-3
_SHOWN = 80
_PART = 2**16
_QUOTES = 100  # JSON with two images has far fewer


def content_type(headers: Mapping[str, str], *allowed: str) -> str:
    """The content type of a request, without parameters; any image type becomes JPEG, because the body has the format.

    Raises:
        ServiceError: 415, for another type, or a compressed body.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        what = f"the body is encoded, as {encoding[:_SHOWN]!r}"
        raise ServiceError(415, what, allowed="identity", headers={"Accept-Encoding": "identity"})
    if kind == "multipart/form-data":
        what = "the body is a form, as curl -F sends it: send the file itself, under its own content type"
        raise ServiceError(
            415, what, allowed={"types": list(allowed), "curl": "--data-binary @FILE -H 'Content-Type: TYPE'"}
        )
    kind = _OF_AN_IMAGE.get(kind, kind)
    if kind not in allowed:
        raise ServiceError(415, "the content type is missing or not an allowed one", allowed=list(allowed))
    return kind


def query_of(body: bytes, dimension: int) -> Query | str:
    """The query of a body in JSON, or its text.

    Raises:
        ServiceError: for any other body.
    """
    return _text_or_query(_named(_content(body), TextRequest, EmbeddingRequest), dimension)


def embedding_query_of(body: bytes, dimension: int) -> Query:
    """The query of a body in JSON with an embedding.

    Raises:
        ServiceError: for any other body.
    """
    query = query_of(body, dimension)
    if isinstance(query, str):
        raise no_texts()
    return query


def pair_of(body: bytes, dimension: int, max_json: int) -> list[Query | bytes | str]:
    """The two parts of a body in JSON: each a query, a text, or the file of an image in base64.

    Raises:
        ServiceError: for any other body, or one of more than `max_json` bytes without its images.
    """
    if len(body) > max_json:
        _refuse_costly(body, max_json)
    pair = validate(_content(body), PairRequest)
    return [_part(pair[name], name, dimension, max_json) for name in ("first", "second")]


@dataclass(frozen=True)
class ParsedItem:
    """The item of a body.

    Attributes:
        content: its embedding, its text, or the file of an image.
        id, label: None if the body lacks them.
        metadata: JSON for the store, without a text; None if the body lacks it.
    """

    content: Query | str | bytes
    id: str | None = None
    label: str | None = None
    metadata: str | None = None


def item_of(body: bytes, dimension: int) -> ParsedItem:
    """The item of a body in JSON.

    Raises:
        ServiceError: for any other body.
    """
    item = _named(_content(body), TextItemRequest, ItemRequest)
    metadata = item.get("metadata")
    if "text" in item and "text" in (metadata or ()):
        raise ServiceError(422, "metadata: the body has a text of its own", allowed="metadata without text")
    kept = None if metadata is None else metadata_json(metadata)
    return ParsedItem(_text_or_query(item, dimension), item.get("id"), item.get("label"), kept)


def patch_of(body: bytes) -> tuple[str | None, dict[str, Any]]:
    """The new label, None to keep it, and the new metadata of a body in JSON.

    Raises:
        ServiceError: for any other body, or one without a change.
        Refusal: for an invalid label or metadata.
    """
    patch = validate(_content(body), PatchRequest)
    if not patch:
        raise ServiceError(422, "the body changes nothing", allowed=schema_of(PatchRequest)["properties"])
    label, metadata = patch.get("label"), patch.get("metadata", {})
    metadata_json(metadata)
    return None if label is None else normalize_label(label), metadata


def feedback_of(body: bytes) -> Feedback:
    """The feedback of a body in JSON.

    Raises:
        ServiceError: for any other body.
        Refusal: for an invalid label.
    """
    feedback = validate(_content(body), FeedbackRequest)
    if ("label" in feedback) == ("correct" in feedback):
        properties = schema_of(FeedbackRequest)["properties"]
        allowed = {name: properties[name] for name in ("label", "correct")}
        raise ServiceError(422, "the body must hold either a label or correct", allowed=allowed)
    label = feedback.get("label")
    label = None if label is None else normalize_label(label)
    return Feedback(feedback["answer_id"], label, feedback.get("correct"))


def _named(content: Any, by_text: type[Any], by_embedding: type[Any]) -> Any:
    """Validate JSON as a text or an embedding, by its names."""
    if isinstance(content, dict) and not content.keys() & {"text", "embedding"}:
        allowed = schema_of(by_text)["properties"] | schema_of(by_embedding)["properties"]
        raise ServiceError(422, "the body names neither an embedding nor a text", allowed=allowed)
    return validate(content, by_text if kind_of(content) == "text" else by_embedding)


def _content(body: bytes) -> Any:
    try:
        content = from_json(body)  # ten times as fast as Python's parser, which also blocks other threads
        if body.count(b":") > _names_in(content):  # colons in texts, or repeated names: Python tells
            json.loads(body, object_pairs_hook=_once_each)
    except ValueError:
        raise ServiceError(400, "the body is no valid JSON", allowed=JSON) from None
    return content


def _names_in(content: Any) -> int:
    """Number of names in all objects of JSON; lists of numbers are skipped."""
    if isinstance(content, dict):
        return len(content) + sum(map(_names_in, content.values()))
    if isinstance(content, list) and content and isinstance(content[0], dict | list):
        return sum(map(_names_in, content))
    return 0


def _once_each(pairs: list[tuple[str, Any]]) -> None:
    for name, times in Counter(name for name, _ in pairs).items():
        if times > 1:
            raise ServiceError(422, f"the name {name[:_SHOWN]!r} is given more than once", allowed="once")


def _refuse_costly(body: bytes, most: int) -> None:
    """Refuse a body that is large without its images: parsed lists and numbers take a hundred times their bytes."""
    plain = body.replace(b"\\/", b"/") if b"\\" in body else body  # some encoders escape the slashes of base64
    quotes = [-1]
    while len(quotes) <= _QUOTES and (quote := plain.find(b'"', quotes[-1] + 1)) >= 0:
        quotes.append(quote)
    beside = sum(end - start - 1 for start, end in [*pairwise([*quotes, len(plain)])][::2])
    if b"\\" in plain or beside > most:
        raise ServiceError(
            413, f"the body is larger than {most} bytes beside its images", allowed={"max_bytes": most, "and": "base64"}
        )


def _part(
    part: ImageRequest | TextRequest | EmbeddingRequest, name: str, dimension: int, max_json: int
) -> Query | bytes | str:
    if "image" not in part:
        query = _text_or_query(part, dimension)
        if isinstance(query, str) and len(query) > max_json:
            what = f"the text of {name} has {len(query)} characters"
            raise ServiceError(413, what, allowed={"max_characters": max_json})
        return query
    text = part["image"]
    try:  # in parts: other threads run in between
        return b"".join(base64.b64decode(text[at : at + _PART], validate=True) for at in range(0, len(text), _PART))
    except ValueError:
        raise ServiceError(422, f"the image of {name} is no base64", allowed="base64 of a file") from None


def _text_or_query(request: TextRequest | EmbeddingRequest, dimension: int) -> Query | str:
    if "text" in request:
        return request["text"]
    numbers, allowed = request["embedding"], {"embedding": f"{dimension} finite numbers, a unit vector"}
    if len(numbers) != dimension:
        raise ServiceError(422, f"embedding has dimension {len(numbers)}", allowed=allowed)
    vector = np.array(numbers)
    with np.errstate(over="ignore"):
        norm = float(np.linalg.norm(vector))
    if not abs(norm - 1) <= _UNIT_TOLERANCE:
        raise ServiceError(422, f"embedding has length {norm:.6g}", allowed=allowed)
    return Query(embedding_of(torch.from_numpy((vector / norm).astype(np.float32)), request["kappa"]))
