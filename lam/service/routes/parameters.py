"""What the routes share: parameters and responses."""

import hashlib
from typing import Annotated

from fastapi import Query, Request, Response

from lam.gallery.filters import MAX_FILTER
from lam.inputs.thumbnails import media_type
from lam.service import answers, models
from lam.service.engine import Engine
from lam.service.models import JSON

Where = Annotated[
    str | None,
    Query(
        max_length=MAX_FILTER,
        description="only items that pass this filter: JSON with must, should and must_not, as docs/reference/http.md "
        'says, such as `{"must": [{"key": "city", "match": {"value": "Rome"}}]}`',
    ),
]


def json_response(answer: models.Answer, status: int = 200) -> Response:
    """The response that holds an answer."""
    return Response(answer.to_json(), status, media_type=JSON)


def max_json_of(engine: Engine) -> int:
    """The most bytes of a JSON body, which may be an embedding."""
    return engine.settings.max_json + 32 * engine.gallery.dimension  # 32 characters for each number


async def part_of(engine: Engine, filter: str | None) -> answers.Part | None:
    """The part of the gallery that a filter leaves; None without a filter."""
    if filter is None:
        return None
    engine.admit(engine.filterer)
    return await engine.part(filter)


def picture(request: Request, image: bytes) -> Response:
    """An image, or 304 if the client already has it."""
    tag = f'"{hashlib.sha256(image).hexdigest()[:32]}"'
    known = {each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")}
    if known & {tag, "*"}:
        return Response(status_code=304, headers={"ETag": tag})
    return Response(image, media_type=media_type(image), headers={"ETag": tag})
