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
def served(run: Path, **environment: str) -> Iterator[Served]:
    """Serve a run until the end of the block, then kill.

    Args:
        run: its folder.
        environment: beside that of the tests.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.service.serve_quickly", str(run)],
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
        assert "items at http://127.0.0.1:" in line, process.stderr.read()
        found = Served(process, int(line.split(":")[-1].split(",")[0]))
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                if found.ask("GET", "/v1/ready")[0] == 200:
                    found.seconds = time.monotonic() - started
                    break
            time.sleep(0.02)
        yield found
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
