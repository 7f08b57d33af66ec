"""The application as a whole: its description, answers to bad requests, and failures of parts."""

import json
import math
import re
import sqlite3
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import faiss
import pytest
from PIL import Image
from starlette.testclient import TestClient

from lam.cli.parser import command_parser
from lam.gallery.store import FILE
from lam.runs.folder import GALLERY
from lam.service.app import PAGE
from lam.service.engine import Engine
from tests.service.asking import JSON, PNG, base64_of, client_of, embedding, refused
from tests.service.conftest import SMALL, encoded

ROUTES = ("/v1/search", "/v1/items")


def test_the_state_is_told(client: TestClient, shared_engine: Engine) -> None:
    assert client.get("/v1/health").json() == {"status": "alive"}
    assert client.get("/v1/ready").json()["status"] == "ready"
    model = client.get("/v1/model").json()
    assert model["sha256"] == shared_engine.run.fingerprint
    assert model["gallery"] == "classes"
    assert model["limits"]["max_bytes"] == SMALL.max_body
    assert (model["limits"]["max_side"], model["limits"]["max_decoded_bytes"]) == (16_384, 2**26)
    curves = client.get("/v1/calibration").json()
    rates = [point["rate"] for point in curves["false_accept"]]
    assert rates == sorted(rates, reverse=True)
    assert len(curves["kappa"]["edges"]) == len(curves["kappa"]["counts"]) + 1


def test_versions_are_told_whichever_faiss_is_installed(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def version_of(name: str) -> str:
        if name.startswith("faiss"):
            raise PackageNotFoundError(name)  # faiss-gpu instead of faiss-cpu, or vice versa
        return version(name)

    monkeypatch.setattr("lam.service.routes.state.version", version_of)
    versions = client.get("/v1/model").json()["versions"]
    assert versions["faiss"] == faiss.__version__
    assert {"lam", "torch", "pillow", "uvicorn"} <= versions.keys()


def test_samples_are_inputs_to_try_it_with(client: TestClient, shared_engine: Engine) -> None:
    samples = client.get("/v1/samples").json()["samples"]
    assert [sample["stranger"] for sample in samples] == [False, False, False, True]
    for sample, own in zip(samples, shared_engine.samples, strict=True):
        picture = client.get(sample["image"])
        assert (picture.content, picture.headers["content-type"]) == (own.image, "image/png")
        assert client.post("/v1/search", content=picture.content, headers=PNG).status_code == 200
    for number in ("4", "99999999999999999999999"):
        assert "of this number" in refused(client.get(f"/v1/samples/{number}"), 404)
    refused(client.get("/v1/samples/-1"), 422)


def test_what_happens_is_counted(engine: Engine, png: bytes) -> None:
    client = client_of(engine)
    for _ in range(3):
        client.post("/v1/search", content=png, headers=PNG)
    client.post("/v1/search", content=b"", headers=PNG)
    text = client.get("/metrics").text
    assert 'lam_requests_total{method="POST",route="/v1/search",status="200"} 3.0' in text
    assert 'lam_requests_total{method="POST",route="/v1/search",status="400"} 1.0' in text
    assert f"lam_index_items {len(engine.gallery)}.0" in text
    assert 'lam_query_kappa{quantile="0.5"}' in text
    assert 'lam_promise_observations{test="kappa"} 3.0' in text
    assert 'lam_worker_restarts{worker="network"} 0.0' in text


@pytest.mark.parametrize("route", ROUTES)
def test_bodies_that_are_no_image(client: TestClient, route: str, png: bytes) -> None:
    for body, status in ((b"", 400), (b"hello", 415), (png[:-30], 400), (encoded(Image.new("L", (8, 8)), "GIF"), 415)):
        refused(client.post(route, content=body, headers=PNG), status)
    refused(client.post(route, content=encoded(Image.new("1", (1001, 1000))), headers=PNG), 413)
    refused(client.post(route, content=b"x" * (SMALL.max_body + 1), headers=PNG), 413)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", ["image/gif", "image/svg+xml", "text/plain", "multipart/form-data; boundary=x", ""])
def test_other_content_types_are_refused(client: TestClient, route: str, kind: str, png: bytes) -> None:
    assert "content type" in refused(client.post(route, content=png, headers={"content-type": kind}), 415)


@pytest.mark.parametrize("kind", ["image/jpg", "image/x-png", "application/octet-stream"])
def test_what_clients_call_an_image_is_one_where_its_body_is(client: TestClient, kind: str, png: bytes) -> None:
    for body, status in ((png, 200), (b"hello", 415)):
        assert client.post("/v1/search", content=body, headers={"content-type": kind}).status_code == status
    assert client.post("/v1/verify", content=png, headers={"content-type": kind}).status_code == 415


@pytest.mark.parametrize("route", [*ROUTES, "/v1/verify"])
@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_bodies_that_are_compressed_are_refused(client: TestClient, route: str, encoding: str, png: bytes) -> None:
    for kind in (PNG, JSON):
        response = client.post(route, content=png, headers={**kind, "content-encoding": encoding})
        assert repr(encoding) in refused(response, 415)
        assert response.json()["allowed"] == response.headers["accept-encoding"] == "identity"
    assert client.post("/v1/search", content=png, headers={**PNG, "content-encoding": "Identity"}).status_code == 200


def test_a_form_is_told_to_be_a_file(client: TestClient, png: bytes) -> None:
    response = client.post("/v1/search", files={"image": png})
    assert "as curl -F sends" in refused(response, 415)
    assert "image/png" in response.json()["allowed"]["types"]
    assert "--data-binary @FILE" in response.json()["allowed"]["curl"]


def test_probes_may_ask_for_no_body(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(engine, key="secret")
    for path in ("/v1/health", "/v1/ready"):
        response = client.head(path)
        assert (response.status_code, response.content) == (200, b"")
        assert client.head(f"{path}?x=1").status_code == 422
    monkeypatch.setattr(engine.network, "_running", False)
    assert client.head("/v1/ready").status_code == 503


def wrong_embeddings(dimension: int) -> dict[str, bytes]:
    good = embedding(dimension)
    texts = {
        "one too many": {**good, "embedding": [*good["embedding"], 0.0]},
        "one too few": {**good, "embedding": good["embedding"][1:]},
        "twice as many": {**good, "embedding": good["embedding"] * 2},
        "none": {**good, "embedding": []},
        "nested": {**good, "embedding": [good["embedding"]]},
        "deeper": {**good, "embedding": [[good["embedding"]]]},
        "text": {**good, "embedding": "1,0,0"},
        "of text": {**good, "embedding": ["1"] * dimension},
        "of truths": {**good, "embedding": [True, False, False]},
        "missing": {"kappa": 1.0},
        **{f"base64 of {values}": {**good, "embedding": base64_of(values)} for values in ([1.0], [0.0] * dimension)},
        "base64 of NaN": {**good, "embedding": base64_of([math.nan] + [0.0] * (dimension - 1))},
        "base64 of infinity": {**good, "embedding": base64_of([math.inf] + [0.0] * (dimension - 1))},
        "base64 of doubles": {**good, "embedding": base64_of(good["embedding"], "<f8")},
        "half of a float": {**good, "embedding": base64_of([1.0] * dimension, "<f2")[:8]},
        "zero": {**good, "embedding": [0.0] * dimension},
        "too long": {**good, "embedding": [2.0, *good["embedding"][1:]]},
        "huge": {**good, "embedding": [1e38] * dimension},
        "huger": {**good, "embedding": [1e300] * dimension},
        "no kappa": {"embedding": good["embedding"]},
        "negative kappa": {**good, "kappa": -1},
        "boundless kappa": {**good, "kappa": 1.01e30},
        "text kappa": {**good, "kappa": "9"},
    }
    found = {name: json.dumps(body).encode() for name, body in texts.items()}
    rest = ", 0.0" * (dimension - 1)
    for value in ("NaN", "Infinity", "-Infinity", "1e999", "9" * 400):
        found[value] = f'{{"embedding": [{value}{rest}], "kappa": 1}}'.encode()
        found[f"kappa {value}"] = f'{{"embedding": [1.0{rest}], "kappa": {value}}}'.encode()
    return found


@pytest.mark.parametrize("route", ROUTES)
def test_wrong_embeddings_change_nothing(client: TestClient, shared_engine: Engine, route: str) -> None:
    size = len(shared_engine.gallery)
    for name, body in wrong_embeddings(shared_engine.gallery.dimension).items():
        assert refused(client.post(route, content=body, headers=JSON), 422), name
    assert len(shared_engine.gallery) == size


@pytest.mark.parametrize(
    ("body", "status"),
    [
        *((body, 400) for body in (b"", b"{", b"\xff\xfe", b"[" * 60_000, json.dumps(embedding(3)).encode("utf-16"))),
        (b'{"embedding": [' + b"9" * 5000 + b"]}", 400),
        *((body, 422) for body in (b"[]", b"null", b"3", b"{}", b'{"embedding": [1], "kappa": 1, "kappa": 2}')),
    ],
)
def test_malformed_json_is_refused(client: TestClient, body: bytes, status: int) -> None:
    for route in (*ROUTES, "/v1/verify"):
        refused(client.post(route, content=body, headers=JSON), status)


def test_a_name_in_json_is_given_once_however_deep(client: TestClient, shared_engine: Engine) -> None:
    item = json.dumps(embedding(shared_engine.gallery.dimension))[:-1]
    for metadata in ('{"a": 1, "a": 2}', '{"b": [3, {"a": 1, "\\u0061": 2}]}'):
        response = client.post("/v1/items", content=f'{item}, "metadata": {metadata}}}', headers=JSON)
        assert "the name 'a'" in refused(response, 422)
    body = f'{item}, "metadata": {{"a": {{"a": "at 9:30: now"}}, "b": [1, {{"a": 1}}, {{"a": 1}}]}}}}'
    assert client.post("/v1/items", content=body, headers=JSON).status_code == 201


WHOLE, SHARE = {"type": "integer", "minimum": 1, "maximum": 100}, {"type": "number", "minimum": 0, "maximum": 1}


@pytest.mark.parametrize(
    ("route", "query", "allowed"),
    [
        *(("/v1/search", f"k={k}", WHOLE) for k in ("0", "-1", "101", "x", "1.5", "")),
        *(("/v1/search", f"min_probability={least}", SHARE) for least in ("nan", "2", "inf", "few")),
        ("/v1/items", "uncertain=drop", {"enum": ["keep", "refuse"]}),
        ("/v1/items", "fuse=perhaps", {"type": "boolean"}),
    ],
)
def test_queries_outside_their_range_are_refused(
    client: TestClient, png: bytes, route: str, query: str, allowed: dict[str, Any]
) -> None:
    response = client.post(f"{route}?{query}", content=png, headers=PNG)
    name, _, given = query.partition("=")
    said = refused(response, 422)
    assert said.startswith(f"{name}: Input should be ")
    assert said.endswith(f", got {given!r}")
    assert allowed.items() <= response.json()["allowed"].items()


def test_of_every_parameter_it_is_published_what_it_may_be(client: TestClient) -> None:
    said = {}
    for operations in client.get("/openapi.json").json()["paths"].values():
        for operation in operations.values():
            given = [one for one in operation.get("parameters", ()) if one["in"] == "query"]
            said |= {one["name"]: one["schema"] for one in given}
    assert {"type": "integer", "minimum": 1, "maximum": 1000}.items() <= said["limit"].items()
    assert {"type": "string", "maxLength": 128}.items() <= said["after"].items()
    of_searches = {"k", "min_probability", "score_threshold", "with_vector", "group_by", "group_size"}
    of_items = {"id", "label", "uncertain", "fuse", "on_error", "after", "limit", "filter"}
    assert set(said) == of_searches | of_items


def test_unknown_parameters_are_refused_on_every_route(client: TestClient, shared_engine: Engine, png: bytes) -> None:
    size = len(shared_engine.gallery)
    for path, operations in client.get("/openapi.json").json()["paths"].items():
        for method in operations:
            sent = {"content": png, "headers": PNG} if method in ("post", "put") else {}
            response = client.request(method, f"{path.replace('{id}', 'one')}?lable=x", **sent)
            assert "query parameter 'lable'" in refused(response, 422), (method, path)
    response = client.post("/v1/search?K=3", content=png, headers=PNG)
    assert "query parameter 'K'" in refused(response, 422)
    assert response.json()["allowed"][:3] == ["k", "min_probability", "filter"]
    assert client.get("/metrics?x").json()["allowed"] == "no query parameter"
    twice = client.post("/v1/search?k=3&k=4", content=png, headers=PNG)
    assert "parameter 'k'" in refused(twice, 422)
    assert len(shared_engine.gallery) == size


def test_the_page_and_the_schema_take_any_query(client: TestClient) -> None:
    for path in ("/", "/app.js", "/icon.svg", "/openapi.json"):
        assert client.get(f"{path}?v=2&v=3").status_code == 200


@pytest.mark.parametrize("route", ROUTES)
def test_names_that_a_body_cannot_have_are_refused(client: TestClient, shared_engine: Engine, route: str) -> None:
    good, size = embedding(shared_engine.gallery.dimension), len(shared_engine.gallery)
    response = client.post(route, json={**good, "lable": "oak"})
    assert refused(response, 422).startswith("lable: ")
    names = ["embedding", "kappa"]
    assert list(response.json()["allowed"]) == names + (["id", "label", "metadata"] if route == "/v1/items" else [])
    refused(client.post(route, content=json.dumps({**good, "\ud800": 1}), headers=JSON), 400)  # half a character
    assert len(shared_engine.gallery) == size


def test_names_that_a_pair_cannot_have_are_refused(client: TestClient, shared_engine: Engine) -> None:
    good, image = embedding(shared_engine.gallery.dimension), {"image": ""}
    for pair, said in (
        ({"first": good, "second": good, "third": good}, "third: "),
        ({"first": good, "second": {**good, "label": "x"}}, "second.embedding.label: "),
        ({"first": {**image, **good}, "second": good}, "first.image.embedding: "),
    ):
        assert refused(client.post("/v1/verify", json=pair), 422).startswith(said)


def test_a_kappa_beyond_all_bounds_is_told_the_bound(client: TestClient, shared_engine: Engine) -> None:
    response = client.post("/v1/search", json=embedding(shared_engine.gallery.dimension, kappa=1e31))
    assert re.match("kappa: .*1000000", refused(response, 422))
    assert {"type": "number", "minimum": 0, "maximum": 1e30}.items() <= response.json()["allowed"]["kappa"].items()
    assert client.post("/v1/search", json=embedding(shared_engine.gallery.dimension, kappa=1e30)).status_code == 200


def test_unknown_paths_and_methods_are_json_too(client: TestClient) -> None:
    for response in (client.get("/nothing"), client.post("/nothing"), client.get("/docs"), client.put("/v1/")):
        assert "no such path" in refused(response, 404)
        assert response.json()["allowed"] == "the paths of /openapi.json"
    refused(client.get("/v1/items/nobody"), 404)
    methods = dict.fromkeys(("/v1/health", "/", "/app.js"), "GET, HEAD")
    for path, allowed in (methods | {"/v1/model": "GET", "/v1/items": "DELETE, GET, POST"}).items():
        response = client.patch(path)
        assert "'PATCH'" in refused(response, 405)
        assert response.json()["allowed"] == response.headers["allow"] == allowed


def test_methods_that_nobody_knows_are_counted_as_one(engine: Engine) -> None:
    client = client_of(engine, key="secret")
    for number in range(300):
        refused(client.request(f"ZZ{number}", f"/v1/{number}"), 401)
    text = client.get("/metrics", headers={"x-api-key": "secret"}).text
    assert 'lam_requests_total{method="other",route="other",status="401"} 300.0' in text
    assert "ZZ" not in text
    assert text.count("lam_requests_total{") == 1


def test_decisions_on_pairs_are_counted_apart(engine: Engine) -> None:
    client, one = client_of(engine), embedding(engine.gallery.dimension, kappa=1e-6)
    assert client.post("/v1/verify", json={"first": one, "second": one}).json()["decision"] == "abstain"
    text = client.get("/metrics").text
    assert 'lam_pair_decisions_total{decision="abstain"} 1.0' in text
    assert "lam_decisions_total{" not in text
    assert "lam_query_kappa" not in text


def test_a_full_queue_is_503_with_retry_after(engine: Engine, png: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.network, "_queue", 0)
    response = client_of(engine).post("/v1/search", content=png, headers=PNG)
    refused(response, 503)
    assert int(response.headers["retry-after"]) >= 1


def test_a_disk_that_is_full_is_507_and_searches_go_on(engine: Engine, png: bytes) -> None:
    client, size = client_of(engine), len(engine.gallery)
    writer = engine.gallery.store._writer
    (pages,) = writer.execute("PRAGMA page_count").fetchone()
    writer.execute(f"PRAGMA max_page_count={pages}")
    noise = encoded(Image.effect_noise((128, 128), 90))
    for number in range(20):
        last = client.post(f"/v1/items?id={number}-n", content=noise, headers=PNG)
        if last.status_code != 201:
            break
    assert "not be stored" in refused(last, 507)
    assert client.post("/v1/search", content=png, headers=PNG).status_code == 200
    assert len(engine.gallery) == size + number
    writer.execute("PRAGMA max_page_count=1000000")
    assert client.post("/v1/items?id=later", content=noise, headers=PNG).status_code == 201


def test_a_database_that_another_process_locks_is_503_and_reads_go_on(engine: Engine, png: bytes) -> None:
    client, path = client_of(engine), engine.run.folder / GALLERY / FILE
    engine.gallery.store._writer.execute("PRAGMA busy_timeout=50")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        response = client.post("/v1/items?id=mine", content=png, headers=PNG)
        assert "locked the database" in refused(response, 503)
        assert response.headers["retry-after"] == "1"
        refused(client.get("/v1/items/mine"), 404)
        assert client.post("/v1/search", content=png, headers=PNG).status_code == 200
    assert client.post("/v1/items?id=mine", content=png, headers=PNG).status_code == 201


def test_a_worker_that_died_is_told_and_replaced(engine: Engine, png: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    client, embed = client_of(engine), engine.network._work

    def die(_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(engine.network, "_work", die)
    refused(client.post("/v1/search", content=png, headers=PNG), 503)
    assert "network worker" in refused(client.get("/v1/ready"), 503)
    monkeypatch.setattr(engine.network, "_work", embed)
    assert client.post("/v1/search", content=png, headers=PNG).status_code == 200
    assert client.get("/v1/ready").status_code == 200


def test_a_lost_device_is_replaced_by_the_cpu(engine: Engine, png: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(engine.embedder, "device", "meta")
    monkeypatch.setattr(engine.embedder.encoder, "predict", lost)
    client = client_of(engine)
    assert "the CPU" in refused(client.post("/v1/search", content=png, headers=PNG), 503)
    assert engine.embedder.device == "cpu"
    assert client.post("/v1/search", content=png, headers=PNG).status_code == 200


def test_a_failure_inside_is_500_and_says_nothing(
    engine: Engine, png: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr(engine.responder.__class__, "answer", fail)
    response = client_of(engine).post("/v1/search", content=png, headers={**PNG, "X-Request-ID": "mine-1"})
    assert "secret" not in refused(response, 500)
    assert "secret" in caplog.text
    assert "the request mine-1 failed" in caplog.text


def test_the_schema_names_every_route_and_refusal(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    assert {"/v1/search", "/v1/items", "/v1/items/{id}", "/v1/verify", "/v1/model", "/metrics"} <= set(schema["paths"])
    for path in schema["paths"].values():
        for operation in path.values():
            assert {"413", "503"} <= set(operation["responses"])
    bodies = {path: schema["paths"][path]["post"]["requestBody"]["content"] for path in ROUTES}
    assert "image/png" in bodies["/v1/search"]
    for name in ("health", "ready", "model", "calibration"):
        answered = schema["paths"][f"/v1/{name}"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert answered == {"$ref": f"#/components/schemas/{name.title()}Response"}
    parts = schema["components"]["schemas"]

    def names(union: str) -> list[set[str]]:
        kinds = parts[union].get("oneOf") or parts[union]["anyOf"]
        return [set(parts[kind["$ref"].rpartition("/")[2]]["properties"]) for kind in kinds]

    beside = {"id", "label", "metadata"}
    assert names("ImageTextOrEmbedding") == [{"image"}, {"text"}, {"embedding", "kappa"}]
    assert names("ImageTextOrEmbeddingItem") == [one | beside for one in names("ImageTextOrEmbedding")]


@pytest.mark.parametrize("file", ["index.html", "words.js"])
def test_the_commands_that_the_page_names_are_known(file: str) -> None:
    commands = re.findall(r"lam (calibrate RUN[^\n”]*)", (PAGE / file).read_text(encoding="utf-8"))
    assert commands
    for command in commands:
        command_parser().parse_args(command.split())
