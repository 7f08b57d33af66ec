"""The schema as generators of clients read it."""

import asyncio
import importlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from lam.service.embedder import CONTENT_TYPES
from lam.service.engine import Engine
from lam.service.models import JSON as JSON_TYPE
from tests.service.asking import HOST, client_of, create_app, embedding

OPEN = {"get_health", "get_ready"}
GENERATOR = "openapi-python-client"


@pytest.fixture(scope="module")
def schema(shared_engine: Engine) -> dict[str, Any]:
    """The published schema."""
    return client_of(shared_engine).get("/openapi.json").json()


def operations(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [operation for path in schema["paths"].values() for operation in path.values()]


def nodes(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from nodes(part)


def test_every_operation_has_a_short_id(schema: dict[str, Any]) -> None:
    ids = [operation["operationId"] for operation in operations(schema)]
    assert len(set(ids)) == len(ids)
    assert {"search", "verify", "add_item", "put_item", "list_items", "delete_item"} <= set(ids)


def test_every_model_is_a_component(schema: dict[str, Any]) -> None:
    """Every reference resolves; models and their unions are only in the components."""
    components = schema["components"]["schemas"]
    for node in nodes(schema):
        if "$ref" in node:
            assert node["$ref"].rpartition("/")[2] in components
    for node in nodes([schema["paths"], [part.get("properties") for part in components.values()]]):
        assert not (isinstance(node.get("properties"), dict) and node.get("type") == "object")
        assert sum("$ref" in kind for kind in node.get("anyOf", node.get("oneOf", ()))) < 2


def test_security_is_stated(schema: dict[str, Any]) -> None:
    schemes = schema["components"]["securitySchemes"]
    kinds = {(scheme["type"], scheme.get("name")) for scheme in schemes.values()}
    assert kinds == {("http", None), ("apiKey", "X-API-Key")}
    for operation in operations(schema):
        named = {name for way in operation["security"] for name in way}
        assert named == (set() if operation["operationId"] in OPEN else set(schemes))


def test_images_are_binary_and_refusals_have_a_model(schema: dict[str, Any]) -> None:
    with_image = 0
    for operation in operations(schema):
        content = operation.get("requestBody", {}).get("content", {})
        for kind in content.keys() - {JSON_TYPE}:
            assert kind in CONTENT_TYPES
            assert content[kind]["schema"] == {"type": "string", "format": "binary"}
            with_image += 1
        for status in ("401", "422", "503"):
            refused = operation["responses"][status]["content"][JSON_TYPE]["schema"]
            assert refused == {"$ref": "#/components/schemas/ErrorResponse"}
    assert with_image == 4 * len(CONTENT_TYPES)


@pytest.mark.long
@pytest.mark.skipif(shutil.which(GENERATOR) is None, reason=f"{GENERATOR} is not installed")
def test_a_generated_client_searches_and_compares(
    shared_engine: Engine,
    client: TestClient,
    schema: dict[str, Any],
    png: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    settings = {"content_type_overrides": dict.fromkeys(CONTENT_TYPES, "application/octet-stream")}
    (tmp_path / "settings.yml").write_text(json.dumps(settings))  # which is YAML, too
    command = [GENERATOR, "generate", "--path", "schema.json", "--config", "settings.yml", "--meta", "none"]
    command += ["--output-path", "made_client"]
    said = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "warning" not in (said.stdout + said.stderr).lower()
    pytest.importorskip("httpx")
    monkeypatch.syspath_prepend(tmp_path)
    made, models = importlib.import_module("made_client"), importlib.import_module("made_client.models")
    types = importlib.import_module("made_client.types")
    httpx = importlib.import_module("httpx")
    over = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(shared_engine)), base_url=HOST)
    service = made.Client(base_url=HOST).set_async_httpx_client(over)

    def call(name: str, **arguments: Any) -> Any:
        operation = importlib.import_module(f"made_client.api.default.{name}")
        return asyncio.run(operation.asyncio(client=service, **arguments))

    def image() -> Any:
        return types.File(payload=png)

    dimension = client.get("/v1/model").json()["dimension"]
    query = models.EmbeddingRequest.from_dict(embedding(dimension))
    assert isinstance(call("add_item", body=image(), id="made"), models.EnrolResponse)
    assert call("search", body=image()).hits[0].id == "made"
    assert isinstance(call("search", body=query, k=1), models.SearchResponse)
    pair = models.PairRequest(first=query, second=query)
    assert isinstance(call("verify", body=pair), models.VerifyResponse)
    assert isinstance(call("search", body=query, k=0), models.ErrorResponse)
