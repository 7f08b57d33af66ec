"""Ids that are paths, and changes of label and metadata alone."""

import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from lam.service.engine import Engine
from tests.milvus_servers import CONTRACTS
from tests.service.asking import PNG, client_of, embedding, opened, refused

INDEXES = CONTRACTS


def test_ids_may_be_paths(engine: Engine, png: bytes) -> None:
    client, name = client_of(engine), "cats/old ones/1.jpg"
    added = client.put("/v1/items/cats/old ones/1.jpg?label=cat", content=png, headers=PNG)
    assert (added.status_code, added.json()["id"]) == (201, name)
    for path in ("/v1/items/cats/old ones/1.jpg", "/v1/items/cats%2Fold%20ones%2F1.jpg"):
        assert client.get(path).json()["id"] == name
        assert client.get(f"{path}/search?k=1").status_code == 200
        assert client.get(f"{path}/thumbnail").headers["content-type"].startswith("image/")
    assert client.get(added.json()["thumbnail"]).status_code == 200
    assert client.post("/v1/search?k=1", content=png, headers=PNG).json()["hits"][0]["id"] == name
    assert client.post("/v1/items", params={"id": "dogs/1.jpg"}, content=png, headers=PNG).status_code == 201
    filter = json.dumps({"must": [{"has_id": [name, "dogs/1.jpg"]}]})
    listed = client.get("/v1/items", params={"filter": filter}).json()["items"]
    assert [item["id"] for item in listed] == [name, "dogs/1.jpg"]
    assert client.get("/v1/items", params={"after": "cats/z", "limit": 1}).json()["items"][0]["id"] == "dogs/1.jpg"
    assert client.delete("/v1/items/cats/old%20ones/1.jpg").json()["id"] == name
    refused(client.get("/v1/items/cats/old ones/1.jpg"), 404)


@pytest.mark.parametrize(
    "id", ["/a", "a/", "a//b", "a/../b", "a/./b", "..", "a/thumbnail", "a/b/search", "a/ b", "a\\b", "a/" * 64 + "b"]
)
def test_ids_that_no_address_could_name_are_refused(client: TestClient, png: bytes, id: str) -> None:
    refused(client.post("/v1/items", params={"id": id}, content=png, headers=PNG), 422)


def test_an_embedding_searches_and_is_stored_like_its_image(engine: Engine, png: bytes) -> None:
    client = client_of(engine)
    found = client.post("/v1/embed", content=png, headers=PNG).json()
    assert sum(number**2 for number in found["embedding"]) == pytest.approx(1, abs=1e-9)
    client.put("/v1/items/mine", content=png, headers=PNG)
    item = engine.gallery.store.get("mine")
    assert item is not None
    assert found["embedding"] == pytest.approx(item.embedding.tolist(), abs=1e-6)
    assert found["kappa"] == pytest.approx(item.kappa, rel=1e-6)
    assert found["uncertain"] == client.get("/v1/items/mine").json()["uncertain"]
    query = {name: found[name] for name in ("embedding", "kappa")}
    assert client.post("/v1/embed", json=query).json()["embedding"] == pytest.approx(found["embedding"], abs=1e-6)
    assert client.post("/v1/search?k=1", json=query).json()["hits"][0]["id"] == "mine"
    assert len(engine.gallery) == 61
    refused(client.post("/v1/embed", content=b"no image", headers=PNG), 415)
    refused(client.post("/v1/embed", json={"text": "a"}), 422)


def test_ids_of_one_part_may_be_any_word(engine: Engine, png: bytes) -> None:
    client = client_of(engine)
    for name in ("search", "thumbnail", "search/a"):
        assert client.put(f"/v1/items/{name}", content=png, headers=PNG).status_code == 201
        assert client.get(f"/v1/items/{name}").json()["id"] == name
        assert client.get(f"/v1/items/{name}/search?k=1").status_code == 200


def test_a_patch_changes_label_and_metadata_alone(engine: Engine, png: bytes) -> None:
    client, name = client_of(engine), "/v1/items/mine"
    client.put(f"{name}?label=oak", content=png, headers=PNG)
    before = client.get(name).json()
    patched = client.patch(name, json={"metadata": {"a": 1, "b": [2]}}).json()
    assert (patched["label"], patched["metadata"]) == ("oak", {"a": 1, "b": [2]})
    patched = client.patch(name, json={"label": "Cafe\u0301", "metadata": {"a": None, "c": {"d": None}}}).json()
    assert (patched["label"], patched["metadata"]) == ("Caf\u00e9", {"b": [2], "c": {"d": None}})
    assert client.get(name).json() == patched
    assert patched["sha256"] != before["sha256"]
    assert {**patched, "sha256": 0, "label": 0, "metadata": 0} == {**before, "sha256": 0, "label": 0, "metadata": 0}
    hit = client.post("/v1/search?k=1", content=png, headers=PNG).json()["hits"][0]
    assert (hit["id"], hit["score"], hit["metadata"]) == ("mine", pytest.approx(1), patched["metadata"])
    assert len(engine.gallery) == 61
    assert client.patch(name, json={"label": ""}).json()["label"] == ""


@pytest.mark.parametrize(
    "body",
    [
        *[{}, {"labels": "a"}, {"label": 1}, {"label": "a\x00"}, {"label": "a" * 2000}],
        *[{"metadata": []}, {"metadata": {"a": "x" * 20_000}}, []],
    ],
)
def test_a_wrong_patch_changes_nothing(engine: Engine, body: object) -> None:
    client, name = client_of(engine), "/v1/items/mine"
    client.put(name, json=embedding(engine.gallery.dimension, label="oak"))
    before = client.get(name).json()
    refused(client.patch(name, json=body), 422)
    assert client.get(name).json() == before
    refused(client.patch("/v1/items/other", json={"label": "a"}), 404)
    refused(client.patch(name, content=b"{}", headers=PNG), 415)


def test_the_text_of_an_item_is_its_content(served_texts: Path) -> None:
    with opened(served_texts) as (client, _):
        client.put("/v1/items/mine", json={"text": "a thing", "metadata": {"page": 1}})
        refused(client.patch("/v1/items/mine", json={"metadata": {"text": "other"}}), 409)
        patched = client.patch("/v1/items/mine", json={"metadata": {"page": None, "kind": "x"}}).json()
    assert patched["metadata"] == {"text": "a thing", "kind": "x"}
