"""A process that serves a run under limits that a test can wait for, and requests to it."""

import contextlib
import http.client
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lam.cli import main
from lam.gallery.item import Item
from lam.gallery.store import FILE, ItemStore
from lam.runs.folder import GALLERY

ROOT = Path(__file__).parents[2]
PNG = {"Content-Type": "image/png"}


@dataclass
class Served:
    """A process that serves a run."""

    process: "subprocess.Popen[str]"
    port: int
    log: Path
    seconds: float = math.inf  # until it was ready

    def ask(self, method: str, path: str, body: bytes | None = None, headers: Any = PNG) -> tuple[int, dict[str, Any]]:
        """Send a request on a new connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def ids(self, headers: Any = PNG) -> list[str]:
        """Ids of all items."""
        found, after = list[str](), ""
        while after is not None:
            _, page = self.ask("GET", f"/v1/items?limit=1000&after={after}", headers=headers)
            found, after = found + [item["id"] for item in page["items"]], page["after"]
        return found

    def memory(self) -> int:
        """Bytes of memory in use."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])

    def files(self) -> int:
        """Number of open files."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


def until(holds: Callable[[], object], *, seconds: float = 20.0) -> None:
    """Wait until a condition holds; fail after some seconds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextlib.contextmanager
def at_once(jobs: Iterable[Callable[[], object]]) -> Iterator[None]:
    """Do jobs during the block, each in its own thread, and wait until they end."""
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


def items_in(run: Path) -> list[Item]:
    """Items of a run that is not served, after a check of each row."""
    with contextlib.closing(ItemStore(run / GALLERY / FILE)) as store:
        assert store.check() == []
        return [item for _, item in store.items_by_key()]


class Watch:
    """Measurements of a process from outside, during the block.

    Attributes:
        seconds: durations of `/v1/health`, each on a new connection.
        answers: counts of the answers.
        grown: greatest growth of memory since the start, in bytes.
        logged: bytes of new log lines.
    """

    def __init__(self, found: Served) -> None:
        self.seconds: list[float] = []
        self.answers: Counter[str] = Counter()
        self.grown = self.logged = 0
        self._found, self._end = found, threading.Event()

    def __enter__(self) -> "Watch":
        self._before, self._logged_before = self._found.memory(), self._found.log.stat().st_size
        self._threads = [threading.Thread(target=watch) for watch in (self._ask, self._measure)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        self.logged = self._found.log.stat().st_size - self._logged_before

    def p99(self) -> float:
        """The 99 % quantile of the durations, in seconds."""
        return sorted(self.seconds)[int(0.99 * len(self.seconds))]

    def told(self) -> dict[str, Any]:
        """The measurements in milliseconds, MiB and bytes, for a record."""
        return {
            "health": dict(self.answers),
            "health_p99_ms": round(1000 * self.p99(), 1),
            "health_max_ms": round(1000 * max(self.seconds), 1),
            "memory_mib": round(self.grown / 2**20, 1),
            "logged_bytes": self.logged,
        }

    def _ask(self) -> None:
        while not self._end.wait(0.02):
            begun = time.monotonic()
            try:
                answer = str(self._found.ask("GET", "/v1/health")[0])
            except OSError as error:
                answer = type(error).__name__
            self.seconds.append(time.monotonic() - begun)
            self.answers[answer] += 1

    def _measure(self) -> None:
        while not self._end.wait(0.01):
            self.grown = max(self.grown, self._found.memory() - self._before)


def large_run(run: Path, count: int, dimension: int) -> Path:
    """A run of the demo with `count` random items in addition to its own."""
    few = ("--data.limit=60", "--training.epochs=1", "--evaluation.n_samples=8")
    assert main(["demo", "--quiet", f"--output={run}", f"--network.dimension={dimension}", *few]) == 0
    draw = np.random.default_rng(0)
    with contextlib.closing(ItemStore(run / GALLERY / FILE)) as store:
        for start in range(0, count, 10_000):
            vectors = draw.normal(size=(min(10_000, count - start), dimension)).astype(np.float32)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            store.write(
                Item(f"more-{start + row}", vector.tobytes(), 50.0, origin="before")
                for row, vector in enumerate(vectors)
            )
    return run


@contextlib.contextmanager
def started(
    *module: str, run: Path, files: int | None = None, **environment: str
) -> Iterator[tuple["subprocess.Popen[str]", str, Path]]:
    """Start a module that serves a run, and kill it at the end of the block; gives process, address and log.

    Args:
        module: name of the module, and arguments before the folder.
        run: the folder.
        files: limit on open files.
        environment: further environment variables.
    """
    few = [] if files is None else ["bash", "-c", f'ulimit -n {files} && exec "$@"', "bash"]
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = subprocess.Popen(
            [*few, sys.executable, "-m", *module, str(run), "--port", "0"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert " items at http://127.0.0.1:" in line, Path(log.name).read_text()
            yield process, line.split(" at ")[1].split(",")[0], Path(log.name)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@contextlib.contextmanager
def served(run: Path, *module: str, files: int | None = None, **environment: str) -> Iterator[Served]:
    """A process that serves a run, once it is ready; by default with short limits. Arguments as in `started`."""
    begun, module = time.monotonic(), module or ("tests.service.serve_quickly",)
    with started(*module, run=run, files=files, **environment) as (process, address, log):
        found = Served(process, int(address.rpartition(":")[2]), log)
        until(lambda: found.ask("GET", "/v1/ready")[0] == 200, seconds=60.0)
        found.seconds = time.monotonic() - begun
        yield found
