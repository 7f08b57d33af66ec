"""The FAISS index of a gallery beside its store."""

from pathlib import Path

import numpy as np
import pytest

from lam.gallery.item import Item
from lam.gallery.local_index import LocalIndex, build_index
from lam.gallery.store import ItemStore
from lam.retrieval.index.faiss_index import Index


def item(name: str, number: int) -> Item:
    return Item(name, np.eye(3, dtype=np.float32)[number].tobytes(), 9.0, "mine")


def test_a_write_reads_no_list_of_all_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ItemStore(tmp_path / "items.sqlite")
    local = LocalIndex(tmp_path / "index", store, 3, "Flat")
    with monkeypatch.context() as patch:
        patch.delattr(Index, "ids")
        local.apply(set(), {1: item("a", 0), 2: item("b", 1)})
        local.apply({1, 7}, {2: item("b", 2), 3: item("c", 2)})
    assert local.index.ids.tolist() == [2, 3]
    store.close()


def test_a_cache_that_a_service_deletes_meanwhile_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(folder: Path) -> Index:
        raise FileNotFoundError(folder / "MANIFEST.json")

    monkeypatch.setattr(Index, "load", load)
    (tmp_path / "index").mkdir()
    items = iter([(1, item("a", 0)), (2, item("b", 1))])
    index = build_index(tmp_path / "index", items, 3, "HNSW8", source=tmp_path / "items.sqlite")
    assert (len(index), index.factory) == (2, "HNSW8")
    assert "built anew" in caplog.text
