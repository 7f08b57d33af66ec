"""Exchanges of runs during requests: by route and by SIGHUP, in processes and between two requests."""

import asyncio
import contextlib
import http.client
import json
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from lam.gallery.item import Item
from lam.gallery.refusal import Refusal
from lam.gallery.store import FILE, ItemStore
from lam.runs.finished import Run
from lam.runs.folder import GALLERY
from lam.service.app import ServedRuns
from lam.service.embedder import no_texts
from lam.service.engine import Engine
from lam.service.limits import Limits
from lam.service.queries import Query, Search
from lam.service.settings import ServiceSettings
from lam.utils.files import locked
from tests.service.asking import HOST, JSON, client_of, embedding
from tests.service.serving import Served, Watch, at_once, items_in, large_run, served, until


def point(link: Path, folder: Path) -> None:
    """Change the target of a link atomically."""
    new = link.with_name("new-link")
    new.symlink_to(folder)
    new.replace(link)


def marked(run: Path, name: str) -> Path:
    """A run with an item that identifies it, in the direction of the first axis."""
    with contextlib.closing(ItemStore(run / GALLERY / FILE)) as store:
        axis = np.eye(Run(run).encoder.dimension, dtype=np.float32)[0]
        store.write([Item("mark", axis.tobytes(), 50.0, label=name)])
    return run


def is_free(gallery: Path) -> bool:
    """Whether no process has a gallery open."""
    with contextlib.suppress(ValueError), locked(gallery):
        return True
    return False


class Requests:
    """Searches and additions on lasting and on new connections.

    Attributes:
        right: names of the runs whose answers are right at present.
        statuses: statuses of all answers, errors of refusals, failures of connections, and wrong answers.
        seconds: durations of `/v1/health`.
        added: acknowledged ids.
    """

    def __init__(self, found: Served, image: bytes, dimension: int, right: str) -> None:
        self._found, self._image = found, image
        self._body = json.dumps(embedding(dimension)).encode()
        self.right = {right}
        self.statuses, self.seconds, self.added = Counter[Any](), list[float](), list[str]()
        self._ends = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Send requests during the block."""
        jobs = [partial(self._search, lasts) for lasts in (True, False, True)]
        with at_once([*jobs, *(partial(self._add, name) for name in "ab"), self._health]):
            try:
                yield
            finally:
                self._ends.set()

    def _search(self, lasts: bool) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._found.port, timeout=20)
        while not self._ends.is_set():
            right = self.right
            try:
                connection.request("POST", "/v1/search?k=1", self._body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                answer = json.loads(response.read())
                is_right = response.status >= 400 or answer["hits"][0]["label"] in right | self.right
                self.statuses[answer.get("error", response.status) if is_right else "wrong"] += 1
            except (OSError, http.client.HTTPException) as error:
                self.statuses[type(error).__name__] += 1
            if not lasts:
                connection.close()
        connection.close()

    def _add(self, name: str) -> None:
        for number in range(100_000):
            if self._ends.wait(0.01):
                return
            status, answer = self._found.ask("PUT", f"/v1/items/{name}-{number}", self._image)
            self.statuses[answer.get("error", status)] += 1
            if status == 201:
                self.added.append(f"{name}-{number}")

    def _health(self) -> None:
        while not self._ends.wait(0.02):
            begun = time.monotonic()
            self.statuses[self._found.ask("GET", "/v1/health")[0]] += 1
            self.seconds.append(time.monotonic() - begun)


def two_runs(run: Path, folder: Path) -> tuple[list[Path], Path]:
    """A run and another, each with its mark, and a link to the first."""
    runs = [marked(run, "run"), marked(Path(shutil.copytree(run, folder / "other")), "other")]
    (link := folder / "current").symlink_to(run)
    return runs, link


def exchanges_lose_nothing(run: Path, png: bytes, folder: Path, times: int) -> dict[str, Any]:
    """Exchange a run again and again, by route and by SIGHUP, while requests come: each gets the right answer.

    The old run must be released each time, once it has answered its requests.
    """
    (runs, link), dimension = two_runs(run, folder), Run(run).encoder.dimension
    with served(link) as found, (requests := Requests(found, png, dimension, run.name)).running():
        memory = [found.memory()]
        for number in range(times):
            target = runs[(number + 1) % 2]
            requests.right = {each.name for each in runs}
            point(link, target)
            if number % 2:
                found.process.send_signal(signal.SIGHUP)
            else:
                status, answer = found.ask("POST", "/v1/reload")
                assert (status, answer["exchanged"], answer["run"]) == (200, True, target.name)
            until(lambda name=target.name: found.ask("GET", "/v1/model")[1]["run"] == name, seconds=30.0)
            requests.right = {target.name}
            until(lambda gallery=runs[number % 2] / GALLERY: is_free(gallery), seconds=30.0)
            memory.append(found.memory())
    assert requests.statuses.keys() <= {200, 201}, requests.statuses
    assert set(requests.added) <= {item.id for each in runs for item in items_in(each)}
    p99 = sorted(requests.seconds)[int(0.99 * len(requests.seconds))]
    return {
        "exchanges": times,
        "answers": sum(requests.statuses.values()),
        "added": len(requests.added),
        "health_p99_ms": round(1000 * p99, 1),
        "memory_mib": [round((size - memory[0]) / 2**20) for size in memory[1:]],
    }


@pytest.mark.long
def test_runs_are_exchanged_without_a_lost_request(served_run: Path, png: bytes, tmp_path: Path) -> None:
    found = exchanges_lose_nothing(served_run, png, tmp_path, 2)
    assert found["answers"] > 50
    assert found["added"] > 3


@pytest.mark.slow
def test_runs_are_exchanged_often_without_a_lost_request(
    served_run: Path, png: bytes, tmp_path: Path, record_property: Any
) -> None:
    found = exchanges_lose_nothing(served_run, png, tmp_path, 20)
    record_property("exchanges", json.dumps(found))
    assert found["memory_mib"][-1] < 128


@pytest.mark.long
@pytest.mark.parametrize("root", ["", "/runs/first"])
def test_requests_in_flight_at_an_exchange_are_answered_by_their_run(
    served_run: Path, tmp_path: Path, root: str
) -> None:
    """One request with an incomplete body, some that wait for a busy worker, and one right after the exchange."""
    (runs, link), free = two_runs(served_run, tmp_path), threading.Event()
    served = ServedRuns({"first": link}, Engine)
    old = served.engines["first"]
    body = json.dumps(embedding(old.gallery.dimension)).encode()

    async def asked(client: httpx.AsyncClient, content: Any) -> str:
        response = await client.post(f"{root}/v1/search?k=1", content=content, headers=JSON)
        assert response.status_code == 200, response.text
        return response.json()["hits"][0]["label"]

    def busy() -> Query:
        free.wait(10)
        raise no_texts()

    async def exchanged() -> None:
        comes = asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield body[:9]
            await comes.wait()
            yield body[9:]

        transport = httpx.ASGITransport(Limits(served.sites, ServiceSettings()))
        async with httpx.AsyncClient(transport=transport, base_url=HOST) as client:
            old.searcher.submit(Search(busy, 1))
            waiting = [asyncio.create_task(asked(client, content)) for content in (slowly(), *[body] * 4)]
            while old.searcher.jobs < 5:
                await asyncio.sleep(0.01)
            point(link, runs[1])
            new = await served.reload("first")
            assert [await asked(client, body) for _ in range(2)] == ["other"] * 2
            point(link, runs[0])
            back = asyncio.create_task(served.reload("first"))  # to a run that still answers
            await asyncio.sleep(0.2)
            assert not back.done()
            comes.set()
            free.set()
            assert await asyncio.gather(*waiting) == ["run"] * 5
            assert (await back).run.folder == runs[0]
            assert await asked(client, body) == "run"
            await served.sites.wait_until_closed("first", 10)
            assert not vars(new)

    try:
        asyncio.run(exchanged())
    finally:
        free.set()
        served.sites.close()


@pytest.mark.long
def test_a_run_that_cannot_be_opened_leaves_the_old_one(served_run: Path, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(served_run)
    with served(link) as found:
        point(link, tmp_path / "none")
        status, answer = found.ask("POST", "/v1/reload")
        assert (status, found.ask("GET", "/v1/ready")[0]) == (409, 200)
        assert "is no folder" in answer["error"]
        found.process.send_signal(signal.SIGHUP)
        until(lambda: "stays as it was" in found.log.read_text(), seconds=10.0)
        assert "current stays as it was: " in found.log.read_text()
        assert found.ask("GET", "/v1/ready")[0] == 200
        point(link, served_run)
        assert found.ask("POST", "/v1/reload")[1]["exchanged"] is False


def test_a_run_whose_folder_was_moved_is_still_described(engine: Engine, tmp_path: Path) -> None:
    engine.run.folder.rename(tmp_path / "moved")
    assert client_of(engine).get("/v1/model").json()["gallery"] == "classes"


def test_another_folder_in_the_place_of_the_served_one_is_opened(served_run: Path, tmp_path: Path) -> None:
    other = marked(Path(shutil.copytree(served_run, tmp_path / "other")), "other")
    runs = ServedRuns({"first": served_run}, Engine)

    async def exchanged() -> None:
        served_run.rename(tmp_path / "moved")
        with pytest.raises(ValueError, match="is no folder"):
            await runs.reload("first")
        other.rename(served_run)
        with pytest.raises(Refusal, match="folder was moved.*replaced"):
            await runs.engines["first"].back_up()
        new = await runs.reload("first")
        assert new.gallery.store.get("mark") is not None
        assert await runs.reload("first") is new
        await runs.sites.wait_until_closed("first", 10)

    try:
        asyncio.run(exchanged())
    finally:
        runs.sites.close()


@pytest.mark.slow
def test_backups_and_exchanges_of_a_large_gallery_leave_health_alone(tmp_path: Path, record_property: Any) -> None:
    """20,000 items of 256 dimensions: each exchange opens a run while the run before it is copied.

    Health checks may take 50 ms longer than for an idle service, because other programs may use the processors.
    """
    runs = [large_run(tmp_path / "run", 20_000, 256)]
    runs.append(Path(shutil.copytree(runs[0], tmp_path / "other")))
    link, seconds = tmp_path / "current", {"backup": list[float](), "exchange": list[float]()}
    link.symlink_to(runs[0])

    def take(what: str, found: Served, path: str) -> None:
        begun = time.monotonic()
        status, answer = found.ask("POST", path)
        assert status in (200, 201), answer
        seconds[what].append(time.monotonic() - begun)

    with served(link, "lam", "serve") as found:
        with Watch(found) as alone:
            time.sleep(10)
        with Watch(found) as seen, ThreadPoolExecutor(2) as pool:
            for number in range(10):
                copied = pool.submit(take, "backup", found, "/v1/backup")
                time.sleep(0.05)
                point(link, runs[(number + 1) % 2])
                pool.submit(take, "exchange", found, "/v1/reload").result()
                copied.result()
                for backup in tmp_path.glob("*-backup-*"):
                    shutil.rmtree(backup)
    longest = {f"{what}_s": round(max(each), 1) for what, each in seconds.items()}
    at_rest = {"alone_p99_ms": alone.told()["health_p99_ms"]}
    record_property("exchange beside backup", json.dumps({"exchanges": 10, **longest, **seen.told(), **at_rest}))
    assert set(seen.answers) == {"200"}
    assert seen.p99() < alone.p99() + 0.05
