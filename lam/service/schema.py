"""The OpenAPI schema of bodies, answers and keys."""

from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from lam.service import requests
from lam.service.embedder import CONTENT_TYPES
from lam.service.models import JSON, Answer, EnrolResponse
from lam.service.state_models import ErrorResponse

Responses = dict[int | str, dict[str, Any]]
_BINARY = {"type": "string", "format": "binary"}


def responses_of(kind: type[Answer], *statuses: int) -> Responses:
    """OpenAPI responses with these statuses, by default 200."""
    return {status: {"model": kind, "description": kind.__doc__} for status in statuses or (200,)}


ENROLLED = responses_of(EnrolResponse, 200, 201)
THUMBNAIL: Responses = {
    200: {"description": "the thumbnail", "content": {kind: {"schema": _BINARY} for kind in CONTENT_TYPES[:2]}},
    304: {"description": "unchanged: its ETag is in If-None-Match"},
}
SAMPLE: Responses = {**THUMBNAIL, 200: {**THUMBNAIL[200], "description": "the file of an image"}}
METRICS: Responses = {
    200: {"description": "metrics of Prometheus", "content": {"text/plain": {"schema": {"type": "string"}}}}
}
_REFUSED = (400, 401, 403, 404, 405, 408, 409, 413, 415, 421, 422, 500, 503, 507)
REFUSALS = responses_of(ErrorResponse, *_REFUSED)
SECURITY = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "a key with the right in the list, if the service has keys",
    },
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "the same key"},
}
_BODIES = (
    requests.ImageTextOrEmbedding,
    requests.ImageTextOrEmbeddingItem,
    requests.SearchBatchRequest,
    requests.ItemBatchRequest,
    requests.PairRequest,
    requests.PatchRequest,
    requests.FeedbackRequest,
)


def request_schemas() -> dict[str, Any]:
    """Schemas of request bodies and their parts by name; `QUERY`, `ITEM` and `PAIR` refer to them."""
    adapters: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]]
    adapters = [(kind.__name__, "validation", requests.adapter_of(kind)) for kind in _BODIES]
    _, schema = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    return schema["$defs"]


def _request(kind: Any, *, images: tuple[str, ...] = ()) -> dict[str, Any]:
    """OpenAPI of a JSON body of this kind, or of an image body of one of these types."""
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
