"""The application of a run: its routes, their schema, and the page; `lam.service.limits` checks requests first."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from lam import __version__
from lam.service import schema
from lam.service.engine import Engine
from lam.service.keys import GUARDED, OPEN_PATHS, right_for
from lam.service.metrics import Metrics
from lam.service.refusals import answer_errors, refuse_unknown_parameters
from lam.service.routes.items import add_items
from lam.service.routes.parameters import json_limits_of
from lam.service.routes.searches import add_searches
from lam.service.routes.state import add_state

PAGE = Path(__file__).parent / "page"
Count = Callable[[str, str, int, float], None]


@dataclass(eq=False)
class Site:
    """A run that is served.

    Attributes:
        max_json: greatest number of bytes of a JSON body.
        count: called for every answer with its route, method, status and seconds.
        describe: builds the schema of its routes, which takes a tenth of a second.
        requests: number of requests that are being answered.
    """

    name: str
    app: ASGIApp
    max_json: int
    count: Count
    close: Callable[[], object] = bool
    describe: Callable[[], object] = bool
    requests: int = 0


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
        dependencies=[Depends(refuse_unknown_parameters)],
        # FastAPI's own spans hold ids, labels and filters; older versions open none, and ignore this
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    answer_errors(app, pages=frozenset({"/", *(f"/{file.name}" for file in PAGE.iterdir())}))
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

    return Site(name, app, json_limits_of(engine).max_json, metrics.count_request, close, app.openapi)
