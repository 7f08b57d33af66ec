"""A service in its own process, with slow clients, kills, signals, and a second process."""

import contextlib
import functools
import http.client
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lam.cli import main
from lam.gallery.item import Item
from lam.gallery.store import FILE, ItemStore
from lam.runs.folder import GALLERY
from lam.service.engine import Engine
from lam.service.settings import ServiceSettings
from lam.utils.files import CorruptFileError
from tests.gallery.test_store import WHOLE, locked
from tests.runs.conftest import Lam
from tests.service.serve_quickly import BODY, HEADERS, LIMIT
from tests.service.serving import Served, at_once, items_in, large_run, served

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def shared(calibrated_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(Path(shutil.copytree(calibrated_run, tmp_path_factory.mktemp("served") / "run"))) as found:
        yield found


def until_closed(port: int, first: bytes, drip: bytes = b"") -> tuple[float, bytes]:
    """Send bytes, then slowly more, until the server closes; returns the seconds and the answer."""
    said, started = b"", time.monotonic()
    with (
        socket.create_connection(("127.0.0.1", port), timeout=0.1) as connection,
        contextlib.suppress(ConnectionError),  # a reset, if the server closed before it read all bytes
    ):
        connection.sendall(first)
        while time.monotonic() - started < 20:
            with contextlib.suppress(TimeoutError):
                received = connection.recv(4096)
                if not received:
                    break
                said += received
            connection.sendall(drip)
    return time.monotonic() - started, said


HEAD = b"POST /v1/search HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: image/png\r\n"
SLOW = {
    "silence": (b"", b"", HEADERS),
    "headers that drip": (b"POST /v1", b"x", HEADERS),
    "a body that drips": (HEAD + b"Content-Length: 5000\r\n\r\n", b"x", BODY),
    "a body that never comes": (HEAD + b"Content-Length: 5000\r\n\r\n", b"", BODY),
    "chunks that drip": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n", BODY),
}


def test_slow_clients_are_closed_in_time(shared: Served) -> None:
    with ThreadPoolExecutor(len(SLOW)) as pool:
        found = list(pool.map(lambda slow: until_closed(shared.port, slow[0], slow[1]), SLOW.values()))
    for (taken, said), (name, (_, _, seconds)) in zip(found, SLOW.items(), strict=True):
        assert seconds - 0.2 < taken < seconds + 10, name
        if seconds == BODY:
            assert said.startswith(b"HTTP/1.1 408"), name
            assert b"within 1.5 s" in said


def good_traffic(found: Served, png: bytes, requests: int) -> float:
    """A high quantile of the durations of requests, in seconds."""
    seconds = []
    for _ in range(requests):
        started = time.monotonic()
        assert found.ask("POST", "/v1/search", png)[0] == 200
        seconds.append(time.monotonic() - started)
    return sorted(seconds)[int(0.9 * requests)]


def slow_ones_do_not_matter(
    found: Served, png: bytes, *, rounds: int, requests: int, allowed: Callable[[float], float]
) -> None:
    """With 200 slow clients, a request takes at most `allowed(seconds)`, for its seconds without them."""
    good_traffic(found, png, 10)
    alone = good_traffic(found, png, requests)
    for _ in range(rounds):
        held = [socket.create_connection(("127.0.0.1", found.port)) for _ in range(200)]
        for number, connection in enumerate(held):
            connection.sendall(HEAD + b"Content-Length: 5000\r\n\r\nx" if number % 2 else b"POST /v1/sea")
        assert good_traffic(found, png, requests) < allowed(alone)
        for connection in held:
            connection.close()


def test_slow_clients_do_not_slow_others(shared: Served, png: bytes) -> None:
    half = BODY / 2  # of the time for which a slow client could block others
    slow_ones_do_not_matter(shared, png, rounds=1, requests=40, allowed=lambda alone: alone + half)


@pytest.mark.slow
def test_slow_clients_do_not_slow_others_for_minutes(shared: Served, png: bytes) -> None:
    slow_ones_do_not_matter(shared, png, rounds=60, requests=100, allowed=lambda alone: 2 * alone + 0.05)


def endless(port: int, head: bytes, chunk: bytes, total: int) -> tuple[bytes, int]:
    """Send until the server stops reading; returns its answer and the number of bytes sent."""
    said, sent = b"", 0
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(head)
        with contextlib.suppress(OSError):
            while sent < total:
                connection.sendall(chunk)
                sent += len(chunk)
        with contextlib.suppress(OSError):
            while received := connection.recv(4096):
                said += received
    return said, sent


def test_uploads_beyond_the_limit_are_refused_and_not_held(shared: Served) -> None:
    body = b"x" * LIMIT
    assert shared.ask("POST", "/v1/search", body)[0] == 415
    assert shared.ask("POST", "/v1/search", body[:-1])[0] == 415
    status, found = shared.ask("POST", "/v1/search", body + b"x")
    assert (status, found["allowed"]) == (413, {"max_bytes": LIMIT})
    before, chunk = shared.memory(), b"10000\r\n" + b"x" * 65536 + b"\r\n"
    endless(shared.port, HEAD + b"Content-Length: 629145600\r\n\r\n", b"x" * 65536, 600 * 2**20)
    endless(shared.port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunk, 600 * 2**20)
    assert shared.memory() - before < 32 * 2**20
    said, _ = endless(shared.port, HEAD + b"Content-Length: 629145600\r\n\r\n", b"x", 10)
    assert said.startswith(b"HTTP/1.1 413")


def test_a_second_process_is_refused(served_run: Path, lam: Lam) -> None:
    with served(served_run):
        assert "is in use" in lam("serve", served_run, "--port", "0", code=1).err


def kills_lose_nothing(run: Path, png: bytes, kills: int, *, ready_within: float = 60.0) -> None:
    acknowledged: set[str] = set()
    asked: set[str] = set()
    draw = random.Random(0)
    for kill in range(kills):
        with served(run) as found:
            assert found.seconds < ready_within
            assert found.ask("GET", "/v1/items?limit=1")[1]["total"] >= len(acknowledged)

            def add(worker: int, kill: int = kill, found: Served = found) -> None:
                for number in range(10_000):
                    name = f"{kill}-{worker}-{number}"
                    asked.add(name)
                    try:
                        status, _ = found.ask("PUT", f"/v1/items/{name}", png)
                    except (OSError, http.client.HTTPException, ValueError):
                        return
                    if status == 201:
                        acknowledged.add(name)

            with at_once(functools.partial(add, worker) for worker in range(4)):
                time.sleep(draw.uniform(0.1, 0.6))
                found.process.send_signal(signal.SIGKILL)
        names = [item.id for item in items_in(run) if item.origin == "service"]
        assert len(names) == len(set(names))
        assert acknowledged <= set(names) <= asked
    assert acknowledged


def test_kills_while_items_are_added_lose_nothing(served_run: Path, png: bytes) -> None:
    kills_lose_nothing(served_run, png, 2)


@pytest.mark.slow
def test_many_kills_while_items_are_added_lose_nothing(served_run: Path, png: bytes) -> None:
    kills_lose_nothing(served_run, png, 60)


@pytest.mark.slow
def test_kills_while_items_are_added_to_100_000_cost_ten_seconds(tmp_path: Path, png: bytes) -> None:
    kills_lose_nothing(large_run(tmp_path / "run", 100_000, 512), png, 10, ready_within=10.0)


def drained(run: Path, png: bytes, clients: int) -> None:
    """After SIGTERM with requests in flight, acknowledged items are stored, and the process ends in time."""
    with served(run) as found:
        stored: set[str] = set()

        def add(number: int) -> None:
            name = f"{time.monotonic_ns()}-{number}"
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                if found.ask("PUT", f"/v1/items/{name}", png)[0] == 201:
                    stored.add(name)

        with ThreadPoolExecutor(clients) as pool:
            jobs = [pool.submit(add, number) for number in range(clients)]
            time.sleep(0.05)
            found.process.send_signal(signal.SIGTERM)
            started = time.monotonic()
            assert found.process.wait(15) == 0
            assert time.monotonic() - started < 10
            for job in jobs:
                job.result()
    assert stored <= {item.id for item in items_in(run)}
    assert not (run / GALLERY / f"{FILE}-wal").exists()


def test_a_signal_to_end_drains_what_is_in_flight(served_run: Path, png: bytes) -> None:
    drained(served_run, png, 100)


@pytest.mark.slow
def test_50_signals_drain_what_is_in_flight(served_run: Path, png: bytes) -> None:
    for _ in range(50):
        drained(served_run, png, 100)


def test_without_a_key_only_this_machine_is_served(
    calibrated_run: Path, monkeypatch: pytest.MonkeyPatch, lam: Lam
) -> None:
    monkeypatch.delenv("LAM_API_KEY", raising=False)
    said = lam("serve", calibrated_run, "--host", "0.0.0.0", code=1).err
    assert "needs a key, got host '0.0.0.0'" in said
    wrong = {" ": "is empty", "a b": "no spaces", "clé": "ASCII", "a\nb": "no spaces", "k" * 4097: "at most 4096"}
    for key, message in wrong.items():
        monkeypatch.setenv("LAM_API_KEY", key)
        assert message in lam("serve", calibrated_run, code=1).err
    monkeypatch.delenv("LAM_API_KEY")


def test_behind_a_proxy_one_address_may_have_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("lam.service.server.serve", lambda *_, settings, **__: given.append(settings))
    assert main(["serve", "run"]) == main(["serve", "run", "--behind-proxy"]) == 0
    assert given == [ServiceSettings(), ServiceSettings(client_connections=None)]
    assert ServiceSettings().client_connections == 256


def test_a_key_may_end_with_a_line_break(served_run: Path) -> None:
    with served(served_run, LAM_API_KEY="secret\r\n") as found:
        assert found.ask("GET", "/v1/model", headers={"X-API-Key": "secret"})[0] == 200
        assert found.ask("GET", "/v1/model", headers={"X-API-Key": "secre"})[0] == 401
        connection = http.client.HTTPConnection("127.0.0.1", found.port, timeout=20)
        connection.request("HEAD", "/v1/ready")
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"")
        connection.close()


def test_what_cannot_be_served_is_told(
    served_run: Path, tmp_path: Path, lam: Lam, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "is no folder" in lam("serve", tmp_path / "nothing", "--port", "0", code=1).err
    assert "0 to 65535, got 70000" in lam("serve", served_run, "--port", "70000", code=1).err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1, port {port}" in lam("serve", served_run, "--port", port, code=1).err
    (posterior,) = (served_run / "encoder").glob("*/posterior.safetensors")
    content = bytearray(posterior.read_bytes())
    content[-3] ^= 1
    posterior.write_bytes(content)
    said = lam("serve", served_run, "--port", "0", code=1).err
    assert "posterior.safetensors is truncated" in said
    monkeypatch.setitem(sys.modules, "lam.service.server", None)
    assert "pip install 'lam-retrieval[serve]'" in lam("serve", served_run, code=1).err


def test_pictures_and_reports_that_were_altered_stop_nothing(served_run: Path) -> None:
    for file in (served_run / "report.html", served_run / "metrics.json", *(served_run / "plots").iterdir()):
        file.write_bytes(b"altered")
    Engine(served_run).close()
    (served_run / "config.yaml").write_bytes(b"altered: true")
    with pytest.raises(CorruptFileError, match="config.yaml.*truncated"):
        Engine(served_run)


def test_a_database_that_another_process_locks_stops_the_start(served_run: Path, lam: Lam) -> None:
    with locked(served_run / GALLERY, *WHOLE):
        said = lam("serve", served_run, "--port", "0", code=1).err
    assert "items.sqlite is locked" in said


def test_an_altered_row_stops_the_start_with_its_name(served_run: Path, lam: Lam) -> None:
    with contextlib.closing(ItemStore(served_run / GALLERY / FILE)) as store:
        store.write([Item("mine", b"\0" * 12, 1.0)])
        store._writer.execute("UPDATE items SET label = 'x' WHERE id = 'mine'")
    assert "items.sqlite: rows mine" in lam("serve", served_run, "--port", "0", code=1).err
