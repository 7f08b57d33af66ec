"""A gallery that is searched along a graph, over the same store as one that is searched exactly."""

import logging
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lam.gallery.gallery import Gallery
from lam.gallery.item import Item
from lam.gallery.local_index import LocalIndex
from lam.gallery.store import CACHE, ItemStore
from lam.retrieval.index import faiss_calls
from lam.retrieval.index.faiss_index import Index
from lam.runs.index import index_images
from lam.vmf.embeddings import Embeddings
from tests.gallery.test_gallery import D, embeddings, everything, items, opened
from tests.helpers import stored


def own_index(gallery: Gallery) -> Index:
    assert isinstance(gallery.index, Index)
    return gallery.index


def found(gallery: Gallery, queries: Embeddings, k: int = 1) -> list[list[str]]:
    hits, infos = gallery.search(queries, k)
    return [[infos[key].id for key in row] for row in hits.ids.tolist()]


def test_items_are_added_found_replaced_removed_and_there_after_a_restart(run_copy: Path) -> None:
    with opened(run_copy, "hnsw") as gallery:
        assert gallery.index.factory == "HNSW32"
        gallery.write(items(40))
        assert found(gallery, embeddings(40)) == [[f"0-{row}"] for row in range(40)]
        gallery.write(["0-3", *(Item(f"0-{row}", items(40, 1)[row].vector, 9.0) for row in range(5, 9))])
        assert found(gallery, embeddings(40, 1)[5:9]) == [[f"0-{row}"] for row in range(5, 9)]
        before = found(gallery, embeddings(20, 2), 50)
    with opened(run_copy, "hnsw") as gallery:
        assert (len(gallery), gallery.index.factory) == (60 + 40 - 1, "HNSW32")
        assert gallery.store.get("0-3") is None
        assert found(gallery, embeddings(20, 2), 50) == before


@pytest.mark.parametrize("restart", [False, True])
def test_a_removed_item_never_comes_back(run_copy: Path, restart: bool) -> None:
    """Not while the graph still contains it, not after the sweep, and not from the cache."""
    gone = set[str]()
    gallery = Gallery(run_copy / "gallery", D, index="hnsw")
    gallery.write(items(300))
    for round_ in range(6):
        removed = [f"0-{row}" for row in range(round_, 240, 6)]
        gone |= set(removed)
        gallery.write([*removed, *items(20, seed=round_ + 1)])
        if restart:
            gallery.close()
            gallery = Gallery(run_copy / "gallery", D, index="hnsw")
        names = found(gallery, embeddings(300), 100)
        assert not gone & {name for row in names for name in row}
        assert all(len(set(row)) == 100 for row in names)
    assert len(gallery) == 60 + 300 - 240 + 120
    gallery.close()


def test_what_was_removed_is_in_no_file_once_the_graph_is_closed(run_copy: Path) -> None:

    with opened(run_copy, "hnsw") as gallery:
        gallery.write(items(200))
    with opened(run_copy, "hnsw") as gallery:
        vector = gallery.index.search(embeddings(200)[7:8], 1)
        assert vector.scores.item() == pytest.approx(1)
        held = own_index(gallery)._store.column("vectors")[60 + 7].tobytes()  # because the index normalised it again
        assert held in everything(run_copy)
        gallery.write(["0-7"])
        assert own_index(gallery).holds_removed
        assert held not in everything(run_copy)
    assert held not in everything(run_copy)
    assert not (run_copy / "gallery" / CACHE).exists()
    with opened(run_copy, "hnsw") as gallery:
        assert len(gallery) == 60 + 199
        assert not own_index(gallery).holds_removed
    assert held not in everything(run_copy)
    assert (run_copy / "gallery" / CACHE).is_dir()


def test_either_kind_serves_what_the_other_wrote(run_copy: Path) -> None:
    with opened(run_copy, "hnsw") as gallery:
        gallery.write(items(30))
    with opened(run_copy, "flat") as gallery:
        assert (gallery.index.factory, gallery.recall) == ("Flat", None)
        gallery.write(["0-1", "7", *items(10, 1)])
        exact = found(gallery, embeddings(25, 3), 50)
    with opened(run_copy, "hnsw") as gallery:
        assert (gallery.index.factory, len(gallery)) == ("HNSW32", 60 + 30 - 2 + 10)
        assert found(gallery, embeddings(25, 3), 50) == exact
        assert len(stored(gallery, limit=200)) == len(gallery)
    with opened(run_copy) as gallery:
        assert gallery.index.factory == "Flat"
        assert found(gallery, embeddings(25, 3), 50) == exact


def test_no_graph_is_saved_beside_the_items_that_took_the_place(run_copy: Path, tmp_path: Path) -> None:
    """Otherwise, the next start of those items would search the wrong graph."""
    folder, other = run_copy / "gallery", Path(shutil.copytree(run_copy / "gallery", tmp_path / "other"))
    with opened(run_copy, "hnsw"):
        folder.rename(tmp_path / "moved")
        other.rename(folder)
    assert (tmp_path / "moved" / CACHE).is_dir()
    assert not (folder / CACHE).exists()


@pytest.mark.parametrize(
    ("index", "factory"), [(None, "HNSW8"), ("hnsw", "HNSW8"), ("flat", "Flat")], ids=["as made", "hnsw", "flat"]
)
def test_a_gallery_that_was_made_with_a_graph_keeps_it(
    run_copy: Path, digit_folder: Path, index: str | None, factory: str
) -> None:
    index_images(run_copy, digit_folder, factory="HNSW8", progress=False)
    with opened(run_copy, index) as gallery:
        assert gallery.index.factory == factory
        assert (gallery.recall is None) == (factory == "Flat")
    with opened(run_copy) as gallery:
        assert gallery.index.factory == "HNSW8"


@pytest.mark.parametrize("index", ["HNSW", "ivf", "", "milvus:/host/items", "flat,hnsw"])
def test_another_kind_of_index_is_refused(run_copy: Path, index: str) -> None:
    said = f"index.*flat, hnsw.*Milvus.*{index!r}"
    with pytest.raises(ValueError, match=said):
        Gallery(run_copy / "gallery", D, index=index)
    Gallery(run_copy / "gallery", D).close()  # nothing is left open


def test_searches_go_on_while_the_graph_is_built_anew(run_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, add = list[list[str]](), faiss_calls.add

    def searching_meanwhile(*arguments: Any) -> None:
        searching = threading.Thread(target=lambda: names.extend(found(gallery, embeddings(150)[100:])))
        searching.start()
        searching.join(20)
        assert not searching.is_alive()
        add(*arguments)

    with opened(run_copy, "hnsw") as gallery:
        gallery.write(items(150))
        before = own_index(gallery)._faiss
        monkeypatch.setattr(faiss_calls, "add", searching_meanwhile)
        gallery.write([f"0-{row}" for row in range(100)])
        monkeypatch.setattr(faiss_calls, "add", add)
        assert names == [[f"0-{row}"] for row in range(100, 150)]
        assert own_index(gallery)._faiss is not before
        assert not own_index(gallery).holds_removed
        assert found(gallery, embeddings(150)[100:]) == names
        assert len(gallery) == 60 + 50


@pytest.fixture
def large(tmp_path: Path) -> Iterator[ItemStore]:
    """The store of 3,000 items in 32 dimensions."""
    with closing(ItemStore(tmp_path / "items.sqlite")) as store:
        store.write(items(3000, dimension=32))
        yield store


def test_a_graph_that_finds_too_little_says_what_to_do(
    large: ItemStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        poor = LocalIndex(tmp_path / "poor", large, 32, "HNSW4")
        assert poor.recall is not None
        assert 0.3 < poor.recall.share < 0.95
        assert str(poor.recall) in caplog.text
        assert "serve with --index flat" in caplog.text
        caplog.clear()
        good = LocalIndex(tmp_path / "good", large, 32, "HNSW64")
        assert good.recall is not None
        assert poor.recall.share < 0.95 < good.recall.share
        assert not caplog.text


def test_a_graph_that_was_kept_finds_as_much(large: ItemStore, tmp_path: Path) -> None:
    """The cache keeps the search width, too."""
    first = LocalIndex(tmp_path / "index", large, 32, "HNSW32")
    first.close()
    again = LocalIndex(tmp_path / "index", large, 32, "HNSW32")
    assert first.recall is not None
    assert again.recall == first.recall
    assert first.recall.share > 0.95
