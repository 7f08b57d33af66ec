"""Requests to the application, without a server."""

import asyncio
import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from lam.service.app import Sites, site_of
from lam.service.engine import Engine
from lam.service.keys import Keys
from lam.service.limits import Limits
from lam.service.settings import ServiceSettings

HOST = "http://127.0.0.1"
PNG = {"content-type": "image/png"}
JSON = {"content-type": "application/json"}


def create_app(engine: Engine, *, keys: Keys | None = None, log: Any = None) -> Limits:
    """The application of one run; its reload reads only the calibration."""

    async def reload() -> Engine:
        await asyncio.to_thread(engine.recalibrate)
        return engine

    site = site_of(engine, reload, name=engine.run.folder.name)
    return Limits(Sites([site]), engine.settings, keys=keys, log=log)


def client_of(engine: Engine, *, key: str | None = None, keys: Keys | None = None, log: Any = None) -> TestClient:
    keys = keys if key is None else Keys({key: "admin"})
    return TestClient(create_app(engine, keys=keys, log=log), base_url=HOST, raise_server_exceptions=False)


@contextlib.contextmanager
def opened(run: Path, settings: ServiceSettings | None = None, **options: Any) -> Iterator[tuple[TestClient, Engine]]:
    """A client of a run, and its engine, until the end of the block."""
    with contextlib.closing(Engine(run, settings, **options)) as engine:
        yield client_of(engine), engine


def embedding(dimension: int, axis: int = 0, kappa: float = 50.0, **fields: Any) -> dict[str, Any]:
    return {"embedding": [float(row == axis) for row in range(dimension)], "kappa": kappa, **fields}


def base64_of(numbers: Any, kind: str = "<f4") -> str:
    """Numbers in base64, by default as 32-bit floats."""
    return base64.b64encode(np.array(numbers, kind).tobytes()).decode()


def refused(response: Any, status: int) -> str:
    """The error message of a refusal, after a check of its form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    found = response.json()
    assert set(found) == {"error", "allowed", "request_id"}
    assert found["request_id"] == response.headers["x-request-id"]
    assert "Traceback" not in response.text
    assert "site-packages" not in response.text
    return found["error"]


def alike(found: Any, wanted: Any) -> bool:
    """Whether two answers are equal up to rounding.

    The network sums batches of float32 in another order, and so does Milvus; a probability may amplify the difference.
    """
    if isinstance(wanted, dict):
        names = wanted.keys() - {"answer_id", "promise"}  # different in each answer
        return found.keys() == wanted.keys() and all(alike(found[name], wanted[name]) for name in names)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(alike, found, wanted))
    return found == (pytest.approx(wanted, rel=1e-2, abs=1e-5) if isinstance(wanted, float) else wanted)
