"""A gallery that grew while it was served; a calibration beside the service, which then reads it."""

import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from lam.cli import main
from lam.gallery import store as store_module
from lam.gallery.gallery import open_store
from lam.gallery.store import FILE
from lam.runs.calibrate import calibrate_run
from lam.runs.finished import Run
from lam.runs.folder import GALLERY
from lam.runs.index import index_images
from lam.runs.search import search
from lam.service.embedder import embedding_of
from lam.service.engine import Engine
from lam.service.hangups import block_hangups, unblock_hangups
from lam.service.models import SearchResponse
from lam.service.queries import Query, Search
from tests.helpers import stored
from tests.runs.conftest import Lam
from tests.service.conftest import SMALL
from tests.service.serving import ROOT, served, until

START = "import sys; from lam.cli import main; print('starting', flush=True); sys.exit(main())"
TARGETS = ("--quiet", "--target-far=0.1", "--target-ood=0.1", "--target-miss=0.1")


def grown(engine: Engine, count: int, *, label: str | None = None) -> None:
    """Add copies of stored items under new ids."""
    items = stored(engine.gallery, limit=60)
    for number in range(count):
        item = items[number % len(items)]
        query = Query(embedding_of(torch.from_numpy(item.embedding.copy()), item.kappa))
        name = f"more{number}{'' if label is None else ' without label'}"
        engine.gallery.write([query.to_item(name, label=item.label if label is None else label, metadata="{}")])


def test_what_a_service_holds_is_read_beside_it(engine: Engine) -> None:
    grown(engine, 3)
    engine.gallery.write(["0"])
    found = Run(engine.run.folder).gallery
    assert len(found.embeddings) == len(found) == len(engine.gallery) == 62
    by_id = {item.id: item for item in stored(engine.gallery)}
    assert sorted(item.label for item in found.items) == sorted(item.label for item in by_id.values())
    assert float(found.embeddings.kappa.sum()) == pytest.approx(sum(item.kappa for item in by_id.values()))


def test_what_is_written_while_it_is_read_alters_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service replaces an item and adds others while another process reads the rows, before it reads the ledger."""
    (item,), all_rows, writes = stored(engine.gallery, limit=1), store_module.rows_of, count(1)

    def write() -> None:
        number = next(writes)
        engine.gallery.write([replace(item, label=f"label {number}")])
        grown(engine, number)

    def rows(connection: sqlite3.Connection) -> Iterator[Any]:
        for number, row in enumerate(all_rows(connection)):
            yield row
            if number % 20 == 0:
                write()

    with monkeypatch.context() as patched:
        patched.setattr(store_module, "rows_of", rows)
        found = Run(engine.run.folder).gallery
    assert next(writes) == 4
    assert len(found.embeddings) == 60
    assert not [item.label for item in found.items if item.label.startswith("label")]
    assert len(Run(engine.run.folder).gallery) == 63


@pytest.mark.long
def test_a_gallery_that_grew_is_calibrated_for_and_the_service_takes_it_over(engine: Engine, lam: Lam) -> None:
    grown(engine, 30)
    assert engine.responder.state(len(engine.gallery)) == "stale"
    assert "gallery: 90 items" in lam("calibrate", engine.run.folder, *TARGETS).out
    assert engine.run.calibration.facts["gallery"] == "index"
    assert engine.responder.state(len(engine.gallery)) == "stale"
    engine.recalibrate()
    assert engine.responder.state(len(engine.gallery)) == "current"


@pytest.mark.long
def test_items_without_label_spoil_no_calibration(engine: Engine, lam: Lam) -> None:
    """Without labels, matches are unknown; such items would all count as wrong."""
    made = []
    for unlabelled in (0, 40):
        grown(engine, unlabelled, label="")
        printed = lam("calibrate", engine.run.folder, *TARGETS).out
        made.append((engine.run.calibration, printed))
    (before, said_before), (after, said_after) = made
    assert after.accept_above == before.accept_above
    assert after.reliability.expected_error == before.reliability.expected_error
    assert (after.gallery_size, after.facts["without_label"], before.facts["without_label"]) == (60, 40, 0)
    assert "gallery: 60 items; calibrated on 60 queries" in said_before
    assert "gallery: 60 items, 40 more without label left out; calibrated on 60 queries" in said_after
    assert ["answers are marked stale" in said for said in (said_before, said_after)] == [False, True]
    assert [after.is_stale(size) for size in (60, 72, 100)] == [False, False, True]


def test_a_gallery_without_any_label_cannot_be_calibrated_for(engine: Engine) -> None:
    engine.gallery.write([replace(item, label="") for item in stored(engine.gallery, limit=60)])
    with pytest.raises(ValueError, match="60 stored items.*label"):
        calibrate_run(engine.run.folder, progress=False)


def test_what_is_served_is_searched_beside_it(engine: Engine, digit_folder: Path) -> None:
    before = search(engine.run.folder, digit_folder / "2" / "3.png", k=200)
    grown(engine, 3)
    engine.gallery.write([before.items[0][0].id])
    after = search(engine.run.folder, digit_folder / "2" / "3.png", k=200)
    names = {item.id for item in before.items[0]} - {before.items[0][0].id} | {"more0", "more1", "more2"}
    assert {item.id for item in after.items[0]} == names
    assert after.decisions is not None


def test_no_index_is_written_beneath_a_service(engine: Engine, digit_folder: Path) -> None:
    with pytest.raises(ValueError, match="gallery.*use"):
        index_images(engine.run.folder, digit_folder, progress=False)
    assert len(engine.run.gallery) == 60


def test_a_calibration_that_comes_during_a_search_is_of_the_next(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search without calibration returns only k hits, fewer than a decision needs."""
    calibrated, search = engine.responder, engine.gallery.search
    engine.searches.responder = replace(calibrated, calibration=None)

    def meanwhile(*arguments: Any) -> Any:
        engine.recalibrate()
        return search(*arguments)

    monkeypatch.setattr(engine.gallery, "search", meanwhile)
    job = Search(Query(embedding_of(torch.tensor([1.0, 0.0, 0.0]), 1e4)), 1)
    first, second = (engine.searches.search([job])[0] for _ in range(2))
    assert isinstance(first, SearchResponse)
    assert isinstance(second, SearchResponse)
    assert first.decision is None
    assert second.decision is not None


def test_a_run_without_gallery_or_items_cannot_be_calibrated_for(served_run: Path, lam: Lam) -> None:
    shutil.rmtree(served_run / GALLERY)
    missing = "items.sqlite is missing or empty: "
    assert missing in lam("calibrate", served_run, *TARGETS, code=1).err
    for emptied in (False, True):  # added items would be lost without an error
        if emptied:
            (served_run / GALLERY).mkdir()
        with pytest.raises(ValueError, match=missing):
            Engine(served_run, SMALL)
        assert (served_run / GALLERY).exists() == emptied
    with open_store(served_run / GALLERY):
        pass
    assert "no items: `lam index`" in lam("calibrate", served_run, *TARGETS, code=1).err


def test_items_that_were_lost_are_told(engine: Engine, lam: Lam) -> None:
    engine.gallery.close()
    (engine.run.folder / GALLERY / FILE).unlink()
    assert "items.sqlite is missing" in lam("calibrate", engine.run.folder, *TARGETS, code=1).err
    assert ", or delete" in lam("serve", engine.run.folder, "--port", "0", code=1).err


@pytest.mark.long
def test_a_hangup_reads_the_calibration_anew(served_run: Path) -> None:
    with served(served_run) as found:
        before = found.ask("GET", "/v1/model")[1]["threshold"]
        assert main(["calibrate", str(served_run), "--quiet", "--target-far=0.2"]) == 0
        assert found.ask("GET", "/v1/model")[1]["threshold"] == before
        found.process.send_signal(signal.SIGHUP)
        until(lambda: found.ask("GET", "/v1/model")[1]["threshold"] != before)
        after = found.ask("GET", "/v1/model")[1]["threshold"]
        assert (before["far"], after["far"]) == (0.1, 0.2)


@contextmanager
def starting(*command: str) -> Iterator[tuple["subprocess.Popen[str]", IO[str]]]:
    """A process that is killed at the end of the block, and its output."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("tenth", range(10))
def test_a_hangup_during_the_start_waits(served_run: Path, tenth: int) -> None:
    with starting(sys.executable, "-c", START, "serve", str(served_run), "--port", "0") as (process, lines):
        assert lines.readline() == "starting\n"
        time.sleep(0.02 + 0.3 * tenth)
        process.send_signal(signal.SIGHUP)
        assert " items at http://127.0.0.1:" in lines.readline()
        time.sleep(0.5)
        process.send_signal(signal.SIGHUP)
        process.terminate()
        process.send_signal(signal.SIGHUP)
        assert process.wait(20) == 0


@pytest.mark.slow
@pytest.mark.parametrize("tenth", range(10))
def test_a_hangup_before_lam_is_loaded_is_ignored_where_the_shell_says_so(served_run: Path, tenth: int) -> None:
    command = ("sh", "-c", "trap '' HUP; exec \"$@\"", "sh", sys.executable, "-m", "lam", "serve", str(served_run))
    with starting(*command, "--port", "0") as (process, lines):
        time.sleep(0.05 + 0.3 * tenth)
        process.send_signal(signal.SIGHUP)
        assert " items at http://127.0.0.1:" in lines.readline()
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        process.terminate()
        assert process.wait(20) == 0


def test_a_hangup_that_waits_is_served_or_dropped() -> None:
    heard = list[int]()
    before = signal.signal(signal.SIGHUP, lambda number, _: heard.append(number))
    try:
        with block_hangups():
            signal.raise_signal(signal.SIGHUP)
            assert not heard
            with unblock_hangups():
                assert heard == [signal.SIGHUP]
            with block_hangups():
                signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert len(heard) == 2
    finally:
        signal.signal(signal.SIGHUP, before)
