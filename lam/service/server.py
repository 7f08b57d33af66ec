"""hypercorn around the application: who may connect, for how long, and how it ends."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import torch
from hypercorn.asyncio import serve as serve_asgi
from hypercorn.config import Config

from lam.service.app import create_app
from lam.service.engine import Engine
from lam.service.limits import LOCAL_HOSTS
from lam.service.settings import ServiceSettings

KEY = "LAM_API_KEY"
_THREADS = 2
_GRACE = 8.0


def serve(
    run: str | Path, *, host: str = "127.0.0.1", port: int = 8000, device: str = "cpu", drop_corrupt: bool = False
) -> None:
    """Serve a run until SIGTERM or SIGINT, then answer what is in flight.

    Args:
        run: the run's folder.
        host: other than this machine only with a key in the environment.
        port: 0 for any that is free.
        device: where the network runs.
        drop_corrupt: go on without rows of the gallery that were altered.

    Raises:
        ValueError: for a host that needs a key, or as `Engine`.
        CorruptFileError: as `Engine`.
    """
    key = os.environ.get(KEY)
    if key is not None and not key.strip():
        raise ValueError(f"${KEY} is empty: unset it to serve this machine alone, or give it a key")
    if key is None and host not in LOCAL_HOSTS:
        raise ValueError(f"without a key only this machine is served, got host {host}: set ${KEY}")
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be from 0 to 65535, got {port}")
    torch.set_num_threads(_THREADS)
    _use_one_faiss_thread()
    settings = ServiceSettings()
    engine = Engine(run, settings, device=device, drop_corrupt=drop_corrupt)
    asyncio.run(serve_asgi(create_app(engine, key=key), _config(host, port, settings)))  # type: ignore[arg-type]


def _use_one_faiss_thread() -> None:
    import faiss

    faiss.omp_set_num_threads(1)


def _config(host: str, port: int, settings: ServiceSettings) -> Any:
    config = Config()
    config.bind = [f"{host}:{port}"]
    config.keep_alive_timeout = settings.header_seconds  # also the time until the first headers are there
    config.read_timeout = int(settings.body_seconds + settings.answer_seconds) + 5  # silence while an answer is made
    config.graceful_timeout = _GRACE
    config.include_server_header = False
    config.errorlog = logging.getLogger("hypercorn.error")
    config.backlog = 512
    return config
