"""What a request's JSON may hold. Numbers are checked before torch; what reading costs is bounded before it is read."""

import base64
import binascii
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lam.gallery.item import ID_RULE, MAX_LABEL, MAX_METADATA, checked_metadata
from lam.service.answers import Query
from lam.service.engine import embedding_of
from lam.service.errors import ServiceError

JSON = "application/json"
_UNIT_TOLERANCE = 1e-3
_MAX_KAPPA = 1e30
_SHOWN = 80
_PART = 2**18
_QUOTES = 100  # which two images in JSON are far from having

EMBEDDING_SCHEMA = {
    "type": "object",
    "required": ["embedding", "kappa"],
    "properties": {
        "embedding": {"type": "array", "items": {"type": "number"}, "description": "a unit vector"},
        "kappa": {"type": "number", "minimum": 0, "maximum": _MAX_KAPPA, "description": "its concentration"},
    },
    "additionalProperties": False,
}
ITEM_SCHEMA = {
    **EMBEDDING_SCHEMA,
    "properties": {
        **EMBEDDING_SCHEMA["properties"],
        "id": {"type": "string", "description": f"{ID_RULE}; the same as beside the body, where it is there too"},
        "label": {"type": "string", "maxLength": MAX_LABEL, "description": "what it shows; likewise"},
        "metadata": {"type": "object", "description": f"at most {MAX_METADATA} characters of JSON"},
    },
}
IMAGE_SCHEMA = {"type": "string", "format": "binary"}
_ENCODED_SCHEMA = {
    "type": "object",
    "required": ["image"],
    "properties": {"image": {"type": "string", "format": "byte", "description": "base64"}},
    "additionalProperties": False,
}
PAIR_SCHEMA = {
    "type": "object",
    "required": ["first", "second"],
    "properties": {name: {"anyOf": [EMBEDDING_SCHEMA, _ENCODED_SCHEMA]} for name in ("first", "second")},
    "additionalProperties": False,
}


def content_type(headers: Mapping[str, str], *allowed: str) -> str:
    """Give the content type of a request, without parameters.

    Raises:
        ServiceError: 415, for another, or a body that is compressed.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        what = f"the body is encoded, as {encoding[:_SHOWN]!r}"
        raise ServiceError(415, what, allowed="identity", headers={"Accept-Encoding": "identity"})
    if kind == "multipart/form-data":
        what = "the content type is that of a form, as curl -F sends it: send the file itself, under its own type"
        raise ServiceError(
            415, what, allowed={"types": list(allowed), "curl": "--data-binary @FILE -H 'Content-Type: TYPE'"}
        )
    if kind not in allowed:
        raise ServiceError(415, "the content type is missing or not an allowed one", allowed=list(allowed))
    return kind


def query_of(body: bytes, dimension: int) -> Query:
    """Make a query of a body in JSON.

    Raises:
        ServiceError: for what is no embedding.
    """
    return _embedded(_parsed(body, EMBEDDING_SCHEMA), dimension)


def pair_of(body: bytes, dimension: int, max_json: int) -> list[Query | bytes]:
    """Make queries of the two parts of a body in JSON; of an image in base64, its file.

    Args:
        body: what came.
        dimension: of the embeddings.
        max_json: bytes that it may have beside its texts.

    Raises:
        ServiceError: for what is neither.
    """
    if len(body) > max_json:
        _refuse_costly(body, max_json)
    given = _parsed(body, PAIR_SCHEMA)
    return [_one_of(given.get(name), name, dimension) for name in ("first", "second")]


@dataclass(frozen=True)
class Given:
    """An item in JSON.

    Attributes:
        query: its embedding.
        said: the `id` and the `label`, where they are there.
        metadata: as it is stored.
    """

    query: Query
    said: dict[str, str]
    metadata: str


def item_of(body: bytes, dimension: int) -> Given:
    """Make an item of a body in JSON.

    Raises:
        ServiceError: for what is none.
    """
    given = _parsed(body, ITEM_SCHEMA)
    said = {name: given[name] for name in ("id", "label") if name in given}
    for name, text in said.items():
        if not isinstance(text, str):
            raise ServiceError(422, f"{name} must be text", allowed="a JSON string")
    metadata = checked_metadata(given.get("metadata", {}))
    return Given(_embedded(given, dimension), said, metadata)


def _parsed(body: bytes, schema: dict[str, Any]) -> dict[str, Any]:
    """The object that JSON holds; of the schema, the names alone are looked at."""
    try:
        found = json.loads(body.decode())  # else JSON would be tried as UTF-16 too
    except (ValueError, RecursionError):
        raise ServiceError(400, "the body is no valid JSON", allowed=JSON) from None
    if not isinstance(found, dict):
        raise ServiceError(422, "the body must be a JSON object", allowed="an object")
    _refuse_unknown(found, schema, "the body")
    return found


def _refuse_costly(body: bytes, most: int) -> None:
    """Refuse a body that has more beside a few plain texts: lists and numbers cost a hundred times what they weigh."""
    plain = body.replace(b"\\/", b"/") if b"\\" in body else body  # as some write the slashes of base64
    beside = sum(map(len, plain.split(b'"', _QUOTES)[::2]))
    if b"\\" in plain or beside > most:
        raise ServiceError(
            413, f"the body is larger than {most} bytes beside its images", allowed={"max_bytes": most, "and": "base64"}
        )


def _one_of(given: Any, name: str, dimension: int) -> Query | bytes:
    if not isinstance(given, dict):
        raise ServiceError(422, f"{name} must be an object", allowed={"image": "base64", "or": "embedding and kappa"})
    _refuse_unknown(given, _ENCODED_SCHEMA if "image" in given else EMBEDDING_SCHEMA, name)
    if "image" not in given:
        return _embedded(given, dimension)
    try:
        return _file(given["image"])
    except (binascii.Error, TypeError, ValueError):
        raise ServiceError(422, f"the image of {name} is no base64", allowed="base64 of a file") from None


def _file(text: str) -> bytes:
    """What base64 says, in parts, between which other threads have their turn."""
    return b"".join(base64.b64decode(text[at : at + _PART], validate=True) for at in range(0, len(text), _PART))


def _embedded(given: dict[str, Any], dimension: int) -> Query:
    allowed = {"embedding": f"{dimension} finite numbers, a unit vector", "kappa": f"a number from 0 to {_MAX_KAPPA:g}"}
    numbers: Any = given.get("embedding")
    kappa: Any = given.get("kappa")
    if not isinstance(numbers, list) or not all(map(_is_number, numbers)):
        raise ServiceError(422, "embedding must be a list of finite numbers", allowed=allowed)
    if len(numbers) != dimension:
        raise ServiceError(422, f"embedding has dimension {len(numbers)}", allowed=allowed)
    if not _is_number(kappa) or not 0 <= kappa <= _MAX_KAPPA:
        raise ServiceError(422, f"kappa must be a number from 0 to {_MAX_KAPPA:g}", allowed=allowed)
    vector = np.array(numbers, np.float64)
    with np.errstate(over="ignore"):
        norm = float(np.linalg.norm(vector))
    if not abs(norm - 1) <= _UNIT_TOLERANCE:
        raise ServiceError(422, f"embedding has length {norm:.6g}", allowed=allowed)
    return Query(embedding_of(torch.from_numpy((vector / norm).astype(np.float32)), float(kappa)))


def _refuse_unknown(given: dict[str, Any], schema: dict[str, Any], where: str) -> None:
    known = schema["properties"]
    for name in given:
        if name not in known:
            shown = name[:_SHOWN].encode(errors="replace").decode()  # JSON may hold halves of characters
            raise ServiceError(422, f"{where} has no {shown!r}", allowed=list(known))


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
