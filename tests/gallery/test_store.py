"""Items on disk: acknowledged items exist, deleted items are gone, altered items are detected."""

import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lam.gallery.database import explain_errors
from lam.gallery.item import Item, ItemInfo, check_id, metadata_json, normalize_label
from lam.gallery.operations import Patch
from lam.gallery.refusal import Refusal
from lam.gallery.replica import Snapshot
from lam.gallery.store import FACTORY, FILE, MARK, MEAN_SAMPLES, ItemStore
from lam.utils.files import CorruptFileError
from tests.service.test_full_disk import small_file_system

DIMENSION = 16


def item(name: str, seed: int = 0, **fields: object) -> Item:
    vector = np.random.default_rng(seed).normal(size=DIMENSION).astype(np.float32)
    return Item(name, vector.tobytes(), 7.5, **{"label": "one", "thumbnail": b"picture" * 9, **fields})


def test_items_survive_a_restart(tmp_path: Path) -> None:
    with closing(ItemStore(tmp_path / FILE)) as store:
        added = store.write([item("a", 1), item("b", 2)])
        assert [change.created for change in added] == [True, True]
    with closing(ItemStore(tmp_path / FILE)) as store:
        assert store.check() == []
        assert len(store) == 2
        assert store.get("a") == item("a", 1)
        assert store.get("nobody") is None
        assert [key for key, _ in store.items_by_key()] == [change.key for change in added]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_nothing_is_acknowledged_once_the_file_is_gone(store: ItemStore, tmp_path: Path, is_replaced: bool) -> None:
    path = tmp_path / FILE
    store.write([item("a", 1)])
    path.rename(tmp_path / "moved")
    (tmp_path / "moved").rename(path)
    store.write([item("b", 2)])
    if is_replaced:
        (tmp_path / "other").write_bytes(path.read_bytes())
        (tmp_path / "other").replace(path)
    else:
        path.unlink()
    with pytest.raises(Refusal, match="deleted or replaced") as refused:
        store.write([item("c", 3)])
    assert refused.value.status == 507
    assert store.get("a") is not None


def test_an_update_has_a_new_key_and_the_same_content_keeps_its_key(store: ItemStore) -> None:
    (first,) = store.write([item("a", 1)])
    (same,) = store.write([item("a", 1)])
    assert (same.key, same.removed, same.created) == (first.key, (), False)
    (other,) = store.write([item("a", 2)])
    assert other.removed == (first.key,)
    assert len(store) == 1
    store.write(["a"])
    (again,) = store.write([item("a", 1)])
    assert None not in (first.key, other.key, again.key)
    assert first.key < other.key < again.key  # a key is never given twice


def test_operations_are_done_in_their_order(store: ItemStore) -> None:
    changes = store.write([item("a", 1), "a", item("a", 2), item("b"), "c"])
    assert [bool(change.removed) for change in changes] == [False, True, False, False, False]
    assert store.get("a") == item("a", 2)
    assert [found.id for found in store.page(after="a", limit=5).values()] == ["b"]
    assert store.check() == []


def test_what_is_deleted_is_in_no_file(store: ItemStore, tmp_path: Path) -> None:
    secret = item("secret", 99, label="LABEL-OF-IT", thumbnail=b"PICTURE-OF-IT" * 1000)
    store.write([secret, *(item(str(number), number) for number in range(50))])
    traces = (secret.vector, b"LABEL-OF-IT", b"PICTURE-OF-IT")
    assert any(trace in path.read_bytes() for path in tmp_path.iterdir() for trace in traces)
    store.write(["secret"])
    assert store.erase_log() == ""
    assert not [trace for path in tmp_path.iterdir() for trace in traces if trace in path.read_bytes()]


def test_a_log_that_cannot_be_moved_says_why(tmp_path: Path) -> None:
    store = ItemStore(tmp_path / FILE)
    store.close()
    assert store.erase_log() == "the database keeps its log (Cannot operate on a closed database.)"


def test_a_full_disk_refuses_the_whole_write_and_reads_go_on(store: ItemStore) -> None:
    store.write([item("a")])
    (pages,) = store._writer.execute("PRAGMA page_count").fetchone()
    store._writer.execute(f"PRAGMA max_page_count={pages + 2}")
    with pytest.raises(Refusal, match="not be stored") as refused:
        store.write([item("b"), item("c", thumbnail=b"x" * 100_000)])
    assert refused.value.status == 507
    assert store.get("a") == item("a")
    assert store.get("b") is None
    store._writer.execute("PRAGMA max_page_count=100000")
    store.write([item("b")])
    assert store.check() == []


@pytest.mark.parametrize("change", ["kappa = 8.0", "label = CAST(x'ef6e65' AS TEXT)"])  # the text is not UTF-8
def test_an_altered_row_is_named_and_can_be_dropped(store: ItemStore, change: str) -> None:
    store.write([item("good"), item("bad", 5)])
    store._writer.execute(f"UPDATE items SET {change} WHERE id = 'bad'")
    with pytest.raises(CorruptFileError, match="items.sqlite: rows bad.*--drop-corrupt"):
        store.check()
    assert store.check(drop_corrupt=True) == ["bad"]
    assert store.check() == []
    assert store.get("good") is not None


def test_indexing_again_keeps_an_item_that_the_service_changed(store: ItemStore) -> None:
    indexed = [item(name, origin="index") for name in "abc"]
    store.replace(indexed, facts={})
    store.write([Patch("a", "two", {"page": 3}), Patch("b", "one", {})])  # the second changes nothing
    store.replace(indexed[:1], facts={})
    ((_, left),) = store.items_by_key()
    assert (left.id, left.label, left.metadata) == ("a", "two", '{"page": 3}')


def test_a_restored_copy_gives_no_key_again(tmp_path: Path) -> None:
    """Otherwise a cached graph or a collection would hold the lost item's vector under the new item's key."""
    path, keys = tmp_path / "items.sqlite", list[int]()
    for name in "abc":
        if name == "c":
            (tmp_path / "copy").replace(path)
        with closing(ItemStore(path)) as store:
            store.write([item(name)])
            keys.append(max(store.keys()))
        if name == "a":
            shutil.copy(path, tmp_path / "copy")
    assert keys == sorted(set(keys))


def test_a_row_that_is_missing_is_noticed(store: ItemStore) -> None:
    store.write([item("a"), item("b")])
    store._writer.execute("DELETE FROM items WHERE id = 'a'")
    with pytest.raises(CorruptFileError, match="1 rows instead of 2"):
        store.check()


def test_a_row_that_is_replaced_by_another_is_noticed(store: ItemStore) -> None:
    store.write([item("a"), item("b")])
    values = (item("a", 2).vector, item("a", 2).sha256)
    store._writer.execute("UPDATE items SET vector = ?, sha256 = ? WHERE id = 'a'", values)
    with pytest.raises(CorruptFileError, match="2 rows"):
        store.check()


def test_every_connection_waits_for_the_disk_and_overwrites_what_is_deleted(store: ItemStore) -> None:
    for connection in (store._writer, store._reader):
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA secure_delete").fetchone() == (1,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_another_format_is_refused(tmp_path: Path) -> None:
    with closing(ItemStore(tmp_path / FILE)) as store:
        store._writer.execute("PRAGMA user_version = 9")
    with pytest.raises(ValueError, match="format 9.*version.*1"):
        ItemStore(store.path)


LOST = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "without a table": lambda path: path.write_bytes(empty_database(path.with_name("other"))),
}


def empty_database(path: Path) -> bytes:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("VACUUM")
    return path.read_bytes()


@pytest.mark.parametrize("name", LOST)
def test_a_file_that_is_lost_is_not_begun_anew(tmp_path: Path, name: str) -> None:
    path = tmp_path / FILE
    with closing(ItemStore(path)) as store:
        store.write([item("a")])
    whole = path.read_bytes()
    LOST[name](path)
    for _ in range(2):
        with pytest.raises(CorruptFileError, match="items.sqlite.*missing or empty.*items.made"):
            ItemStore(path)
    path.write_bytes(whole)
    with closing(ItemStore(path)) as store:
        assert store.get("a") == item("a")
    LOST[name](path)
    (tmp_path / MARK).unlink()
    with closing(ItemStore(path)) as store:
        assert len(store) == 0
    assert (tmp_path / MARK).is_file()


def test_a_file_without_a_mark_gets_one(tmp_path: Path) -> None:
    ItemStore(tmp_path / FILE).close()
    (tmp_path / MARK).unlink()
    ItemStore(tmp_path / FILE).close()
    assert (tmp_path / MARK).is_file()


@contextmanager
def locked(folder: Path, *statements: str) -> Iterator[None]:
    """Lock the file of a gallery as another process would; stores then wait only for a moment."""
    with (
        pytest.MonkeyPatch.context() as patched,
        closing(sqlite3.connect(folder / FILE, isolation_level=None)) as other,
    ):
        patched.setattr("lam.gallery.database._PATIENCE", 0.05)
        for statement in statements:
            other.execute(statement)
        yield


WHOLE = ("PRAGMA locking_mode=EXCLUSIVE", "BEGIN EXCLUSIVE")


def test_a_locked_file_is_called_locked(tmp_path: Path) -> None:
    ItemStore(tmp_path / FILE).close()
    with (
        locked(tmp_path, *WHOLE),
        pytest.raises(ValueError, match="items.sqlite.*locked.*process") as refusal,
    ):
        ItemStore(tmp_path / FILE)
    assert not isinstance(refusal.value, CorruptFileError)
    ItemStore(tmp_path / FILE).close()


def test_a_lock_that_lets_others_read_is_met_at_the_start(tmp_path: Path) -> None:
    ItemStore(tmp_path / FILE).close()
    with locked(tmp_path, "BEGIN EXCLUSIVE"):
        with pytest.raises(ValueError, match="locked.*another process"):
            ItemStore(tmp_path / FILE)
        ItemStore(tmp_path / FILE, read_only=True).close()


def test_a_full_disk_of_a_copy_is_not_taken_for_the_disk_of_the_gallery(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", 2**16), closing(ItemStore(tmp_path / FILE)) as store:
        store.write([item("a", thumbnail=b"x" * 2**17)])
        with pytest.raises(OSError, match="disk/copy.sqlite.*written.*: make room"):
            store.copy(tmp_path / "disk" / "copy.sqlite")


def test_a_file_that_cannot_be_written_is_called_that(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", 2**20):
        path = tmp_path / "disk" / FILE
        with closing(ItemStore(path)) as store:
            store.write([item("a")])
            left = shutil.copytree(path.parent, tmp_path / "left")  # the log and its memory, as a kill leaves them
        for is_killed in (False, True):
            if is_killed:
                shutil.copytree(left, path.parent, dirs_exist_ok=True)
            subprocess.run(["mount", "-o", "remount,ro", str(path.parent)], check=True)
            with pytest.raises(OSError, match="items.sqlite.*written.*: mount .*disk writable"):
                ItemStore(path)
            subprocess.run(["mount", "-o", "remount,rw", str(path.parent)], check=True)
        with closing(ItemStore(path)) as store:
            assert store.get("a") == item("a")


@pytest.mark.parametrize("code", [sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_FSYNC])
def test_a_disk_that_fails_at_the_start_is_called_that(tmp_path: Path, code: int) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code
    said = r"items.sqlite.*\(disk I/O error\): check"
    with pytest.raises(OSError, match=said), explain_errors(tmp_path / FILE):
        raise error


def test_a_file_that_cannot_be_read_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ItemStore(tmp_path / FILE).close()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    said = "items.sqlite.*read.*right"
    with pytest.raises(OSError, match=said), explain_errors(tmp_path / FILE):
        raise sqlite3.OperationalError("unable to open database file")


def test_all_that_is_known_of_images_counts(store: ItemStore) -> None:
    known = {"images": 2, "resultant": 0.5, "least_image_kappa": 3.0, "contents": b"contents" * 2, "sums": b"sums"}
    fused = item("a", paths='["a.jpg", "b.jpg"]', **known)
    others = {"images": 3, "resultant": 0.25, "least_image_kappa": None, "paths": "[]", "contents": b"contents"}
    items = [fused, item("a"), *(replace(fused, **{name: value}) for name, value in others.items())]
    items += [replace(fused, sums=None), replace(fused, sums=b"")]
    assert len({one.sha256 for one in items}) == len(items)
    for one in items:
        (change,) = store.write([one])
        assert store.get("a") == one
        least = 7.5 if one.least_image_kappa is None else 3.0
        facts = ("a", "one", "{}", one.images, one.resultant, least, 7.5, one.sha256)
        infos = {change.key: ItemInfo(*facts, has_thumbnail=True)}
        assert store.infos_of([change.key, 99]) == infos
        assert one.least_kappa == least
    assert store.check() == []
    altered = {"images": 9, "resultant": 0.1, "least_kappa": 1.0, "contents": b"\0", "paths": "[]", "sums": b"\0"}
    for column, value in altered.items():
        store.write([fused])
        store._writer.execute(f"UPDATE items SET {column} = ?", (value,))
        with pytest.raises(CorruptFileError, match="rows a.*altered"):
            store.check()
        store.write([item("a")])
        store.write(["a"])


def test_the_facts_of_a_snapshot_are_those_of_its_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lam.gallery.database._PATIENCE", 0.05)
    with closing(ItemStore(tmp_path / FILE)) as store:
        store.replace([item("a", origin="index")], facts={FACTORY: "Flat", MEAN_SAMPLES: ""})
    whole = ItemStore._read_whole

    def then_replaced(*arguments: Any) -> Any:
        """Read; then another process replaces the items."""
        result = whole(*arguments)
        with closing(ItemStore(tmp_path / FILE)) as other:
            other.replace([item("b", origin="index")], facts={FACTORY: "HNSW8", MEAN_SAMPLES: "8"})
        return result

    monkeypatch.setattr(ItemStore, "_read_whole", then_replaced)
    snapshot = Snapshot.read(tmp_path, DIMENSION)
    assert [found.id for found in snapshot.items] == ["a"]
    assert (snapshot.factory, snapshot.mean_samples) == ("Flat", None)


def damaged(path: Path, whole: bytes, content: dict[str, Item]) -> bool:
    """Whether damage is detected, or harmless."""
    try:
        store = ItemStore(path)
    except (CorruptFileError, ValueError):
        return True
    try:
        store.check()
        return {found.id: found for _, found in store.items_by_key()} == content
    except (CorruptFileError, ValueError):
        return True
    finally:
        store.close()
        path.write_bytes(whole)


def no_flip_and_no_cut_passes(folder: Path, flips: int, cuts: int) -> None:
    path, draw = folder / FILE, random.Random(0)
    content = {str(number): item(str(number), number) for number in range(30)}
    fused = {"images": 2, "resultant": 0.9, "least_image_kappa": 3.5, "contents": b"contents" * 2}
    fused["sums"] = np.arange(2.0 + DIMENSION).tobytes()
    content |= {str(number): item(str(number), number, **fused) for number in range(30, 40)}
    with closing(ItemStore(path)) as store:
        store.write(content.values())
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
from lam.gallery.item import Item
from lam.gallery.store import ItemStore
from tests.service.test_full_disk import small_file_system
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
        first = max(acknowledged) + 2  # the last, unacknowledged one may exist or not
        found = {number: set() for number in acknowledged}
        with closing(ItemStore(path)) as store:
            assert store.check() == []
            for _, there in store.items_by_key():
                number, half = there.id.split("-")
                assert there.embedding[0] == int(number)
                found.setdefault(int(number), set()).add(half)
        for number, halves in found.items():
            if number in acknowledged:
                assert halves == ({"b"} if number % 7 == 0 else {"a", "b"})
            else:
                assert halves in ({"b"}, {"a", "b"})


@pytest.mark.long
def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    nothing_is_lost_by_kills(tmp_path, 3)


@pytest.mark.slow
def test_what_was_acknowledged_survives_100_kills(tmp_path: Path) -> None:
    nothing_is_lost_by_kills(tmp_path, 100)


@pytest.mark.parametrize("identity", ["", ".", "..", "a//b", "..\\", "x" * 129, " b", "é ", "a\n", "a%b", "a\0"])
def test_ids_that_could_mean_something_else_are_refused(identity: str) -> None:
    with pytest.raises(Refusal, match="rule for ids"):
        check_id(identity)


@pytest.mark.parametrize("identity", ["किताब 1", "หนังสือ", "Jose\u0301", "Zoë"])
def test_ids_may_be_of_any_script(identity: str) -> None:
    assert check_id(identity) == identity


def test_metadata_and_labels_are_bounded() -> None:
    assert metadata_json({"b": 1, "a": [None, "x"]}) == '{"a": [null, "x"], "b": 1}'
    assert json.loads(metadata_json({"a": 8000 * "я"})) == {"a": 8000 * "я"}  # 16,000 bytes, and 48,000 if escaped
    for wrong, match in (([], "a JSON object"), ({"a": float("nan")}, "finite"), ({"a": "x" * 20000}, "bytes")):
        with pytest.raises(Refusal, match=match):
            metadata_json(wrong)
    assert normalize_label(" oak \u00a0") == "oak"
    with pytest.raises(Refusal, match="1025 characters"):
        normalize_label("x" * 1025)
    with pytest.raises(Refusal, match="Unicode"):
        normalize_label("\ud800")
