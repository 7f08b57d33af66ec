"""Pages of other sites: allowed origins and readable headers."""

import asyncio
from typing import Any

import pytest

from lam.service.limits import Limits
from lam.service.settings import ServiceSettings
from tests.service.test_limits import Reply, answer, ask, limits

ORIGIN = (b"origin", b"https://example.org")
HOST = (b"host", b"127.0.0.1")
PREFLIGHT = [HOST, ORIGIN, (b"access-control-request-method", b"PUT")]


def app(key: str | None = None) -> Limits:
    return limits(key, ServiceSettings(cors_origins=("https://example.org", "http://localhost:5173")))


def replied(app: Limits, **options: Any) -> Reply:
    return asyncio.run(ask(app, **options))


def test_without_an_origin_nothing_is_allowed() -> None:
    for headers in (PREFLIGHT, [HOST, ORIGIN]):
        reply = answer(headers=headers, method="OPTIONS", key="k")
        assert reply.status == 401
        assert not [name for name in reply.headers if name.startswith("access-control")]


def test_a_browser_asks_without_a_key_what_it_may_send() -> None:
    reply = replied(app("k"), headers=PREFLIGHT, method="OPTIONS", path="/v1/items/a")
    assert (reply.status, reply.body, reply.ended) == (204, b"", 1)
    assert reply.headers["access-control-allow-origin"] == "https://example.org"
    assert "PUT" in reply.headers["access-control-allow-methods"]
    allowed = reply.headers["access-control-allow-headers"].split(", ")
    assert {"Authorization", "Content-Type", "X-API-Key"} <= set(allowed)
    other = [HOST, (b"origin", b"https://evil.example"), PREFLIGHT[2]]
    assert replied(app("k"), headers=other, method="OPTIONS").status == 401
    assert replied(app("k"), headers=PREFLIGHT, method="PUT").status == 401
    assert replied(app(), headers=[(b"host", b"evil.example"), *PREFLIGHT[1:]], method="OPTIONS").status == 421


@pytest.mark.parametrize("origin", [b"https://example.org", b"http://localhost:5173"])
def test_answers_and_refusals_may_be_read_by_the_origins(origin: bytes) -> None:
    for key, status in (("k", 401), (None, 200)):
        reply = replied(app(key), headers=[HOST, (b"origin", origin)])
        assert reply.status == status
        assert reply.headers["access-control-allow-origin"] == origin.decode()
        assert reply.headers["vary"] == "Origin"
        assert "X-Request-ID" in reply.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in reply.headers


@pytest.mark.parametrize("origin", [b"https://example.org.evil", b"http://example.org", b"null", b"", b"*"])
def test_others_may_not_read(origin: bytes) -> None:
    reply = replied(app(), headers=[HOST, (b"origin", origin)])
    assert reply.headers["vary"] == "Origin"
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("origin", ["*", "null", "", "example.org", "https://example.org/", "https://*.example.org"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="CORS origin.*https://example.org"):
        ServiceSettings(cors_origins=(origin,))
