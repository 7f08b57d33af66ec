"""Items added over HTTP: uncertain images, and fused images."""

import concurrent.futures
import re
import time
from typing import Any

import pytest
import torch
from PIL import Image

from lam.retrieval.index.fusion import fuse_identities
from lam.service.answers import Responder
from lam.service.engine import Engine
from lam.vmf.embeddings import Embeddings
from tests.service.asking import PNG, client_of, embedding, refused
from tests.service.conftest import encoded


def flag_of(engine: Engine) -> float:
    assert engine.responder.calibration is not None
    return engine.responder.calibration.kappa_below


def test_uncertain_items_are_kept_and_told(engine: Engine) -> None:
    client, flag = client_of(engine), flag_of(engine)
    body = embedding(engine.gallery.dimension, kappa=flag / 2)
    added = client.post("/v1/items?id=uncertain", json=body)
    assert (added.status_code, added.json()["uncertain"]) == (201, True)
    assert not client.put("/v1/items/good?uncertain=keep", json={**body, "kappa": flag * 2}).json()["uncertain"]
    assert client.get("/v1/items/uncertain").json()["uncertain"]
    listed = {item["id"]: item["uncertain"] for item in client.get("/v1/items?limit=1000").json()["items"]}
    assert (listed["uncertain"], listed["good"]) == (True, False)
    hits = {hit["id"]: hit["uncertain"] for hit in client.post("/v1/search?k=2", json=body).json()["hits"]}
    assert hits == {"uncertain": True, "good": False}
    made = engine.responder.calibration
    # the present calibration decides whether an item is uncertain
    engine.searches.responder = Responder(None, engine.responder.dimension)
    assert client.get("/v1/items/uncertain").json()["uncertain"] is None
    assert {hit["uncertain"] for hit in client.post("/v1/search?k=2", json=body).json()["hits"]} == {None}
    engine.searches.responder = Responder(made, engine.responder.dimension)
    assert client.get("/v1/items/uncertain").json()["uncertain"]


def test_uncertain_images_are_refused_where_that_is_asked_for(engine: Engine, png: bytes) -> None:
    client, flag, size = client_of(engine), flag_of(engine), len(engine.gallery)
    body = embedding(engine.gallery.dimension, kappa=flag / 2)
    for send, path in ((client.post, "/v1/items?id=it&"), (client.put, "/v1/items/it?"), (client.post, "/v1/items?")):
        response = send(f"{path}uncertain=refuse", json=body)
        assert re.search(f"uncertain: .*{flag / 2:.6g}.*{flag:.6g}", refused(response, 422))
        assert response.json()["allowed"] == {"kappa_at_least": flag, "or": "uncertain=keep"}
    assert "uncertain" in refused(client.post("/v1/items?uncertain=drop", content=png, headers=PNG), 422)
    assert len(engine.gallery) == size
    assert client.put("/v1/items/it?uncertain=refuse", json={**body, "kappa": flag}).status_code == 201


def test_images_of_one_identity_become_one_item(engine: Engine) -> None:
    client, size, flag = client_of(engine), len(engine.gallery), flag_of(engine)
    mean = torch.nn.functional.normalize(torch.eye(1, 3) + 0.3 * torch.randn(12, 3), dim=1)
    kappa = torch.linspace(2 * flag, 90 * flag, 12, dtype=torch.float64)
    bodies = [{"embedding": row.tolist(), "kappa": value} for row, value in zip(mean, kappa.tolist(), strict=True)]

    def send(row: int) -> Any:
        if row % 2:
            return client.put("/v1/items/oak?fuse=true&label=oak", json=bodies[row])
        return client.post("/v1/items?fuse=true&label=oak", json={**bodies[row], "id": "oak"})

    def until_answered(row: int) -> Any:
        while (answer := send(row)).status_code == 503:  # a slow machine has a second of work waiting
            time.sleep(0.05)
        return answer

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(until_answered, [*range(12), *range(12)]))
    assert sorted(answer.status_code for answer in answers) == [200] * 23 + [201]
    assert sorted({answer.json()["images"] for answer in answers}) == list(range(1, 13))
    assert len(engine.gallery) == size + 1
    expected = fuse_identities(Embeddings(mean, kappa, torch.ones_like(kappa), torch.zeros_like(kappa)), [0] * 12)
    found = client.get("/v1/items/oak").json()
    query = {"embedding": expected.embeddings.mean[0].tolist(), "kappa": 9.0}
    (hit,) = client.post("/v1/search?k=1", json=query).json()["hits"]
    assert hit["score"] == pytest.approx(1)
    for shown in (found, hit):
        assert (shown["id"], shown["label"], shown["images"], shown["uncertain"]) == ("oak", "oak", 12, False)
        assert shown["kappa"] == pytest.approx(float(expected.embeddings.kappa), rel=1e-5)
        assert shown["resultant"] == pytest.approx(float(expected.embeddings.resultant), rel=1e-5)
    uncertain = {**bodies[0], "embedding": [0.0, 0.0, 1.0], "kappa": flag / 2}
    refused(client.put("/v1/items/oak?fuse=true&uncertain=refuse", json=uncertain), 422)
    assert client.put("/v1/items/oak?fuse=true", json=uncertain).json()["uncertain"]
    assert client.put("/v1/items/oak", json=bodies[0]).json()["images"] == 1
    assert client.delete("/v1/items/oak").json()["gallery_size"] == size


def test_an_image_file_is_the_same_by_its_bytes(engine: Engine, png: bytes) -> None:
    client = client_of(engine)
    client.post("/v1/items?id=a&label=one", content=png, headers=PNG)
    again = client.post("/v1/items?id=a&fuse=true", content=png, headers=PNG)
    assert (again.status_code, again.json()["images"]) == (200, 1)
    other = client.put("/v1/items/a?fuse=1", content=encoded(Image.radial_gradient("L")), headers=PNG)
    assert (other.json()["images"], other.json()["label"], other.json()["created"]) == (2, "one", False)


def test_what_cannot_be_fused_is_told(engine: Engine, png: bytes) -> None:
    client = client_of(engine)
    body = embedding(engine.gallery.dimension, metadata={"shelf": 3})
    client.post("/v1/items?id=a&label=one", json=body)
    said = refused(client.post("/v1/items?fuse=true", content=png, headers=PNG), 422)
    assert "fuse needs" in said
    said = refused(client.post("/v1/items?id=a&fuse=true&label=two", content=png, headers=PNG), 409)
    assert "the item has 'one', this image 'two'" in said
    said = refused(client.put("/v1/items/a?fuse=true", json={**body, "metadata": {"shelf": 4}}), 409)
    assert "other metadata" in said
    assert "fuse" in refused(client.post("/v1/items?id=a&fuse=perhaps", content=png, headers=PNG), 422)
    assert client.get("/v1/items/a").json()["images"] == 1
