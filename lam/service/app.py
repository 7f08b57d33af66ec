"""The runs of one service: the application of each run (routes, schema, page, errors), and the replacement of runs.

`lam.service.limits` checks requests first. Names and ranges of parameters come from the OpenAPI schema, so the service
allows exactly the published parameters.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from ctypes import CDLL
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from lam import __version__
from lam.gallery.item import ID_RULE
from lam.gallery.refusal import Refusal
from lam.service import schema
from lam.service.engine import Engine
from lam.service.keys import GUARDED, OPEN_PATHS, right_for
from lam.service.metrics import Metrics
from lam.service.routes.items import add_items
from lam.service.routes.searches import add_searches
from lam.service.routes.state import add_state
from lam.service.tracing import request_id

PAGE = Path(__file__).parent / "page"
PREFIX = "/runs/"
FAILED = Refusal(500, "the service failed at this request; its log says why")
_LOOK = 0.05  # seconds between checks whether a replaced run has answered its last request
_PATIENCE = 30.0  # seconds for which a reload waits for the last answers of the replaced run
_LOG = logging.getLogger(__name__)
_SHOWN = 80


@dataclass(eq=False)
class Site:
    """A run that is served.

    Attributes:
        max_json: greatest number of bytes of a JSON body.
        count: called for every answer with its route, method, status and seconds.
        describe: builds the schema of the run's routes, in a tenth of a second.
        requests: number of requests that are being answered.
    """

    name: str
    app: ASGIApp
    max_json: int
    count: Callable[[str, str, int, float], None]
    close: Callable[[], object] = bool
    describe: Callable[[], object] = bool
    requests: int = 0


class Sites:
    """Sites by name, under `/runs/NAME/`; the first also answers at the root."""

    def __init__(self, sites: Iterable[Site]) -> None:
        self._sites = {site.name: site for site in sites}
        self._going: dict[Site, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    @property
    def first(self) -> Site:
        """The site at the root."""
        return next(iter(self._sites.values()))

    def find(self, path: str) -> tuple[Site | None, str]:
        """The site of a path, and the path below it; None for an unknown name."""
        if not path.startswith(PREFIX):
            return self.first, path
        name, slash, rest = path.removeprefix(PREFIX).partition("/")
        return (self._sites.get(name) if slash else None), f"/{rest}"

    def exchange(self, new: Site) -> None:
        """Send new requests to `new`, and close the old site of this name once its requests are answered."""
        old, self._sites[new.name] = self._sites[new.name], new
        self._going[old] = asyncio.create_task(self._retire(old))

    async def wait_until_closed(self, name: str, seconds: float) -> None:
        """Wait until the replaced sites of this name are closed, for at most `seconds`."""
        if going := [task for site, task in self._going.items() if site.name == name]:
            await asyncio.wait(going, timeout=seconds)

    async def _retire(self, old: Site) -> None:
        while old.requests:
            await asyncio.sleep(_LOOK)
        await asyncio.to_thread(old.close)
        del self._going[old]

    def close(self) -> None:
        """Release all runs."""
        for site in (*self._sites.values(), *self._going):
            site.close()


class ServedRuns:
    """Opened runs by name; the first is also served at the root.

    A folder may be a symbolic link. If the path leads to another run now, a reload opens the new run with its own
    gallery, sends new requests to the new run, and closes the old run after its last answer.
    """

    def __init__(self, folders: Mapping[str, Path], open_run: Callable[[Path], Engine]) -> None:
        self._folders, self._open = dict(folders), open_run
        self._reloading = asyncio.Lock()
        self.engines: dict[str, Engine] = {}
        try:
            for name, folder in self._folders.items():
                self.engines[name] = open_run(_leads_to(folder))
            self.sites = Sites([self._site(name, engine) for name, engine in self.engines.items()])
        except BaseException:
            for engine in self.engines.values():
                engine.close()
            raise

    async def reload(self, name: str) -> Engine:
        """The engine of the run to which the folder now leads; for the same run, only the calibration is read again.

        If reading fails, a `ValueError` or an `OSError` says why, and the old run or calibration stays.
        """
        async with self._reloading:
            engine, folder = self.engines[name], _leads_to(self._folders[name])
            if folder == engine.run.folder and engine.run.is_in_place:
                await asyncio.to_thread(engine.recalibrate)
                return engine
            await self.sites.wait_until_closed(name, _PATIENCE)  # a run that still closes may be in this folder
            new = await asyncio.to_thread(self._open, folder)
            self.sites.exchange(await asyncio.to_thread(self._site, name, new))
            self.engines[name] = new
            return new

    async def reload_all(self) -> None:
        """Reload all runs; a failure is logged."""
        for name in self._folders:
            try:
                engine = await self.reload(name)
            except Exception as error:  # nobody waits for an answer, so an error that is not logged is lost
                expected = isinstance(error, OSError | ValueError)
                _LOG.error("%s stays as it was: %s", name, error, exc_info=None if expected else error)
            else:
                _LOG.warning("%s was read anew: %s", name, engine.run.folder)

    def _site(self, name: str, engine: Engine) -> Site:
        root = "" if name == next(iter(self._folders)) else f"{PREFIX}{quote(name)}"
        site = site_of(engine, partial(self.reload, name), name=name, root=root)
        site.describe()  # built now: the first request with a parameter would delay all others
        return site


def _leads_to(folder: Path) -> Path:
    """The folder behind links. A link to itself is returned unchanged, where `Path.resolve` may raise."""
    return Path(os.path.realpath(folder))


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The schema, with the bodies that routes parse themselves, and the right that each operation needs."""
        if self.openapi_schema is None:
            described = super().openapi()
            described["components"]["schemas"] |= schema.request_schemas()
            described["components"]["securitySchemes"] = schema.SECURITY
            for path, operations in described["paths"].items():
                is_guarded = path.startswith(GUARDED) and path not in OPEN_PATHS
                for method, operation in operations.items():
                    right = right_for(method.upper(), path)
                    operation["security"] = [{}, *({name: [right]} for name in schema.SECURITY)] if is_guarded else []
        return super().openapi()


def site_of(engine: Engine, reload: Callable[[], Awaitable[Engine]], *, name: str, root: str = "") -> Site:
    """The routes of an engine, below the path `root`; `reload` reads the run anew, and returns the present engine."""
    metrics = Metrics(engine)
    app = _App(
        title="lam",
        version=__version__,
        servers=[{"url": root or "/"}],
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        responses=schema.REFUSALS,
        dependencies=[Depends(_refuse_unknown_parameters)],
        # FastAPI's own spans hold ids, labels and filters; older versions open none, and ignore this
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    _answer_errors(app, pages=frozenset({"/", *(f"/{file.name}" for file in PAGE.iterdir())}))
    add_searches(app, engine, metrics)
    add_items(app, engine)
    add_state(app, engine, metrics, reload)
    app.router.default = StaticFiles(directory=PAGE, html=True)  # a mount would hide the methods of routes

    def close() -> None:
        if vars(engine):
            engine.close()
        vars(engine).clear()  # FastAPI caches endpoints of the last hundred applications; they refer to the engine
        with suppress(AttributeError):
            CDLL(None).malloc_trim(0)  # glibc keeps the freed memory of threads that have ended

    return Site(name, app, engine.json_limits.max_json, metrics.count_request, close, app.openapi)


async def _refuse_unknown_parameters(request: Request) -> None:
    """Raise a Refusal of 422 for query parameters that are unknown, repeated or not UTF-8."""
    try:
        unquote_to_bytes(request.scope["query_string"]).decode()
    except UnicodeDecodeError:
        raise Refusal(422, "the query parameters are not valid UTF-8", allowed="percent-encoded UTF-8") from None
    names = [name for name, _ in request.query_params.multi_items()]
    known = _parameters(request, "query") if names else {}
    for name in names:
        if name not in known:
            allowed = list(known) or "no query parameter"
            raise Refusal(422, f"there is no query parameter {name[:_SHOWN]!r} here", allowed=allowed)
        if names.count(name) > 1:
            raise Refusal(422, f"the query parameter {name!r} is given more than once", allowed="once")


def answer_to(refusal: Refusal) -> JSONResponse:
    """The answer to a refused request."""
    body = {"error": refusal.error, "allowed": refusal.allowed, "request_id": request_id()}
    return JSONResponse(body, refusal.status, headers=refusal.headers)


def _answer_errors(app: FastAPI, *, pages: frozenset[str]) -> None:
    """Answer every error of an application in JSON; `pages` are the paths of its static files."""

    @app.exception_handler(Refusal)
    async def _refused(_: Request, error: Refusal) -> JSONResponse:
        return answer_to(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        name = first["loc"][-1]
        what = f"{name}: {first['msg']}, got {str(first['input'])[:_SHOWN]!r}"
        return answer_to(Refusal(422, what, allowed=_parameters(request, "query", "path")[name]))

    @app.exception_handler(Exception)
    async def _failed(_: Request, error: Exception) -> JSONResponse:
        return answer_to(FAILED)

    @app.exception_handler(HTTPException)
    async def _other(request: Request, error: HTTPException) -> JSONResponse:
        routes = [route for route in app.routes if isinstance(route, Route) and route.matches(request.scope)[0].value]
        methods = sorted({method for route in routes for method in route.methods or ()})
        methods = methods or (["GET", "HEAD"] if request.url.path in pages else [])
        if error.status_code == 405 and methods:
            allowed = ", ".join(methods)
            what = f"this path does not have the method {request.method[:_SHOWN]!r}"
            return answer_to(Refusal(405, what, allowed=allowed, headers={"Allow": allowed}))
        if error.status_code in (404, 405):
            allowed = "the paths of /openapi.json"
            is_item = request.url.path.startswith("/v1/items/")
            more = {"paths": allowed, "an id": ID_RULE} if is_item else allowed
            return answer_to(Refusal(404, "there is no such path", allowed=more))
        return answer_to(Refusal(error.status_code, str(error.detail).lower()))


def _parameters(request: Request, *places: str) -> dict[str, dict[str, Any]]:
    """The schema of each parameter of a request's route, by name; `places` are "query" and "path"."""
    operations = request.app.openapi()["paths"][request.scope["route"].path_format]
    operation = operations["get" if request.method == "HEAD" else request.method.lower()]
    parameters = operation.get("parameters", ())
    return {each["name"]: each["schema"] for each in parameters if each["in"] in places}
