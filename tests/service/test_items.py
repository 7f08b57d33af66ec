"""Items that are added and deleted during service, and valid ids."""

import base64
import concurrent.futures
import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from starlette.testclient import TestClient

from lam.gallery.enrolment import ID_RULE
from lam.gallery.store import FILE
from lam.runs.folder import GALLERY
from lam.service.engine import Engine
from tests.milvus_servers import CONTRACTS
from tests.service.asking import JSON, PNG, client_of, embedding, refused

INDEXES = CONTRACTS


def test_items_come_and_go_while_served(engine: Engine, png: bytes) -> None:
    client, size = client_of(engine), len(engine.gallery)
    added = client.post("/v1/items?id=mine&label=a%20thing", content=png, headers=PNG)
    assert added.status_code == 201
    assert (added.json()["label"], added.json()["gallery_size"]) == ("a thing", size + 1)
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


def test_a_label_is_the_same_however_its_accents_and_the_blanks_around_it_are_written(
    engine: Engine, png: bytes
) -> None:
    client = client_of(engine)
    for label in ("Cafe\u0301", "Caf\u00e9", " Caf\u00e9 "):
        client.put("/v1/items/mine", params={"label": label}, content=png, headers=PNG)
        assert client.get("/v1/items/mine").json()["label"] == "Caf\u00e9"


def test_a_put_without_a_label_keeps_it_and_an_empty_one_empties_it(engine: Engine, png: bytes) -> None:
    client = client_of(engine)
    dimension = engine.gallery.dimension
    client.put("/v1/items/mine?label=oak", content=png, headers=PNG)
    assert client.put("/v1/items/mine", content=png, headers=PNG).json()["label"] == "oak"
    assert client.put("/v1/items/mine", json=embedding(dimension)).json()["label"] == "oak"
    assert client.post("/v1/items?id=mine", json=embedding(dimension, 1)).json()["label"] == "oak"
    assert client.get("/v1/items/mine").json()["label"] == "oak"
    assert client.put("/v1/items/mine?label=", content=png, headers=PNG).json()["label"] == ""


def test_a_put_without_metadata_keeps_them_and_empty_ones_empty_them(engine: Engine, png: bytes) -> None:
    client, name = client_of(engine), "/v1/items/mine"
    given = embedding(engine.gallery.dimension, metadata={"page": 3})
    client.put(f"{name}?label=oak", json=given)
    assert client.put(name, content=png, headers=PNG).json()["metadata"] == {"page": 3}
    assert client.put(f"{name}?label=elm", content=png, headers=PNG).json()["metadata"] == {"page": 3}
    changed = client.put(name, json={**given, "metadata": {"page": 4}}).json()
    assert (changed["label"], changed["metadata"]) == ("elm", {"page": 4})
    assert client.put(name, json={**given, "metadata": {}}).json()["metadata"] == {}
    assert client.put("/v1/items/other", content=png, headers=PNG).json()["label"] == ""


@pytest.mark.parametrize("label", ["%00", "oak%1B%5B31m", "%7F", "%C2%85", "%FF", "oak%C3"])
def test_labels_that_are_no_text_are_refused(client: TestClient, png: bytes, label: str) -> None:
    refused(client.put(f"/v1/items/mine?label={label}", content=png, headers=PNG), 422)
    refused(client.get("/v1/items/mine"), 404)


def test_labels_may_have_lines(engine: Engine, png: bytes) -> None:
    added = client_of(engine).put("/v1/items/mine?label=oak%0A%09old", content=png, headers=PNG)
    assert added.json()["label"] == "oak\n\told"


def test_metadata_of_an_image_may_be_called_text(engine: Engine, png: bytes) -> None:
    client, name = client_of(engine), "/v1/items/mine"
    image = {"image": base64.b64encode(png).decode(), "metadata": {"text": "a caption", "page": 1}}
    assert client.put(name, json=image).json()["metadata"] == image["metadata"]
    other = {"image": image["image"], "metadata": {"text": "another caption", "page": 1}}
    refused(client.put(f"{name}?fuse=true", json=other), 409)
    assert client.patch(name, json={"metadata": {"page": 2}}).json()["metadata"]["page"] == 2
    assert client.patch(name, json={"metadata": {"text": "new"}}).json()["metadata"] == {"text": "new", "page": 2}
    assert client.put(name, content=png, headers=PNG).json()["metadata"] == {"text": "new", "page": 2}


def test_metadata_of_a_vector_may_be_called_text(engine: Engine) -> None:
    client, dimension = client_of(engine), engine.gallery.dimension
    client.put("/v1/items/a", json=embedding(dimension, metadata={"text": "a caption", "page": 3}))
    assert client.put("/v1/items/a", json=embedding(dimension, 1)).json()["metadata"]["text"] == "a caption"
    patched = client.patch("/v1/items/a", json={"metadata": {"text": "another"}})
    assert patched.json()["metadata"] == {"text": "another", "page": 3}


def test_a_picture_that_the_client_has_is_not_sent_again(engine: Engine, png: bytes) -> None:
    client = client_of(engine)
    client.put("/v1/items/mine", content=png, headers=PNG)
    for path in ("/v1/items/mine/thumbnail", client.get("/v1/samples").json()["samples"][0]["image"]):
        sent = client.get(path)
        for known in (sent.headers["etag"], f'"x", W/{sent.headers["etag"]}', "*"):
            again = client.get(path, headers={"If-None-Match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", sent.headers["etag"])
        assert client.get(path, headers={"If-None-Match": '"x"'}).content == sent.content


def test_items_are_listed_in_pages(client: TestClient) -> None:
    seen, after = [], ""
    while after is not None:
        page = client.get("/v1/items", params={"after": after, "limit": 25}).json()
        seen, after = seen + [item["id"] for item in page["items"]], page["after"]
    assert len(seen) == len(set(seen)) == page["total"]
    assert seen == sorted(seen)


@pytest.mark.parametrize("identity", ["José García", "東 3", "a:b@c+d=e", "4_2.-", "IMG (1).JPG", "O'Brien & [co], ~!"])
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


NO_IDS = ("a%00b", "%F0%9F%98%80", "x" * 200, "a%20")
OTHER_PATHS = ("..%2Fmetrics", "%2e%2e%2fconfig.yaml", "a%2F..%2Fb")


@pytest.mark.parametrize("name", [*NO_IDS, *OTHER_PATHS])
def test_ids_that_are_none_are_refused_and_lead_to_no_other_path(client: TestClient, png: bytes, name: str) -> None:
    for method, options in (("get", {}), ("delete", {}), ("put", {"content": png, "headers": PNG})):
        response = client.request(method, f"/v1/items/{name}", **options)
        assert "rule for ids" in refused(response, 422)
        assert response.json()["allowed"] == ID_RULE


def test_what_the_address_and_the_body_say_must_be_the_same(client: TestClient, shared_engine: Engine) -> None:
    dimension, size = shared_engine.gallery.dimension, len(shared_engine.gallery)
    for send, path, fields, name in (
        (client.put, "/v1/items/j2", {"id": "j1"}, "id"),
        (client.post, "/v1/items?id=j2", {"id": "j1"}, "id"),
        (client.put, "/v1/items/j2?label=a", {"label": "b"}, "label"),
        (client.post, "/v1/items?id=j2&label=", {"label": "b"}, "label"),
    ):
        response = send(path, json={**embedding(dimension), **fields})
        assert f"the {name} in the address" in refused(response, 422)
    assert len(shared_engine.gallery) == size
    for send, path in (
        (client.put, "/v1/items/j2?label=b"),
        (client.post, "/v1/items?id=j2"),
        (client.post, "/v1/items"),
    ):
        item = send(path, json=embedding(dimension, id="j2", label="b")).json()
        assert (item["id"], item["label"]) == ("j2", "b")
    for fields in ({"label": 3}, {"id": None}):
        said = refused(client.post("/v1/items", json=embedding(dimension, **fields)), 422)
        assert said.startswith(f"{next(iter(fields))}: ")
    client.delete("/v1/items/j2")


def test_without_an_id_content_is_the_id(engine: Engine, png: bytes) -> None:
    client, size = client_of(engine), len(engine.gallery)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.post("/v1/items", content=png, headers=PNG), range(40)))
    assert {answer.text for answer in answers if answer.is_error} == set()
    assert {answer.status_code for answer in answers} == {200, 201}
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
    (hit,) = client.post("/v1/search?k=1", json=embedding(engine.gallery.dimension)).json()["hits"]
    assert (hit["id"], hit["label"], hit["metadata"]) == (added["id"], "axis", {"shelf": 3})
    assert refused(client.get(f"/v1/items/{added['id']}/thumbnail"), 404)


def nested(levels: int) -> str:
    return '{"a": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (nested(33), "32 deep"),
        (nested(150), "32 deep"),
        (nested(200), None),  # at the limit on JSON, or slightly beyond
        (nested(900), "valid JSON"),
        ('{"a": "\\ud800"}', "valid JSON"),
        ('{"\\udfff": 1}', "valid JSON"),
        ('{"a": 1e999}', "must be finite"),
    ],
)
def test_what_could_not_be_shown_is_not_stored(engine: Engine, metadata: str, said: str | None) -> None:
    client, item = client_of(engine), embedding(engine.gallery.dimension)
    for levels in range(190, 206) if said is None else [0]:
        text = metadata if levels == 0 else nested(levels)
        body = json.dumps({**item, "id": "bad", "metadata": "HERE"}).replace('"HERE"', text)
        response = client.post("/v1/items", content=body, headers=JSON)
        assert response.status_code in (400, 422)
        assert said is None or said in response.json()["error"]
    assert engine.gallery.store.get("bad") is None
    body = json.dumps({**item, "metadata": "HERE"}).replace('"HERE"', nested(32))
    stored = client.put("/v1/items/deep", content=body, headers=JSON)
    assert stored.json()["metadata"] == json.loads(nested(32))
    assert client.get("/v1/items?limit=1000").status_code == 200
    assert client.post("/v1/search?k=1", json=item).json()["hits"][0]["metadata"] == json.loads(nested(32))


def test_numbers_in_the_store_are_those_that_were_sent(engine: Engine) -> None:
    client_of(engine).post("/v1/items", json=embedding(engine.gallery.dimension, axis=1, id="e"))
    with closing(sqlite3.connect(engine.run.folder / GALLERY / FILE)) as connection:
        (vector,) = connection.execute("SELECT vector FROM items WHERE id = 'e'").fetchone()
    assert np.frombuffer(vector, np.float32).tolist() == embedding(engine.gallery.dimension, axis=1)["embedding"]
