"""Errors outside the routes: unknown or invalid parameters, paths and methods.

Names and ranges of parameters come from the OpenAPI schema, so the service allows exactly the published ones.
"""

from typing import Any
from urllib.parse import unquote_to_bytes

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Route

from lam.gallery.item import ID_RULE
from lam.gallery.refusal import Refusal
from lam.service.errors import FAILED, ServiceError

_SHOWN = 80


async def refuse_unknown_parameters(request: Request) -> None:
    """Raise a ServiceError of 422 for query parameters that are unknown, repeated or not UTF-8."""
    try:
        unquote_to_bytes(request.scope["query_string"]).decode()
    except UnicodeDecodeError:
        raise ServiceError(422, "the query parameters are not valid UTF-8", allowed="percent-encoded UTF-8") from None
    names = [name for name, _ in request.query_params.multi_items()]
    known = _parameters(request, "query") if names else {}
    for name in names:
        if name not in known:
            allowed = list(known) or "no query parameter"
            raise ServiceError(422, f"there is no query parameter {name[:_SHOWN]!r} here", allowed=allowed)
        if names.count(name) > 1:
            raise ServiceError(422, f"the query parameter {name!r} is given more than once", allowed="once")


def answer_errors(app: FastAPI, *, pages: frozenset[str]) -> None:
    """Answer every error of an application in JSON; `pages` are the paths of its static files."""

    @app.exception_handler(ServiceError)
    @app.exception_handler(Refusal)
    async def _refused(_: Request, error: ServiceError | Refusal) -> JSONResponse:
        return _answer(ServiceError.of(error))

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        name = first["loc"][-1]
        what = f"{name}: {first['msg']}, got {str(first['input'])[:_SHOWN]!r}"
        return _answer(ServiceError(422, what, allowed=_parameters(request, "query", "path")[name]))

    @app.exception_handler(Exception)
    async def _failed(_: Request, error: Exception) -> JSONResponse:
        return _answer(FAILED)

    @app.exception_handler(HTTPException)
    async def _other(request: Request, error: HTTPException) -> JSONResponse:
        methods = _methods(app, request, pages)
        if error.status_code == 405 and methods:
            allowed = ", ".join(methods)
            what = f"this path does not have the method {request.method[:_SHOWN]!r}"
            return _answer(ServiceError(405, what, allowed=allowed, headers={"Allow": allowed}))
        if error.status_code in (404, 405):
            return _answer(ServiceError(404, "there is no such path", allowed=_paths_like(request.url.path)))
        return _answer(ServiceError(error.status_code, str(error.detail).lower()))


def _answer(error: ServiceError) -> JSONResponse:
    return JSONResponse(error.to_json(), error.status, headers=error.headers)


def _parameters(request: Request, *places: str) -> dict[str, dict[str, Any]]:
    """The schema of each parameter of a request's route, by name; `places` are "query" and "path"."""
    operations = request.app.openapi()["paths"][request.scope["route"].path_format]
    operation = operations["get" if request.method == "HEAD" else request.method.lower()]
    parameters = operation.get("parameters", ())
    return {each["name"]: each["schema"] for each in parameters if each["in"] in places}


def _methods(app: FastAPI, request: Request, pages: frozenset[str]) -> list[str]:
    routes = [route for route in app.routes if isinstance(route, Route) and route.matches(request.scope)[0].value]
    methods = {method for route in routes for method in route.methods or ()}
    return sorted(methods) or (["GET", "HEAD"] if request.url.path in pages else [])


def _paths_like(path: str) -> Any:
    if path.startswith("/v1/items/"):
        return {"paths": "the paths of /openapi.json", "an id": ID_RULE}
    return "the paths of /openapi.json"
