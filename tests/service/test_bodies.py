"""What a body in JSON may cost: little beside an embedding, and images of a pair alone may be large."""

import base64
import json
import os

import pytest
from starlette.testclient import TestClient

from lam.service.answers import Query
from lam.service.bodies import pair_of
from lam.service.engine import Engine
from lam.service.errors import ServiceError
from lam.service.settings import ServiceSettings
from tests.service.asking import JSON, client_of, embedding, refused

D, MOST = 3, 1000
IMAGE = {"image": base64.b64encode(b"\xff" * 30_000).decode()}  # of slashes alone


@pytest.mark.parametrize("path", ["/v1/search", "/v1/items"])
@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_has_a_limit_of_its_own(client: TestClient, shared_engine: Engine, path: str, kind: str) -> None:
    most = 2**16 + 32 * shared_engine.gallery.dimension
    assert client.get("/v1/model").json()["limits"]["max_json_bytes"] == most
    body = json.dumps(embedding(shared_engine.gallery.dimension)).encode()
    for size, status in ((most, (200, 201)), (most + 1, (413,))):
        response = client.post(path, content=body.ljust(size), headers={"content-type": kind})
        assert response.status_code in status
    assert response.json()["error"] == f"the body is larger than {most} bytes"
    assert response.json()["allowed"] == {"max_bytes": most}


def pair(first: object, second: object) -> bytes:
    return json.dumps({"first": first, "second": second}).encode()


def test_images_of_a_pair_may_be_large() -> None:
    assert pair_of(pair(IMAGE, IMAGE), D, MOST) == [b"\xff" * 30_000] * 2
    by_some = pair(IMAGE, embedding(D)).replace(b"/", b"\\/")
    image, query = pair_of(by_some, D, MOST)
    assert image == b"\xff" * 30_000
    assert isinstance(query, Query)


LISTS = "[" + "[]," * 3000 + "[]]"
COSTLY = {
    "lists": f'{{"first": {LISTS}}}',
    "lists in an embedding": json.dumps({"first": IMAGE})[:-1] + f', "second": {{"embedding": {LISTS}}}}}',
    "lists behind a quote in a text": '{"first": "a\\"", "second": ' + LISTS + ', "third": "\\""}',
    "lists behind an escaped quote": '{"first": "\\u0022", "second": ' + LISTS + "}",
    "many texts": '{"first": [' + '"",' * 3000 + '""]}',
    "escapes": '{"first": "' + "\\n" * 3000 + '"}',
    "blanks": "{" + " " * 3000 + "}",
}


@pytest.mark.parametrize("name", COSTLY)
def test_what_costs_more_than_it_weighs_is_refused(name: str) -> None:
    with pytest.raises(ServiceError, match="the body is larger than 1000 bytes beside its images") as refusal:
        pair_of(COSTLY[name].encode(), D, MOST)
    assert (refusal.value.status, refusal.value.allowed) == (413, {"max_bytes": MOST, "and": "base64"})


def test_lists_that_another_encoding_hides_are_refused() -> None:
    """Where U+2200 has the byte of a quote."""
    hidden = ('{"first": "\u2200", "second": ' + LISTS + ', "third": "\u2200"}').encode("utf-16-be")
    with pytest.raises(ServiceError, match="no valid JSON|larger"):
        pair_of(hidden, D, MOST)


def test_a_pair_of_large_images_passes_all_of_it(engine: Engine) -> None:
    noise = base64.b64encode(os.urandom(60_000)).decode()
    body = json.dumps({"first": {"image": noise}, "second": {"image": noise}}).encode()
    assert len(body) > ServiceSettings().max_json
    response = client_of(engine).post("/v1/verify", content=body, headers=JSON)
    assert refused(response, 415) == "the body is no image of an allowed format"
    costly = ('{"first": ' + LISTS * 10 + "}").encode()
    assert "beside its images" in refused(client_of(engine).post("/v1/verify", content=costly, headers=JSON), 413)
