"""The cost of a body in JSON: only embeddings and images may be large."""

import base64
import json
import os

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from lam.gallery.refusal import Refusal
from lam.service.bodies import JsonLimits, pair_of, queries_of
from lam.service.engine import Engine
from lam.service.queries import Query
from lam.service.settings import ServiceSettings
from tests.service.asking import JSON, base64_of, client_of, embedding, refused

D, MOST = 3, 1000
LIMITS = JsonLimits(D, MOST, max_batch=4, max_batch_json=3000)
IMAGE = {"image": base64.b64encode(b"\xff" * 30_000).decode()}  # of slashes alone


def test_an_embedding_is_a_list_or_base64() -> None:
    numbers = np.array([0.6, 0.0, -0.8], "<f4")
    bodies = [{"embedding": vector, "kappa": 5.0} for vector in (numbers.tolist(), base64_of(numbers))]
    of_list, of_text = queries_of(json.dumps({"queries": bodies}).encode(), LIMITS)
    assert isinstance(of_list, Query)
    assert isinstance(of_text, Query)
    assert torch.equal(of_list.embedding.mean, of_text.embedding.mean)
    assert of_list.embedding.mean[0].tolist() == pytest.approx(numbers.tolist())


@pytest.mark.parametrize("path", ["/v1/search", "/v1/items"])
@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_has_a_limit_of_its_own(client: TestClient, shared_engine: Engine, path: str, kind: str) -> None:
    most = 2**16 + 32 * shared_engine.gallery.dimension
    assert client.get("/v1/model").json()["limits"]["max_json_bytes"] == most
    body = json.dumps(embedding(shared_engine.gallery.dimension)).encode()
    for size, status in ((most, (200, 201)), (most + 1, (413,))):
        response = client.post(path, content=body.ljust(size), headers={"content-type": kind})
        assert response.status_code in status
    assert f"{most} bytes without" in response.json()["error"]
    assert response.json()["allowed"] == {"max_bytes": most}


def pair(first: object, second: object) -> bytes:
    return json.dumps({"first": first, "second": second}).encode()


def test_images_of_a_pair_may_be_large() -> None:
    assert pair_of(pair(IMAGE, IMAGE), LIMITS) == [b"\xff" * 30_000] * 2
    by_some = pair(IMAGE, embedding(D)).replace(b"/", b"\\/")
    image, query = pair_of(by_some, LIMITS)
    assert image == b"\xff" * 30_000
    assert isinstance(query, Query)


LISTS = "[" + "[]," * 3000 + "[]]"
COSTLY = {
    "lists": f'{{"first": {LISTS}}}',
    "lists in an embedding": json.dumps({"first": IMAGE})[:-1] + f', "second": {{"embedding": {LISTS}}}}}',
    "lists behind a quote in a text": '{"first": "a\\"", "second": ' + LISTS + ', "third": "\\""}',
    "lists behind an escaped quote": '{"first": "\\u0022", "second": ' + LISTS + "}",
    "many texts": '{"first": [' + '"",' * 10_000 + '""]}',
    "escapes": '{"first": "' + "\\n" * 10_000 + '"}',
}
LONG = {
    "a text": json.dumps({"first": {"text": "x" * 3000}, "second": IMAGE}),
    "blanks": "{" + " " * 3000 + "}",
    "an image under another name": json.dumps({"first": {"text": IMAGE["image"]}, "second": IMAGE}),
}


@pytest.mark.parametrize("name", COSTLY)
def test_what_costs_more_than_it_weighs_is_refused(name: str) -> None:
    with pytest.raises(Refusal, match="too many values") as refusal:
        pair_of(COSTLY[name].encode(), LIMITS)
    assert refusal.value.status == 413


@pytest.mark.parametrize("name", LONG)
def test_what_is_long_beside_its_images_is_refused(name: str) -> None:
    with pytest.raises(Refusal, match="2000 bytes without") as refusal:
        pair_of(LONG[name].encode(), LIMITS)
    assert (refusal.value.status, refusal.value.allowed) == (413, {"max_bytes": 2 * MOST})


def test_lists_that_another_encoding_hides_are_refused() -> None:
    """In UTF-16, U+2200 contains the byte of a quote."""
    hidden = ('{"first": "\u2200", "second": ' + LISTS + ', "third": "\u2200"}').encode("utf-16-be")
    with pytest.raises(Refusal, match="not valid JSON|too many values"):
        pair_of(hidden, LIMITS)


def test_a_pair_of_large_images_passes_all_of_it(engine: Engine) -> None:
    noise = base64.b64encode(os.urandom(60_000)).decode()
    body = json.dumps({"first": {"image": noise}, "second": {"image": noise}}).encode()
    assert len(body) > ServiceSettings().max_json
    response = client_of(engine).post("/v1/verify", content=body, headers=JSON)
    assert "allowed format" in refused(response, 415)
    costly = ('{"first": ' + LISTS * 10 + "}").encode()
    assert "too many values" in refused(client_of(engine).post("/v1/verify", content=costly, headers=JSON), 413)


@pytest.mark.parametrize("head", ["data:image/png;base64,", "DATA:image/svg+xml;charset=utf-8;BASE64,", ""])
def test_an_image_is_base64_or_a_data_url(head: str) -> None:
    image = {"image": head + IMAGE["image"]}
    assert pair_of(pair(image, IMAGE), LIMITS) == [b"\xff" * 30_000] * 2


@pytest.mark.parametrize(
    "image", ["data:image/png,AAAA", "data:text/plain;base64,AAAA", "data:", "?", "AAA", "QUFB\nQUFB"]
)
def test_other_texts_are_no_image(image: str) -> None:
    with pytest.raises(Refusal, match="of first") as refusal:
        pair_of(pair({"image": image}, IMAGE), LIMITS)
    assert refusal.value.status == 422


def test_a_name_twice_is_refused_beside_colons_in_texts() -> None:
    once = '{"first": {"text": "a:b:c"}, "second": {"text": "data:"}}'
    assert pair_of(once.encode(), LIMITS) == ["a:b:c", "data:"]
    for twice in (
        once[:-1] + ', "second": {"text": "d"}}',
        once.replace('{"text"', '{"text": "", "text"', 1),
        once.replace('"a:b:c"', '"a", "text": "\\u003a"'),
    ):
        with pytest.raises(Refusal, match="more than once"):
            pair_of(twice.encode(), LIMITS)


def test_a_batch_has_a_number_and_a_size() -> None:
    found = queries_of(
        json.dumps({"queries": [IMAGE, embedding(D), {"text": "a"}, {"text": "a" * 1001}]}).encode(), LIMITS
    )
    assert [type(one).__name__ for one in found] == ["bytes", "Query", "str", "Refusal"]
    for bad in ({"queries": [IMAGE] * 5}, {"queries": []}, {"queries": {}}, {}, [], {"queries": [IMAGE], "more": 1}):
        with pytest.raises(Refusal, match="list of queries") as refusal:
            queries_of(json.dumps(bad).encode(), LIMITS)
        assert (refusal.value.status, refusal.value.allowed) == (422, {"queries": "1 to 4"})
    with pytest.raises(Refusal, match="3000 bytes without"):
        queries_of(json.dumps({"queries": [{"text": "a" * 3000}, IMAGE]}).encode(), LIMITS)
