"""Several runs in one process, and runs that are exchanged while requests come."""

import contextlib
import http.client
import json
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from lam.cli import main
from lam.cli.commands import _named_runs
from lam.gallery.store import FILE, ItemStore
from lam.runs.finished import Run
from lam.runs.folder import GALLERY
from lam.service.engine import Engine
from lam.service.keys import Keys
from lam.service.limits import Limits
from lam.service.served_runs import ServedRuns
from lam.utils.files import locked
from tests.service.asking import PNG, client_of, embedding, refused
from tests.service.conftest import HOST, SMALL
from tests.service.serving import Served, served


@pytest.fixture
def two(served_run: Path, tmp_path: Path) -> Iterator[tuple[ServedRuns, TestClient]]:
    """Two runs in one process, and a client of both."""
    other = Path(shutil.copytree(served_run, tmp_path / "other"))
    runs = ServedRuns({"first": served_run, "second": other}, lambda folder: Engine(folder, SMALL))
    yield runs, TestClient(Limits(runs.sites, SMALL), base_url=HOST, raise_server_exceptions=False)
    runs.sites.close()


def test_each_run_answers_under_its_name_and_the_first_at_the_root(
    two: tuple[ServedRuns, TestClient], png: bytes
) -> None:
    runs, client = two
    assert client.put("/runs/second/v1/items/a%2Fnew", content=png, headers=PNG).status_code == 201
    sizes = [client.get(f"{root}/v1/ready").json()["gallery_size"] for root in ("", "/runs/first", "/runs/second")]
    assert sizes == [60, 60, 61]
    assert client.post("/runs/second/v1/search?k=1", content=png, headers=PNG).json()["hits"][0]["id"] == "a/new"
    assert client.get("/runs/second/v1/items/a/new/thumbnail").headers["content-type"] == "image/png"
    refused(client.get("/v1/items/a/new"), 404)
    assert client.get("/runs/second/").headers["content-type"].startswith("text/html")
    assert client.get("/runs/second/app.js").status_code == 200
    schemas = [client.get(f"{root}/openapi.json").json()["servers"] for root in ("", "/runs/first", "/runs/second")]
    assert schemas == [[{"url": "/"}], [{"url": "/"}], [{"url": "/runs/second"}]]
    assert 'route="/v1/search"' in client.get("/runs/second/metrics").text
    assert 'route="/v1/search"' not in client.get("/metrics").text
    assert {name: engine.run.folder.name for name, engine in runs.engines.items()} == {
        "first": "run",
        "second": "other",
    }


@pytest.mark.parametrize("path", ["/runs/third/v1/model", "/runs/third/", "/runs/second", "/runs/", "/runs//v1/model"])
def test_an_unknown_run_is_404_and_tells_the_names_to_those_with_a_key(
    two: tuple[ServedRuns, TestClient], path: str
) -> None:
    runs, client = two
    response = client.get(path)
    assert "no run of this name" in refused(response, 404)
    assert response.json()["allowed"] == ["/runs/first/", "/runs/second/"]
    keyed = TestClient(Limits(runs.sites, SMALL, keys=Keys({"k" * 9: "read"})), base_url=HOST)
    assert "first" not in keyed.get(path).text
    refused(keyed.get(path), 401)


def test_rights_hold_under_names_too(two: tuple[ServedRuns, TestClient], png: bytes) -> None:
    runs, _ = two
    client = TestClient(Limits(runs.sites, SMALL, keys=Keys({"k" * 9: "read"})), base_url=HOST)
    key = {"X-API-Key": "k" * 9}
    assert client.get("/runs/second/v1/health").status_code == 200
    refused(client.get("/runs/second/v1/model"), 401)
    assert client.get("/runs/second/v1/model", headers=key).status_code == 200
    refused(client.put("/runs/second/v1/items/a", content=png, headers={**PNG, **key}), 403)
    refused(client.post("/runs/second/v1/reload", headers=key), 403)


def test_names_come_from_folders_or_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a=b").mkdir()
    words = [f"{tmp_path}/one", f"faces={tmp_path}/two", f"{tmp_path}/a=b"]
    assert list(_named_runs(words)) == ["one", "faces", "a=b"]
    for wrong in (["x/run", "y/run"], ["=x"], ["..=x"]):
        assert main(["serve", *wrong]) == 1
        assert "each run needs a name of its own" in capsys.readouterr().err
    assert main(["serve", "a=x", "b=y", "--index", "milvus://db/photographs"]) == 1
    assert "a Milvus collection belongs to one run" in capsys.readouterr().err


def test_a_run_that_cannot_be_opened_releases_those_before(served_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        ServedRuns({"first": served_run, "second": tmp_path / "none"}, Engine)
    with locked(served_run / GALLERY):
        pass


def test_a_reload_reads_the_calibration_or_tells_why_not(engine: Engine) -> None:
    client, before = client_of(engine), engine.responder
    expected = {"run": "run", "exchanged": False, "calibration": "current", "gallery_size": 60}
    assert client.post("/v1/reload").json() == expected
    assert engine.responder is not before
    tables = next((engine.run.folder / "calibration").glob("*/tables.safetensors"))
    tables.write_bytes(tables.read_bytes()[:-1])
    now = engine.responder
    assert "tables.safetensors is truncated" in refused(client.post("/v1/reload"), 409)
    assert engine.responder is now


def point(link: Path, folder: Path) -> None:
    """Let a link lead elsewhere, at once."""
    new = link.with_name("new-link")
    new.symlink_to(folder)
    new.replace(link)


class Requests:
    """Searches and additions on lasting and on new connections, until the end of the block.

    Attributes:
        statuses: of all answers, or how a connection failed.
        seconds: that `/v1/health` took.
        added: ids that were acknowledged, by the gallery's size in the answer.
    """

    def __init__(self, found: Served, image: bytes, dimension: int) -> None:
        self._found, self._image = found, image
        self._body = json.dumps(embedding(dimension)).encode()
        self.statuses, self.seconds, self.added = Counter[Any](), list[float](), list[str]()
        self._ends = threading.Event()

    def __enter__(self) -> "Requests":
        self._threads = [threading.Thread(target=self._search, args=(lasts,)) for lasts in (True, False, True)]
        self._threads += [threading.Thread(target=self._add), threading.Thread(target=self._health)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _note(self, status: int, answer: dict[str, Any]) -> None:
        """Count an answer; on a slow machine a queue may be too long, which is no loss: the client asks again."""
        is_queue = status == 503 and "of work are before this one" in answer["error"]
        self.statuses["queue" if is_queue else answer["error"] if status >= 400 else status] += 1

    def _search(self, lasts: bool) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._found.port, timeout=20)
        while not self._ends.is_set():
            try:
                connection.request("POST", "/v1/search", self._body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                self._note(response.status, json.loads(response.read()))
            except (OSError, http.client.HTTPException) as error:
                self.statuses[type(error).__name__] += 1
            if not lasts:
                connection.close()
        connection.close()

    def _add(self) -> None:
        for number in range(100_000):
            if self._ends.is_set():
                return
            status, answer = self._found.ask("PUT", f"/v1/items/new-{number}", self._image)
            self._note(status, answer)
            if status == 201:
                self.added.append(f"new-{number}")
            time.sleep(0.01)

    def _health(self) -> None:
        while not self._ends.wait(0.02):
            begun = time.monotonic()
            self.statuses[self._found.ask("GET", "/v1/health")[0]] += 1
            self.seconds.append(time.monotonic() - begun)


def exchanges_lose_nothing(run: Path, png: bytes, folder: Path, times: int) -> dict[str, Any]:
    """Exchange a run again and again, by route and by SIGHUP, while requests come."""
    runs = [run, Path(shutil.copytree(run, folder / "other"))]
    dimension = Run(run).encoder.dimension
    link = folder / "current"
    link.symlink_to(run)
    with served(link) as found, Requests(found, png, dimension) as requests:
        memory = found.memory()
        for number in range(times):
            target = runs[(number + 1) % 2]
            point(link, target)
            if number % 2:
                found.process.send_signal(signal.SIGHUP)
            else:
                status, answer = found.ask("POST", "/v1/reload")
                assert (status, answer["exchanged"], answer["run"]) == (200, True, target.name)
            until = time.monotonic() + 30
            while found.ask("GET", "/v1/model")[1]["run"] != target.name and time.monotonic() < until:
                time.sleep(0.05)
            with contextlib.ExitStack() as stack:
                while time.monotonic() < until:  # the old run is released once it has answered all
                    with contextlib.suppress(ValueError):
                        stack.enter_context(locked(runs[number % 2] / GALLERY))
                        break
                    time.sleep(0.05)
                assert time.monotonic() < until
        grown = found.memory() - memory
    assert set(requests.statuses) <= {200, 201, "queue"}, requests.statuses
    held: set[str] = set()
    for each in runs:
        with contextlib.closing(ItemStore(each / GALLERY / FILE)) as store:
            assert store.check() == []
            held |= {item.id for _, item in store.items_by_key()}
    assert set(requests.added) <= held
    p99 = sorted(requests.seconds)[int(0.99 * len(requests.seconds))]
    return {
        "exchanges": times,
        "answers": sum(requests.statuses.values()),
        "added": len(requests.added),
        "health_p99_ms": round(1000 * p99, 1),
        "memory_mib": round(grown / 2**20, 1),
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
    record_property("exchanges", json.dumps(exchanges_lose_nothing(served_run, png, tmp_path, 20)))


@pytest.mark.long
def test_a_run_that_cannot_be_opened_leaves_the_old_one(served_run: Path, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(served_run)
    with served(link) as found:
        point(link, tmp_path / "none")
        status, answer = found.ask("POST", "/v1/reload")
        assert (status, found.ask("GET", "/v1/ready")[0]) == (409, 200)
        assert "the run stays as it was: there is no folder" in answer["error"]
        found.process.send_signal(signal.SIGHUP)
        until = time.monotonic() + 10
        while "stays as it was" not in found.log.read_text() and time.monotonic() < until:
            time.sleep(0.05)
        assert "current stays as it was: there is no folder" in found.log.read_text()
        assert found.ask("GET", "/v1/ready")[0] == 200
        point(link, served_run)
        assert found.ask("POST", "/v1/reload")[1]["exchanged"] is False
