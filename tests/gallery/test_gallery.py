"""Store and index together: catching up, erasing, and searching while items are added."""

import json
import shutil
import sqlite3
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from lam.gallery.gallery import Gallery
from lam.gallery.item import Item, pack
from lam.gallery.operations import Change, Fuse, Operation
from lam.gallery.refusal import Refusal
from lam.gallery.replica import Replica
from lam.gallery.store import CACHE, FILE, ItemStore
from lam.runs.data import load_data
from lam.runs.finished import Run
from lam.runs.index import index_images
from lam.utils.files import sha256_of
from lam.vmf.embeddings import Embeddings
from tests.helpers import stored

D = 3


def opened(run: Path, index: str | None = None) -> closing[Gallery]:
    """The gallery of a run until the end of the block."""
    return closing(Gallery(run / "gallery", D, index=index))


@pytest.fixture
def gallery(run_copy: Path) -> Iterator[Gallery]:
    with opened(run_copy) as gallery:
        yield gallery


def embeddings(count: int, seed: int = 0, dimension: int = D) -> Embeddings:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(count, dimension, generator=generator), dim=1)
    return Embeddings(mean, torch.full((count,), 9.0), torch.ones(count), torch.zeros(count))


def items(count: int, seed: int = 0, dimension: int = D) -> list[Item]:
    rows = embeddings(count, seed, dimension).mean
    return [Item(f"{seed}-{row}", mean.numpy().tobytes(), 9.0) for row, mean in enumerate(rows)]


def everything(folder: Path) -> bytes:
    """All files of a folder."""
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def found(gallery: Gallery, query: Embeddings, k: int = 1) -> list[str]:
    hits, described = gallery.search(query, k)
    return [described[key].id for key in hits.ids[0].tolist() if key in described]


def test_a_run_ends_with_its_test_split_and_pictures(gallery: Gallery, run_copy: Path) -> None:
    images: Any = load_data(Run(run_copy).config.data)[0].test
    kappa = Run(run_copy).encoder.embed(images.images).kappa
    assert len(gallery) == 60
    for item in stored(gallery):
        assert item.origin == "index"
        assert item.thumbnail is not None
        assert item.path == f"digits {item.id}"
        assert item.kappa == pytest.approx(float(kappa[int(item.id)]), rel=1e-4)


def test_what_is_written_is_found_again_after_a_restart(run_copy: Path) -> None:
    with opened(run_copy) as first:
        first.write(items(5))
        first.write(["0-3", "7"])
    with opened(run_copy) as again:
        assert len(again) == 60 + 5 - 2
        for row in range(5):
            assert (found(again, embeddings(5)[row : row + 1]) == [f"0-{row}"]) == (row != 3)
        assert again.store.get("7") is None


def test_a_read_only_folder_is_searched_and_never_written(run_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_copy / "gallery"
    with opened(run_copy) as gallery:
        expected = found(gallery, embeddings(1), k=60)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(ValueError, match="process that writes"):
        Replica(folder, D, index=None)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for index in (None, "flat"):
        with closing(Replica(folder, D, index=index)) as replica:
            assert len(replica) == 60
            assert found(replica, embeddings(1), k=60) == expected
            with pytest.raises(Refusal, match="only reads"):
                replica.write(items(1))
    with pytest.raises(ValueError, match="got 'milvus:///items.db/items'"):  # Milvus Lite would be written
        Replica(folder, D, index="milvus:///items.db/items")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    (folder / f"{FILE}-wal").touch()
    with pytest.raises(ValueError, match="sqlite-wal holds changes"):
        Replica(folder, D, index=None)


def test_a_new_index_replaces_the_items_of_the_old_and_no_others(run_copy: Path, digit_folder: Path) -> None:
    with opened(run_copy) as gallery:
        gallery.write(items(2))
    count = len(index_images(run_copy, digit_folder, progress=False))
    with opened(run_copy) as again:
        assert len(again) == count + 2
        assert again.store.get("0") is None
        assert again.store.get("0-1") is not None
        assert all(item.thumbnail for item in stored(again) if item.origin == "index")


def test_a_corrupt_index_is_rebuilt(run_copy: Path, digit_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    index_images(run_copy, digit_folder, factory="HNSW8", progress=False)
    with opened(run_copy) as first:
        assert (run_copy / "gallery" / CACHE).is_dir()  # a kill from here on costs no second build
        first.write(items(4))
        assert first.index.factory == "HNSW8"
    cache = next((run_copy / "gallery" / CACHE).glob("*/embeddings.safetensors"))
    whole = sha256_of(cache)
    with opened(run_copy) as second:
        assert found(second, embeddings(4)[:1]) == ["0-0"]
    cache = next((run_copy / "gallery" / CACHE).glob("*/embeddings.safetensors"))
    assert sha256_of(cache) == whole  # read, not built anew
    content = bytearray(cache.read_bytes())
    content[-1] ^= 1
    cache.write_bytes(content)
    with opened(run_copy) as third:
        assert "built anew" in caplog.text
        assert found(third, embeddings(4)[:1]) == ["0-0"]


def test_a_cache_of_the_index_is_caught_up(run_copy: Path, digit_folder: Path, tmp_path: Path) -> None:
    index_images(run_copy, digit_folder, factory="HNSW8", progress=False)
    with opened(run_copy) as first:
        first.write(items(4))
    old = shutil.copytree(run_copy / "gallery" / CACHE, tmp_path / "old")
    with opened(run_copy) as second:
        second.write(["0-0", *items(3, seed=1)])
    assert not (run_copy / "gallery" / CACHE).exists()  # the graph still holds what was deleted
    shutil.copytree(old, run_copy / "gallery" / CACHE)
    with opened(run_copy) as third:
        assert found(third, embeddings(4)[:1]) != ["0-0"]
        assert [found(third, embeddings(3, 1)[row : row + 1]) for row in range(3)] == [["1-0"], ["1-1"], ["1-2"]]
        assert len(third) == 24 + 3 + 3


def test_items_of_another_encoder_are_refused(run_copy: Path) -> None:
    Gallery(run_copy / "gallery", D).close()
    with pytest.raises(ValueError, match="item .*dimension 3.*4"):
        Gallery(run_copy / "gallery", 4)


def test_a_second_opening_is_refused(gallery: Gallery, run_copy: Path) -> None:
    with pytest.raises(ValueError, match="is in use"):
        Gallery(run_copy / "gallery", D)


def changed_and_searched(gallery: Gallery, operations: list[Operation], query: Embeddings, k: int) -> list[str]:
    """Ids that a search finds if it begins after items are stored, and before the index follows."""
    apply, names = gallery._index.apply, list[str]()
    searching = threading.Thread(target=lambda: names.extend(found(gallery, query, k)))

    def apply_late(gone: set[int], new: Mapping[int, Item]) -> None:
        searching.start()
        searching.join(0.1)
        apply(gone, new)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gallery._index, "apply", apply_late)
        gallery.write(operations)
    searching.join()
    return names


def test_a_search_between_store_and_index_sees_one_state(gallery: Gallery) -> None:
    """An update replaces an item's key; a concurrent search still finds each item that exists all the time."""
    one, other = items(2)
    gallery.write([one, other])
    query = embeddings(2)[:1]
    for operation in (Item(one.id, one.vector, 5.0), Fuse(Item(one.id, one.vector, 4.0)), one):
        assert changed_and_searched(gallery, [operation], query, 1) == [one.id]
    names = changed_and_searched(gallery, [one.id, Item(other.id, one.vector, 2.0)], query, 100)
    assert names[0] == other.id
    assert len(names) == len(gallery) == 61


def test_no_search_waits_for_the_disk(gallery: Gallery) -> None:
    """A search whose hits do not change is answered while a write waits for the disk."""
    (one,) = items(1)
    gallery.write([one])
    write, began, synced = gallery.store.write, threading.Event(), threading.Event()

    def write_late(*given: Any, **options: Any) -> list[Change]:
        began.set()
        synced.wait(10)
        return write(*given, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gallery.store, "write", write_late)
        writing = threading.Thread(target=lambda: gallery.write([Item(one.id, one.vector, 5.0)]))
        writing.start()
        began.wait(10)
        assert found(gallery, embeddings(1)) == [one.id]
        synced.set()
        writing.join()
    assert float(gallery.search(embeddings(1), 1)[0].kappa) == 5.0


def test_no_search_waits_for_a_log_that_a_reader_keeps(gallery: Gallery) -> None:
    gallery.write(items(2))
    gallery.store._writer.execute("PRAGMA busy_timeout=500")
    with closing(sqlite3.connect(gallery.store.path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM items").fetchone()
        answers: list[Change | Refusal] = []
        deleting = threading.Thread(target=lambda: answers.extend(gallery.write(["0-0"])))
        deleting.start()
        while gallery.store.get("0-0") is not None:
            time.sleep(0.001)
        assert found(gallery, embeddings(2)[1:]) == ["0-1"]
        assert deleting.is_alive()
        deleting.join()
    (refused,) = answers
    assert isinstance(refused, Refusal)
    assert "a reader of" in refused.error
    assert gallery.write(["0-0"]) == [Change()]


def test_what_a_failed_write_left_in_the_index_is_no_hit(gallery: Gallery) -> None:
    gallery.write(items(3))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gallery._index, "apply", lambda *_: (_ for _ in ()).throw(MemoryError("no room for a copy")))
        with pytest.raises(MemoryError):
            gallery.write(["0-0", "0-1"])
    hits, described = gallery.search(embeddings(2), 61)
    assert hits.ids.shape == (2, 61)
    assert set(hits.ids[0].tolist()) == set(hits.ids[1].tolist()) == described.keys()
    assert not {"0-0", "0-1"} & {what.id for what in described.values()}
    assert len(gallery) == 61


_CHANGED = 10**6  # the seed of the two items that are changed


class Watched:
    """Items that one thread writes and others search for, and the errors found."""

    def __init__(self, gallery: Gallery) -> None:
        self._gallery = gallery
        self._stop = threading.Event()
        self._begun, self._acknowledged, self._deleted = 0, 0, 0
        self.wrong: list[str] = []
        self._update(0)

    def _update(self, number: int) -> None:
        """Replace one item, and fuse an image into another; every third new item is deleted again."""
        updated, fused = items(2, seed=_CHANGED)
        image = Item(fused.id, fused.vector, 9.0, contents=pack([number]))
        self._gallery.write([Item(updated.id, updated.vector, 9.0 + number), Fuse(image)])

    def write(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until or not self._deleted:
            number = self._begun = self._begun + 1
            self._gallery.write(items(1, number))
            self._acknowledged = number
            self._update(number)
            if number % 3 == 0:
                (change,) = self._gallery.write([f"{number}-0"])
                if isinstance(change, Refusal):
                    self.wrong.append(change.error)
                self._deleted = number
        self._stop.set()

    def read(self) -> None:
        try:
            while not self._stop.is_set():
                self._search()
        except Exception as error:
            self.wrong.append(repr(error))

    def _search(self) -> None:
        acknowledged, deleted = self._acknowledged, self._deleted
        queries = Embeddings.concatenate([embeddings(1, acknowledged), embeddings(1, deleted), embeddings(2, _CHANGED)])
        hits, described = self._gallery.search(queries, 3)
        if unknown := set(hits.ids.flatten().tolist()) - described.keys():
            self.wrong.append(f"nobody knows what {unknown} are")
            return
        last, gone, updated, fused = ([described[key].id for key in row] for row in hits.ids.tolist())
        if acknowledged and f"{acknowledged}-0" not in last and acknowledged % 3:
            self.wrong.append(f"{acknowledged} was acknowledged and is not found")
        if deleted and f"{deleted}-0" in gone:
            self.wrong.append(f"{deleted} was deleted and is found")
        sent = {f"{number}-0" for number in range(self._begun + 1)} | {f"{_CHANGED}-0", f"{_CHANGED}-1"}
        self.wrong.extend(f"{name} was never sent" for name in last if "-" in name and name not in sent)
        if (updated.count(f"{_CHANGED}-0"), fused.count(f"{_CHANGED}-1")) != (1, 1):
            self.wrong.append(f"{updated} and {fused} were found for what is there all the time")


def adding_and_searching(gallery: Gallery, seconds: float, readers: int) -> None:
    watched = Watched(gallery)
    with ThreadPoolExecutor(readers) as pool:
        for _ in range(readers):
            pool.submit(watched.read)
        watched.write(seconds)
    assert not watched.wrong, watched.wrong[:3]
    assert watched._deleted


def test_adding_and_searching_at_once(gallery: Gallery) -> None:
    adding_and_searching(gallery, 1.0, 4)


@pytest.mark.slow
def test_adding_and_searching_at_once_for_minutes(gallery: Gallery) -> None:
    adding_and_searching(gallery, 250.0, 16)


def rates(calls: list[Callable[[int], object]], seconds: float) -> list[list[float]]:
    """Milliseconds of calls; each runs again and again in its own thread, with a rising number as its argument."""
    until = time.monotonic() + seconds

    def repeated(call: Callable[[int], object], number: int) -> list[float]:
        taken = []
        while (began := time.monotonic()) < until:
            call(number * 1_000_000 + len(taken))
            taken.append(1000 * (time.monotonic() - began))
        return sorted(taken)

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(repeated, call, n) for n, call in enumerate(calls)]]


def median(times: list[list[float]]) -> float:
    return round(statistics.median([one for part in times for one in part]), 2)


@pytest.mark.slow
def test_writers_at_a_million_items_leave_searches_half_their_speed(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    dimension, count = 128, 1_000_000
    generator = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(count, dimension, generator=generator), dim=1)
    with closing(ItemStore(tmp_path / FILE)) as store:
        store.write(Item(str(row), vector.numpy().tobytes(), 9.0) for row, vector in enumerate(rows))
    with closing(Gallery(tmp_path, dimension)) as gallery:
        one = torch.ones(1)
        query = Embeddings(rows[:1], 9.0 * one, one, torch.zeros(1))

        def search(_: int) -> None:
            gallery.search(query, 10)

        def add(number: int) -> None:
            gallery.write([Item(f"new {number}", rows[number % count].numpy().tobytes(), 9.0)])

        def remove(number: int) -> None:
            gallery.write([str(number % count)])

        quiet = {name: median(rates([call], 3.0)) for name, call in (("add", add), ("remove", remove))}
        alone = rates([search] * 4, 10.0)
        beside = rates([search] * 4 + [add] * 8, 10.0)
    measured = {
        "addition_ms": quiet["add"],
        "removal_ms": quiet["remove"],
        "search_ms_of_4_searchers": median(alone),
        "search_ms_of_4_searchers_beside_8_writers": median(beside[:4]),
        "addition_ms_of_8_writers_beside_4_searchers": median(beside[4:]),
        "additions_per_second": round(sum(map(len, beside[4:])) / 10, 1),
    }
    record_property("a million items of 128 dimensions", json.dumps(measured))
    assert max(quiet.values()) <= 10
    assert median(beside[:4]) <= 2 * median(alone)
