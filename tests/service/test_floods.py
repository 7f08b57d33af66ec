"""Image searches during floods of cheap requests, and of requests that clients repeat at once after a refusal."""

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.service.serving import Served, served

pytestmark = pytest.mark.slow
SECONDS = 4.0
_FLOOD = """
import socket, sys, threading
port, keeps = int(sys.argv[1]), sys.argv[2] == "kept"
close = "" if keeps else "Connection: close\\r\\n"
request = f"GET {sys.argv[3]} HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n{close}\\r\\n".encode()
def flood():
    while True:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(request)
            while connection.recv(65536) and keeps:
                connection.sendall(request)
for _ in range(8):
    threading.Thread(target=flood).start()
"""


@pytest.fixture(scope="module")
def found(calibrated_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    run = Path(shutil.copytree(calibrated_run, tmp_path_factory.mktemp("flooded") / "run"))
    with served(run, "lam", "serve") as process:
        yield process


def searches(found: Served, png: bytes) -> Counter[int]:
    """The statuses of one client's searches, each sent at once after the answer to the one before."""
    statuses, until = Counter[int](), time.monotonic() + SECONDS
    while time.monotonic() < until:
        statuses[found.ask("POST", "/v1/search", png)[0]] += 1
    return statuses


@pytest.mark.parametrize(("way", "path"), [("kept", "/v1/health"), ("kept", "/app.js"), ("new", "/v1/health")])
def test_a_flood_of_cheap_requests_leaves_searches_a_quarter_of_their_rate(
    found: Served, png: bytes, way: str, path: str, record_property: Callable[[str, object], None]
) -> None:
    quiet = searches(found, png)[200]
    flood = subprocess.Popen(
        [sys.executable, "-c", _FLOOD, str(found.port), way, path], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(0.5)
        flooded = searches(found, png)[200]
    finally:
        flood.kill()
        flood.wait()
    rates = {"quiet_per_second": quiet / SECONDS, "flooded_per_second": flooded / SECONDS}
    record_property(f"{path}, connections {way}", json.dumps(rates))
    assert flooded >= quiet / 4


def test_clients_that_retry_at_once_are_served_as_fast_as_one(
    found: Served, png: bytes, record_property: Callable[[str, object], None]
) -> None:
    alone = searches(found, png)[200]
    with ThreadPoolExecutor(64) as pool:
        statuses = sum(pool.map(lambda _: searches(found, png), range(64)), Counter[int]())
    rates = {"alone_per_second": alone / SECONDS, "together_per_second": statuses[200] / SECONDS}
    record_property("64 clients", json.dumps({**rates, "refused_per_second": statuses[503] / SECONDS}))
    assert statuses[200] >= alone / 2
    assert statuses.keys() <= {200, 503}
