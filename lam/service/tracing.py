"""Records of a request: its id, its seconds at each stage, spans of OpenTelemetry, and a line of the log."""

import json
import logging
import re
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEADER = "X-Request-ID"
_CARRIED = (b"traceparent", b"tracestate")
_MOST = 10_000  # lines in memory while the disk is slow
_LOG = logging.getLogger(__name__)
_SANE = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class Spans:
    """Opens spans of OpenTelemetry: one for each request, and one for each of its stages.

    `opentelemetry-instrument lam serve RUN --traces` sets up an SDK that exports spans; without an SDK, spans are lost.
    Raises an `ImportError` without the package.
    """

    def __init__(self) -> None:
        from opentelemetry import trace
        from opentelemetry.propagate import extract

        self._trace, self._extract = trace, extract
        self.tracer = trace.get_tracer("lam")

    @contextmanager
    def request(self, headers: Mapping[bytes, bytes], facts: Mapping[str, Any]) -> Iterator[None]:
        """Within the context, a request has a span below the client's span; at the end, the span gets the `facts`."""
        carried = {name.decode(): headers[name].decode("latin1") for name in _CARRIED if name in headers}
        above, kind = self._extract(carried), self._trace.SpanKind.SERVER
        with self.tracer.start_as_current_span("request", context=above, kind=kind) as span:
            try:
                yield
            finally:
                if facts:
                    self._describe(span, facts)

    def _describe(self, span: Any, facts: Mapping[str, Any]) -> None:
        span.update_name(f"{facts['method']} {facts['route']}")
        names = {"http.request.method": "method", "http.route": "route", "http.response.status_code": "status"}
        names |= {"lam.run": "run", "lam.request_id": "id"}
        span.set_attributes({name: facts[fact] for name, fact in names.items()})
        if facts["status"] >= 500:
            span.set_status(self._trace.StatusCode.ERROR)


@dataclass
class Trace:
    """The trace of a request.

    Attributes:
        id: the client's id for the request, or a new one.
        stages: seconds of waiting and work at each worker, by the worker's name.
        facts: fields for the log and the span; empty until the request is answered.
    """

    id: str
    spans: Spans | None = None
    stages: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


_NOW: ContextVar[Trace | None] = ContextVar("trace", default=None)


@contextmanager
def traced(headers: Mapping[bytes, bytes], spans: Spans | None = None) -> Iterator[Trace]:
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
        with nullcontext() if spans is None else spans.tracer.start_as_current_span(name):
            yield
    finally:
        if trace is not None:
            trace.stages[name] = trace.stages.get(name, 0.0) + time.perf_counter() - started


def request_id() -> str | None:
    """Id of the present request; None outside a request."""
    trace = _NOW.get()
    return None if trace is None else trace.id


class RequestLog:
    """The log of requests, as JSON lines without keys, item ids, labels or contents of requests.

    A thread writes the lines, so that no request waits for a disk; lines that a slow disk cannot take are dropped.

    The file is opened anew for each batch of lines, so it may be renamed and compressed meanwhile. A file that cannot
    be written raises an `OSError` at once.

    Args:
        target: file for all requests, or `-` for standard error; None logs only slow requests, on standard error.
        slow: seconds from which a request is marked as slow; None marks no request.
    """

    def __init__(self, target: str | Path | None, slow: float | None = None) -> None:
        self._slow, self._all = slow, target is not None
        self._file = None if target in (None, "-") else Path(target)
        self._lines: deque[str] = deque()
        self._changed, self._closing, self._dropped = threading.Condition(), False, 0
        if self._file is not None:
            self._file.open("a").close()
        self._thread = threading.Thread(target=self._write, name="lam request log", daemon=True)
        self._thread.start()

    def note(self, seconds: float, **fields: Any) -> None:
        """Log a request."""
        is_slow = self._slow is not None and seconds >= self._slow
        if not (self._all or is_slow):
            return
        slow = {} if self._slow is None else {"slow": is_slow}
        with self._changed:
            if len(self._lines) >= _MOST:
                self._dropped += 1
                return
            fields |= {"dropped": self._dropped} if self._dropped else {}
            self._dropped = 0
            self._lines.append(json.dumps({**fields, "seconds": round(seconds, 6), **slow}))
            self._changed.notify()

    def close(self) -> None:
        """Write the lines that wait, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closing)
                lines, is_last = list(self._lines), self._closing
                self._lines.clear()
            try:
                with nullcontext(sys.stderr) if self._file is None else self._file.open("a", encoding="utf-8") as file:
                    file.write("".join(f"{line}\n" for line in lines))
                    file.flush()
            except (OSError, ValueError) as error:  # a closed stream is a ValueError
                _LOG.error("%d lines of the request log are lost: %s", len(lines), error)
            if is_last:
                return
