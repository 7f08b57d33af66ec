"""Items on disk: what was acknowledged is there, what was deleted is gone, what was altered is noticed."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lam.files import CorruptFileError
from lam.service.errors import ServiceError
from lam.service.items import Item, checked_id, checked_label, checked_metadata
from lam.service.store import ItemStore

DIMENSION = 16


def item(name: str, seed: int = 0, **fields: object) -> Item:
    vector = np.random.default_rng(seed).normal(size=DIMENSION).astype(np.float32)
    return Item(name, vector.tobytes(), 7.5, **{"label": "one", "thumbnail": b"picture" * 9, **fields})


def test_items_survive_a_restart(tmp_path: Path) -> None:
    store = ItemStore(tmp_path / "items.sqlite")
    added = store.write([item("a", 1), item("b", 2)])
    assert [change.created for change in added] == [True, True]
    store.close()
    store = ItemStore(tmp_path / "items.sqlite")
    assert store.check() == []
    assert len(store) == 2
    assert store.get("a") == item("a", 1)
    assert store.get("nobody") is None
    assert [key for key, _ in store.keyed()] == [change.key for change in added]
    store.close()


def test_an_update_has_a_new_key_and_the_same_content_keeps_its_key(tmp_path: Path) -> None:
    store = ItemStore(tmp_path / "items.sqlite")
    (first,) = store.write([item("a", 1)])
    (same,) = store.write([item("a", 1)])
    assert same.key == first.key
    assert not same.removed
    assert not same.created
    (other,) = store.write([item("a", 2)])
    assert other.removed == (first.key,)
    assert other.key is not None
    assert first.key is not None
    assert other.key > first.key
    assert len(store) == 1
    store.write(["a"])
    (again,) = store.write([item("a", 1)])
    assert again.key is not None
    assert again.key > other.key  # a key is never given twice
    store.close()


def test_operations_are_done_in_their_order(tmp_path: Path) -> None:
    store = ItemStore(tmp_path / "items.sqlite")
    changes = store.write([item("a", 1), "a", item("a", 2), item("b"), "c"])
    assert [bool(change.removed) for change in changes] == [False, True, False, False, False]
    assert store.get("a") == item("a", 2)
    assert [found.id for found in store.page(after="a", limit=5)] == ["b"]
    assert store.check() == []
    store.close()


def test_what_is_deleted_is_in_no_file(tmp_path: Path) -> None:
    store = ItemStore(tmp_path / "items.sqlite")
    secret = item("secret", 99, label="LABEL-OF-IT", thumbnail=b"PICTURE-OF-IT" * 1000)
    store.write([secret, *(item(str(number), number) for number in range(50))])
    traces = (secret.vector, b"LABEL-OF-IT", b"PICTURE-OF-IT")
    assert any(trace in path.read_bytes() for path in tmp_path.iterdir() for trace in traces)
    store.write(["secret"])
    assert store.erase_log()
    assert not [trace for path in tmp_path.iterdir() for trace in traces if trace in path.read_bytes()]
    store.close()


def test_a_full_disk_refuses_the_whole_write_and_reads_go_on(tmp_path: Path) -> None:
    store = ItemStore(tmp_path / "items.sqlite")
    store.write([item("a")])
    (pages,) = store._writer.execute("PRAGMA page_count").fetchone()
    store._writer.execute(f"PRAGMA max_page_count={pages + 2}")
    with pytest.raises(ServiceError, match="could not be stored") as refused:
        store.write([item("b"), item("c", thumbnail=b"x" * 100_000)])
    assert refused.value.status == 507
    assert store.get("a") == item("a")
    assert store.get("b") is None
    store._writer.execute("PRAGMA max_page_count=100000")
    store.write([item("b")])
    assert store.check() == []
    store.close()


def test_an_altered_row_is_named_and_can_be_dropped(tmp_path: Path) -> None:
    store = ItemStore(tmp_path / "items.sqlite")
    store.write([item("good"), item("bad", 5)])
    store._writer.execute("UPDATE items SET kappa = 8.0 WHERE id = 'bad'")
    with pytest.raises(CorruptFileError, match=r"items.sqlite: rows bad are altered.*--drop-corrupt"):
        store.check()
    assert store.check(drop_corrupt=True) == ["bad"]
    assert store.check() == []
    assert store.get("good") is not None
    store.close()


def test_a_row_that_is_missing_is_noticed(tmp_path: Path) -> None:
    store = ItemStore(tmp_path / "items.sqlite")
    store.write([item("a"), item("b")])
    store._writer.execute("DELETE FROM items WHERE id = 'a'")
    with pytest.raises(CorruptFileError, match="1 rows are there, not 2"):
        store.check()
    store.close()


def test_every_connection_waits_for_the_disk_and_overwrites_what_is_deleted(tmp_path: Path) -> None:
    store = ItemStore(tmp_path / "items.sqlite")
    for connection in (store._writer, store._reader):
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA secure_delete").fetchone() == (1,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()


def test_another_format_is_refused(tmp_path: Path) -> None:
    store = ItemStore(tmp_path / "items.sqlite")
    store._writer.execute("PRAGMA user_version = 9")
    store.close()
    with pytest.raises(ValueError, match="format 9, this version of lam reads 1"):
        ItemStore(tmp_path / "items.sqlite")


def damaged(path: Path, whole: bytes, content: dict[str, Item]) -> bool:
    """Whether damage is noticed, or has done no harm."""
    try:
        store = ItemStore(path)
    except (CorruptFileError, ValueError):
        return True
    try:
        store.check()
        return {found.id: found for _, found in store.keyed()} == content
    except (CorruptFileError, ValueError):
        return True
    finally:
        store.close()
        path.write_bytes(whole)


def no_flip_and_no_cut_passes(folder: Path, flips: int, cuts: int) -> None:
    path, draw = folder / "items.sqlite", random.Random(0)
    store = ItemStore(path)
    content = {str(number): item(str(number), number) for number in range(40)}
    store.write(content.values())
    store.close()
    whole = path.read_bytes()
    for _ in range(flips):
        changed = bytearray(whole)
        changed[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        assert damaged(path, whole, content)
    for _ in range(cuts):
        path.write_bytes(whole[: draw.randrange(1, len(whole))])
        assert damaged(path, whole, content)


def test_flipped_bits_and_cuts_are_caught(tmp_path: Path) -> None:
    no_flip_and_no_cut_passes(tmp_path, 60, 30)


@pytest.mark.slow
def test_a_thousand_flipped_bits_and_500_cuts_are_caught(tmp_path: Path) -> None:
    no_flip_and_no_cut_passes(tmp_path, 1000, 500)


ADDING = """
import sys
import numpy as np
from lam.service.items import Item
from lam.service.store import ItemStore
store, first = ItemStore(sys.argv[1]), int(sys.argv[2])
for number in range(first, first + 100000):
    vector = np.full(16, number, np.float32).tobytes()
    changes = store.write([Item(f"{number}-{half}", vector, 1.0) for half in "ab"])
    if number % 7 == 0:
        store.write([f"{number}-a"])
        store.erase_log()
    print(number, flush=True)
"""


def nothing_is_lost_by_kills(folder: Path, kills: int) -> None:
    path, draw, acknowledged, first = folder / "items.sqlite", random.Random(1), set(), 0
    for _ in range(kills):
        process = subprocess.Popen(
            [sys.executable, "-c", ADDING, str(path), str(first)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(draw.randrange(1, 60))]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        process.wait()
        process.stdout.close()
        numbers = [int(line) for line in lines if line.endswith("\n")]
        acknowledged |= set(numbers)
        first = max(acknowledged) + 2  # the one after the last may be there or not
        store = ItemStore(path)
        assert store.check() == []
        found = {number: set() for number in acknowledged}
        for _, there in store.keyed():
            number, half = there.id.split("-")
            assert there.embedding[0] == int(number)
            found.setdefault(int(number), set()).add(half)
        store.close()
        for number, halves in found.items():
            if number in acknowledged:
                assert halves == ({"b"} if number % 7 == 0 else {"a", "b"})
            else:
                assert halves in ({"b"}, {"a", "b"})


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    nothing_is_lost_by_kills(tmp_path, 3)


@pytest.mark.slow
def test_what_was_acknowledged_survives_100_kills(tmp_path: Path) -> None:
    nothing_is_lost_by_kills(tmp_path, 100)


@pytest.mark.parametrize("identity", ["", "a/b", "..\\", "x" * 129, "a b", "é", "a\n"])
def test_ids_that_could_mean_something_else_are_refused(identity: str) -> None:
    with pytest.raises(ServiceError, match="not one that an item can have"):
        checked_id(identity)


def test_metadata_and_labels_are_bounded() -> None:
    assert checked_metadata({"b": 1, "a": [None, "x"]}) == '{"a": [null, "x"], "b": 1}'
    for wrong, match in (([], "a JSON object"), ({"a": float("nan")}, "finite"), ({"a": "x" * 20000}, "characters")):
        with pytest.raises(ServiceError, match=match):
            checked_metadata(wrong)
    with pytest.raises(ServiceError, match="1025 characters"):
        checked_label("x" * 1025)
    with pytest.raises(ServiceError, match="Unicode"):
        checked_label("\ud800")
