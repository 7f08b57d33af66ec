"""The routes: answers, items that come and go, and what bad requests get."""

import base64
import concurrent.futures
import io
import json
import math
import sqlite3
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from lam.service.app import create_app
from lam.service.engine import Engine
from lam.service.errors import ServiceError
from lam.service.store import FILE
from tests.service.conftest import HOST, SMALL, encoded

PNG = {"content-type": "image/png"}
JSON = {"content-type": "application/json"}
ROUTES = ("/v1/search", "/v1/items")


def client_of(engine: Engine, **options: Any) -> TestClient:
    return TestClient(create_app(engine, **options), base_url=HOST, raise_server_exceptions=False)


def embedding(dimension: int, axis: int = 0, kappa: float = 50.0, **fields: Any) -> dict[str, Any]:
    return {"embedding": [float(row == axis) for row in range(dimension)], "kappa": kappa, **fields}


def refused(response: Any, status: int) -> str:
    """The sentence of a refusal, once it is one as it should be."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    found = response.json()
    assert set(found) == {"error", "allowed"}
    assert "Traceback" not in response.text
    assert "site-packages" not in response.text
    return found["error"]


def test_a_search_decides_and_gives_hits(client: TestClient, png: bytes) -> None:
    answer = client.post("/v1/search?k=3", content=png, headers=PNG).json()
    assert answer["decision"] in ("match", "unknown", "abstain")
    assert 0 <= answer["probability"] <= 1
    assert answer["calibration"] == "current"
    assert answer["threshold"]["far"] == 0.1
    assert len(answer["hits"]) == 3
    scores = [hit["score"] for hit in answer["hits"]]
    assert scores == sorted(scores, reverse=True)
    hit = answer["hits"][0]
    assert hit["accepted"] == (hit["score"] > answer["threshold"]["accept_above"])
    picture = client.get(hit["thumbnail"])
    assert picture.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(picture.content)).size == (8, 8)


def test_an_embedding_gets_what_its_image_gets(shared_engine: Engine, client: TestClient, png: bytes) -> None:
    query = shared_engine._embed([shared_engine._decode([(png, False)])[0][0]])[0]
    body = {"embedding": query.embedding.mean[0].tolist(), "kappa": query.kappa}
    by_embedding = client.post("/v1/search", json=body).json()
    by_image = client.post("/v1/search", content=png, headers=PNG).json()
    assert by_embedding["decision"] == by_image["decision"]
    assert [hit["id"] for hit in by_embedding["hits"]] == [hit["id"] for hit in by_image["hits"]]
    assert by_embedding["kappa"] == pytest.approx(by_image["kappa"])


def test_a_match_must_be_as_probable_as_is_asked(engine: Engine, png: bytes) -> None:
    client = client_of(engine)
    kappa = engine.judge.calibration.flags.kappa.scores.min().neg().item() + 1
    client.post("/v1/items", json=embedding(engine.gallery.dimension, kappa=kappa, id="one"))
    search = embedding(engine.gallery.dimension, kappa=kappa)
    found = client.post("/v1/search", json=search).json()
    assert found["decision"] == "match"
    asked = client.post(f"/v1/search?min_probability={min(1.0, found['probability'] + 1e-6)}", json=search).json()
    assert asked["decision"] == ("unknown" if found["probability"] < 1 else "match")
    unsure = client.post("/v1/search", json=embedding(engine.gallery.dimension, kappa=1e-6)).json()
    assert unsure["decision"] == "abstain"
    assert unsure["kappa_capped"]


def test_items_come_and_go_while_served(engine: Engine, png: bytes) -> None:
    client, size = client_of(engine), len(engine.gallery)
    added = client.post("/v1/items?id=mine&label=a%20thing", content=png, headers=PNG)
    assert added.status_code == 201
    assert added.json()["label"] == "a thing"
    assert added.json()["gallery_size"] == size + 1
    best = client.post("/v1/search?k=1", content=png, headers=PNG).json()["hits"][0]
    assert (best["id"], best["score"]) == ("mine", pytest.approx(1))
    found = client.get("/v1/items/mine").json()
    assert found["sha256"] == added.json()["sha256"]
    changed = client.put("/v1/items/mine?label=other", content=png, headers=PNG)
    assert (changed.status_code, changed.json()["created"]) == (200, False)
    assert client.get("/v1/items/mine").json()["label"] == "other"
    assert len(engine.gallery) == size + 1
    assert client.delete("/v1/items/mine").json() == {"id": "mine", "deleted": True, "gallery_size": size}
    assert refused(client.delete("/v1/items/mine"), 404)
    assert refused(client.get("/v1/items/mine"), 404)
    assert refused(client.get("/v1/items/mine/thumbnail"), 404)


def test_items_are_listed_in_pages(client: TestClient) -> None:
    seen, after = [], ""
    while True:
        page = client.get("/v1/items", params={"after": after, "limit": 25}).json()
        seen += [item["id"] for item in page["items"]]
        if page["after"] is None:
            break
        after = page["after"]
    assert len(seen) == len(set(seen)) == page["total"]
    assert seen == sorted(seen)


@pytest.mark.parametrize("identity", ["José García", "東 3", "a:b@c+d=e", "4_2.-"])
def test_ids_are_names_as_people_have_them(client: TestClient, png: bytes, identity: str) -> None:
    added = client.post("/v1/items", params={"id": identity}, content=png, headers=PNG)
    assert (added.status_code, added.json()["id"]) == (201, identity)
    assert client.get(added.json()["thumbnail"]).status_code == 200
    hits = client.post("/v1/search", params={"k": 100}, content=png, headers=PNG).json()["hits"]
    assert added.json()["thumbnail"] in [hit["thumbnail"] for hit in hits]
    path = added.json()["thumbnail"].removesuffix("/thumbnail")
    assert client.get(path).json()["id"] == identity
    assert client.delete(path).json() == {"id": identity, "deleted": True, "gallery_size": 60}
    assert client.get(path).status_code == 404


def test_without_an_id_content_is_the_id(engine: Engine, png: bytes) -> None:
    client, size = client_of(engine), len(engine.gallery)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.post("/v1/items", content=png, headers=PNG), range(40)))
    assert sorted({answer.status_code for answer in answers}) == [200, 201]
    assert sum(answer.status_code == 201 for answer in answers) == 1
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(engine.gallery) == size + 1
    for name in ("a", "b"):
        client.post(f"/v1/items?id={name}", content=png, headers=PNG)
    assert len(engine.gallery) == size + 3


def test_an_embedding_can_be_an_item_with_metadata(engine: Engine) -> None:
    client = client_of(engine)
    body = embedding(engine.gallery.dimension, label="axis", metadata={"shelf": 3})
    added = client.post("/v1/items", json=body).json()
    assert added["thumbnail"] is None
    (hit,) = client.post("/v1/search?k=1", json=body).json()["hits"]
    assert (hit["id"], hit["label"], hit["metadata"]) == (added["id"], "axis", {"shelf": 3})
    assert refused(client.get(f"/v1/items/{added['id']}/thumbnail"), 404)


def test_two_images_are_the_same_or_not(client: TestClient, png: bytes) -> None:
    image = {"image": base64.b64encode(png).decode()}
    answer = client.post("/v1/verify", json={"first": image, "second": image}).json()
    assert answer["score"] == pytest.approx(1)
    assert answer["same"] in (True, None)  # None where κ says that it cannot be judged
    assert answer["far"] == 0.1
    opposite = embedding(3)
    opposite["embedding"][0] = -1.0
    answer = client.post("/v1/verify", json={"first": embedding(3), "second": opposite}).json()
    assert (answer["same"], answer["decision"]) == (False, "unknown")
    for wrong in ({}, {"first": image}, {"first": image, "second": {"image": "?"}}, {"first": 1, "second": 2}):
        refused(client.post("/v1/verify", json=wrong), 422)


def test_the_state_is_told(client: TestClient, shared_engine: Engine) -> None:
    assert client.get("/v1/health").json() == {"status": "alive"}
    assert client.get("/v1/ready").json()["status"] == "ready"
    model = client.get("/v1/model").json()
    assert model["sha256"] == shared_engine.fingerprint
    assert model["limits"]["max_bytes"] == SMALL.max_body
    curves = client.get("/v1/calibration").json()
    rates = [point["rate"] for point in curves["false_accept"]]
    assert rates == sorted(rates, reverse=True)
    assert len(curves["kappa"]["edges"]) == len(curves["kappa"]["counts"]) + 1


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
    assert "lam_kappa_drift" in text
    assert 'lam_worker_restarts{worker="network"} 0.0' in text


def test_a_gallery_that_grew_makes_the_calibration_stale(engine: Engine, png: bytes) -> None:
    client = client_of(engine)
    for number in range(20):
        client.post(f"/v1/items?id={number}-new", content=png, headers=PNG)
    assert client.post("/v1/search", content=png, headers=PNG).json()["calibration"] == "stale"
    assert client.get("/v1/model").json()["calibration"] == "stale"


def test_a_run_without_calibration_gives_hits_and_no_decision(run_copy: Path, png: bytes) -> None:
    engine = Engine(run_copy, SMALL)
    client = client_of(engine)
    answer = client.post("/v1/search?k=2", content=png, headers=PNG).json()
    assert (answer["decision"], answer["probability"], answer["calibration"]) == (None, None, "none")
    assert len(answer["hits"]) == 2
    refused(client.get("/v1/calibration"), 404)
    said = refused(client.post("/v1/items?poor=refuse", content=png, headers=PNG), 409)
    assert said == "the run is not calibrated: nothing says which images are poor"
    assert client.post("/v1/items", content=png, headers=PNG).json()["poor"] is None
    engine.close()


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


@pytest.mark.parametrize("kind", ["L", "RGB", "RGBA", "LA", "P", "1", "I;16"])
@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (8, 8)])
def test_odd_images_are_answered(client: TestClient, kind: str, size: tuple[int, int]) -> None:
    answer = client.post("/v1/search", content=encoded(Image.new(kind, size)), headers=PNG)
    assert answer.status_code == 200
    assert math.isfinite(answer.json()["kappa"])


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
        "zero": {**good, "embedding": [0.0] * dimension},
        "too long": {**good, "embedding": [2.0, *good["embedding"][1:]]},
        "huge": {**good, "embedding": [1e38] * dimension},
        "huger": {**good, "embedding": [1e300] * dimension},
        "no kappa": {"embedding": good["embedding"]},
        "negative kappa": {**good, "kappa": -1},
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
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"embedding": [' + b"9" * 5000 + b"]}", 400),
        (b"[]", 422),
        (b"null", 422),
        (b"3", 422),
        (b"{}", 422),
    ],
)
def test_malformed_json_is_refused(client: TestClient, body: bytes, status: int) -> None:
    for route in (*ROUTES, "/v1/verify"):
        refused(client.post(route, content=body, headers=JSON), status)


@pytest.mark.parametrize("query", ["k=0", "k=-1", "k=101", "k=x", "k=1.5", "min_probability=nan", "min_probability=2"])
def test_queries_outside_their_range_are_refused(client: TestClient, png: bytes, query: str) -> None:
    response = client.post(f"/v1/search?{query}", content=png, headers=PNG)
    assert query.partition("=")[0] in refused(response, 422)


def test_more_hits_than_there_are_items_gives_all(run_copy: Path, png: bytes) -> None:
    engine = Engine(run_copy, SMALL)
    found = client_of(engine).post("/v1/search?k=100", content=png, headers=PNG).json()
    assert len(found["hits"]) == len(engine.gallery) == 60
    engine.close()


@pytest.mark.parametrize("name", ["..%2Fmetrics", "a%00b", "%F0%9F%98%80", "x" * 200, "a%20", "%2e%2e%2fconfig.yaml"])
def test_ids_that_are_none_are_refused(client: TestClient, png: bytes, name: str) -> None:
    for response in (
        client.get(f"/v1/items/{name}"),
        client.delete(f"/v1/items/{name}"),
        client.put(f"/v1/items/{name}", content=png, headers=PNG),
    ):
        assert response.status_code in (404, 405, 422)
        refused(response, response.status_code)
    refused(client.post("/v1/items", params={"id": "a/b"}, content=png, headers=PNG), 422)


def test_unknown_paths_and_methods_are_json_too(client: TestClient) -> None:
    refused(client.get("/nothing"), 404)
    refused(client.get("/v1/items/nobody"), 404)
    refused(client.post("/v1/health"), 405)
    refused(client.get("/docs"), 404)


def test_a_key_is_needed_where_one_is_set(shared_engine: Engine, png: bytes) -> None:
    client = client_of(shared_engine, key="secret")
    refused(client.post("/v1/search", content=png, headers=PNG), 401)
    refused(client.get("/metrics", headers={"x-api-key": "secre"}), 401)
    assert client.get("/v1/model", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert client.get("/v1/health").status_code == 200


def test_a_full_queue_is_503_with_retry_after(engine: Engine, png: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.network, "_queue", 0)
    response = client_of(engine).post("/v1/search", content=png, headers=PNG)
    refused(response, 503)
    assert int(response.headers["retry-after"]) >= 1


def test_a_disk_that_is_full_is_507_and_searches_go_on(engine: Engine, png: bytes) -> None:
    client, size = client_of(engine), len(engine.gallery)
    writer = engine.gallery._store._writer
    (pages,) = writer.execute("PRAGMA page_count").fetchone()
    writer.execute(f"PRAGMA max_page_count={pages}")
    noise = encoded(Image.effect_noise((128, 128), 90))
    last = None
    for number in range(20):
        last = client.post(f"/v1/items?id={number}-n", content=noise, headers=PNG)
        if last.status_code != 201:
            break
    assert "could not be stored" in refused(last, 507)
    assert client.post("/v1/search", content=png, headers=PNG).status_code == 200
    assert len(engine.gallery) == size + number
    writer.execute("PRAGMA max_page_count=1000000")
    assert client.post("/v1/items?id=later", content=noise, headers=PNG).status_code == 201


def test_a_worker_that_died_is_told_and_replaced(engine: Engine, png: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    client, embed = client_of(engine), engine.network._work

    def die(_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(engine.network, "_work", die)
    refused(client.post("/v1/search", content=png, headers=PNG), 503)
    assert "network worker is being restarted" in refused(client.get("/v1/ready"), 503)
    monkeypatch.setattr(engine.network, "_work", embed)
    assert client.post("/v1/search", content=png, headers=PNG).status_code == 200
    assert client.get("/v1/ready").status_code == 200


def test_a_lost_device_is_replaced_by_the_cpu(engine: Engine, png: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(engine, "device", "meta")
    monkeypatch.setattr(engine.encoder, "observe", lost)
    client = client_of(engine)
    assert "lost" in refused(client.post("/v1/search", content=png, headers=PNG), 503)
    assert engine.device == "cpu"
    assert client.post("/v1/search", content=png, headers=PNG).status_code == 200


def test_a_failure_inside_is_500_and_says_nothing(
    engine: Engine, png: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr(engine.judge.__class__, "answer", fail)
    response = client_of(engine).post("/v1/search", content=png, headers=PNG)
    assert "secret" not in refused(response, 500)
    assert "secret" in caplog.text


def test_the_schema_names_every_route_and_refusal(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    assert {"/v1/search", "/v1/items", "/v1/items/{id}", "/v1/verify", "/v1/model", "/metrics"} <= set(schema["paths"])
    for path in schema["paths"].values():
        for operation in path.values():
            assert {"413", "503"} <= set(operation["responses"])
    assert "image/png" in schema["paths"]["/v1/search"]["post"]["requestBody"]["content"]


def test_errors_of_the_engine_are_typed() -> None:
    error = ServiceError(418, "short and stout", allowed=["tea"])
    assert error.to_json() == {"error": "short and stout", "allowed": ["tea"]}


def test_numbers_in_the_store_are_those_that_were_sent(engine: Engine) -> None:
    client_of(engine).post("/v1/items", json=embedding(engine.gallery.dimension, axis=1, id="e"))
    with warnings.catch_warnings():
        connection = sqlite3.connect(engine.run / "service" / FILE)
        (vector,) = connection.execute("SELECT vector FROM items WHERE id = 'e'").fetchone()
        connection.close()
    assert np.frombuffer(vector, np.float32).tolist() == embedding(engine.gallery.dimension, axis=1)["embedding"]
