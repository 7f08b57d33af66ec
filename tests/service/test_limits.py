"""The checks before every route, called as a server calls them."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from lam.service.app import Site, Sites
from lam.service.keys import Keys
from lam.service.limits import HEADERS, Limits
from lam.service.settings import ServiceSettings

SETTINGS = ServiceSettings(max_body=1000, max_held=1500, body_seconds=0.2, linger_seconds=0.1)
LONG = 100_000
LOCAL = ((b"host", b"127.0.0.1:8000"),)


@dataclass
class Reply:
    """The answer that was sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    read: int = 0
    ended: int = 0

    @property
    def error(self) -> str:
        """The error message of a refusal."""
        found = json.loads(self.body)
        assert set(found) == {"error", "allowed", "request_id"}
        return found["error"]


async def echo(scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
    """An application that answers with the size of the body, or fails on request."""
    if scope["path"] == "/fail":
        raise RuntimeError("secret detail")
    message = await receive()
    content = b"x" * LONG if scope["path"] == "/v1/long" else str(len(message["body"])).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": content})


counted: list[tuple[str, str, int]] = []


def limits(key: str | None = None, settings: ServiceSettings = SETTINGS) -> Limits:
    counted.clear()
    return Limits(
        Sites([Site("run", echo, 400, lambda route, method, status, _: counted.append((route, method, status)))]),
        settings,
        keys=None if key is None else Keys({key: "admin"}),
    )


async def ask(
    app: Limits,
    chunks: Iterable[bytes] = (b"",),
    *,
    path: str = "/v1/x",
    headers: Iterable[tuple[bytes, bytes]] = LOCAL,
    pause: float = 0.0,
    gone: bool = False,
    read: asyncio.Event | None = None,
    client: tuple[str, int] | None = None,
    raw_path: bytes = b"",
    method: str = "POST",
) -> Reply:
    """Send a request with a body in chunks; the client may leave before the end, or read only after a signal."""
    reply, left = Reply(), list(chunks)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(pause)
        if not left:
            if gone:
                return {"type": "http.disconnect"}
            await asyncio.sleep(3600)
        chunk = left.pop(0)
        reply.read += len(chunk)
        return {"type": "http.request", "body": chunk, "more_body": bool(left) or gone}

    async def send(message: Any) -> None:
        assert not reply.ended
        if read is not None and message["type"] == "http.response.body":
            await read.wait()
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            reply.body += message["body"]
            reply.ended += not message.get("more_body", False)

    scope = {"type": "http", "http_version": "1.1", "method": method, "path": path, "headers": list(headers)}
    scope |= {"client": client, "raw_path": raw_path}
    await app(scope, receive, send)
    return reply


def answer(*arguments: Any, key: str | None = None, **options: Any) -> Reply:
    return asyncio.run(ask(limits(key), *arguments, **options))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Delays before answers, in seconds; no time passes in the test."""
    made, sleep = list[float](), asyncio.sleep

    async def passed(seconds: float) -> None:
        if is_pause := seconds in (0.02, 0.05):
            made.append(seconds)
        await sleep(0 if is_pause else seconds)

    monkeypatch.setattr(asyncio, "sleep", passed)
    return made


async def _ask_often(app: Limits, path: str, times: int, port: int) -> None:
    for _ in range(times):
        await ask(app, path=path, client=("127.0.0.1", port))


@pytest.mark.parametrize("path", ["/v1/health", "/app.js"])
def test_a_connection_that_floods_what_is_cheap_is_paced_alone(pauses: list[float], path: str) -> None:
    app = limits()
    asyncio.run(_ask_often(app, path, 100, port=1))
    assert len(pauses) >= 40  # 30 of each second pass, and the hundred may fall into two
    pauses.clear()
    asyncio.run(_ask_often(app, path, 20, port=2))
    assert not pauses


def test_an_address_that_connects_anew_for_each_request_is_paced_alone(pauses: list[float]) -> None:
    async def connect(app: Limits, path: str, address: str, times: int) -> None:
        for port in range(times):
            await ask(app, path=path, client=(address, port))

    app = limits()
    asyncio.run(connect(app, "/v1/health", "127.0.0.1", 300))
    assert len(pauses) >= 100  # 100 of each second pass, and the 300 may fall into two
    assert set(pauses) == {0.02}
    pauses.clear()
    asyncio.run(connect(app, "/v1/health", "127.0.0.2", 50))
    asyncio.run(connect(app, "/v1/search", "127.0.0.1", 300))
    assert not pauses


def test_work_is_not_paced(pauses: list[float]) -> None:
    asyncio.run(_ask_often(limits(), "/v1/search", 100, port=1))
    assert not pauses


def test_clients_that_ask_again_at_once_wait_for_a_refusal(pauses: list[float]) -> None:
    assert answer(key="secret").status == 401
    assert len(pauses) == 1
    busy = asyncio.run(ask(limits(settings=replace(SETTINGS, max_held=1)), [b"xx"]))
    assert (busy.status, len(pauses)) == (503, 2)
    assert answer([b"x" * 1001]).status == 413
    assert len(pauses) == 2


def test_a_body_of_the_limit_passes_and_one_more_byte_does_not() -> None:
    assert answer([b"x" * 400, b"x" * 600]).body == b"1000"
    reply = answer([b"x" * 400, b"x" * 601])
    assert reply.status == 413
    assert "larger than 1000 bytes" in reply.error
    assert reply.ended == 1


def test_a_declared_length_is_refused_before_anything_is_read_and_a_false_one_does_not_help() -> None:
    for body, length in ((b"", b"1001"), (b"", b"600000000"), (b"", b"9" * 5000), (b"x" * 1500, b"10")):
        assert answer([body], headers=[*LOCAL, (b"content-length", length)]).status == 413


def test_an_endless_body_is_stopped_and_not_held() -> None:
    reply = answer([b"x" * 100] * 5000)
    assert reply.status == 413
    assert reply.body
    assert counted == [("other", "POST", 413)]


def test_a_body_that_drips_is_refused_in_time() -> None:
    async def timed() -> tuple[Reply, float]:
        started = asyncio.get_running_loop().time()
        reply = await ask(limits(), [b"x"] * 100, pause=0.05)
        return reply, asyncio.get_running_loop().time() - started

    reply, seconds = asyncio.run(timed())
    assert reply.status == 408
    assert "within 0.2 s" in reply.error
    assert reply.read < 10
    assert seconds < 1


def test_a_client_that_goes_is_forgotten() -> None:
    reply = answer([b"x"], gone=True)
    assert reply.status == 0
    assert counted == [("other", "POST", 499)]


def test_all_bodies_together_are_bounded_and_let_go() -> None:
    async def several() -> list[int]:
        app = limits()
        together = await asyncio.gather(*(ask(app, [b"x" * 400, b"x" * 400], pause=0.02) for _ in range(3)))
        later = await ask(app, [b"x" * 1000])
        return [reply.status for reply in together] + [later.status]

    *together, later = asyncio.run(several())
    assert 503 in together
    assert 200 in together
    assert later == 200


def test_answers_that_nobody_reads_count_too() -> None:
    async def several() -> list[int]:
        app, read = limits(), asyncio.Event()
        unread = [asyncio.create_task(ask(app, path="/v1/long", read=read)) for _ in range(2)]
        await asyncio.sleep(0.05)
        refused = [await ask(app, path=path) for path in ("/v1/x", "/v1/health")]
        read.set()
        long = [await task for task in unread]
        assert [reply.body for reply in long] == [b"x" * LONG] * 2
        return [reply.status for reply in (*refused, *long, await ask(app))]

    assert asyncio.run(several()) == [503, 200, 200, 200, 200]


def test_a_key_is_asked_for_where_there_is_one() -> None:
    host = (b"host", b"example.org")
    right = [(b"authorization", b"Bearer k"), (b"x-api-key", b"k"), (b"authorization", b"bearer k")]
    for header in right:
        assert answer(headers=[host, header], key="k").status == 200
    wrong = [(b"authorization", b"Bearer kk"), (b"x-api-key", b""), (b"authorization", b"Basic k"), host]
    for header in wrong:
        reply = answer(headers=[host, header], key="k")
        assert reply.status == 401
        assert reply.headers["www-authenticate"] == "Bearer"
        assert "k" in reply.error
    assert answer(headers=[host], key="k", path="/v1/health").status == 200
    assert answer(headers=[host], key="k", path="/").status == 200
    for path in ("/metrics", "/openapi.json", "/v1/health/", "/v1/items"):
        assert answer(headers=[host], key="k", path=path).status == 401


def test_without_a_key_other_names_for_this_machine_are_refused() -> None:
    for host in (b"localhost", b"LOCALHOST:80", b"localhost.", b"localhost.:80", b"127.0.0.1", b"[::1]:8000", b"[::1]"):
        assert answer(headers=[(b"host", host)]).status == 200
    for host in (b"evil.example", b"127.0.0.1.evil.example:80", b"", b"localhost.evil:8000"):
        assert answer(headers=[(b"host", host)]).status == 421


def test_a_whole_address_is_a_path_and_a_host() -> None:
    long = answer(path="http://127.0.0.1/v1/long", raw_path=b"http://127.0.0.1/v1/long", headers=[])
    assert len(long.body) == LONG
    other = answer(path="HTTP://evil.example/v1/x", raw_path=b"HTTP://evil.example/v1/x")
    assert other.status == 421
    assert answer(path="http://localhost", raw_path=b"http://localhost", headers=[]).status == 200


def test_a_body_of_two_lengths_is_refused() -> None:
    lengths = [(b"Content-Length", b"3"), (b"Transfer-Encoding", b"chunked")]
    assert answer([b"abc"], headers=[*LOCAL, *lengths]).status == 400
    for length in lengths:
        assert answer([b"abc"], headers=[*LOCAL, length]).status == 200


def test_every_answer_has_the_headers() -> None:
    for reply in (answer(), answer([b"x" * 2000]), answer(path="/fail")):
        for name, value in HEADERS.items():
            assert reply.headers[name.lower()] == value
    assert "http:" not in HEADERS["Content-Security-Policy"]


def test_a_failure_says_nothing_of_itself(caplog: pytest.LogCaptureFixture) -> None:
    reply = answer(path="/fail")
    assert reply.status == 500
    assert "its log" in reply.error
    assert "secret detail" in caplog.text


def test_a_limit_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_k must be positive, got 0"):
        ServiceSettings(max_k=0)
