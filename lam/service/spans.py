"""Spans of OpenTelemetry: one for each request, and one for each of its stages.

`opentelemetry-instrument lam serve RUN --traces` sets up an SDK that exports spans; without an SDK, spans are lost.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.propagate import extract

_CARRIED = (b"traceparent", b"tracestate")


class Spans:
    """Opens spans."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("lam")

    @contextmanager
    def request(self, headers: Mapping[bytes, bytes], facts: Mapping[str, Any]) -> Iterator[None]:
        """Within the context, a request has a span below the client's span; at the end, the span gets the `facts`."""
        carried = {name.decode(): headers[name].decode("latin1") for name in _CARRIED if name in headers}
        kind = trace.SpanKind.SERVER
        with self._tracer.start_as_current_span("request", context=extract(carried), kind=kind) as span:
            try:
                yield
            finally:
                self._describe(span, facts)

    @staticmethod
    def _describe(span: trace.Span, facts: Mapping[str, Any]) -> None:
        if not facts:
            return
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
            span.set_status(trace.StatusCode.ERROR)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Open the span of a stage within the context."""
        with self._tracer.start_as_current_span(name):
            yield
