"""Store and index together: take-over, catching up, erasing, and searching while items are added."""

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lam.embeddings import Embeddings
from lam.files import sha256_of
from lam.gallery import index_folder
from lam.retrieval.index import Index
from lam.service.errors import ServiceError
from lam.service.gallery import CACHE, FOLDER, Gallery
from lam.service.items import Item
from lam.service.store import FILE

D = 3


@pytest.fixture
def gallery(run_copy: Path) -> Iterator[Gallery]:
    opened = Gallery(run_copy, D)
    yield opened
    opened.close()


def embeddings(count: int, seed: int = 0) -> Embeddings:
    mean = torch.nn.functional.normalize(torch.randn(count, D, generator=torch.Generator().manual_seed(seed)), dim=1)
    return Embeddings(mean, torch.full((count,), 9.0), torch.ones(count), torch.zeros(count))


def items(count: int, seed: int = 0) -> list[Item]:
    rows = embeddings(count, seed).mean
    return [Item(f"{seed}-{row}", mean.numpy().tobytes(), 9.0) for row, mean in enumerate(rows)]


def found(gallery: Gallery, query: Embeddings, k: int = 1) -> list[str]:
    hits, described = gallery.search(query, k)
    return [described[key].id for key in hits.ids[0].tolist() if key in described]


def test_the_index_of_a_run_is_taken_over_with_pictures(gallery: Gallery, run_copy: Path) -> None:
    saved = Index.load(run_copy / "index")
    assert len(gallery) == len(saved) == 60
    for item in gallery.page(after="", limit=100):
        assert item.origin == "index"
        assert item.thumbnail is not None
        assert item.kappa == float(saved.kappa_of([int(item.id)])[0])


def test_what_is_written_is_found_again_after_a_restart(run_copy: Path) -> None:
    first = Gallery(run_copy, D)
    first.write(items(5))
    first.write(["0-3", "7"])
    first.close()
    again = Gallery(run_copy, D)
    assert len(again) == 60 + 5 - 2
    for row in range(5):
        assert (found(again, embeddings(5)[row : row + 1]) == [f"0-{row}"]) == (row != 3)
    assert again.get("7") is None
    again.close()


def test_deleted_items_leave_every_file_of_the_run(run_copy: Path) -> None:
    vector = Index.load(run_copy / "index")._store.column("vectors")[7].numpy().tobytes()
    files = [path for folder in ("index", FOLDER) for path in (run_copy / folder).rglob("*")]
    assert any(vector in path.read_bytes() for path in files if path.is_file())
    gallery = Gallery(run_copy, D)
    (change,) = gallery.write(["7"])
    assert change.removed
    for path in run_copy.rglob("*"):
        assert not path.is_file() or vector not in path.read_bytes(), path
    gallery.close()
    again = Gallery(run_copy, D)
    assert again.get("7") is None
    assert len(Index.load(run_copy / "index")) == len(again) == 59
    again.close()


def test_a_new_index_replaces_the_items_of_the_old_and_no_others(run_copy: Path, digit_folder: Path) -> None:
    gallery = Gallery(run_copy, D)
    gallery.write(items(2))
    gallery.close()
    count = index_folder(run_copy, digit_folder, progress=False)
    again = Gallery(run_copy, D)
    assert len(again) == count + 2
    assert again.get("0") is None
    assert again.get("0-1") is not None
    assert all(item.thumbnail for item in again.page(after="", limit=100) if item.origin == "index")
    again.close()


def test_nothing_is_deleted_while_another_process_writes_the_index(gallery: Gallery, run_copy: Path) -> None:
    from lam.run_folder import locked

    with locked(run_copy), pytest.raises(ServiceError, match="nothing was deleted"):
        gallery.write(["7"])
    assert gallery.get("7") is not None
    gallery.write(["7"])


def test_a_corrupt_index_is_rebuilt(run_copy: Path, digit_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    index_folder(run_copy, digit_folder, factory="HNSW8", progress=False)
    first = Gallery(run_copy, D)
    assert (run_copy / FOLDER / CACHE).is_dir()  # a kill from here on costs no second build
    first.write(items(4))
    assert first.index.factory == "HNSW8"
    first.close()
    cache = next((run_copy / FOLDER / CACHE).glob("*/embeddings.safetensors"))
    whole = sha256_of(cache)
    second = Gallery(run_copy, D)
    assert found(second, embeddings(4)[:1]) == ["0-0"]
    second.close()
    cache = next((run_copy / FOLDER / CACHE).glob("*/embeddings.safetensors"))
    assert sha256_of(cache) == whole  # read, not built anew
    content = bytearray(cache.read_bytes())
    content[-1] ^= 1
    cache.write_bytes(content)
    third = Gallery(run_copy, D)
    assert "built anew" in caplog.text
    assert found(third, embeddings(4)[:1]) == ["0-0"]
    third.close()


def test_a_cache_of_the_index_is_caught_up(run_copy: Path, digit_folder: Path, tmp_path: Path) -> None:
    index_folder(run_copy, digit_folder, factory="HNSW8", progress=False)
    first = Gallery(run_copy, D)
    first.write(items(4))
    first.close()
    old = shutil.copytree(run_copy / FOLDER / CACHE, tmp_path / "old")
    second = Gallery(run_copy, D)
    second.write(["0-0", *items(3, seed=1)])
    second.close()
    shutil.rmtree(run_copy / FOLDER / CACHE)
    shutil.copytree(old, run_copy / FOLDER / CACHE)
    third = Gallery(run_copy, D)
    assert found(third, embeddings(4)[:1]) != ["0-0"]
    assert [found(third, embeddings(3, 1)[row : row + 1]) for row in range(3)] == [["1-0"], ["1-1"], ["1-2"]]
    assert len(third) == 24 + 3 + 3
    third.close()


def test_items_of_another_encoder_are_refused(run_copy: Path) -> None:
    Gallery(run_copy, D).close()
    with pytest.raises(ValueError, match=r"holds item .* of dimension 3, the run has 4"):
        Gallery(run_copy, 4)


def test_a_second_opening_is_refused(gallery: Gallery, run_copy: Path) -> None:
    with pytest.raises(ValueError, match="another process is writing to"):
        Gallery(run_copy, D)


def test_a_run_without_index_begins_empty(run_copy: Path) -> None:
    shutil.rmtree(run_copy / "index")
    gallery = Gallery(run_copy, D)
    assert len(gallery) == 0
    assert found(gallery, embeddings(1)) == []
    gallery.write(items(1))
    assert found(gallery, embeddings(1)) == ["0-0"]
    gallery.close()
    assert (run_copy / FOLDER / FILE).is_file()


def adding_and_searching(gallery: Gallery, seconds: float, readers: int) -> None:
    acknowledged, begun, stop, wrong = set(), set(), threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            before = sorted(acknowledged)[-1:]
            names = found(gallery, embeddings(1, int(before[0]) if before else 1), 3)
            if before and f"{before[0]}-0" not in names:
                wrong.append(f"{before[0]} was acknowledged and is not found")
            wrong.extend(name for name in names if name.endswith("-0") and int(name.split("-")[0]) not in begun)

    threads = [threading.Thread(target=read) for _ in range(readers)]
    for thread in threads:
        thread.start()
    until, seed = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        seed += 1
        begun.add(seed)
        gallery.write(items(1, seed))
        acknowledged.add(seed)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]
    assert seed > 3


def test_adding_and_searching_at_once(gallery: Gallery) -> None:
    adding_and_searching(gallery, 1.0, 4)


@pytest.mark.slow
def test_adding_and_searching_at_once_for_minutes(gallery: Gallery) -> None:
    adding_and_searching(gallery, 250.0, 16)
