"""Milvus servers in their own processes: Milvus Lite, and the standalone server if its package can be installed."""

import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest

PACKAGE = "milvus==2.3.5"
COMMAND = "LAM_MILVUS_SERVER"
"""The environment variable with the path of `milvus-server`, if it is installed."""


class MilvusProcess(ABC):
    """A server that listens at a port of this machine and keeps its data in a folder."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._folder = folder
        self.start()

    @abstractmethod
    def _command(self) -> list[str]:
        """The command that starts the server."""

    def _serving(self) -> list[int]:
        """The processes that serve."""
        return [self.process.pid]

    def start(self) -> None:
        self.process = subprocess.Popen(self._command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 120
        while not self.listens():
            if time.monotonic() > until:
                self.end()
                pytest.fail(f"{self._command()[0]} does not listen")
            time.sleep(0.05)

    def listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=0.2):
            return True
        return False

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop the server; on a busy machine, threads still answer until one of them has received the signal."""
        self._signal(signal.SIGSTOP)
        until = time.monotonic() + 30
        while any(_state(pid) not in "TZ" for pid in self._serving()):
            if time.monotonic() > until:
                pytest.fail("the server does not stop")
            time.sleep(0.005)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in self._serving():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _state(pid: int) -> str:
    """The letter of /proc by which a process runs (R), sleeps (S), is stopped (T) or has ended (Z)."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


class MilvusLite(MilvusProcess):
    """Milvus Lite, which speaks the same protocol."""

    def _command(self) -> list[str]:
        options = ["--data-dir", str(self._folder), "--host", "127.0.0.1", "--port", str(self.port)]
        return [sys.executable, "-m", "milvus_lite", "server", *options]


class MilvusServer(MilvusProcess):
    """The standalone server of PyPI's `milvus`, whose command starts another process that serves.

    A machine can run only one, because the server needs further, fixed ports.
    """

    def __init__(self, command: Path, folder: Path) -> None:
        self._path = command
        super().__init__(folder)

    def _command(self) -> list[str]:
        return [str(self._path), "--data", str(self._folder), "--proxy-port", str(self.port)]

    def _serving(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with suppress(OSError):
            return [int(pid) for pid in children.read_text().split()]
        return []


MILVUS = [pytest.param("lite", id="lite"), pytest.param("server", id="server", marks=pytest.mark.slow)]
"""Servers for tests over Milvus: Milvus Lite in this process, always, and the standalone server."""


CONTRACTS = ["flat", pytest.param("lite", marks=pytest.mark.long)]
"""The indexes over which the contracts of the service are tested: in this process, and Milvus Lite."""

READING = [*CONTRACTS, pytest.param("replica", marks=pytest.mark.long)]
"""The same, and a replica beside the engine that writes, for contracts that change nothing."""


def lite_or_own(kind: str, run: Path) -> str | None:
    """The index of a run for one of `CONTRACTS`: a collection beside it, or None."""
    return f"milvus://{run.with_name('items.db')}/items" if kind == "lite" else None


def address_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """The address of a new collection for a test, of one of `MILVUS`."""
    if kind == "lite":
        return f"milvus://{folder / 'items.db'}/items"
    own = sha256(str(folder).encode()).hexdigest()[:16]
    return f"milvus://127.0.0.1:{request.getfixturevalue('milvus_server').port}/items_{own}"


def milvus_command(folder: Path) -> Path:
    """The command of the standalone server: $LAM_MILVUS_SERVER, or from a new environment in a folder."""
    if given := os.environ.get(COMMAND):
        return Path(given)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [str(folder / "bin" / "pip"), "install", "--quiet", "--only-binary=:all:", PACKAGE]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{PACKAGE} cannot be installed here ({done.stderr.strip().splitlines()[-1]}): give {COMMAND}")
    return folder / "bin" / "milvus-server"
