"""Batches of queries: each gets the same answer as alone, also if another one is bad."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from lam.service.engine import Engine
from tests.milvus_servers import READING
from tests.service.asking import JSON, PNG, alike, client_of, embedding, opened, refused
from tests.service.conftest import SMALL, encoded

INDEXES = READING


def image_of(file: bytes, head: str = "") -> dict[str, str]:
    return {"image": head + base64.b64encode(file).decode()}


def test_a_batch_gets_what_each_gets_alone(client: TestClient, shared_engine: Engine) -> None:
    dimension = shared_engine.gallery.dimension
    images = [encoded(Image.effect_noise((8, 8), 10 * number)) for number in range(1, 41)]
    vectors = [embedding(dimension, axis, kappa) for axis in range(dimension) for kappa in (1.0, 1e4)]
    queries = [*map(image_of, images), *vectors]
    options = "k=4&min_probability=0.3"
    response = client.post(f"/v1/search/batch?{options}", json={"queries": queries})
    assert response.status_code == 200, response.text
    alone = [client.post(f"/v1/search?{options}", content=image, headers=PNG).json() for image in images]
    alone += [client.post(f"/v1/search?{options}", json=vector).json() for vector in vectors]
    answers = response.json()["answers"]
    for found, wanted in zip(answers, alone, strict=True):
        assert alike(found, {**wanted, "known": found["known"], "probability": found["probability"]}), (found, wanted)
    # two calibration scores one float32 step apart let P(known) of a rare image change by a tenth
    assert sum(map(alike, answers[: len(images)], alone)) >= len(images) - 2
    assert all(map(alike, answers[len(images) :], alone[len(images) :]))
    assert {answer["decision"] for answer in answers} > {"abstain"}


def test_a_bad_query_stops_no_other(client: TestClient, shared_engine: Engine, png: bytes) -> None:
    good = embedding(shared_engine.gallery.dimension)
    bad: dict[int, Any] = {
        415: image_of(b"no image"),
        400: image_of(png[:50]),
        422: embedding(shared_engine.gallery.dimension + 1),
    }
    queries = [image_of(png), *bad.values(), {"text": "a"}, {"image": "?"}, {}, 3, {**good, "more": 1}, good]
    first, *refusals, last = client.post("/v1/search/batch?k=1", json={"queries": queries}).json()["answers"]
    assert len(first["hits"]) == len(last["hits"]) == 1
    assert [one["status"] for one in refusals] == [*bad, 422, 422, 422, 422, 422]
    for query, refusal in zip(queries[1:-1], refusals, strict=True):
        alone = client.post("/v1/search", json=query)
        found = alone.json()
        assert refusal == {"status": alone.status_code, "error": found["error"], "allowed": found["allowed"]}


def test_a_batch_is_searched_within_a_filter(client: TestClient, shared_engine: Engine) -> None:
    where = json.dumps({"must": [{"has_label": ["3"]}]})
    queries = [embedding(shared_engine.gallery.dimension, axis) for axis in range(3)]
    answers = client.post("/v1/search/batch", params={"filter": where}, json={"queries": queries}).json()["answers"]
    for query, answer in zip(queries, answers, strict=True):
        assert {hit["label"] for hit in answer["hits"]} == {"3"}
        assert alike(answer, client.post("/v1/search", params={"filter": where}, json=query).json())
    refused(client.post("/v1/search/batch", params={"filter": "{"}, json={"queries": queries}), 422)
    stricter = {"filter": where, "min_probability": 0.5}
    refused(client.post("/v1/search/batch", params=stricter, json={"queries": queries}), 422)


def test_a_batch_has_limits(client: TestClient, shared_engine: Engine) -> None:
    query = embedding(shared_engine.gallery.dimension)
    limits = client.get("/v1/model").json()["limits"]
    assert (limits["max_batch"], limits["max_batch_json_bytes"]) == (64, 4 * 2**20)
    assert client.post("/v1/search/batch", json={"queries": [query] * 64}).status_code == 200
    assert "65 of them" in refused(client.post("/v1/search/batch", json={"queries": [query] * 65}), 422)
    assert "hits" in refused(client.post("/v1/search/batch?k=51", json={"queries": [query] * 64}), 422)
    assert client.post("/v1/search/batch?k=50", json={"queries": [query] * 64}).status_code == 200
    refused(client.post("/v1/search/batch", content=b"x", headers=PNG), 415)
    refused(client.post("/v1/search/batch", content=b"{", headers=JSON), 400)
    refused(client.post("/v1/search/batch?group=1", json={"queries": [query]}), 422)


def test_a_batch_may_be_larger_than_a_queue(served_run: Path, png: bytes) -> None:
    with opened(served_run, replace(SMALL, queue=2)) as (client, engine):
        queries = [image_of(png), embedding(engine.gallery.dimension)] * 5
        answers = client.post("/v1/search/batch?k=1", json={"queries": queries}).json()["answers"]
        assert [len(answer["hits"]) for answer in answers] == [1] * 10


def test_a_batch_counts_each_decision(served_run: Path) -> None:
    with opened(served_run) as (client, engine):
        query = embedding(engine.gallery.dimension, kappa=1e-6)
        client.post("/v1/search/batch", json={"queries": [query, {}, query]})
        assert 'lam_decisions_total{decision="abstain"} 2.0' in client.get("/metrics").text


@pytest.mark.parametrize("path", ["/v1/search", "/v1/embed", "/v1/items?id=json"])
@pytest.mark.parametrize("head", ["", "data:image/png;base64,"])
def test_an_image_in_json_is_the_image(engine: Engine, png: bytes, path: str, head: str) -> None:
    client = client_of(engine)
    wanted = client.post(path, content=png, headers=PNG).json()
    found = client.post(path, json=image_of(png, head)).json()
    assert alike({**found, "created": None}, {**wanted, "created": None})


def test_an_item_in_json_may_be_a_large_image(engine: Engine) -> None:
    client, noise = client_of(engine), encoded(Image.effect_noise((300, 300), 90))
    facts = {"label": "noise", "metadata": {"note": "a: b"}}
    body = {**image_of(noise, "data:image/png;base64,"), **facts}
    assert len(json.dumps(body)) > 2**16
    added = client.put("/v1/items/noise", json=body)
    assert added.status_code == 201, added.text
    assert {name: added.json()[name] for name in facts} == facts
    assert client.get("/v1/items/noise/thumbnail").status_code == 200
    by_content = client.post("/v1/items", json=image_of(noise)).json()["id"]
    assert by_content == client.post("/v1/items", content=noise, headers=PNG).json()["id"]
