"""Backups of a run that is served.

The contract is that of snapshots in Qdrant's documentation. Creating one is synchronous and answers with name, time of
creation, size and checksum. It holds the configuration and all items of its moment, and nothing later. The service goes
on meanwhile. Several snapshots can exist. A service restored from one answers as the original did then. A checksum
detects an altered copy before use. lam adds: after the answer, the copy is on disk and checked; otherwise none exists.
"""

import http.client
import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lam.gallery.item import Item
from lam.gallery.store import FILE, ItemStore
from lam.runs.backup import RECORD, back_up
from lam.runs.finished import Run
from lam.runs.folder import GALLERY
from lam.service.engine import Engine
from lam.service.keys import Keys
from lam.utils.files import CorruptFileError, read_json, sha256_of
from tests.milvus_servers import CONTRACTS
from tests.runs.conftest import Lam
from tests.service.asking import JSON, PNG, alike, client_of, embedding, refused
from tests.service.serving import ROOT, Served, at_once, items_in, served, until

INDEXES = CONTRACTS


def ids_in(run: Path) -> set[str]:
    return {item.id for item in items_in(run)}


def searched(engine: Engine) -> Any:
    response = client_of(engine).post("/v1/search?k=20", json=embedding(engine.gallery.dimension))
    assert response.status_code == 200
    return {**response.json(), "answer_id": None}  # each answer has its own


def test_a_backup_is_named_sized_and_hashed(engine: Engine) -> None:
    client = client_of(engine)
    made = [client.post("/v1/backup") for _ in range(2)]
    assert [response.status_code for response in made] == [201, 201]
    assert len({response.json()["name"] for response in made}) == 2
    for found in (response.json() for response in made):
        folder = engine.run.folder.parent / found["name"]
        assert found["name"].startswith("run-backup-20")
        assert found["items"] == len(engine.gallery)
        assert found["bytes"] == sum(file["bytes"] for file in found["files"])
        assert {file["name"] for file in found["files"]} >= {"config.yaml", f"{GALLERY}/{FILE}", "metrics.json"}
        for file in found["files"]:
            assert (folder / file["name"]).stat().st_size == file["bytes"]
            assert sha256_of(folder / file["name"]) == file["sha256"]
        assert read_json(folder / RECORD)["files"] == found["files"]
    assert not list(engine.run.folder.parent.glob(".*.tmp"))


def test_a_backup_answers_as_the_run_did_at_its_moment(engine: Engine, png: bytes) -> None:
    client = client_of(engine)
    client.put("/v1/items/before", content=png, headers=PNG)
    client.delete(f"/v1/items/{client.get('/v1/items').json()['items'][0]['id']}")
    then, items = searched(engine), client.get("/v1/items?limit=1000").json()
    name = client.post("/v1/backup").json()["name"]
    client.put("/v1/items/after", content=png, headers=PNG)
    client.delete("/v1/items/before")
    assert searched(engine) != then
    with closing(Engine(engine.run.folder.parent / name)) as copy:
        assert alike(searched(copy), then)
        assert client_of(copy).get("/v1/items?limit=1000").json() == items
        assert client_of(copy).get("/v1/items/before/thumbnail").status_code == 200
        assert copy.run.fingerprint == engine.run.fingerprint


def test_nobody_but_an_admin_makes_one_and_no_path_is_taken(engine: Engine, tmp_path: Path) -> None:
    keys = Keys({"w" * 9: "write", "a" * 9: "admin"})
    client, before = client_of(engine, keys=keys), sorted(engine.run.folder.parent.iterdir())
    assert "needs 'admin'" in refused(client.post("/v1/backup", headers={"X-API-Key": "w" * 9}), 403)
    admin = {"X-API-Key": "a" * 9}
    refused(client.post("/v1/backup?folder=/tmp/mine", headers=admin), 422)
    assert sorted(engine.run.folder.parent.iterdir()) == before
    assert client.post("/v1/backup", headers=admin).status_code == 201


def test_a_backup_that_cannot_be_written_leaves_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(engine.run.folder.parent.iterdir())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lam.runs.backup.sync_folder", full)
    assert "No space left" in refused(client_of(engine).post("/v1/backup"), 507)
    assert sorted(engine.run.folder.parent.iterdir()) == before
    assert client_of(engine).get("/v1/ready").status_code == 200


def test_a_run_that_was_altered_is_not_backed_up(served_run: Path, tmp_path: Path) -> None:
    with closing(ItemStore(served_run / GALLERY / FILE)) as store:
        store.write([Item("mine", b"\0" * 12, 1.0)])
        store._writer.execute("UPDATE items SET label = 'x' WHERE id = 'mine'")
    with pytest.raises(CorruptFileError, match=f"{served_run / GALLERY / FILE}: rows mine"):
        back_up(served_run, tmp_path / "copy")
    (posterior,) = (served_run / "encoder").glob("*/posterior.safetensors")
    posterior.write_bytes(posterior.read_bytes()[:-3])
    with pytest.raises(CorruptFileError, match="posterior.safetensors.*truncated"):
        back_up(served_run, tmp_path / "copy")
    assert {path.name for path in tmp_path.iterdir()} == {served_run.name}


def test_the_command_says_what_it_copied_and_what_it_cannot(
    served_run: Path, tmp_path: Path, lam: Lam, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, other = tmp_path / "copy", tmp_path / "other"
    assert f"MiB: {copy}" in lam("backup", served_run, copy).out
    assert ids_in(copy) == ids_in(served_run)
    for place, said in (
        (copy, "copy exists"),
        (tmp_path / "no" / "copy", "make it first"),
        (served_run / "backups", "in the run"),
    ):
        assert said in lam("backup", served_run, place, code=1).err
    with monkeypatch.context() as patched:
        patched.setattr("os.access", lambda path, _: Path(path) != tmp_path)
        refused = lam("backup", served_run, other, code=1).err
    assert f"{tmp_path} cannot be written" in refused
    lam("backup", tmp_path / "no", other, code=1)
    with Run(served_run).lock():
        assert "is in use" in lam("backup", served_run, other, code=1).err


@pytest.mark.parametrize("part", [GALLERY, "calibration", "samples"])
def test_a_folder_of_the_run_that_is_a_link_is_copied(served_run: Path, tmp_path: Path, part: str) -> None:
    (served_run / part).rename(tmp_path / "elsewhere")
    (served_run / part).symlink_to(tmp_path / "elsewhere")
    copy = back_up(served_run, tmp_path / "copy").folder / part
    assert not copy.is_symlink()
    assert {path.name for path in copy.iterdir()} == {path.name for path in (tmp_path / "elsewhere").iterdir()}


@dataclass
class Traffic:
    """Additions and deletions of items, and searches, until the process ends.

    Attributes:
        found: the process.
        asked, acknowledged, deleted: ids in requests to add, in answers 201, and in requests to delete.
        searched: number of answered searches.
        failed: answers to searches except 200 and 503.
    """

    found: Served
    image: bytes
    body: bytes
    asked: set[str] = field(default_factory=set)
    acknowledged: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    searched: int = 0
    failed: list[int] = field(default_factory=list)

    def add(self, worker: str) -> None:
        """Add items, and delete every fifth."""
        for number in range(100_000):
            self.asked.add(name := f"{worker}-{number}")
            status, _ = self.found.ask("PUT", f"/v1/items/{name}", self.image)
            if status == 201:
                self.acknowledged.add(name)
            if number % 5 == 4:
                self.deleted.add(gone := f"{worker}-{number - 2}")
                self.found.ask("DELETE", f"/v1/items/{gone}")

    def search(self) -> None:
        """Search."""
        while True:
            status, _ = self.found.ask("POST", "/v1/search", self.body, JSON)
            self.searched += status == 200
            self.failed += [status] * (status not in (200, 503))

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """Traffic within the context; the process must end within the context."""
        jobs = [partial(self.add, f"{name}-{worker}") for worker in range(3)] + [self.search]

        def until_the_end(job: Callable[[], None]) -> None:
            with suppress(OSError, http.client.HTTPException, ValueError):
                job()

        with at_once(partial(until_the_end, job) for job in jobs):
            try:
                yield
            finally:
                self.found.process.send_signal(signal.SIGKILL)


@dataclass
class Backups:
    """Backups of a run during traffic, with the ids that each must hold, and may hold.

    Attributes:
        run: the run.
        traffic: changes of the run's items.
        finished: folder, ids that were acknowledged before its start and not deleted, and all ids sent before its end.
    """

    run: Path
    traffic: Traffic
    finished: list[tuple[Path, set[str], set[str]]] = field(default_factory=list)

    @contextmanager
    def _noting(self, folders: list[Path]) -> Iterator[None]:
        before = self.traffic.acknowledged - self.traffic.deleted
        yield
        self.finished += [(folder, before, set(self.traffic.asked)) for folder in folders]

    def by_route(self) -> float:
        """Make a backup by the service; returns the seconds."""
        folders, begun = list[Path](), time.monotonic()
        with self._noting(folders):
            status, answer = self.traffic.found.ask("POST", "/v1/backup")
            assert status == 201, answer
            folders.append(self.run.with_name(answer["name"]))
        return time.monotonic() - begun

    def by_command(self, name: str, kill_after: float | None = None) -> None:
        """Make a backup by the command; its process may be killed some seconds after the copy begins."""
        copy = self.run.with_name(name)
        with self._noting(folders := [copy]):
            command = [sys.executable, "-m", "lam", "backup", str(self.run), str(copy)]
            with subprocess.Popen(command, cwd=ROOT) as process:
                until(lambda: process.poll() is not None or list(self.run.parent.glob(f".{name}.*")), seconds=30.0)
                if kill_after is not None:
                    time.sleep(kill_after)
                    process.kill()
            if process.returncode:
                assert kill_after is not None
                folders.clear()


def backups_lose_nothing(run: Path, png: bytes, kills: int) -> dict[str, int]:
    """Back up by route and by command during traffic, and kill the service, or first the command.

    Each finished backup is complete: it holds all items that were acknowledged before its start and not deleted since,
    and only items that were sent. One backup of each round is served. A killed one leaves only a temporary folder.
    """
    draw, counts = random.Random(0), {"kills": kills, "added": 0, "searched": 0, "backups": 0, "cut": 0}
    body = json.dumps(embedding(Run(run).encoder.dimension)).encode()
    for kill in range(kills):
        known, there = ids_in(run), set(run.parent.iterdir())
        with served(run) as found:
            traffic = Traffic(found, png, body)
            backups = Backups(run, traffic)
            with traffic.running(str(kill)):
                moment = draw.uniform(0.0, 1.2) * backups.by_route()
                if kill % 2:
                    backups.by_command(f"copy-{kill}", kill_after=moment)
                    backups.by_route()
                else:
                    backups.by_command(f"copy-{kill}")
                    with ThreadPoolExecutor(1) as pool:
                        last = pool.submit(backups.by_route)
                        time.sleep(moment)
                        found.process.send_signal(signal.SIGKILL)
                    assert isinstance(last.exception(), OSError | http.client.HTTPException | None), last.exception()
        assert not traffic.failed
        assert traffic.acknowledged - traffic.deleted <= ids_in(run) <= known | traffic.asked
        made = set(run.parent.iterdir()) - there
        cut = {folder for folder in made if folder.name.startswith(".")}
        for folder in made - cut:  # also one that was finished and not acknowledged
            for file in read_json(folder / RECORD)["files"]:
                assert sha256_of(folder / file["name"]) == file["sha256"]
            ids_in(folder)
        for folder, least, most in backups.finished:
            assert least - traffic.deleted <= ids_in(folder) <= known | most
        folder, least, _ = draw.choice(backups.finished)
        with served(folder) as restored:
            assert restored.ask("POST", "/v1/search", body, JSON)[0] == 200
            assert least - traffic.deleted <= set(restored.ids())
        for folder in made:
            shutil.rmtree(folder)
        counts["added"] += len(traffic.acknowledged)
        counts["searched"] += traffic.searched
        counts["backups"] += len(made - cut)
        counts["cut"] += len(cut)
    return counts


@pytest.mark.long
def test_backups_under_load_lose_nothing(served_run: Path, png: bytes) -> None:
    counts = backups_lose_nothing(served_run, png, 1)
    assert min(counts["added"], counts["searched"], counts["backups"]) > 1, counts


@pytest.mark.slow
def test_many_backups_under_load_lose_nothing(served_run: Path, png: bytes, record_property: Any) -> None:
    record_property("backups", json.dumps(backups_lose_nothing(served_run, png, 20)))


def test_a_copy_of_the_database_alone_may_be_torn_where_a_backup_is_not(served_run: Path, tmp_path: Path) -> None:
    """A plain copy of the file lacks the items in SQLite's log. Therefore the command exists."""
    with closing(Engine(served_run)) as engine:
        client_of(engine).post("/v1/items", json=embedding(engine.gallery.dimension, id="in-the-log"))
        back_up(served_run, tmp_path / "backup")
        shutil.copyfile(served_run / GALLERY / FILE, tmp_path / FILE)
        with closing(sqlite3.connect(tmp_path / FILE)) as torn:
            assert torn.execute("SELECT count(*) FROM items WHERE id = 'in-the-log'").fetchone() == (0,)
        assert "in-the-log" in ids_in(tmp_path / "backup")
