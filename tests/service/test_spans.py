"""Spans of OpenTelemetry."""

import sys
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.testclient import TestClient

from lam.service.engine import Engine
from lam.service.limits import Limits
from lam.service.tracing import Spans
from tests.helpers import run_python
from tests.runs.conftest import Lam
from tests.service.asking import HOST, PNG, client_of

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The spans that a process with an SDK would send."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def traced(engine: Engine) -> TestClient:
    plain: Any = client_of(engine).app
    return TestClient(Limits(plain._sites, engine.settings, spans=Spans()), base_url=HOST)


def test_a_request_and_its_stages_are_spans_below_the_clients(
    engine: Engine, png: bytes, exported: InMemorySpanExporter
) -> None:
    client = traced(engine)
    headers = {**PNG, "traceparent": PARENT, "X-Request-ID": "mine"}
    assert client.post("/v1/search", content=png, headers=headers).status_code == 200
    *stages, request = exported.get_finished_spans()
    assert request.name == "POST /v1/search"
    assert request.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/search",
        "http.response.status_code": 200,
        "lam.run": "run",
        "lam.request_id": "mine",
    }
    assert request.parent is not None
    assert f"{request.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{request.parent.span_id:016x}" == PARENT.split("-")[2]
    assert [stage.name for stage in stages] == ["decoding", "network", "search"]
    assert {stage.parent and stage.parent.span_id for stage in stages} == {request.context.span_id}


def test_a_failure_is_an_error_and_a_refusal_is_none(
    engine: Engine, exported: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = traced(engine)
    client.get("/v1/items/none", headers={"traceparent": "nonsense"})
    monkeypatch.setattr(engine.network, "_running", False)
    client.get("/v1/ready")
    found = {span.name: span for span in exported.get_finished_spans()}
    assert found["GET /v1/ready"].status.status_code == trace.StatusCode.ERROR
    assert found["GET /v1/items/{id}"].status.status_code == trace.StatusCode.UNSET
    assert found["GET /v1/items/{id}"].parent is None


def test_without_traces_a_request_opens_no_span(engine: Engine, exported: InMemorySpanExporter) -> None:
    assert client_of(engine).get("/v1/items/secret?filter=%7B%7D").status_code == 422
    assert exported.get_finished_spans() == ()


def test_without_traces_nothing_of_it_is_loaded_by_lam() -> None:
    run_python("-c", "import sys; sys.modules['opentelemetry'] = None; import lam.service.tracing, lam.service.engine")


def test_traces_without_the_library_name_the_extra(monkeypatch: pytest.MonkeyPatch, lam: Lam) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert "pip install 'lam-retrieval[otel]'" in lam("serve", "run", "--traces", code=1).err
