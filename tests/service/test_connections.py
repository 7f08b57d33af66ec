"""Connections over TCP: their deadlines, their caps, and which one is closed at a cap."""

import asyncio
import contextlib
import functools
import gc
import inspect
import json
import logging
import resource
import socket
import struct
import time
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import uvloop

from lam.service.app import Site, Sites
from lam.service.connections import OpenConnections
from lam.service.limits import Limits
from lam.service.server import _bound, _open_files, _sparing_log, server_of
from lam.service.settings import ServiceSettings

SETTINGS = ServiceSettings(header_seconds=0.4, write_seconds=0.6, body_seconds=5.0, linger_seconds=0.1)
BIG = 15_000_000
GET = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
HALF = b"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\nhalf"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Served:
    """A server in this event loop; its application answers at once, with a large body, or after `let` is set."""

    def __init__(self, settings: ServiceSettings, most: int) -> None:
        self.connections = OpenConnections(most, settings.client_connections)
        self.let, self.counted, self.clients = asyncio.Event(), list[int](), list[Client]()
        limits = Limits(Sites([Site("run", self._app, 1000, lambda *answer: self.counted.append(answer[2]))]), settings)
        self.server, self.port = server_of(limits, settings, self.connections), 0

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if scope["path"] == "/v1/work":
            await self.let.wait()
        body = b"x" * (BIG if scope["path"] == "/v1/big" else 2)
        head = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]}
        await send(head)
        await send({"type": "http.response.body", "body": body})

    async def client(self, first: bytes = b"", *, address: str = "127.0.0.1") -> Client:
        """A connection from an address of this machine, on which something was sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0), limit=1000)
        writer.write(first)
        for _ in range(3):
            await asyncio.sleep(0.01)
        self.clients.append((reader, writer))
        return reader, writer


def serve(test: Callable[[Served], Coroutine[Any, Any, None]], *, most: int = 100, **settings: Any) -> None:
    """Run a test beside a server, and close the connections that it left open."""

    async def run() -> None:
        served = Served(replace(SETTINGS, **settings), most)
        with _bound("127.0.0.1", 0) as listener:
            listener.listen()
            served.port = listener.getsockname()[1]
            ended = asyncio.create_task(served.server.serve([listener]))
            while not served.server.started:
                await asyncio.sleep(0.01)
            try:
                await test(served)
            finally:
                for _, writer in served.clients:
                    writer.close()
                served.let.set()
                served.server.should_exit = True
                await ended

    uvloop.run(run())


def beside(**options: Any) -> Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]:
    """A decorator that turns a coroutine with a server as first argument into a test, by `serve`."""

    def made(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            serve(functools.partial(test, **given), **options)

        _, *others = inspect.signature(test).parameters.values()
        vars(run)["__signature__"] = inspect.Signature(others)  # of what pytest gives
        return run

    return made


async def status(client: Client) -> int:
    """Status of the next answer, from its headers; 0 if the connection was closed."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        head = await asyncio.wait_for(client[0].readuntil(b"\r\n\r\n"), 5)
        return int(head.split()[1])
    return 0


async def closed_after(served: Served, begun: float) -> float:
    """Seconds until the server has no connection."""
    while len(served.connections):
        assert time.monotonic() - begun < 5
        await asyncio.sleep(0.01)
    return time.monotonic() - begun


@beside(header_seconds=60.0, write_seconds=60.0)
async def test_a_connection_that_its_client_closes_is_let_go_at_once(served: Served) -> None:
    clients = [await served.client(GET % b"/v1/x") for _ in range(5)] + [await served.client(HALF)]
    clients += [await served.client(GET % b"/v1/big"), await served.client(b"GET /v1")]
    assert [await status(client) for client in clients[:5]] == [200] * 5
    assert len(served.connections) == 8
    begun = time.monotonic()
    for _, writer in clients:
        writer.close()
    assert await closed_after(served, begun) < 0.3


@pytest.mark.parametrize("requests", [1, 2])
@beside(header_seconds=60.0, write_seconds=60.0)
async def test_who_ends_what_is_sent_is_answered(served: Served, requests: int) -> None:
    reader, writer = await served.client()
    writer.write(GET % b"/v1/work" * requests)
    writer.write_eof()
    await asyncio.sleep(0.05)
    served.let.set()
    answers = await asyncio.wait_for(reader.read(), 5)  # to the end: the connection is closed behind the last one
    assert answers.count(b"HTTP/1.1 200 OK") == answers.count(b"\r\n\r\nxx") == requests
    assert await closed_after(served, time.monotonic()) < 0.3


@pytest.mark.parametrize("first", [b"", b"GET /v1", HALF, GET % b"/v1/x", GET % b"/v1/work" + b"GET /v1"])
@beside(header_seconds=60.0, write_seconds=60.0)
async def test_who_ends_what_is_sent_before_a_request_is_whole_is_let_go(served: Served, first: bytes) -> None:
    _, writer = await served.client(first)
    writer.write_eof()
    served.let.set()
    assert await closed_after(served, time.monotonic()) < 0.3


@beside(header_seconds=60.0)
async def test_nothing_is_kept_of_a_connection_that_its_client_resets(served: Served) -> None:
    reader, writer = await served.client(GET % b"/v1/x")
    assert await status((reader, writer)) == 200
    (kept,) = map(weakref.ref, served.connections._open)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()
    await closed_after(served, time.monotonic())
    await asyncio.sleep(0.05)
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(("first", "drip"), [(b"", b""), (b"GET /v1", b"x"), (GET % b"/v1/x", b"")])
@beside()
async def test_headers_must_come_in_time(served: Served, first: bytes, drip: bytes) -> None:
    """Also if no byte comes, if bytes come slowly, or if no second request follows."""
    begun = time.monotonic()
    _, writer = await served.client(first)
    while len(served.connections) and time.monotonic() - begun < 5:
        writer.write(drip)
        await asyncio.sleep(0.02)
    assert 0.3 < time.monotonic() - begun < 1.5


@pytest.mark.parametrize("requests", [1, 3])
@beside(header_seconds=0.3)
async def test_an_answer_must_be_read_in_time(served: Served, requests: int) -> None:
    begun = time.monotonic()
    await served.client(GET % b"/v1/big" * requests)
    assert 0.4 < await closed_after(served, begun) < 2


@pytest.mark.parametrize(
    ("first", "answer"),
    [(GET % b"/v1/big", 200), (GET % b"/v1/big" * 2, 200), (HALF, 503), (GET % b"/v1/work", 503)],
)
def test_what_is_not_answered_when_the_server_ends_is_no_failure(
    first: bytes, answer: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer is not read, the request is incomplete, or the answer is not ready."""
    monkeypatch.setattr("lam.service.server._GRACE", 0.1)

    async def unanswered(served: Served) -> None:
        client = await served.client(first)
        served.server.should_exit = True
        while served.server.server_state.tasks:
            await asyncio.sleep(0.01)
        assert await status(client) == answer

    serve(unanswered, write_seconds=60.0)
    assert "timeout graceful shutdown exceeded" in caplog.text
    assert "Traceback" not in caplog.text


@beside(max_held=2 * BIG + 1000, write_seconds=60.0)
async def test_clients_that_do_not_read_take_no_memory_from_others(served: Served) -> None:
    """If unread answers fill the allowed memory, the answer that waits longest is dropped."""
    *_, good = [await served.client(GET % path) for path in [b"/v1/big"] * 5 + [b"/v1/x"]]
    assert await status(good) == 200
    assert len(served.connections) == 3  # the last two that do not read, and the one that does


def test_the_system_keeps_little_of_what_is_not_read() -> None:
    """Megabytes for each of a thousand connections would be gigabytes that no limit counts."""
    with _bound("127.0.0.1", 0) as listener, socket.socket() as client:
        listener.listen()
        client.connect(listener.getsockname())
        server, _ = listener.accept()
        with server:
            for sender in (server, client):
                sender.setblocking(False)
            assert _taken(server) < 2**20 + client.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
            assert server.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) <= 2**18


def _taken(sender: socket.socket) -> int:
    """Number of bytes that can be sent while the receiver does not read."""
    taken = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            taken += sender.send(bytes(2**16))
    return taken


@beside()
async def test_an_answer_that_is_read_slowly_is_read_whole_or_cut_in_time(served: Served) -> None:
    for pause, whole in ((0.0, True), (0.02, False)):
        (reader, _), found, begun = await served.client(GET % b"/v1/big"), 0, time.monotonic()
        with contextlib.suppress(ConnectionError):
            while found < BIG and (part := await reader.read(100_000)):
                found += len(part)
                await asyncio.sleep(pause)
        assert (found >= BIG) == whole
        assert await closed_after(served, begun) < 4


@beside()
async def test_requests_one_after_another_and_at_once_are_answered(served: Served) -> None:
    client = await served.client()
    for _ in range(4):
        client[1].write(GET % b"/v1/x" * 2)
        for _ in range(2):
            assert await status(client) == 200
            assert await client[0].readexactly(2) == b"xx"
        await asyncio.sleep(0.2)  # together longer than the deadline of one request


@beside()
async def test_an_answer_in_two_pieces_does_not_wait_for_the_client(served: Served) -> None:
    """With Nagle's algorithm, the second piece would wait for the client's acknowledgement, which comes late."""
    client = await served.client()
    begun = time.monotonic()
    for _ in range(50):
        client[1].write(GET % b"/v1/x")
        assert await status(client) == 200
        assert await client[0].readexactly(2) == b"xx"
    assert time.monotonic() - begun < 1


@beside(most=3, header_seconds=5.0)
async def test_the_one_left_alone_for_longest_gives_way(served: Served) -> None:
    at_work, first, second = await served.client(GET % b"/v1/work"), *[await served.client() for _ in range(2)]
    first[1].write(b"GET /v1/x HTTP/1.1\r\n")  # so the second one waits longest
    await asyncio.sleep(0.05)
    third = await served.client(GET % b"/v1/x")
    assert (await status(third), await status(second)) == (200, 0)
    served.let.set()
    first[1].write(b"Host: 127.0.0.1\r\n\r\n")
    assert [await status(at_work), await status(first)] == [200, 200]


@pytest.mark.parametrize("first", [HALF, GET % b"/v1/big"])
@beside(most=2)
async def test_who_sends_half_a_body_or_does_not_read_gives_way_too(served: Served, first: bytes) -> None:
    clients = [await served.client(first) for _ in range(2)]
    clients.append(await served.client(GET % b"/v1/x"))
    assert await status(clients[-1]) == 200


@pytest.mark.parametrize(("size", "count", "taken"), [(1, 60, True), (1, 40_000, False), (1000, 4000, True)])
@beside()
async def test_a_body_of_very_many_small_chunks_is_refused(served: Served, size: int, count: int, taken: bool) -> None:
    """Chunks of one byte would take seconds per megabyte, without answers to other clients."""
    head = b"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    begun = time.monotonic()
    client = await served.client(head + (b"%x\r\n%s\r\n" % (size, b"x" * size)) * count + b"0\r\n\r\n")
    assert (await status(client) == 200) == taken
    assert time.monotonic() - begun < 0.5


@pytest.mark.parametrize(("count", "taken"), [(3000, True), (30_000, False)])
@beside()
async def test_headers_are_few_even_where_they_come_at_once(served: Served, count: int, taken: bool) -> None:
    client = await served.client((GET % b"/v1/x")[:-2] + b"a:\r\n" * count + b"\r\n")
    assert (await status(client) == 200) == taken


@beside(most=2)
async def test_one_too_many_is_refused_where_all_are_at_work(served: Served) -> None:
    clients = [await served.client(GET % b"/v1/work") for _ in range(2)]
    begun = time.monotonic()
    more = await served.client(b"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n\r\n")
    more[1].write(b"x" * 100_000)
    head = (await more[0].readuntil(b"\r\n\r\n")).decode()
    assert time.monotonic() - begun < 0.5
    assert head.startswith("HTTP/1.1 503 ")
    assert "retry-after: 1\r\n" in head.lower()
    assert "too many connections" in json.loads(await more[0].read())["error"]
    served.let.set()
    assert [await status(client) for client in clients] == [200, 200]
    later = await served.client(GET % b"/v1/x")
    assert await status(later) == 200
    assert sorted(served.counted) == [200, 200, 200, 503]


@beside(most=1, header_seconds=5.0)
async def test_of_very_many_too_many_some_are_closed_without_a_word(served: Served) -> None:
    clients = [await served.client(GET % b"/v1/work")]
    clients += [await served.client() for _ in range(70)]
    assert await status(clients[-1]) == 0
    assert len(served.connections) == 1
    clients[1][1].write(GET % b"/v1/x")
    assert await status(clients[1]) == 503


@beside(client_connections=2)
async def test_one_client_cannot_take_all(served: Served) -> None:
    mine = [await served.client(GET % b"/v1/work") for _ in range(2)]
    more, others = await served.client(GET % b"/v1/x"), await served.client(GET % b"/v1/x", address="127.0.0.2")
    assert (await status(more), await status(others)) == (503, 200)
    mine[0][1].close()
    await asyncio.sleep(0.05)
    again = await served.client(GET % b"/v1/x")
    assert await status(again) == 200


@beside(client_connections=None, most=3)
async def test_behind_a_proxy_all_may_be_of_one_address(served: Served) -> None:
    clients = [await served.client(GET % b"/v1/work") for _ in range(3)]
    served.let.set()
    assert [await status(client) for client in clients] == [200] * 3


def test_http_2_is_refused_and_an_upgrade_is_none(caplog: pytest.LogCaptureFixture) -> None:
    async def asked(served: Served) -> None:
        client = await served.client(PREFACE)
        assert await status(client) == 505
        assert b"HTTP/2" in await client[0].read()
        settings = b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
        websocket = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
        for kind, more in ((b"h2c", settings), (b"websocket", websocket)):
            upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + kind + b"\r\n" + more + b"\r\n"
            client = await served.client((GET % b"/v1/x")[:-2] + upgrade)
            assert await status(client) == 200

    serve(asked)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_what_clients_bring_about_is_logged_once_in_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("lam.service.server.time.monotonic", lambda: now)
    with _sparing_log():
        for number in range(1000):
            logging.getLogger("asyncio").error("socket.accept() out of system resource\nsocket: %d", number)
            logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
            logging.getLogger("lam.service.tracing").error("%d lines of the request log are lost", number)
            logging.getLogger("pymilvus.decorators").error("RPC error: %d", number)
            logging.getLogger("pymilvus.client.connection_manager").warning("Connection recovery failed")
        now = 11.0
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    assert [record.getMessage() for record in caplog.records] == [
        "socket.accept() out of system resource\nsocket: 0",
        "Invalid HTTP request received.",
        "0 lines of the request log are lost",
        "Invalid HTTP request received. (999 more like this were not logged)",
    ]
    logging.getLogger("asyncio").error("socket.accept() out of system resource\nsocket: 1")
    assert len(caplog.records) == 5


def test_as_many_files_may_be_open_as_the_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.append(given))
    assert _open_files() == 4096
    assert limits == [(4096, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (500, 500))
    with pytest.raises(ValueError, match="500 files, .*512.*`ulimit -n`"):
        _open_files()
