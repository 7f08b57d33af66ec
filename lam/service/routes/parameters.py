"""Parameters and responses that several routes use."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Query, Request, Response

from lam.gallery.filters import MAX_FILTER
from lam.gallery.refusal import Refusal
from lam.inputs.thumbnails import media_type
from lam.service import models, queries
from lam.service.bodies import JsonLimits, content_type
from lam.service.engine import Engine
from lam.service.errors import ServiceError
from lam.service.models import JSON
from lam.service.workers import Worker

Value = TypeVar("Value")

Where = Annotated[
    str | None,
    Query(
        max_length=MAX_FILTER,
        description="only items that pass this filter: JSON with must, should and must_not, such as "
        '`{"must": [{"key": "city", "match": {"value": "Rome"}}]}`; see docs/reference/http.md',
    ),
]

WithVector = Annotated[bool, Query(description="whether to return the vectors of items")]


def json_response(answer: models.Answer, status: int = 200) -> Response:
    """An answer as a response."""
    return Response(answer.to_json(), status, media_type=JSON)


def json_limits_of(engine: Engine) -> JsonLimits:
    """The limits of JSON bodies."""
    settings, dimension = engine.settings, engine.gallery.dimension
    max_json = settings.max_json + 32 * dimension  # 32 characters for each number
    return JsonLimits(dimension, max_json, settings.max_batch, settings.max_batch_json)


def part_answer(result: object) -> Any:
    """The answer to one part of a batch; an error that is no refusal fails the batch."""
    if isinstance(result, ServiceError | Refusal):
        error = ServiceError.of(result)
        return models.RefusedPart(status=error.status, error=error.error, allowed=error.allowed)
    if isinstance(result, BaseException):
        raise result
    return result


async def read_json(
    engine: Engine, request: Request, parse: Callable[[bytes, JsonLimits], Value], *workers: Worker[Any, Any]
) -> Value:
    """Parse a JSON body by `parse`. If the reader or a later worker has no room, the body is refused as `busy`."""
    content_type(request.headers, JSON)
    engine.admit(engine.reader, *workers)
    return await engine.do(engine.reader, partial(parse, await request.body(), json_limits_of(engine)))


async def part_of(engine: Engine, filter: str | None) -> queries.Part | None:
    """The part of the gallery that passes a filter; None without a filter."""
    if filter is None:
        return None
    engine.admit(engine.filterer)
    return await engine.do(engine.filterer, filter)


def picture(request: Request, image: bytes) -> Response:
    """An image, or 304 if the client already has it."""
    tag = f'"{hashlib.sha256(image).hexdigest()[:32]}"'
    known = {each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")}
    if known & {tag, "*"}:
        return Response(status_code=304, headers={"ETag": tag})
    return Response(image, media_type=media_type(image), headers={"ETag": tag})
