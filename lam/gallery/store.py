"""The items on disk: one SQLite file in WAL mode with full sync, a content hash for each row, and a ledger of all rows.

SQLite notices neither a flipped bit in a value nor a page of an older copy. The hash of a row detects an altered row.
The ledger, the number of rows and the XOR of their hashes, detects lost, repeated or replaced rows. XOR is its own
inverse, so a change updates the ledger without reading other rows. A row is never changed: an update inserts it under a
new key. So a key has one content for ever, and an index follows by comparing keys. A mark beside the file says that
it existed: a lost file is then an error, not a new gallery. This module knows no index.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from operator import xor
from pathlib import Path
from typing import Any

from lam.gallery.filters import Filter
from lam.gallery.item import INDEXED, Item, hash_of
from lam.gallery.operations import Batch, Change, DeleteWhere, Operation, Patch
from lam.gallery.refusal import Refusal, busy, full
from lam.utils.files import CorruptFileError, check_format, write_text

FORMAT = 1
FILE, MARK, CACHE = "items.sqlite", "items.made", "index"
FACTORY, MEAN_SAMPLES = "factory", "mean_samples"  # facts
MISSING = "{} is missing or empty: restore it from a copy, or create it with `lam index`"
_MARK_TEXT = f"{FILE} was created here. If it is missing or empty, its items were lost.\n"
_PAGE = 2**14  # bytes: several vectors share a page
_PATIENCE = 5.0  # greatest wait for another process's lock, in seconds
_LOCKED, _UNWRITABLE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED), (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
_FAILING = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL)
MAX_PAGE = 2**20  # characters of metadata in a page of items
_FILTER_SECONDS = 5.0  # greatest time of a filter over all items
_STEPS = 10_000  # SQLite's instructions between two looks at the clock
_COLUMNS = (
    "id, vector, kappa, label, metadata, thumbnail, origin, images, resultant, least_kappa, contents, paths, sums"
)
_TYPES = (
    str, bytes, float, str, str, bytes | None, str, int, float, float | None, bytes, str, bytes | None,
)  # of the columns  # fmt: skip
_THUMBNAIL, _ORIGIN = (_COLUMNS.split(", ").index(name) for name in ("thumbnail", "origin"))
_BY_ID = f"SELECT {_COLUMNS} FROM items WHERE id = ?"
_INSERT = f"INSERT INTO items ({_COLUMNS}, sha256) VALUES ({', '.join('?' * (_COLUMNS.count(',') + 2))})"
_OF_HIT = "id, label, metadata, images, resultant, min(kappa, ifnull(least_kappa, kappa)), thumbnail IS NOT NULL"
_PAGE_OF = f"SELECT {_OF_HIT}, kappa, sha256 FROM items WHERE id > ? AND {{}} ORDER BY id LIMIT ?"
_SCHEMA = f"""
CREATE TABLE items (
    key INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, vector BLOB NOT NULL, kappa REAL NOT NULL,
    label TEXT NOT NULL, metadata TEXT NOT NULL, thumbnail BLOB, origin TEXT NOT NULL, sha256 BLOB NOT NULL,
    images INTEGER NOT NULL, resultant REAL NOT NULL, least_kappa REAL, contents BLOB NOT NULL, paths TEXT NOT NULL,
    sums BLOB
);
CREATE TABLE ledger (one INTEGER PRIMARY KEY CHECK (one = 1), rows INTEGER NOT NULL, sha256 BLOB NOT NULL);
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO ledger VALUES (1, 0, zeroblob(32));
PRAGMA user_version = {FORMAT};
"""


@dataclass(frozen=True)
class HitInfo:
    """A hit without its score and κ.

    Attributes:
        id, label, metadata: fields of the item.
        images: number of its images.
        resultant: mean resultant length of their directions.
        least_kappa: least κ of the item and its images.
        has_thumbnail: whether it has a small picture.
    """

    id: str
    label: str
    metadata: str
    images: int
    resultant: float
    least_kappa: float
    has_thumbnail: bool


@dataclass(frozen=True)
class ItemInfo(HitInfo):
    """An item without its vector and picture.

    Attributes:
        kappa: its concentration.
        sha256: its content hash.
    """

    kappa: float
    sha256: bytes

    @classmethod
    def of(cls, item: Item) -> "ItemInfo":
        """The information on an item."""
        images, has_thumbnail = item.images, item.thumbnail is not None
        return cls(
            item.id, item.label, item.metadata, images.count, images.resultant, item.least_kappa, has_thumbnail,
            item.kappa, item.sha256,
        )  # fmt: skip


class ItemStore:
    """Items under stable ids. One thread may write at a time; any thread may read.

    Args:
        path: the SQLite file.
        read_only: whether to open an existing file only for reading, beside a process that writes.
        make: whether to create a missing file, unless it was lost.

    Raises:
        CorruptFileError: for a file that SQLite cannot read, or that was lost.
        ValueError: for a missing file, an unknown format, or a file that another process has locked.
        OSError: for a file that cannot be written, or a disk that is full or fails.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False, make: bool = True) -> None:
        self.path, self._read_only, self._make = Path(path), read_only, make and not read_only
        self._mark = self.path.with_name(MARK)
        self._ledger = 0, 0  # number of rows and XOR of their hashes, within a transaction
        self._reading, self._listing = threading.Lock(), threading.Lock()
        if not self.path.is_file() or not self.path.stat().st_size:
            self._refuse_lost()
        with self._explain_errors(), ExitStack() as opened:
            self._writer = self._connect(opened)
            self._prepare()
            self._reader, self._lister = self._connect(opened), self._connect(opened)
            opened.pop_all()  # from here on, `close` closes the connections
        if not (read_only or self._mark.is_file()):
            write_text(self._mark, _MARK_TEXT)

    def _connect(self, opened: ExitStack) -> sqlite3.Connection:
        address = f"{self.path.absolute().as_uri()}?mode={'rw' if self._read_only else 'rwc'}"
        if self._read_only and self._cannot_change():
            address += "&immutable=1"
        # no isolation level: this module begins and ends transactions itself
        connection = sqlite3.connect(
            address, uri=True, isolation_level=None, check_same_thread=False, timeout=_PATIENCE
        )
        opened.enter_context(closing(connection))
        connection.execute(f"PRAGMA query_only={self._read_only}")
        connection.execute(f"PRAGMA page_size={_PAGE}")
        connection.execute("PRAGMA cache_spill=OFF")  # a large change stays in memory: each page is written once
        connection.execute("PRAGMA synchronous=FULL")  # in WAL mode, NORMAL acknowledges before the disk has the change
        connection.execute("PRAGMA secure_delete=ON")  # deleted vectors and pictures are overwritten
        connection.execute("PRAGMA trusted_schema=OFF")
        return connection

    def _cannot_change(self) -> bool:
        """Whether the folder is read-only and holds no log, which an immutable connection would ignore."""
        return not os.access(self.path.parent, os.W_OK) and not self.path.with_name(f"{self.path.name}-wal").exists()

    def _prepare(self) -> None:
        (version,) = self._writer.execute("PRAGMA user_version").fetchone()
        if version:
            check_format(self.path, version, readable=FORMAT)
        else:
            self._refuse_lost()
        if self._read_only:
            return
        self._writer.execute("PRAGMA journal_mode=WAL")
        end = "ROLLBACK;" if version else f"{_SCHEMA}COMMIT;"
        self._writer.executescript(f"BEGIN IMMEDIATE;{end}")  # fails if another process holds the write lock

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            code, path = _code_of(error), self.path
            if code in _LOCKED:
                explained = ValueError(f"{path} is locked by another process: end that, or wait until it has finished")
            elif code in _UNWRITABLE:
                explained = OSError(f"{path} cannot be written ({error}): mount {path.parent} writable, for this user")
            elif code in _FAILING:
                explained = OSError(f"{path} cannot be used ({error}): check the disk")
            else:
                explained = CorruptFileError(f"{path} is truncated or altered: {error}; restore it from a copy")
            raise explained from None

    def _refuse_lost(self) -> None:
        if self._mark.is_file():
            raise CorruptFileError(
                f"{self.path} is missing or empty, but existed: its items are lost, also items added while serving; "
                f"restore it from a copy, or delete {self._mark} and run `lam index` to begin anew"
            )
        if not self._make:
            raise ValueError(MISSING.format(self.path))

    def close(self) -> None:
        """Move the log into the file and close it."""
        with closing(self._writer):
            self._reader.close()
            self._lister.close()
            if not self._read_only:
                self.erase_log()

    def check(self, *, drop_corrupt: bool = False) -> list[str]:
        """Compare every row with its hash, and all rows with the ledger; `drop_corrupt` deletes corrupt rows.

        Returns:
            Ids of the deleted rows.

        Raises:
            CorruptFileError: naming the file and the rows.
        """
        with self._explain_errors():
            (verdict,) = self._writer.execute("PRAGMA integrity_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            altered, fault = self._read_whole()
        if fault and not drop_corrupt:
            raise self._corrupt(fault)
        if fault:
            with self._transaction():
                self._writer.executemany("DELETE FROM items WHERE key = ?", [(key,) for key in altered])
                hashes = [sha256 for (sha256,) in self._writer.execute("SELECT sha256 FROM items")]
                self._ledger = len(hashes), _xor(hashes)
        return list(altered.values())

    def read(self) -> tuple[dict[int, Sequence[Any]], dict[str, str]]:
        """All rows and facts at one moment, while another process may write.

        Returns:
            Rows by rising key, without thumbnails, after a check of hashes and ledger; and facts by name.

        Raises:
            CorruptFileError: naming the file and the rows.
        """
        rows: dict[int, Sequence[Any]] = {}
        with self._explain_errors():
            self._writer.execute("BEGIN")  # in one transaction, rows, ledger and facts are from one moment
            try:
                _, fault = self._read_whole(rows)
                facts = dict(self._writer.execute("SELECT name, value FROM facts"))
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
        if fault:
            raise self._corrupt(fault)
        return rows, facts

    def copy(self, path: str | Path) -> None:
        """Copy the items of one moment into a new file, while another process may write.

        Raises:
            OSError: for a full disk.
        """
        with self._explain_errors(), closing(sqlite3.connect(path)) as new:
            self._writer.backup(new)  # all pages in one read transaction: in several, each write would restart it

    def _read_whole(self, kept: dict[int, Sequence[Any]] | None = None) -> tuple[dict[int, str], str]:
        """Collect intact rows in `kept`; return the ids of altered rows by key, and the fault as text."""
        altered: dict[int, str] = {}
        count, digest = 0, 0
        for key, row, sha256 in self._rows():
            count += 1
            if not _is_whole(row, sha256):
                altered[key] = str(row[0])
                continue
            digest ^= int.from_bytes(sha256, "big")
            if kept is not None:
                kept[key] = (*row[:_THUMBNAIL], None, *row[_THUMBNAIL + 1 :])
        rows, sum_of_all = self._writer.execute("SELECT rows, sha256 FROM ledger").fetchone()
        if altered:
            return altered, f"rows {', '.join(list(altered.values())[:5])} are altered"
        if count != rows:
            return {}, f"it has {count} rows instead of {rows}"
        if digest != int.from_bytes(sum_of_all, "big"):
            return {}, f"it has {rows} rows, but not the stored ones"
        return {}, ""

    def _corrupt(self, fault: str) -> CorruptFileError:
        return CorruptFileError(
            f"{self.path}: {fault}; restore it from a copy, or start with --drop-corrupt to go on without them"
        )

    def __len__(self) -> int:
        with self._read() as reader:
            return reader.execute("SELECT rows FROM ledger").fetchone()[0]

    def items_by_key(self) -> Iterator[tuple[int, Item]]:
        """All items by rising key; nothing may be written meanwhile."""
        return ((key, Item.of_row(row)) for key, row, _ in self._rows())

    def keys(self) -> list[int]:
        """The keys of all items, unordered."""
        with self._read() as reader:
            return [row[0] for row in reader.execute("SELECT key FROM items").fetchall()]

    def items_of(self, keys: Iterable[int]) -> dict[int, Item]:
        """Items by key, for up to about a thousand keys; missing keys are left out."""
        return {key: Item.of_row(row) for key, *row in self._of_keys(_COLUMNS, keys)}

    def get(self, item_id: str) -> Item | None:
        """The item of an id, or None."""
        with self._read() as reader:
            row = reader.execute(_BY_ID, (item_id,)).fetchone()
        return None if row is None else Item.of_row(row)

    def hit_infos(self, keys: Iterable[int]) -> dict[int, HitInfo]:
        """Information on hits by key; missing keys are left out."""
        rows = self._of_keys(_OF_HIT, keys)
        return {key: HitInfo(*values, has_thumbnail=bool(thumbnail)) for key, *values, thumbnail in rows}

    def vectors_of(self, keys: Iterable[int]) -> dict[int, bytes]:
        """Vectors of items by key; missing keys are left out."""
        return {row[0]: row[1] for row in self._of_keys("vector", keys)}

    def _of_keys(self, columns: str, keys: Iterable[int]) -> list[Sequence[Any]]:
        known = list(keys)
        query = f"SELECT key, {columns} FROM items WHERE key IN ({', '.join('?' * len(known))})"
        with self._read() as reader:
            return reader.execute(query, known).fetchall()

    def page(self, *, after: str, limit: int, where: Filter | None = None) -> list[ItemInfo]:
        """Items after an id that pass a filter, by rising id; fewer if their metadata exceeds `MAX_PAGE`.

        The page has its own connection, so searches do not wait for it.

        Raises:
            Refusal: `busy`, for a filter that takes too long.
        """
        items, size = list[ItemInfo](), 0
        text, parameters = ("1", ()) if where is None else (where.sql.text, where.sql.parameters)
        query, bound = _PAGE_OF.format(text), (after, *parameters, limit)
        with self._scan() as lister, closing(lister.execute(query, bound)) as rows:
            for *values, thumbnail, kappa, sha256 in rows:
                items.append(ItemInfo(*values, has_thumbnail=bool(thumbnail), kappa=kappa, sha256=sha256))
                size += len(items[-1].metadata)
                if size >= MAX_PAGE:
                    break
        return items

    def where(self, where: Filter) -> tuple[list[tuple[int, str]], tuple[str, ...]]:
        """Keys and labels of the items that pass, by rising key; if none passes, the fields that no item has.

        Raises:
            Refusal: `busy`, for a filter that takes too long.
        """
        with self._scan() as lister:
            query = f"SELECT key, label FROM items WHERE {where.sql.text} ORDER BY key"
            rows = lister.execute(query, where.sql.parameters).fetchall()
            if rows or not where.fields:
                return rows, ()
            tests = ", ".join(f"max({field.text})" for field in where.fields.values())
            names = [name for field in where.fields.values() for name in field.parameters]
            known = lister.execute(f"SELECT {tests} FROM items", names).fetchone()
        return rows, tuple(name for name, is_known in zip(where.fields, known, strict=True) if not is_known)

    def has_label(self, label: str) -> bool:
        """Whether an item has this label.

        Raises:
            Refusal: `busy`, if the scan takes too long.
        """
        with self._scan() as lister:
            return lister.execute("SELECT 1 FROM items WHERE label = ? LIMIT 1", (label,)).fetchone() is not None

    @contextmanager
    def _scan(self) -> Iterator[sqlite3.Connection]:
        """The connection of listings, which searches do not wait for; a long scan is refused."""
        with self._listing, _refuse_locked(), _limited_time(self._lister):
            yield self._lister

    def version(self) -> int:
        """A number that differs after a change by another process."""
        with self._read() as reader:
            return reader.execute("PRAGMA data_version").fetchone()[0]

    def fact(self, name: str) -> str | None:
        """A value stored beside the items, or None."""
        with self._read() as reader:
            row = reader.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def write(
        self, operations: Iterable[Operation], *, facts: Mapping[str, str] | None = None
    ) -> list[Change | Refusal]:
        """Put, fuse and delete items in one transaction: on return it is on disk; after an error nothing has changed.

        An item replaces an item with the same id and other content. Deleting a missing id is no error. A refused
        operation does not stop the others. After a deletion, the log holds the deleted item until `erase_log`.

        Args:
            operations: operations, applied in this order.
            facts: values to store beside the items.

        Returns:
            The effect of each operation, or its refusal.

        Raises:
            Refusal: `full`, if the change could not be stored; `busy`, while another process has the file locked, or
                for a filter that takes too long.
        """
        with self._storing(facts or {}):
            return [self._apply(operation) for operation in operations]

    def replace(self, items: Iterable[Item], *, facts: Mapping[str, str]) -> None:
        """Replace all items of origin `index`, in one transaction.

        Items added or changed while serving stay, and win over a new item with their id. A new item with the content of
        an intact old item keeps its key.

        Args:
            items: items of origin `index`, with different ids.
            facts: values to store beside the items.

        Raises:
            Refusal: `full`, if the change could not be stored; `busy`, while another process has the file locked.
        """
        new = {item.id: (*row, hash_of(row)) for item in items if (row := item.row)}
        gone: list[tuple[int, bytes]] = []
        with self._storing(facts):
            for key, row, sha256 in self._rows():
                is_same = row[0] in new and new[row[0]][-1] == sha256 and _is_whole(row, sha256)
                if row[_ORIGIN] == INDEXED and not is_same:
                    gone.append((key, sha256))
                else:
                    new.pop(row[0], None)
            self._writer.executemany("DELETE FROM items WHERE key = ?", [(key,) for key, _ in gone])
            self._writer.executemany(_INSERT, new.values())
            changed = [*(sha256 for _, sha256 in gone), *(row[-1] for row in new.values())]
            self._update_ledger(len(new) - len(gone), *changed)

    def erase_log(self) -> bool:
        """Move the log into the file, which overwrites deleted content; False if another process prevents it."""
        with suppress(sqlite3.Error):
            (is_blocked, *_) = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            return not is_blocked
        return False

    def _apply(self, operation: Operation) -> Change | Refusal:
        if isinstance(operation, str):
            return self._delete(operation)
        if isinstance(operation, Item):
            return self._put(operation)
        if isinstance(operation, DeleteWhere):
            return self._delete_where(operation.where)
        if isinstance(operation, Batch):
            return self._apply_batch(operation)
        is_patch = isinstance(operation, Patch)
        row = self._writer.execute(_BY_ID, (operation.id if is_patch else operation.item.id,)).fetchone()
        try:
            if is_patch:
                return Change() if row is None else self._put(operation.over(Item.of_row(row)))
            return self._put(operation.item if row is None else operation.over(Item.of_row(row)))
        except Refusal as refusal:
            return refusal

    def _apply_batch(self, batch: Batch) -> Change:
        ledger = self._ledger
        self._writer.execute("SAVEPOINT batch")
        parts = tuple(map(self._apply, batch.operations))
        if batch.whole and any(isinstance(part, Refusal) for part in parts):
            self._writer.execute("ROLLBACK TO batch")
            self._ledger, parts = ledger, tuple(part if isinstance(part, Refusal) else Change() for part in parts)
        self._writer.execute("RELEASE batch")
        return Change(parts=parts)

    def _put(self, item: Item) -> Change:
        row = self._writer.execute("SELECT key, sha256 FROM items WHERE id = ?", (item.id,)).fetchone()
        sha256 = item.sha256
        if row is not None and row[1] == sha256:
            return Change(key=row[0], item=item)
        removed = () if row is None else self._delete(item.id).removed
        added = self._writer.execute(_INSERT, (*item.row, sha256))
        self._update_ledger(1, sha256)
        return Change(removed, added.lastrowid, created=row is None, item=item)

    def _delete(self, item_id: str) -> Change:
        row = self._writer.execute("DELETE FROM items WHERE id = ? RETURNING key, sha256", (item_id,)).fetchone()
        if row is None:
            return Change()
        self._update_ledger(-1, row[1])
        return Change((row[0],))

    def _delete_where(self, where: Filter) -> Change | Refusal:
        query = f"SELECT key, sha256 FROM items WHERE {where.sql.text}"
        try:  # apart from the deletion: an interrupted change would undo the whole transaction
            with _limited_time(self._writer):
                rows = self._writer.execute(query, where.sql.parameters).fetchall()
        except Refusal as refusal:
            return refusal
        self._writer.executemany("DELETE FROM items WHERE key = ?", [(key,) for key, _ in rows])
        self._update_ledger(-len(rows), *(sha256 for _, sha256 in rows))
        return Change(tuple(key for key, _ in rows))

    def _update_ledger(self, rows: int, *changed: bytes) -> None:
        """Add the change in rows to the ledger's count, and XOR their hashes into it."""
        count, digest = self._ledger
        self._ledger = count + rows, digest ^ _xor(changed)

    def _rows(self) -> Iterator[tuple[int, Sequence[Any], bytes]]:
        """Every row with its key and its hash."""
        for key, *row, sha256 in self._writer.execute(f"SELECT key, {_COLUMNS}, sha256 FROM items ORDER BY key"):
            yield key, row, sha256

    @contextmanager
    def _storing(self, facts: Mapping[str, str]) -> Iterator[None]:
        """Within the context, a transaction, which stores facts at its end; an error of SQLite becomes a refusal."""
        try:
            with self._transaction():
                yield
                self._writer.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())
        except sqlite3.Error as error:
            raise (_locked() if _code_of(error) in _LOCKED else full(str(error))) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Within the context, changes and ledger are written together, or not at all.

        IMMEDIATE takes the write lock now: a deferred transaction would read the ledger first, and could not write if
        another process wrote in between. COMMIT returns when the log is on disk (synchronous=FULL), so changes
        acknowledged after it survive a power cut. Any error rolls back, also an error of Python.
        """
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            rows, digest = self._writer.execute("SELECT rows, sha256 FROM ledger").fetchone()
            self._ledger = rows, int.from_bytes(digest, "big")
            yield
            rows, digest = self._ledger
            self._writer.execute("UPDATE ledger SET rows = ?, sha256 = ?", (rows, digest.to_bytes(32, "big")))
            self._writer.execute("COMMIT")
        except BaseException:
            if self._writer.in_transaction:  # SQLite itself rolls back if the disk is full or fails
                self._writer.execute("ROLLBACK")
            raise

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._reading, _refuse_locked():
            yield self._reader


@contextmanager
def _refuse_locked() -> Iterator[None]:
    """Within the context, another process's lock becomes a refusal, `busy`."""
    try:
        yield
    except sqlite3.Error as error:
        if _code_of(error) in _LOCKED:
            raise _locked() from error
        raise


@contextmanager
def _limited_time(connection: sqlite3.Connection) -> Iterator[None]:
    """Within the context, a statement that takes too long is interrupted and becomes a refusal, `busy`."""
    until = time.monotonic() + _FILTER_SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
    try:
        yield
    except sqlite3.OperationalError as error:
        if _code_of(error) != sqlite3.SQLITE_INTERRUPT:
            raise
        raise busy(f"the filter took longer than {_FILTER_SECONDS:g} s: give fewer conditions") from None
    finally:
        connection.set_progress_handler(None, _STEPS)


def _code_of(error: sqlite3.Error) -> int:
    """SQLite's primary error code; for an error that this module raises, the code of corruption."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF


def _locked() -> Refusal:
    return busy("another process has locked the database")


def _xor(hashes: Iterable[bytes]) -> int:
    return reduce(xor, (int.from_bytes(sha256, "big") for sha256 in hashes), 0)


def _is_whole(row: Sequence[Any], sha256: bytes) -> bool:
    """Whether the values of a row have their types and its hash."""
    return all(map(isinstance, row, _TYPES)) and hash_of(row) == sha256
