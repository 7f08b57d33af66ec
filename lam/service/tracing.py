"""The id of a request, and the seconds that it spends at each stage of the service."""

import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lam.service.spans import Spans

HEADER = "X-Request-ID"
_SANE = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass
class Trace:
    """The trace of a request.

    Attributes:
        id: the client's id for the request, or a new one.
        stages: seconds of waiting and work at each worker, by the worker's name.
        facts: fields for the log and the span; empty until the request is answered.
    """

    id: str
    spans: "Spans | None" = None
    stages: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


_NOW: ContextVar[Trace | None] = ContextVar("trace", default=None)


@contextmanager
def traced(headers: Mapping[bytes, bytes], spans: "Spans | None" = None) -> Iterator[Trace]:
    """Trace a request within the context. A short, plain id in `headers` (names in lower case) becomes the trace id."""
    sent = headers.get(HEADER.lower().encode(), b"")
    trace = Trace(sent.decode() if _SANE.fullmatch(sent) else secrets.token_hex(16), spans)
    token = _NOW.set(trace)
    try:
        with nullcontext() if spans is None else spans.request(headers, trace.facts):
            yield trace
    finally:
        _NOW.reset(token)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Add the seconds within the context to this stage of the present request."""
    trace, started = _NOW.get(), time.perf_counter()
    spans = None if trace is None else trace.spans
    try:
        with nullcontext() if spans is None else spans.stage(name):
            yield
    finally:
        if trace is not None:
            trace.stages[name] = trace.stages.get(name, 0.0) + time.perf_counter() - started


def request_id() -> str | None:
    """Id of the present request; None outside a request."""
    trace = _NOW.get()
    return None if trace is None else trace.id
