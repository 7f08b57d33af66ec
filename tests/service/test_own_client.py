"""`lam.client` against a service: requests, results and errors."""

import base64
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import date
from operator import methodcaller
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from lam import client as module
from lam.client import Answer, Client, Comparison, Embedding, Group, Hit, Item, ServiceError
from lam.service import models
from tests.helpers import run_python
from tests.service.serving import served

KEY = "k" * 20


@pytest.fixture
def asked(served_run: Path) -> Iterator[Client]:
    with (
        served(served_run, LAM_API_KEY=KEY) as found,
        Client(f"http://127.0.0.1:{found.port}", key=KEY) as client,
    ):
        yield client


def answering(*answers: httpx.Response, **options: Any) -> tuple[Client, list[httpx.Request]]:
    """A client that gets these answers, and its requests."""
    left, requests = list(answers), list[httpx.Request]()

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return left.pop(0)

    return Client("http://service", transport=httpx.MockTransport(answer), **options), requests


def busy(after: str = "0") -> httpx.Response:
    return httpx.Response(503, json={"error": "busy"}, headers={"Retry-After": after})


@pytest.mark.long
def test_items_come_are_found_and_go(asked: Client, png: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png)
    size = len(list(asked.items()))
    item = asked.add(tmp_path / "a.png", id="boxes/1.png", label="grey")
    assert (item.id, item.label, item.metadata) == ("boxes/1.png", "grey", {})
    assert asked.get(item.id) == item
    answer = asked.search(png, k=3)
    assert answer.decision in ("match", "unknown", "abstain")
    assert (answer.hits[0].id, len(answer.hits), answer.gallery_size) == (item.id, 3, size + 1)
    assert answer.fields["threshold"] is not None
    batch = asked.search_batch([png, Embedding([1.0, 0.0, 0.0], 50.0)], k=3)
    assert [found.id for found in batch[0].hits] == [found.id for found in answer.hits]
    assert (len(batch), len(batch[1].hits)) == (2, 3)
    with pytest.raises(ServiceError, match="query 1: ") as refused:
        asked.search_batch([png, b"no picture"])
    assert refused.value.status in (415, 422)
    patched = asked.patch(item.id, metadata={"shelf": 3})
    assert (patched.label, patched.metadata) == ("grey", {"shelf": 3})
    assert asked.patch(item.id, metadata={"shelf": None}).metadata == {}
    filter = {"must": [{"has_label": ["grey"]}]}
    assert [hit.id for hit in asked.search(png, filter=filter).hits] == [item.id]
    assert [found.id for found in asked.items(filter=filter)] == [item.id]
    (group, *_) = asked.search(png, k=2, group_by="label", group_size=1).groups or ()
    assert (group.label, [hit.id for hit in group.hits]) == ("grey", [item.id])
    (hit,) = asked.search_batch([png], filter=filter, score_threshold=0.5, with_vector=True)[0].hits
    assert (
        hit.vector
        == asked.get(item.id, with_vector=True).vector
        == next(asked.items(with_vector=True, filter=filter)).vector
    )
    assert (len(hit.vector), item.vector) == (3, None)
    query = asked.embed(png)
    assert asked.search(query, k=1).hits[0].id == item.id
    other = asked.add(query, label="by its embedding", metadata={"n": None})
    assert (other.label, other.metadata) == ("by its embedding", {"n": None})
    assert asked.verify(png, query).score > 0.99
    assert asked.delete(item.id)
    assert not asked.delete(item.id)
    assert len(list(asked.items())) == size + 1
    two = asked.add_batch([png, query], ids=["a", "b"], labels=["x", ""], metadata=[{"n": np.int64(1)}, {}])
    assert [(item.id, item.label, item.metadata) for item in two] == [("a", "x", {"n": 1}), ("b", "", {})]
    assert asked.delete_items(filter={"must": [{"has_id": ["a", "b"]}]}) == 2
    with pytest.raises(ServiceError, match="nothing was stored: items 1 of 2"):
        asked.add_batch([png, b"no picture"])
    assert asked.judge(answer, label=answer.hits[0].label) in ("holds", "in doubt", "broken")
    with pytest.raises(ServiceError, match="409: .*judged before"):
        asked.judge(answer, label="")


@pytest.mark.long
def test_a_refusal_is_one_exception(asked: Client, png: bytes) -> None:
    with pytest.raises(ServiceError, match="404: .*no item") as refusal:
        asked.get("none")
    assert refusal.value.request_id
    with pytest.raises(ServiceError, match="422: k.*allowed.*100") as refusal:
        asked.search(png, k=0)
    assert refusal.value.allowed["minimum"] == 1
    with pytest.raises(ServiceError, match="415"):
        asked.search(b"no image")
    with Client(str(asked._http.base_url), key="wrong") as other, pytest.raises(ServiceError, match="401"):
        other.search(png)


def test_a_key_is_read_from_a_file_with_its_line_break() -> None:
    client, requests = answering(httpx.Response(200, json={"deleted": True}), key=f"{KEY}\n")
    assert client.delete("a")
    assert requests[0].headers["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("key", ["\n", "my secret", "секрет"])
def test_a_key_that_no_header_holds_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match="key.*ASCII") as refused:
        Client("http://127.0.0.1:1", key=key)
    assert key not in str(refused.value)


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize(
    ("id", "error"), [("none/../a", ValueError), ("..", ValueError), ("./a", ValueError), (5, TypeError)]
)
def test_an_id_never_leads_to_another_item(id: Any, error: type[Exception]) -> None:
    client, requests = answering()
    for ask in (client.get, client.delete, client.patch):
        with pytest.raises(error, match="id has no part|id must.*int: .*str"):
            ask(id)
    assert not requests


def test_a_refusal_says_what_is_allowed() -> None:
    client, _ = answering(httpx.Response(422, json={"error": "embedding has length 2", "allowed": "a unit vector"}))
    with pytest.raises(ServiceError, match="^422: embedding.*2, allowed: a unit vector$"):
        client.embed("text")


def test_one_text_is_no_batch() -> None:
    client, requests = answering()
    with pytest.raises(TypeError, match=r"queries must.*\[text\]"):
        client.search_batch("hello")
    with pytest.raises(TypeError, match=r"contents must.*\[text\]"):
        client.add_batch("hello")
    assert not requests


def test_a_batch_needs_a_fact_for_each_content(png: bytes) -> None:
    client, requests = answering()
    with pytest.raises(ValueError, match="shorter"):
        client.add_batch([png, png], ids=["a"])
    assert not requests


def test_what_is_busy_is_asked_again_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    gone = httpx.Response(404, json={"error": "there is no item"})
    client, requests = answering(busy("2"), busy("soon"), busy("999"), gone)
    assert client.delete("a/b c") is False
    assert [request.url.raw_path for request in requests] == [b"/v1/items/a/b%20c"] * 4
    assert slept == [2.0, 1.0, 30.0]
    client, requests = answering(busy(), busy(), retries=1)
    with pytest.raises(ServiceError, match="503: busy"):
        client.get("a")
    assert len(requests) == 2


def test_no_answer_and_no_json_are_the_same_exception(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="no answer") as failed, Client("http://127.0.0.1:9", retries=0) as client:
        client.get("a")
    assert failed.value.status is None
    for status in (200, 502):
        client, _ = answering(httpx.Response(status, html="<p>proxy</p>"))
        with pytest.raises(ServiceError, match=f"{status}: <p>proxy</p>"):
            client.get("a")
    with pytest.raises(FileNotFoundError):
        client.search(tmp_path / "none.png")


def requests_of(*calls: Callable[[Client], object]) -> list[httpx.Request]:
    """The requests of calls; each is refused."""
    client, requests = answering(*[httpx.Response(418, json={"error": "tea"})] * len(calls))
    for call in calls:
        with pytest.raises(ServiceError, match="418: tea"):
            call(client)
    return requests


@pytest.mark.usefixtures("as_in_production")
def test_queries_are_sent_by_their_kind(png: bytes) -> None:
    queries = (png, b"\xff\xd8\xff", b"RIFF1234WEBP", b"else", "where?", Embedding([1.0, 0.0], 5.0))
    requests = requests_of(*(methodcaller("search", query) for query in queries))
    kinds = [request.headers["content-type"] for request in requests]
    assert kinds == [
        "image/png", "image/jpeg", "image/webp", "application/octet-stream", "application/json", "application/json",
    ]  # fmt: skip
    assert [json.loads(request.content) for request in requests[4:]] == [
        {"text": "where?"}, {"embedding": "AACAPwAAAAA=", "kappa": 5.0},
    ]  # fmt: skip
    assert all(request.url.query == b"k=10" for request in requests)
    for query, kind in (([1.0, 0.0], "list"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"a query must.*{kind}"):
            answering()[0].search(query)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("vector", [np.array([0.6, 0.8], np.float32), torch.tensor([0.6, 0.8])])
@pytest.mark.usefixtures("as_in_production")
def test_vectors_of_other_libraries_are_sent(vector: Any) -> None:
    (request,) = requests_of(methodcaller("search", Embedding(vector, vector[0])))
    sent = json.loads(request.content)
    assert np.frombuffer(base64.b64decode(sent["embedding"]), "<f4").tolist() == pytest.approx([0.6, 0.8])
    assert sent["kappa"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("value", "sent"),
    [(np.int64(7), 7), (np.float32(0.5), 0.5), (np.array([1, 2]), [1, 2]), (torch.tensor(3), 3), (np.str_("a"), "a")],
)
def test_values_of_other_libraries_are_sent_as_json(value: Any, sent: Any) -> None:
    filter = {"must": [{"key": "a", "match": {"value": value}}]}
    add, search = methodcaller("add", "text", metadata={"a": value}), methodcaller("search", "text", filter=filter)
    added, searched = requests_of(add, search)
    assert json.loads(added.content)["metadata"] == {"a": sent}
    assert json.loads(searched.url.params["filter"])["must"][0]["match"]["value"] == sent


def test_texts_are_sent_as_utf_8_with_lone_surrogates_replaced() -> None:
    (request,) = requests_of(methodcaller("search", "где? \ud83d"))
    assert request.content == '{"text": "где? ?"}'.encode()


@pytest.mark.usefixtures("as_in_production")
def test_values_that_json_cannot_hold_are_named() -> None:
    client, requests = answering()
    with pytest.raises(TypeError, match=r"metadata and filters.*date: .*str\(value\)"):
        client.add("text", metadata={"day": date(2024, 1, 5)})
    label: Any = float("nan")
    with pytest.raises(TypeError, match=r"label must.*float: .*str\(value\)"):
        client.add("text", label=label)
    assert not requests


@pytest.mark.parametrize(
    ("record", "answer"),
    [
        (Embedding, models.EmbedResponse),
        (Item, models.ItemResponse),
        (Hit, models.Hit),
        (Group, models.Group),
        (Answer, models.SearchResponse),
        (Comparison, models.VerifyResponse),
    ],
)
def test_its_fields_are_those_of_the_service(record: Any, answer: Any) -> None:
    assert {field.name for field in fields(record)} - {"fields"} <= set(answer.model_fields)


def test_the_file_alone_is_a_client() -> None:
    code = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('alone', sys.argv[1]); "
        "sys.modules['alone'] = module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); "
        "assert not {'lam', 'torch', 'numpy'} & set(sys.modules); module.Client('http://x')"
    )
    run_python("-c", code, module.__file__)
