"""hypercorn around the application: who may connect, for how long, and how it ends."""

import asyncio
import logging
import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hypercorn.asyncio import serve as serve_asgi
from hypercorn.config import Config

from lam.service.app import create_app
from lam.service.engine import Engine
from lam.service.limits import LOCAL_HOSTS
from lam.service.settings import ServiceSettings

KEY = "LAM_API_KEY"
_THREADS = 2
_GRACE = 8.0
_SLACK = 5


def serve(
    run: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "cpu",
    drop_corrupt: bool = False,
    index: str | None = None,
    settings: ServiceSettings | None = None,
) -> None:
    """Serve a run until SIGTERM or SIGINT, then answer what is in flight; at a SIGHUP, read its calibration anew.

    Args:
        run: the run's folder.
        host: other than this machine only with a key in the environment.
        port: 0 for any that is free.
        device: where the network runs.
        drop_corrupt: go on without rows of the gallery that were altered.
        index: the address of a Milvus collection that is searched, in place of an index of its own.
        settings: limits.

    Raises:
        ValueError: for a host that needs a key, or as `Engine`.
        CorruptFileError: as `Engine`.
        OSError: for an address that cannot be had.
    """
    key = _key(host)
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be from 0 to 65535, got {port}")
    settings = ServiceSettings() if settings is None else settings
    with ExitStack() as held:
        listener = held.enter_context(_bound(host, port))
        engine = Engine(run, settings, device=device, drop_corrupt=drop_corrupt, index=index, threads=_THREADS)
        listener.listen()  # who comes between the line below and the server waits, and is not refused
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}"
        print(f"{engine.run}: {len(engine.gallery)} items at {address}, until interrupted", flush=True)
        app: Any = create_app(engine, key=key)
        held.pop_all()
        asyncio.run(_serve(app, engine, _config(listener.detach(), settings)))  # which closes it


async def _serve(app: Any, engine: Engine, config: Config) -> None:
    if hasattr(signal, "SIGHUP"):
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, lambda: loop.run_in_executor(None, engine.recalibrate))
    await serve_asgi(app, config)


def _key(host: str) -> str | None:
    key = os.environ.get(KEY)
    if key is not None and not key.strip():
        raise ValueError(f"${KEY} is empty: unset it to serve this machine alone, or give it a key")
    if key is None and host not in LOCAL_HOSTS:
        raise ValueError(f"without a key only this machine is served, got host {host!r}: set ${KEY}")
    return key


def _bound(host: str, port: int) -> socket.socket:
    """Take the address before anything is read, so that one that is taken is told at once."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot serve at {host}, port {port}: {error.strerror}") from None
    return listener


def _config(listener: int, settings: ServiceSettings) -> Config:
    config = Config()
    config.bind = [f"fd://{listener}"]
    config.keep_alive_timeout = settings.header_seconds  # also the time until the first headers are there
    config.read_timeout = int(settings.body_seconds + settings.answer_seconds) + _SLACK  # silent while it waits for us
    config.graceful_timeout = _GRACE
    config.include_server_header = False
    config.errorlog = logging.getLogger("hypercorn.error")
    config.backlog = 512
    return config
