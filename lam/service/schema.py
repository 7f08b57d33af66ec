"""Parameters, bodies and responses that several routes use, and their OpenAPI schema."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Query, Request, Response
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from lam.gallery.filters import MAX_FILTER
from lam.gallery.refusal import Refusal
from lam.inputs.decoding import media_type
from lam.service import models, queries, requests
from lam.service.bodies import JsonLimits, content_type
from lam.service.embedder import CONTENT_TYPES
from lam.service.engine import Engine
from lam.service.models import JSON
from lam.service.workers import Worker

Value = TypeVar("Value")
Responses = dict[int | str, dict[str, Any]]
_BINARY = {"type": "string", "format": "binary"}


def responses_of(kind: type[models.Answer], *statuses: int) -> Responses:
    """OpenAPI responses with these statuses, by default 200."""
    return {status: {"model": kind, "description": kind.__doc__} for status in statuses or (200,)}


ENROLLED = responses_of(models.EnrolResponse, 200, 201)
THUMBNAIL: Responses = {
    200: {"description": "the thumbnail", "content": {kind: {"schema": _BINARY} for kind in CONTENT_TYPES[:2]}},
    304: {"description": "unchanged: its ETag is in If-None-Match"},
}
SAMPLE: Responses = {**THUMBNAIL, 200: {**THUMBNAIL[200], "description": "the file of an image"}}
METRICS: Responses = {
    200: {"description": "metrics of Prometheus", "content": {"text/plain": {"schema": {"type": "string"}}}}
}
_REFUSED = (400, 401, 403, 404, 405, 408, 409, 413, 415, 421, 422, 500, 503, 507)
REFUSALS = responses_of(models.ErrorResponse, *_REFUSED)
SECURITY = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "a key with the right in the list, if the service has keys",
    },
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "the same key"},
}
_BODIES = list[Any]()  # kinds of request bodies


def request_schemas() -> dict[str, Any]:
    """Schemas of request bodies and their parts by name; `QUERY`, `ITEM` and `PAIR` refer to them."""
    adapters: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]]
    adapters = [(kind.__name__, "validation", requests.adapter_of(kind)) for kind in _BODIES]
    _, described = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    return described["$defs"]


def _request(kind: Any, *, images: tuple[str, ...] = ()) -> dict[str, Any]:
    """OpenAPI of a JSON body of this kind, or of an image body of one of these types."""
    _BODIES.append(kind)
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    content = {**{image: {"schema": _BINARY} for image in images}, JSON: {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


QUERY = _request(requests.ImageTextOrEmbedding, images=CONTENT_TYPES)
QUERY_BATCH = _request(requests.SearchBatchRequest)
ITEM = _request(requests.ImageTextOrEmbeddingItem, images=CONTENT_TYPES)
ITEM_BATCH = _request(requests.ItemBatchRequest)
PAIR = _request(requests.PairRequest)
PATCH = _request(requests.PatchRequest)
FEEDBACK = _request(requests.FeedbackRequest)


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


def part_answer(result: object) -> Any:
    """The answer to one part of a batch; an error that is not a refusal fails the batch."""
    if isinstance(result, Refusal):
        return models.RefusedPart(status=result.status, error=result.error, allowed=result.allowed)
    if isinstance(result, BaseException):
        raise result
    return result


async def read_json(
    engine: Engine, request: Request, parse: Callable[[bytes, JsonLimits], Value], *workers: Worker[Any, Any]
) -> Value:
    """Parse a JSON body by `parse`. If the reader or a later worker has no room, the body is refused as `busy`."""
    content_type(request.headers, JSON)
    engine.admit(engine.reader, *workers)
    return await engine.do(engine.reader, partial(parse, await request.body(), engine.json_limits))


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
