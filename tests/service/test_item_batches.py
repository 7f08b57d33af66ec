"""Items added by the batch: all or none, in one transaction.

The contract follows Qdrant's batch update: operations run in their order, an upsert replaces the point of its id, and
the same request twice leaves the same points.
"""

import base64
import http.client
import json
import random
import shutil
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lam.gallery.gallery import Gallery
from lam.gallery.item import Item
from lam.gallery.operations import Batch, Fuse
from lam.gallery.refusal import Refusal
from lam.gallery.store import ItemStore
from lam.service.engine import Engine
from tests.milvus_servers import CONTRACTS
from tests.service.asking import JSON, PNG, client_of, embedding, refused
from tests.service.serving import at_once, items_in, served

INDEXES = CONTRACTS
D = 3


def items(count: int, prefix: str = "b", **fields: Any) -> dict[str, Any]:
    return {"items": [embedding(D, number % D, 40.0, id=f"{prefix}{number}", **fields) for number in range(count)]}


def test_items_of_all_kinds_are_added_in_their_order(engine: Engine, png: bytes) -> None:
    client, size = client_of(engine), len(engine.gallery)
    image = {"image": base64.b64encode(png).decode(), "label": "grey", "metadata": {"n": 1}}
    body = {"items": [image, *items(2, label="b")["items"], {**embedding(D), "id": "b0", "label": "last"}]}
    answer = client.post("/v1/items/batch", json=body).json()
    assert (answer["stored"], answer["gallery_size"]) == (4, size + 3)
    assert [item["id"] for item in answer["items"][1:]] == ["b0", "b1", "b0"]
    assert [item["created"] for item in answer["items"]] == [True, True, True, False]
    assert client.get("/v1/items/b0").json()["label"] == "last"
    assert client.get(answer["items"][0]["thumbnail"]).status_code == 200
    assert client.post("/v1/items", content=png, headers=PNG).json()["sha256"] == answer["items"][0]["sha256"]
    hits = client.post("/v1/search?k=3", json=embedding(D)).json()["hits"]
    assert "b0" in [hit["id"] for hit in hits]
    again = client.post("/v1/items/batch", json=body).json()
    assert again["gallery_size"] == size + 3
    assert not any(item["created"] for item in again["items"])


@pytest.mark.parametrize("on_error", ["none", "good"])
def test_a_bad_item_is_named_and_none_or_the_good_ones_are_stored(engine: Engine, png: bytes, on_error: str) -> None:
    client, size = client_of(engine), len(engine.gallery)
    bad: list[tuple[int, dict[str, Any]]] = [
        (422, {**embedding(D + 1), "id": "bad"}),
        (422, {**embedding(D), "id": "../bad"}),
        (422, {**embedding(D), "label": "\u0007"}),
        (422, {**embedding(D), "metadata": {"note": "x" * 20_000}}),
        (415, {"image": "AAAA"}),
        (400, {"image": base64.b64encode(png[:50]).decode()}),
        (422, {}),
    ]
    body = {"items": [*items(2)["items"], *(one for _, one in bad), embedding(D, id="end")]}
    response = client.post(f"/v1/items/batch?on_error={on_error}", json=body)
    if on_error == "none":
        what = refused(response, 422)
        assert "nothing was stored" in what
        assert "items 2, 3, 4, 5, 6, 7, 8 of 10" in what
        assert "Item 2: embedding has dimension 4" in what
        assert len(engine.gallery) == size
        assert client.get("/v1/items/end").status_code == 404
    else:
        found = response.json()
        assert (found["stored"], found["gallery_size"]) == (3, size + 3)
        assert [one["status"] for one in found["items"][2:-1]] == [status for status, _ in bad]
        assert [found["items"][place]["id"] for place in (0, 1, 9)] == ["b0", "b1", "end"]


def test_uncertain_items_of_a_batch_are_refused_where_that_is_asked_for(engine: Engine) -> None:
    client, size = client_of(engine), len(engine.gallery)
    assert engine.responder.calibration is not None
    flag = engine.responder.calibration.kappa_below
    body = {"items": [embedding(D, kappa=flag * 2, id="sure"), embedding(D, kappa=flag / 2, id="unsure")]}
    what = refused(client.post("/v1/items/batch?uncertain=refuse", json=body), 422)
    assert "items 1 of 2" in what
    assert len(engine.gallery) == size
    found = client.post("/v1/items/batch?uncertain=refuse&on_error=good", json=body).json()
    assert [one.get("id") for one in found["items"]] == ["sure", None]


def test_images_of_a_batch_are_fused_into_their_items_or_not_at_all(engine: Engine) -> None:
    client = client_of(engine)
    one = [embedding(D, axis, id="one", label="a") for axis in range(2)]
    assert client.post("/v1/items/batch?fuse=true", json={"items": one}).json()["items"][-1]["images"] == 2
    other = [embedding(D, 2, id="one", label="a"), embedding(D, 2, id="one", label="b")]
    assert "Item 1" in refused(client.post("/v1/items/batch?fuse=true", json={"items": other}), 409)
    assert client.get("/v1/items/one").json()["images"] == 2
    found = client.post("/v1/items/batch?fuse=true&on_error=good", json={"items": other}).json()
    assert (found["items"][0]["images"], found["items"][1]["status"]) == (3, 409)
    refused(client.post("/v1/items/batch?fuse=true", json={"items": [embedding(D)]}), 422)


def test_a_batch_of_items_has_limits(engine: Engine) -> None:
    client = client_of(engine)
    for bad in (items(65), {"items": []}, {"items": 3}, {"queries": []}):
        assert "list of items" in refused(client.post("/v1/items/batch", json=bad), 422)
    refused(client.post("/v1/items/batch?on_error=some", json=items(1)), 422)
    refused(client.post("/v1/items/batch", content=b"x", headers=PNG), 415)
    assert client.put("/v1/items/batch", json=embedding(D)).status_code == 201  # an id may have this name
    assert client.get("/v1/items/batch").status_code == 200


def test_an_undone_batch_leaves_ledger_index_and_neighbours_as_they_are(tmp_path: Path) -> None:
    def item(name: str, label: str = "a") -> Item:
        vector = bytes([0, 0, 128, 63]) + bytes(8)  # (1, 0, 0) in float32
        return Item(name, vector, 9.0, label)

    ItemStore(tmp_path / "items.sqlite").close()
    gallery = Gallery(tmp_path, D)
    gallery.write([item("x")])
    conflict = Fuse(item("x", "other"))
    before, undone, kept, after = gallery.write(
        [
            item("before"),
            Batch([item("lost"), item("x", "new"), conflict], whole=True),
            Batch([item("kept"), conflict], whole=False),
            item("after"),
        ]
    )
    assert not any(isinstance(answer, Refusal) for answer in (before, undone, kept, after))
    assert [type(part).__name__ for part in undone.parts] == ["Change", "Change", "Refusal"]
    assert [part.key for part in undone.parts if not isinstance(part, Refusal)] == [None, None]
    assert [type(part).__name__ for part in kept.parts] == ["Change", "Refusal"]
    assert len(gallery) == 4
    gallery.close()
    with closing(ItemStore(tmp_path / "items.sqlite")) as store:
        assert store.check() == []
        labels = {found.id: found.label for _, found in store.items_by_key()}
    assert labels == dict.fromkeys(("x", "before", "kept", "after"), "a")


@pytest.mark.long
def test_a_client_that_leaves_in_the_middle_of_a_batch_leaves_nothing_half(served_run: Path) -> None:
    body = json.dumps(items(60)).encode()
    with served(served_run) as found:
        size = found.ask("GET", "/v1/ready")[1]["gallery_size"]
        for cut in (1, len(body) // 2, len(body) - 1, len(body)):
            connection = http.client.HTTPConnection("127.0.0.1", found.port, timeout=20)
            connection.putrequest("POST", "/v1/items/batch")
            for name, value in {**JSON, "content-length": str(len(body))}.items():
                connection.putheader(name, value)
            connection.endheaders(body[:cut])
            connection.close()
            time.sleep(0.5)
            sizes = {size} if cut < len(body) else {size, size + 60}
            assert found.ask("GET", "/v1/ready")[1]["gallery_size"] in sizes


@pytest.mark.long
def test_a_kill_leaves_each_batch_whole_or_absent(calibrated_run: Path, tmp_path: Path) -> None:
    for turn in range(3):
        run = Path(shutil.copytree(calibrated_run, tmp_path / f"run{turn}"))
        acknowledged: list[int] = []
        with served(run) as found:

            def send(found: Any = found, acknowledged: list[int] = acknowledged) -> None:
                for number in range(1000):
                    body = json.dumps(items(20, f"{number}-")).encode()
                    try:
                        if found.ask("POST", "/v1/items/batch", body, JSON)[0] == 200:
                            acknowledged.append(number)
                    except (OSError, http.client.HTTPException):
                        return

            with at_once([send]):
                time.sleep(0.3 + random.Random(turn).random() / 2)
                found.process.kill()
        counts = Counter(int(item.id.split("-")[0]) for item in items_in(run) if "-" in item.id)
        assert acknowledged
        assert set(counts.values()) == {20}
        assert set(acknowledged) <= set(counts)
