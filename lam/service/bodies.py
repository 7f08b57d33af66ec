"""What a request's body may hold: an image under its own content type, or JSON. Numbers are checked before torch."""

import base64
import binascii
import json
import math
from typing import Any

import numpy as np
import torch

from lam.enrolment import ID_RULE, MAX_LABEL, MAX_METADATA
from lam.service.engine import Engine, Query, embedding_of
from lam.service.errors import ServiceError
from lam.service.images import CONTENT_TYPES

JSON = "application/json"
_UNIT_TOLERANCE = 1e-3
_MAX_KAPPA = 1e30
_SHOWN = 80

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


def content_type(given: str | None, *allowed: str) -> str:
    """Give the content type of a request, without parameters.

    Raises:
        ServiceError: 415, for another.
    """
    kind = (given or "").partition(";")[0].strip().lower()
    if kind not in allowed:
        raise ServiceError(415, "the content type is missing or not an allowed one", allowed=list(allowed))
    return kind


def parsed(body: bytes, schema: dict[str, Any]) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        body: what came.
        schema: of the object, for the names that it may have; values are not looked at.

    Raises:
        ServiceError: 400 for what is no JSON, 422 for another value than an object, or a name that it cannot have.
    """
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise ServiceError(400, "the body is no valid JSON", allowed=JSON) from None
    if not isinstance(found, dict):
        raise ServiceError(422, "the body must be a JSON object", allowed="an object")
    _refuse_unknown(found, schema, "the body")
    return found


async def query_of(engine: Engine, kind: str, body: bytes) -> Query:
    """Make a query of a body: an image, or an embedding in JSON.

    Raises:
        ServiceError: for what is neither.
    """
    if kind in CONTENT_TYPES:
        return await engine.embed(body)
    return embedded(engine, parsed(body, EMBEDDING_SCHEMA))


async def one_of(engine: Engine, given: Any, name: str) -> Query:
    """Make a query of a part of a JSON body: an embedding, or an image in base64.

    Raises:
        ServiceError: for what is neither.
    """
    if not isinstance(given, dict):
        raise ServiceError(422, f"{name} must be an object", allowed={"image": "base64", "or": "embedding and kappa"})
    _refuse_unknown(given, _ENCODED_SCHEMA if "image" in given else EMBEDDING_SCHEMA, name)
    if "image" not in given:
        return embedded(engine, given)
    try:
        body = base64.b64decode(given["image"], validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise ServiceError(422, f"the image of {name} is no base64", allowed="base64 of a file") from None
    return await engine.embed(body)


def embedded(engine: Engine, given: dict[str, Any]) -> Query:
    """Make a query of an embedding.

    Raises:
        ServiceError: 422, for another dimension, numbers that are not finite, no unit vector, or no κ.
    """
    dimension = engine.gallery.dimension
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
