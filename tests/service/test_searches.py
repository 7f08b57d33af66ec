"""Searches and verifications: decisions and their evidence."""

import base64
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

from lam.gallery.refusal import Refusal
from lam.retrieval.decisions.calibration import Targets
from lam.runs.calibrate import CalibrationOptions, calibrate_run
from lam.runs.finished import Run
from lam.service.engine import Engine
from lam.service.queries import Query
from tests.helpers import stored
from tests.service.asking import PNG, embedding, opened, refused
from tests.service.conftest import SMALL, encoded


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
    picture = client.get(hit["thumbnail"])
    assert picture.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(picture.content)).size == (8, 8)


def tensor_of(engine: Engine, png: bytes) -> torch.Tensor:
    ((tensor, _),) = engine.embedder.decode([(png, False)])
    return tensor


def test_an_embedding_gets_what_its_image_gets(shared_engine: Engine, client: TestClient, png: bytes) -> None:
    (query,) = shared_engine.embedder.embed([tensor_of(shared_engine, png)])
    assert isinstance(query, Query)
    body = {"embedding": query.embedding.mean[0].tolist(), "kappa": query.kappa}
    by_embedding = client.post("/v1/search", json=body).json()
    by_image = client.post("/v1/search", content=png, headers=PNG).json()
    assert by_embedding["decision"] == by_image["decision"]
    assert [hit["id"] for hit in by_embedding["hits"]] == [hit["id"] for hit in by_image["hits"]]
    assert by_embedding["kappa"] == pytest.approx(by_image["kappa"])


def test_an_item_is_searched_by_and_left_out(shared_engine: Engine, client: TestClient) -> None:
    (item,) = stored(shared_engine.gallery, limit=1)
    answer = client.get(f"/v1/items/{item.id}/search?k=100").json()
    same = client.post("/v1/search?k=100", json={"embedding": item.embedding.tolist(), "kappa": item.kappa}).json()
    assert item.id not in [hit["id"] for hit in answer["hits"]]
    assert [hit["id"] for hit in answer["hits"]] == [hit["id"] for hit in same["hits"] if hit["id"] != item.id]
    assert answer["kappa"] == same["kappa"] == item.kappa
    assert answer["flagged_by"] == "kappa"
    assert answer["doubt"] is None
    (first,) = client.get(f"/v1/items/{item.id}/search?k=1").json()["hits"]
    assert first["id"] == answer["hits"][0]["id"]
    assert "of this id" in refused(client.get("/v1/items/nobody/search"), 404)
    refused(client.get(f"/v1/items/{item.id}/search?k=0"), 422)


def test_an_image_without_an_embedding_spoils_no_other_of_its_batch(
    served_run: Path, png: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(served_run, replace(SMALL, batch_seconds=0.5))
    good = tensor_of(engine, png)
    whole = engine.embedder.encoder.predict

    def predict(batch: torch.Tensor, **options: Any) -> Any:
        """Predictions of a network for any shape, whose head without a bias gives 0 for a blank image."""
        seen = whole(batch[..., :8, :8], **options)
        nothing = (batch == 0).flatten(1).all(1)[:, None]
        return replace(seen, embeddings=replace(seen.embeddings, mean=seen.embeddings.mean.where(~nothing, 0.0)))

    monkeypatch.setattr(engine.embedder.encoder, "predict", predict)
    for bad in (good * torch.inf, good * 0, torch.cat([good, good], 1) * torch.inf):
        futures = [engine.network.submit(tensor) for tensor in (good, bad, good)]
        assert futures[0].result(5).kappa == pytest.approx(futures[2].result(5).kappa, rel=1e-5)
        with pytest.raises(Refusal, match="no finite embedding") as refusal:
            futures[1].result(5)
        assert refusal.value.status == 422
    engine.close()


def test_a_match_must_be_as_probable_as_is_asked(served_run: Path) -> None:
    calibrate_run(served_run, CalibrationOptions(targets=Targets(far=0.5, ood=0.1), flag="kappa"), progress=False)
    stored = Run(served_run).gallery.embeddings
    pairs = zip(stored.mean.tolist(), stored.kappa.tolist(), strict=True)
    asked = [{"embedding": mean, "kappa": kappa} for mean, kappa in pairs]
    with opened(served_run) as (client, engine):
        answers = [client.post("/v1/search", json=query).json() for query in asked]
        place = next(place for place, answer in enumerate(answers) if answer["decision"] == "match")
        probability = answers[place]["probability"]
        stricter = f"/v1/search?min_probability={min(1.0, probability + 1e-6)}"
        answer = client.post(stricter, json=asked[place]).json()
        assert answer["decision"] == ("unknown" if probability < 1 else "match")
        unsure = client.post("/v1/search", json=embedding(engine.gallery.dimension, kappa=1e-6)).json()
        assert unsure["decision"] == "abstain"
        assert unsure["kappa_capped"]


def test_two_images_are_the_same_or_not(client: TestClient, png: bytes) -> None:
    image = {"image": base64.b64encode(png).decode()}
    answer = client.post("/v1/verify", json={"first": image, "second": image}).json()
    assert answer["score"] == pytest.approx(1)
    assert answer["same"] in (True, None)  # None if κ is too small for a decision
    assert answer["far"] == 0.1
    certain = {**embedding(3), "kappa": 1e6}  # above the flag
    opposite = {**certain, "embedding": [-1.0, *certain["embedding"][1:]]}
    answer = client.post("/v1/verify", json={"first": certain, "second": opposite}).json()
    assert (answer["same"], answer["decision"]) == (False, "unknown")
    for wrong in ({}, {"first": image}, {"first": image, "second": {"image": "?"}}, {"first": 1, "second": 2}):
        refused(client.post("/v1/verify", json=wrong), 422)


def test_a_run_without_calibration_gives_hits_and_no_decision(run_copy: Path, png: bytes) -> None:
    with opened(run_copy, SMALL) as (client, _):
        answer = client.post("/v1/search?k=2", content=png, headers=PNG).json()
        assert (answer["decision"], answer["probability"], answer["calibration"]) == (None, None, "none")
        assert len(answer["hits"]) == 2
        refused(client.get("/v1/calibration"), 404)
        said = refused(client.post("/v1/items?uncertain=refuse", content=png, headers=PNG), 409)
        assert "not calibrated" in said
        assert client.post("/v1/items", content=png, headers=PNG).json()["uncertain"] is None


@pytest.mark.parametrize("kind", ["L", "RGB", "RGBA", "LA", "P", "1", "I;16"])
@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (8, 8)])
def test_odd_images_are_answered(client: TestClient, kind: str, size: tuple[int, int]) -> None:
    answer = client.post("/v1/search", content=encoded(Image.new(kind, size)), headers=PNG)
    assert answer.status_code == 200
    assert math.isfinite(answer.json()["kappa"])


def test_more_hits_than_there_are_items_gives_all(run_copy: Path, png: bytes) -> None:
    with opened(run_copy, SMALL) as (client, engine):
        found = client.post("/v1/search?k=100", content=png, headers=PNG).json()
        assert len(found["hits"]) == len(engine.gallery) == 60
