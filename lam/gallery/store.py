"""The items on disk: one SQLite file in WAL mode with full sync, a content hash for each row, and a ledger of all rows.

SQLite notices neither a flipped bit in a value nor a page of an older copy. The hash of a row detects an altered row.
The ledger holds the number of rows and the XOR of their hashes, and detects lost, repeated or replaced rows. XOR is its
own inverse, so a change updates the ledger without reading other rows. An update deletes the old row and inserts a new
one under a new key. A process numbers new keys from the present time, so a restored copy gives no key twice. Thus the
content of a key never changes, and comparing keys suffices to update an index. A second file, the mark, records that
the database existed, so that opening a lost database raises an error.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from lam.gallery.database import (
    BY_ID,
    Transaction,
    connect,
    connect_reading,
    copy_database,
    explain_errors,
    is_immutable,
    limited_time,
    refuse_locked,
    refuse_unstored,
    rows_of,
    transaction,
)
from lam.gallery.filters import Filter
from lam.gallery.item import COLUMNS, Item, ItemInfo, is_whole
from lam.gallery.operations import Change, Operation
from lam.gallery.refusal import Refusal, full
from lam.utils.files import CorruptFileError, check_format, write_text

FORMAT = 1
FILE, MARK, CACHE = "items.sqlite", "items.made", "index"
FACTORY, MEAN_SAMPLES = "factory", "mean_samples"  # names of facts: values that are stored beside the items
MISSING = "{} is missing or empty: restore it from a copy, or create it with `lam index`"
_MARK_TEXT = f"{FILE} was created here. If it is missing or empty, its items were lost.\n"
_PAGE = 2**14  # bytes: several vectors share a page
MAX_PAGE = 2**20  # characters of metadata in a page of items
_THUMBNAIL = COLUMNS.split(", ").index("thumbnail")
_INFO = (
    "id, label, metadata, images, resultant, min(kappa, ifnull(least_kappa, kappa)), kappa, sha256, "
    "thumbnail IS NOT NULL"
)
_RAISE_KEYS = "UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'items'"
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


class ItemStore:
    """Items under stable ids. One thread may write at a time; any thread may read.

    Args:
        read_only: whether to open an existing file only for reading, beside a process that writes.
        make: whether to create a file that never existed. A file that existed and is now missing is lost: an error.

    Raises:
        CorruptFileError: for a file that SQLite cannot read, or that was lost.
        ValueError: for a missing file, an unknown format, or a file that another process has locked.
        OSError: for a file that cannot be written, or a disk that is full or fails.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False, make: bool = True) -> None:
        self.path, self._read_only, self._make = Path(path), read_only, make and not read_only
        self._mark = self.path.with_name(MARK)
        self._reading, self._listing = threading.Lock(), threading.Lock()
        self._has_raised_keys = False
        if not self.path.is_file() or not self.path.stat().st_size:
            self._refuse_lost()
        with explain_errors(self.path), ExitStack() as opened:
            self._writer = self._connect(opened)
            # altered text that is no longer UTF-8 must be read too, so that its row can be named and dropped
            self._writer.text_factory = lambda text: text.decode(errors="replace")
            self._prepare()
            self._reader, self._lister = self._connect(opened), self._connect(opened)
            opened.pop_all()  # from here on, `close` closes the connections
        self._file = os.open(self.path, os.O_PATH)  # a plain descriptor would drop SQLite's locks when it is closed
        if not (read_only or self._mark.is_file()):
            write_text(self._mark, _MARK_TEXT)

    def _connect(self, opened: ExitStack) -> sqlite3.Connection:
        connection = connect_reading(self.path) if self._read_only else connect(self.path)
        opened.enter_context(closing(connection))
        connection.execute(f"PRAGMA page_size={_PAGE}")
        connection.execute("PRAGMA cache_spill=OFF")  # a large change stays in memory: each page is written once
        connection.execute("PRAGMA secure_delete=ON")  # deleted vectors and pictures are overwritten
        return connection

    @property
    def is_immutable(self) -> bool:
        """Whether the file cannot change."""
        return is_immutable(self.path)

    @property
    def is_in_place(self) -> bool:
        """Whether the path still leads to the open file; false once its folder was moved, deleted or replaced."""
        try:
            return os.path.samestat(os.fstat(self._file), self.path.stat())
        except OSError:
            return False

    def _prepare(self) -> None:
        (version,) = self._writer.execute("PRAGMA user_version").fetchone()
        if version:
            check_format(self.path, version, readable=FORMAT)
        else:
            self._refuse_lost()
        if self._read_only:
            return
        self._writer.execute("PRAGMA journal_mode=WAL")
        end = f"PRAGMA user_version={version};ROLLBACK;" if version else f"{_SCHEMA}COMMIT;"
        # Fails if another process holds the write lock, or if the folder is read-only: BEGIN alone accepts the latter.
        self._writer.executescript(f"BEGIN IMMEDIATE;{end}")

    def _refuse_lost(self) -> None:
        if self._mark.is_file():
            raise CorruptFileError(
                f"{self.path} is missing or empty, but existed: its items are lost, also items added while serving; "
                f"restore it from a copy, or delete {self._mark} and run `lam index` to begin anew"
            )
        if not self._make:
            raise ValueError(MISSING.format(self.path))

    def close(self) -> None:
        """Move the log into the file, and close the file."""
        os.close(self._file)
        with closing(self._writer):
            self._reader.close()
            self._lister.close()
            if not self._read_only:
                self.erase_log()

    def check(self, *, drop_corrupt: bool = False) -> list[str]:
        """Compare every row with its hash, and all rows with the ledger; a fault raises a `CorruptFileError`.

        With `drop_corrupt`, altered rows are deleted instead, and their ids returned.
        """
        with explain_errors(self.path):
            (verdict,) = self._writer.execute("PRAGMA integrity_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            altered, fault = self._read_whole()
        if fault and not drop_corrupt:
            raise self._corrupt(fault)
        if fault:
            with explain_errors(self.path), transaction(self._writer) as changes:
                changes.drop(altered)
        return list(altered.values())

    def read(self) -> tuple[dict[int, Sequence[Any]], dict[str, str]]:
        """All checked rows by rising key, without thumbnails, and all facts, at one moment; errors as in `check`."""
        rows: dict[int, Sequence[Any]] = {}
        with explain_errors(self.path):
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
        """Copy the items of one moment into a new file, while another process may write."""
        with explain_errors(self.path):
            copy_database(self._writer, path)

    def _read_whole(self, kept: dict[int, Sequence[Any]] | None = None) -> tuple[dict[int, str], str]:
        """Collect intact rows in `kept`; return the ids of altered rows by key, and the fault, empty without one."""
        altered: dict[int, str] = {}
        count, digest = 0, 0
        for key, row, sha256 in rows_of(self._writer):
            count += 1
            if not is_whole(row, sha256):
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
            return {}, f"its {rows} rows are not the stored ones"
        return {}, ""

    def _corrupt(self, fault: str) -> CorruptFileError:
        return CorruptFileError(
            f"{self.path}: {fault}; restore it from a copy, or start with --drop-corrupt to keep the intact rows"
        )

    def __len__(self) -> int:
        with self._read() as reader:
            return reader.execute("SELECT rows FROM ledger").fetchone()[0]

    def items_by_key(self) -> Iterator[tuple[int, Item]]:
        """All items by rising key; nothing may be written meanwhile."""
        return ((key, Item(*row)) for key, row, _ in rows_of(self._writer))

    def keys(self) -> list[int]:
        """The keys of all items, unordered."""
        with self._read() as reader:
            return [row[0] for row in reader.execute("SELECT key FROM items").fetchall()]

    def items_of(self, keys: Iterable[int]) -> dict[int, Item]:
        """Items by key; missing keys are left out."""
        return {key: Item(*row) for key, *row in self._of_keys(COLUMNS, keys)}

    def get(self, item_id: str) -> Item | None:
        """The item of an id, or None."""
        with self._read() as reader:
            row = reader.execute(BY_ID, (item_id,)).fetchone()
        return None if row is None else Item(*row)

    def infos_of(self, keys: Iterable[int]) -> dict[int, ItemInfo]:
        """Information on items by key; missing keys are left out."""
        return {key: _info(row) for key, *row in self._of_keys(_INFO, keys)}

    def vectors_of(self, keys: Iterable[int]) -> dict[int, bytes]:
        """Vectors of items by key; missing keys are left out."""
        return {row[0]: row[1] for row in self._of_keys("vector", keys)}

    def _of_keys(self, columns: str, keys: Iterable[int]) -> list[Sequence[Any]]:
        known = list(keys)
        query = f"SELECT key, {columns} FROM items WHERE key IN ({', '.join('?' * len(known))})"
        with self._read() as reader:
            return reader.execute(query, known).fetchall()

    def page(self, *, after: str, limit: int, where: Filter | None = None) -> dict[int, ItemInfo]:
        """The first `limit` items that pass a filter and whose ids come after `after`: by key, in the order of ids.

        A page ends early once its metadata reach `MAX_PAGE`. A slow filter is refused as `busy`.
        """
        items, size = dict[int, ItemInfo](), 0
        text, parameters = ("1", ()) if where is None else (where.sql.text, where.sql.parameters)
        query = f"SELECT key, {_INFO} FROM items WHERE id > ? AND {text} ORDER BY id LIMIT ?"
        with self._scan() as lister, closing(lister.execute(query, (after, *parameters, limit))) as rows:
            for key, *row in rows:
                items[key] = _info(row)
                size += len(items[key].metadata)
                if size >= MAX_PAGE:
                    break
        return items

    def where(self, where: Filter) -> tuple[list[tuple[int, str]], tuple[str, ...]]:
        """Keys and labels of the items that pass, by rising key; if no item passes, also fields that no item has.

        A slow filter is refused as `busy`.
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
        """Whether an item has this label; a slow scan is refused as `busy`."""
        with self._scan() as lister:
            return lister.execute("SELECT 1 FROM items WHERE label = ? LIMIT 1", (label,)).fetchone() is not None

    @contextmanager
    def _scan(self) -> Iterator[sqlite3.Connection]:
        """A connection for listings, apart from searches; a slow scan is refused as `busy`."""
        with self._listing, refuse_locked(), limited_time(self._lister):
            yield self._lister

    def version(self) -> int:
        """A number that changes when another process writes."""
        with self._read() as reader:
            return reader.execute("PRAGMA data_version").fetchone()[0]

    def fact(self, name: str) -> str | None:
        """The value of a fact, or None."""
        with self._read() as reader:
            row = reader.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def write(
        self, operations: Iterable[Operation], *, facts: Mapping[str, str] | None = None
    ) -> list[Change | Refusal]:
        """Apply operations in one transaction: on return the changes are on disk; after an error nothing has changed.

        An item replaces an item with the same id and other content. Deleting a missing id has no effect. A refused
        operation does not stop other ones. The log holds deleted items until `erase_log`. `facts` holds values to
        store by name.

        Returns:
            The effect of each operation, or its refusal.

        Raises:
            Refusal: `full`, if the changes could not be stored or the file was deleted; `busy`, while another process
                has the file locked.
        """
        with self._transaction() as changes:
            effects = [changes.apply(operation) for operation in operations]
            self._put_facts(facts or {})
        return effects

    def replace(self, items: Iterable[Item], *, facts: Mapping[str, str]) -> None:
        """Replace all items of origin `index`, in one transaction; errors as in `write`.

        Items that a service added or changed stay; a new item with one of their ids is dropped. A new item that
        equals an intact old one keeps its key. The ids of `items` must differ.
        """
        with self._transaction() as changes:
            changes.replace(items)
            self._put_facts(facts)

    def _put_facts(self, facts: Mapping[str, str]) -> None:
        self._writer.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())

    def erase_log(self) -> str:
        """Move the log into the file, to overwrite deleted content; returns the obstacle, or an empty text."""
        try:
            (is_blocked, *_) = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error as error:  # such as a full disk
            return f"the database keeps its log ({error})"
        return "a reader of the database keeps its log" if is_blocked else ""

    @contextmanager
    def _transaction(self) -> Iterator[Transaction]:
        if not os.fstat(self._file).st_nlink:  # SQLite would go on in the deleted file
            raise full(f"{self.path} was deleted or replaced: end this process, and restore the file")
        with refuse_unstored(), transaction(self._writer) as changes:
            if not self._has_raised_keys:
                self._writer.execute(_RAISE_KEYS, (time.time_ns() // 1000,))
            yield changes
        self._has_raised_keys = True

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._reading, refuse_locked():
            yield self._reader


def _info(row: Sequence[Any]) -> ItemInfo:
    *values, has_thumbnail = row
    return ItemInfo(*values, has_thumbnail=bool(has_thumbnail))
