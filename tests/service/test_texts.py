"""A service of a run on texts: searches, comparisons, additions, and the page for texts."""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from lam.gallery.item import content_id
from lam.service.engine import Engine
from tests.service.asking import JSON, PNG, client_of, embedding, refused
from tests.service.browser import browsing
from tests.service.serving import started


@pytest.fixture
def engine(served_texts: Path) -> Iterator[Engine]:
    with closing(Engine(served_texts)) as opened:
        yield opened


@pytest.fixture
def client(engine: Engine) -> TestClient:
    return client_of(engine)


@pytest.mark.parametrize("address", ["/v1/search", "/v1/items"])
def test_a_body_that_names_no_query_is_told_of_all_kinds(client: TestClient, address: str) -> None:
    response = client.post(address, json={"query": "where is my card?"})
    assert "an image, a text nor" in refused(response, 422)
    assert {"image", "text", "embedding", "kappa"} <= response.json()["allowed"].keys()


def first_hit(client: TestClient, text: str) -> Any:
    return client.post("/v1/search?k=1", json={"text": text}).json()["hits"][0]


def test_a_text_is_added_and_found_with_what_it_says(client: TestClient) -> None:
    body = {"text": " whales sing at noon ", "label": "whales", "metadata": {"page": 3}}
    added = client.post("/v1/items", json=body)
    assert added.status_code == 201
    item = added.json()
    assert item["metadata"] == {"page": 3, "text": "whales sing at noon"}
    assert item["id"] == str(content_id(b"whales sing at noon"))
    assert (item["label"], item["thumbnail"], item["text_cut"]) == ("whales", None, False)
    assert client.get(f"/v1/items/{item['id']}").json()["metadata"] == item["metadata"]
    hit = first_hit(client, "whales sing at noon")
    assert hit["metadata"]["text"] == "whales sing at noon"
    assert hit["score"] == pytest.approx(1)
    again = client.post("/v1/items?label=whales", json={"text": "whales sing at noon", "metadata": {"page": 3}})
    assert (again.status_code, again.json()["gallery_size"]) == (200, item["gallery_size"])
    assert client.delete(f"/v1/items/{item['id']}").status_code == 200
    assert first_hit(client, "whales sing at noon")["id"] != item["id"]


def test_a_text_takes_the_place_of_an_item_or_is_fused_into_it(client: TestClient) -> None:
    assert client.put("/v1/items/whales", json={"text": "whales sing"}).status_code == 201
    assert client.put("/v1/items/whales", json={"text": "whales sing loudly"}).status_code == 200
    assert client.get("/v1/items/whales").json()["metadata"] == {"text": "whales sing loudly"}
    for count, text in ((2, "a song of whales"), (2, "a song of whales"), (3, "whales")):
        fused = client.put("/v1/items/whales?fuse=true", json={"text": text}).json()
        assert (fused["images"], fused["metadata"]) == (count, {"text": "whales sing loudly"})
    other = client.put("/v1/items/whales?fuse=true", json={"text": "sea", "metadata": {"page": 3}})
    assert "metadata" in refused(other, 409)


@pytest.mark.long
def test_what_is_uncertain_is_a_text(engine: Engine, client: TestClient) -> None:
    calibration = engine.responder.calibration
    assert calibration is not None
    calibration = replace(calibration, targets=replace(calibration.targets, ood=0.5))
    engine.searches.responder = replace(engine.responder, calibration=calibration)
    flag = calibration.kappa_below
    texts = [f"{'where is ' * (number % 2)}thing{number}" for number in range(40)]  # known questions, and other texts
    answers = [client.put("/v1/items/it?uncertain=refuse", json={"text": text}) for text in texts]
    kappas = [client.post("/v1/search", json={"text": text}).json()["kappa"] for text in texts]
    assert min(kappas) < flag < max(kappas)
    for answer, kappa in zip(answers, kappas, strict=True):
        assert (answer.status_code == 422) == (kappa < flag)
        if kappa < flag:
            assert refused(answer, 422).startswith("the text is uncertain: ")


def test_of_an_answer_that_is_searched_by_nothing_is_decided(client: TestClient) -> None:
    assert client.get("/v1/model").json()["answers"] is True
    asked = client.post("/v1/search?k=3", json={"text": "where is thing7"}).json()
    assert None not in (asked["decision"], asked["probability"], asked["hits"][0]["accepted"])
    likes = client.get(f"/v1/items/{asked['hits'][0]['id']}/search?k=3").json()
    assert [likes[name] for name in ("decision", "probability", "ood_score", "p_value", "flagged_by")] == [None] * 5
    assert {hit["accepted"] for hit in likes["hits"]} == {None}
    assert asked["hits"][0]["id"] not in {hit["id"] for hit in likes["hits"]}
    assert (likes["threshold"], likes["calibration"]) == (asked["threshold"], "current")


def test_texts_are_compared(client: TestClient) -> None:
    same = {"first": {"text": "where is thing7"}, "second": {"text": "where is thing7"}}
    answer = client.post("/v1/verify", json=same).json()
    assert answer["score"] == pytest.approx(1)
    assert answer["text_cut"] == [False, False]
    dimension = client.get("/v1/model").json()["dimension"]
    mixed = {"first": {"text": 2000 * "fur "}, "second": embedding(dimension)}
    assert client.post("/v1/verify", json=mixed).json()["text_cut"] == [True, False]


@pytest.mark.parametrize("path", ["/v1/search", "/v1/items"])
def test_a_text_that_is_too_long_is_cut_and_that_is_said(client: TestClient, path: str) -> None:
    for text, is_cut in ((2000 * "fur ", True), (1000 * "fur ", False), (4 * "fur ", False)):
        answer = client.post(path, json={"text": text}).json()
        assert answer["text_cut"] is is_cut
    for length, kept in ((2000, 2000), (3000, 2048)):
        added = client.post("/v1/items", json={"text": length * "é"}).json()
        assert (added["metadata"]["text"], added["text_cut"]) == (kept * "é", kept < length)


BAD = {
    "blank": ({"text": " \n\0"}, "the text is empty"),
    "empty": ({"text": ""}, "text: String should have at least 1 character"),
    "number": ({"text": 3}, "text: Input should be a valid string"),
    "both": ({"text": "a", "embedding": [1.0], "kappa": 3.0}, "Extra inputs are not permitted"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_text_is_refused_everywhere(client: TestClient, name: str) -> None:
    body, message = BAD[name]
    size = client.get("/v1/ready").json()["gallery_size"]
    sent = {"/v1/search": body, "/v1/items": body, "/v1/verify": {"first": {"text": "a"}, "second": body}}
    for path, content in sent.items():
        assert message in refused(client.post(path, json=content), 422)
    assert message in refused(client.put("/v1/items/it", json=body), 422)
    assert client.get("/v1/ready").json()["gallery_size"] == size


def test_what_a_text_may_cost_is_the_same_everywhere(client: TestClient) -> None:
    most = client.get("/v1/model").json()["limits"]["max_json_bytes"]
    long = {"text": most * "a"}
    for path in ("/v1/search", "/v1/items"):
        assert f"larger than {most} bytes" in refused(client.post(path, json=long), 413)
    pair = {"first": long, "second": {"text": "a"}}
    assert client.post("/v1/verify", json=pair).status_code == 200
    pair = {"first": {"text": "a"}, "second": {"text": (most + 1) * "a"}}
    assert f"second has {most + 1} characters" in refused(client.post("/v1/verify", json=pair), 413)


def test_metadata_leave_room_for_the_text(client: TestClient) -> None:
    body = {"text": 2048 * "é", "metadata": {"page": 13_000 * "a"}}
    assert "metadata has" in refused(client.post("/v1/items", json=body), 422)
    body = {"text": "a", "metadata": {"text": "b"}}
    assert refused(client.post("/v1/items", json=body), 422).startswith("metadata: ")


def test_a_run_on_texts_takes_no_images(client: TestClient) -> None:
    for path in ("/v1/search", "/v1/items"):
        assert "takes no images" in refused(client.post(path, content=b"x", headers=PNG), 422)
    pair = json.dumps({"first": {"image": "eA=="}, "second": {"text": "a"}})
    assert "takes no images" in refused(client.post("/v1/verify", content=pair, headers=JSON), 422)


@pytest.mark.long
def test_the_page_shows_an_answer_once(served_texts: Path, tmp_path: Path) -> None:
    with browsing(tmp_path / "tab") as tab, started("tests.service.serve_quickly", run=served_texts) as (_, address, _):
        tab.open(address)
        tab.wait("!document.querySelector('#desk').hidden")
        tab.run("document.querySelector('#text').value = 'where is thing7'")
        tab.run("document.querySelector('#asking').requestSubmit()")
        tab.wait("document.querySelectorAll('#hits li').length > 0")
        first = tab.text("#hits li")
        assert first.count("is here") == 1
        assert "#1" in first
        cases = (
            ("{label: 'a', metadata: {text: 'a'}}", True),
            ("{label: 'a', metadata: {text: 'a cat'}}", False),
            ("{label: 'a c… (0a1b2c3d)', metadata: {text: 'a cat'}}", True),
            ("{label: 'a d… (0a1b2c3d)', metadata: {text: 'a cat'}}", False),
            ("{label: '', metadata: {text: 'a cat'}}", False),
            ("{label: 'a', metadata: {}}", False),
        )
        for hit, repeats in cases:
            assert tab.run(f"import('/words.js').then((words) => words.repeatsText({hit}))") is repeats
        long = {"label": f"{'a' * 190}… (0a1b2c3d)", "metadata": {"text": 300 * "a"}, "score": 0.9}
        answer = json.dumps({"probability": 0.9, "hits": [long]})
        script = f"import('/words.js').then((words) => words.verdictOf('match', {answer}, 'identities')[2])"
        assert tab.run(script) == f"Yes: “\u2068{199 * 'a'}…\u2069”"
        assert tab.complaints == []
