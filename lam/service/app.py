"""The application: it joins the routes, the schema and the page; `lam.service.limits` checks every request first."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI
from starlette.staticfiles import StaticFiles

from lam import __version__
from lam.service import models
from lam.service.engine import Engine
from lam.service.keys import Keys, right_for
from lam.service.limits import GUARDED, OPEN_PATHS, Limits
from lam.service.metrics import Metrics
from lam.service.refusals import answer_errors, refuse_unknown_parameters
from lam.service.request_log import RequestLog
from lam.service.routes.admin import add_admin
from lam.service.routes.feedback import add_feedback
from lam.service.routes.items import add_items
from lam.service.routes.parameters import json_limits_of
from lam.service.routes.searches import add_searches
from lam.service.routes.state import add_state

PAGE = Path(__file__).parent / "page"


class _App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The schema, with bodies that routes read themselves, and with the right of each operation."""
        if self.openapi_schema is None:
            schema = super().openapi()
            schema["components"]["schemas"] |= models.request_schemas()
            schema["components"]["securitySchemes"] = models.SECURITY
            for path, operations in schema["paths"].items():
                is_guarded = path.startswith(GUARDED) and path not in OPEN_PATHS
                for method, operation in operations.items():
                    right = right_for(method.upper(), path)
                    operation["security"] = [{}, *({name: [right]} for name in models.SECURITY)] if is_guarded else []
        return super().openapi()


def create_app(engine: Engine, *, keys: Keys | None = None, log: RequestLog | None = None) -> Limits:
    """The application of an engine; it closes the engine when the server shuts down.

    Args:
        engine: an opened run.
        keys, log: see `lam.service.limits.Limits`.
    """
    metrics = Metrics(engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.openapi()  # slow; cached here for later
        yield
        await asyncio.to_thread(engine.close)

    app = _App(
        title="lam",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        responses=models.REFUSALS,
        dependencies=[Depends(refuse_unknown_parameters)],
    )
    answer_errors(app, pages=frozenset({"/", *(f"/{file.name}" for file in PAGE.iterdir())}))
    add_searches(app, engine, metrics)
    add_items(app, engine)
    add_feedback(app, engine)
    add_state(app, engine, metrics)
    add_admin(app, engine)
    app.router.default = StaticFiles(directory=PAGE, html=True)  # a mount would hide the methods of routes
    max_json = json_limits_of(engine).max_json
    return Limits(app, engine.settings, keys=keys, max_json=max_json, count=metrics.count_request, log=log)
