"""The id of a request, the seconds that it spends at each stage of the service, and spans of OpenTelemetry."""

import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

HEADER = "X-Request-ID"
_CARRIED = (b"traceparent", b"tracestate")
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
        span.set_attributes(
            {
                "http.request.method": facts["method"],
                "http.route": facts["route"],
                "http.response.status_code": facts["status"],
                "lam.run": facts["run"],
                "lam.request_id": facts["id"],
            }
        )
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
