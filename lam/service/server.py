"""Serves runs with uvicorn: address and keys, open files, log and signals."""

import asyncio
import gc
import logging
import math
import os
import resource
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import quote

import uvicorn
import uvloop

from lam.service.app import PREFIX, ServedRuns
from lam.service.connections import Connection, OpenConnections
from lam.service.engine import Engine
from lam.service.hangups import block_hangups, unblock_hangups
from lam.service.keys import VARIABLE, Keys
from lam.service.limits import LOCAL_HOSTS, Limits
from lam.service.settings import ServiceSettings
from lam.service.tracing import RequestLog, Spans
from lam.utils.extras import install_command

_THREADS = 2
_GRACE = 8
_OTHER_FILES = 128  # open files that are not connections
_LEAST_FILES = 512  # allows more connections than waiting requests, so that some can be closed for new ones
_BACKLOG = 2048  # connections that wait to be accepted; the system drops more, and these try again after a second
_KEPT_BY_SYSTEM = 2**17  # bytes of socket buffers, for each direction of a connection
_NOISY = ("asyncio", "uvicorn.error", "lam.service.gallery_search", "lam.service.tracing")
_REPEATING = ("pymilvus.decorators", "pymilvus.client.connection_manager")  # log every error with its traceback
_QUIET_SECONDS = 10.0
_TURN_SECONDS = 5e-5  # switch interval of Python: workers must catch the microseconds in which the event loop waits


def serve(
    runs: str | Path | Mapping[str, str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "cpu",
    drop_corrupt: bool = False,
    index: str | None = None,
    replica: bool = False,
    settings: ServiceSettings | None = None,
) -> None:
    """Serve runs until SIGTERM or SIGINT, then finish open requests; SIGHUP reloads the runs (see `ServedRuns`).

    Args:
        runs: a run's folder, or folders by name. Each run is served under `/runs/NAME/`, the first also at the root.
        host: the address; a key is needed unless the address is this machine.
        port: the port; 0 for a free port.
        drop_corrupt, index: see `lam.gallery.gallery.Gallery`.
        replica: see `Engine`.

    Raises:
        ValueError: for a missing key, a run given twice, or a Milvus collection for several runs; also as in `Engine`
            and `Keys.read`.
        CorruptFileError: as in `Engine`.
        OSError: for an address that cannot be bound, or a log that cannot be written.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be from 0 to 65535, got {port}")
    settings = ServiceSettings() if settings is None else settings
    keys, spans = _keys(settings.keys, host), _spans() if settings.traces else None
    named = runs if isinstance(runs, Mapping) else {Path(runs).absolute().name: runs}
    folders = {name: Path(folder) for name, folder in named.items()}
    if len(folders) > 1 and "://" in (index or ""):
        raise ValueError(f"a Milvus collection belongs to one run, got {index} for {len(folders)} runs")
    if not replica and len(set(map(os.path.realpath, folders.values()))) < len(folders):
        raise ValueError(f"each run can be served once, got {', '.join(map(str, folders.values()))}")
    how = {"device": device, "drop_corrupt": drop_corrupt, "index": index, "replica": replica, "threads": _THREADS}
    open_run: Callable[[Path], Engine] = partial(Engine, settings=settings, **how)
    with block_hangups(), ExitStack() as resources:
        listener = resources.enter_context(_bound(host, port))
        log = resources.enter_context(closing(RequestLog(settings.access_log, settings.slow_seconds)))
        most = min(settings.max_connections, _open_files() - _OTHER_FILES)
        served = ServedRuns(folders, open_run)
        resources.callback(served.sites.close)
        listener.listen()  # before the address is printed: a client that reads it can connect
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}"
        for number, (name, engine) in enumerate(served.engines.items()):
            at = f"{address}{PREFIX}{quote(name)}/" if number else address
            print(f"{folders[name]}: {len(engine.gallery)} items at {at}, until interrupted", flush=True)
            if engine.gallery.recall is not None:
                print(engine.gallery.recall, flush=True)
        resources.enter_context(_sparing_log())
        resources.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_TURN_SECONDS)
        app = Limits(served.sites, settings, keys=keys, log=log, spans=spans)
        server = server_of(app, settings, OpenConnections(most, settings.client_connections))
        gc.freeze()  # garbage collection over all loaded objects would delay every request
        uvloop.run(_serve(server, listener, served))


async def _serve(server: uvicorn.Server, listener: socket.socket, served: ServedRuns) -> None:
    tasks = set[asyncio.Task[None]]()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, lambda: tasks.add(loop.create_task(served.reload_all())))
    with unblock_hangups():
        await server.serve([listener])


def server_of(app: Limits, settings: ServiceSettings, connections: OpenConnections) -> uvicorn.Server:
    """A server with limits on its connections."""
    connection: Any = partial(Connection, connections, settings, app.refuse_connection)
    app.make_room = partial(connections.drop_waiting, reading=True)
    config = uvicorn.Config(
        app,
        http=connection,
        ws="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=math.ceil(settings.header_seconds),
        timeout_graceful_shutdown=_GRACE,
    )
    return _Server(config)


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End the server, at once on a second Ctrl-C. uvicorn's own handler would raise the signal again at the end."""
        self.force_exit |= self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def _open_files() -> int:
    """Raise the limit on open files to its maximum, and return it; a `ValueError` if it is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < _LEAST_FILES:
        raise ValueError(f"the process may open {hard} files, at least {_LEAST_FILES} are needed: see `ulimit -n`")
    return hard


@contextmanager
def _sparing_log() -> Iterator[None]:
    """Within the context, limit the rate of log lines that clients or a full disk cause, and count dropped lines."""
    sparing = _Sparing()
    for name in _REPEATING:  # lam logs the first error of an outage itself
        logging.getLogger(name).disabled = True
    for name in _NOISY:
        logging.getLogger(name).addFilter(sparing)
    try:
        yield
    finally:
        for name in _REPEATING:
            logging.getLogger(name).disabled = False
        for name in _NOISY:
            logging.getLogger(name).removeFilter(sparing)


class _Sparing(logging.Filter):
    """Passes one message of a kind every few seconds. Messages with the same first line are of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[str, float] = {}
        self._kept_back = Counter[str]()

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = str(record.msg).partition("\n")[0], time.monotonic()
        if now - self._passed.get(kind, -math.inf) < _QUIET_SECONDS:
            self._kept_back[kind] += 1
            return False
        self._passed[kind] = now
        if more := self._kept_back.pop(kind, 0):
            record.msg = f"{record.msg} ({more} more like this were not logged)"
        return True


def _keys(file: str | None, host: str) -> Keys | None:
    keys = Keys.read(file)
    if keys is None and host.lower() not in LOCAL_HOSTS:
        raise ValueError(f"a host other than this machine needs a key, got host {host!r}: set ${VARIABLE} or --keys")
    return keys


def _spans() -> Spans:
    try:
        return Spans()
    except ImportError as error:
        raise ValueError(f"traces need a package that is missing ({error}): {install_command('otel')}") from None


def _bound(host: str, port: int) -> socket.socket:
    """A socket bound to the address; it is made before a run is loaded, so an address in use fails at once."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # connections inherit it; the default is megabytes each
        listener.setsockopt(socket.SOL_SOCKET, buffer, _KEPT_BY_SYSTEM)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot serve at {host}, port {port}: {error.strerror}") from None
    return listener
