"""Parses the bodies of requests at a bounded cost; a bad body raises a `Refusal`.

`lam.service.requests` defines the allowed JSON.
"""

import base64
import json
import re
from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic_core import from_json

from lam.gallery.item import metadata_json, normalize_label
from lam.gallery.refusal import Refusal
from lam.service import requests
from lam.service.embedder import embedding_of, no_texts
from lam.service.models import JSON
from lam.service.queries import Query
from lam.service.workers import results_of

_OF_AN_IMAGE = ("image/jpg", "image/pjpeg", "image/x-png", "application/octet-stream")  # aliases of image/jpeg
_UNIT_TOLERANCE = 1e-3
_SHOWN = 80
_PART = 2**16
_PAIR = ("first", "second")
_VALUES, _VALUES_BESIDE = 2**13, 2**10  # values that a large body may hold, and more for each part of a batch
_DATA_URL = re.compile(r"data:image/[\w.+-]+(;[\w.+-]+=[\w.+-]+)*;base64", re.IGNORECASE)


def content_type(headers: Mapping[str, str], *allowed: str) -> str:
    """The content type without parameters; aliases such as image/jpg become image/jpeg.

    A type that is not allowed, or a compressed body, is refused (415).
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        what = f"the body has the content encoding {encoding[:_SHOWN]!r}"
        raise Refusal(415, what, allowed="identity", headers={"Accept-Encoding": "identity"})
    if kind == "multipart/form-data":
        what = "the body is a form, as curl -F sends it: send the file itself, with its content type"
        with_curl = {"types": list(allowed), "curl": "--data-binary @FILE -H 'Content-Type: TYPE'"}
        raise Refusal(415, what, allowed=with_curl)
    kind = "image/jpeg" if kind in _OF_AN_IMAGE else kind
    if kind not in allowed:
        raise Refusal(415, "the content type is missing or not an allowed one", allowed=list(allowed))
    return kind


@dataclass(frozen=True)
class JsonLimits:
    """The limits of a body in JSON.

    Attributes:
        dimension: dimension of an embedding.
        max_json: bytes of a query or an item without its image; a pair may have twice as many.
        max_batch: queries or items of a batch.
        max_batch_json: bytes of a batch without its images.
    """

    dimension: int
    max_json: int
    max_batch: int
    max_batch_json: int


def query_of(body: bytes, limits: JsonLimits) -> Query | str | bytes:
    """The query in a JSON body: an embedding as `Query`, a text, or the content of an image file."""
    content = _content(body, limits)
    _refuse_large(body, [content], limits.max_json)
    return _query(_named(content, requests.QUERIES), limits)


def embedding_query_of(body: bytes, limits: JsonLimits) -> Query:
    """The query in a JSON body with an embedding, for a run on images."""
    query = query_of(body, limits)
    if not isinstance(query, Query):
        raise no_texts()
    return query


def queries_of(body: bytes, limits: JsonLimits) -> list[Query | str | bytes | Exception]:
    """Each query of a JSON batch, as `query_of` returns it, or its error."""
    parts = _batch(body, "queries", limits)
    return results_of(lambda part=part: _query(_named(part, requests.QUERIES), limits) for part in parts)


def pair_of(body: bytes, limits: JsonLimits) -> list[Query | bytes | str]:
    """The two inputs of a comparison in JSON, each as `query_of` returns it."""
    content = _content(body, limits)
    parts = [content.get(name) for name in _PAIR] if isinstance(content, dict) else []
    _refuse_large(body, parts, 2 * limits.max_json)
    pair = requests.validate(content, requests.PairRequest)
    return [_query(pair[name], limits, f" of {name}") for name in _PAIR]


@dataclass(frozen=True)
class ParsedItem:
    """An item. `content` is what `query_of` returns, `metadata` is JSON without the text, missing values are None."""

    content: Query | str | bytes
    id: str | None = None
    label: str | None = None
    metadata: str | None = None


def item_of(body: bytes, limits: JsonLimits) -> ParsedItem:
    """The item of a body in JSON."""
    content = _content(body, limits)
    _refuse_large(body, [content], limits.max_json)
    return _item(_named(content, requests.ITEMS), limits)


def items_of(body: bytes, limits: JsonLimits) -> list[ParsedItem | Exception]:
    """Each item of a JSON batch, or its error."""
    parts = _batch(body, "items", limits)
    return results_of(lambda part=part: _item(_named(part, requests.ITEMS), limits) for part in parts)


def patch_of(body: bytes, limits: JsonLimits) -> tuple[str | None, dict[str, Any]]:
    """The new label (None keeps the old one) and the new metadata in a JSON body, which must have label or metadata."""
    patch = requests.validate(_content(body, limits), requests.PatchRequest)
    if not patch:
        raise Refusal(422, "the body changes nothing", allowed=requests.schema_of(requests.PatchRequest)["properties"])
    label, metadata = patch.get("label"), patch.get("metadata", {})
    metadata_json(metadata)
    return None if label is None else normalize_label(label), metadata


def feedback_of(body: bytes, limits: JsonLimits) -> tuple[str, str | None, bool | None]:
    """The id of an answer, and its true label or whether it is right, in a JSON body."""
    feedback = requests.validate(_content(body, limits), requests.FeedbackRequest)
    if ("label" in feedback) == ("correct" in feedback):
        properties = requests.schema_of(requests.FeedbackRequest)["properties"]
        allowed = {name: properties[name] for name in ("label", "correct")}
        raise Refusal(422, "the body must hold either a label or correct", allowed=allowed)
    label = feedback.get("label")
    label = None if label is None else normalize_label(label)
    return feedback["answer_id"], label, feedback.get("correct")


def _item(item: Any, limits: JsonLimits) -> ParsedItem:
    metadata = item.get("metadata")
    if "text" in item and "text" in (metadata or ()):
        raise Refusal(422, "metadata: the name text is for the item's text", allowed="metadata without text")
    kept = None if metadata is None else metadata_json(metadata)
    return ParsedItem(_query(item, limits), item.get("id"), item.get("label"), kept)


def _named(content: Any, kinds: Mapping[requests.Kind, type[Any]]) -> Any:
    """Validate JSON as an image, a text or an embedding, according to its names."""
    if isinstance(content, dict) and not content.keys() & kinds.keys():
        properties = [requests.schema_of(kind)["properties"] for kind in kinds.values()]
        what = "the body names neither an image, a text nor an embedding"
        raise Refusal(422, what, allowed=dict(ChainMap(*properties)))
    return requests.validate(content, kinds[requests.kind_of(content)])


def _batch(body: bytes, name: str, limits: JsonLimits) -> list[Any]:
    """The parts of a batch, which are not validated yet."""
    content = _content(body, limits, limits.max_batch)
    parts = content.get(name) if isinstance(content, dict) else None
    if not isinstance(parts, list) or not parts or len(content) > 1 or len(parts) > limits.max_batch:
        given = f"{len(parts)} of them" if isinstance(parts, list) else "no such list"
        what = f"the body must hold a list of {name} and nothing else; it has {given}"
        raise Refusal(422, what, allowed={name: f"1 to {limits.max_batch}"})
    _refuse_large(body, parts, limits.max_batch_json)
    return parts


def _content(body: bytes, limits: JsonLimits, parts: int = 1) -> Any:
    """Parse the JSON of a body with at most `parts` queries or items."""
    if len(body) > limits.max_json:
        _refuse_costly(body, parts * (limits.dimension + _VALUES_BESIDE) + _VALUES)
    try:
        content = from_json(body)  # ten times as fast as Python's parser, which also blocks other threads
        # a name may be repeated, or a colon escaped (which can hide a repeated name): Python's parser tells
        if _count(body, ":") != _colons_in(content) or b"\\u003a" in body or b"\\u003A" in body:
            json.loads(body, object_pairs_hook=_once_each)
    except ValueError:
        raise Refusal(400, "the body is not valid JSON", allowed=JSON) from None
    return content


def _colons_in(content: Any) -> int:
    """Number of colons that JSON with this content must have: one after each name, and the colons within texts."""
    if isinstance(content, str):
        return content.count(":")
    if isinstance(content, dict):
        return sum(1 + name.count(":") + _colons_in(value) for name, value in content.items())
    if isinstance(content, list) and content and isinstance(content[0], dict | list | str):
        return sum(map(_colons_in, content))
    return 0


def _once_each(pairs: list[tuple[str, Any]]) -> None:
    for name, times in Counter(name for name, _ in pairs).items():
        if times > 1:
            raise Refusal(422, f"the name {name[:_SHOWN]!r} is given more than once", allowed="once")


def _refuse_costly(body: bytes, most: int) -> None:
    """Refuse a body with many values before parsing: a list takes 0.5 µs, and 20 times the memory of its text."""
    weights = {",": 1, "[": 4, "{": 4, "\\": 1}
    values = sum(weight * _count(body, sign) for sign, weight in weights.items()) - _escaped_slashes(body)
    if values > most:
        what = f"the body holds too many values: {values}, where a list counts as four"
        raise Refusal(413, what, allowed={"max_values": most})


def _refuse_large(body: bytes, parts: Sequence[Any], most: int) -> None:
    """Refuse a body with more than `most` bytes without the images of its parts."""
    images = [part["image"] for part in parts if isinstance(part, dict) and isinstance(part.get("image"), str)]
    if len(body) - _escaped_slashes(body) - sum(map(len, images)) > most:
        raise Refusal(413, f"the body is larger than {most} bytes without its images", allowed={"max_bytes": most})


def _count(body: bytes, sign: str) -> int:
    """Number of bytes equal to an ASCII character, ten times as fast as `bytes.count`."""
    return int(np.count_nonzero(np.frombuffer(body, np.uint8) == ord(sign)))


def _escaped_slashes(body: bytes) -> int:
    """Number of escaped slashes; some encoders escape the slashes of base64."""
    return body.count(b"\\/") if b"\\" in body else 0


def _file(image: str, where: str) -> bytes:
    if image[:5].lower() == "data:":
        head, _, image = image.partition(",")
        if not _DATA_URL.fullmatch(head):
            raise Refusal(422, f"the data URL{where} is not an image in base64", allowed="data:image/TYPE;base64,...")
    try:  # in parts: other threads run in between
        return b"".join(base64.b64decode(image[at : at + _PART], validate=True) for at in range(0, len(image), _PART))
    except ValueError:
        raise Refusal(422, f"the image{where} is not base64", allowed="base64 of a file, or a data URL") from None


def _vector(numbers: list[float] | str, where: str) -> np.ndarray:
    if isinstance(numbers, list):
        return np.array(numbers)
    try:
        return np.frombuffer(base64.b64decode(numbers, validate=True), "<f4").astype(np.float64)
    except ValueError:
        what = f"the embedding{where} is not base64 of 32-bit floats"
        raise Refusal(422, what, allowed="a list of numbers, or base64 of 32-bit floats, little-endian") from None


def _query(request: Any, limits: JsonLimits, where: str = "") -> Query | bytes | str:
    """The query of a validated image, text or embedding; `where` names its place in the body."""
    if "image" in request:
        return _file(request["image"], where)
    if "text" in request:
        if len(request["text"]) > limits.max_json:
            what = f"the text{where} has {len(request['text'])} characters"
            raise Refusal(413, what, allowed={"max_characters": limits.max_json})
        return request["text"]
    dimension = limits.dimension
    allowed = {"embedding": f"{dimension} finite numbers, a unit vector"}
    vector = _vector(request["embedding"], where)
    if len(vector) != dimension:
        raise Refusal(422, f"embedding has dimension {len(vector)}", allowed=allowed)
    with np.errstate(over="ignore"):
        norm = float(np.linalg.norm(vector))
    if not abs(norm - 1) <= _UNIT_TOLERANCE:
        raise Refusal(422, f"embedding has length {norm:.6g}", allowed=allowed)
    return Query(embedding_of(torch.from_numpy((vector / norm).astype(np.float32)), request["kappa"]))
