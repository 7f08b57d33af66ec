"""A process that serves a run under limits that a test can wait for, and requests to it."""

import contextlib
import http.client
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PNG = {"Content-Type": "image/png"}


@dataclass
class Served:
    """A process that serves a run."""

    process: "subprocess.Popen[str]"
    port: int
    seconds: float = math.inf  # until it was ready

    def ask(self, method: str, path: str, body: bytes | None = None, headers: Any = PNG) -> tuple[int, dict[str, Any]]:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def memory(self) -> int:
        """Bytes that it holds."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


@contextlib.contextmanager
def started(*module: str, run: Path, **environment: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Start a module that serves a run, and kill it at the end of the block; gives the process and its address.

    Args:
        module: its name and what stands before the folder.
        run: the folder.
        environment: beside that of the tests.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", *module, str(run), "--port", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = process.stdout.readline()
        assert " items at http://127.0.0.1:" in line, process.stderr.read()
        yield process, line.split(" at ")[1].split(",")[0]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@contextlib.contextmanager
def served(run: Path, **environment: str) -> Iterator[Served]:
    """Serve a run under short limits, once it is ready; otherwise as `started`."""
    begun = time.monotonic()
    with started("tests.service.serve_quickly", run=run, **environment) as (process, address):
        found = Served(process, int(address.rpartition(":")[2]))
        until = time.monotonic() + 20
        while found.ask("GET", "/v1/ready")[0] != 200 and time.monotonic() < until:
            time.sleep(0.02)
        found.seconds = time.monotonic() - begun
        yield found
