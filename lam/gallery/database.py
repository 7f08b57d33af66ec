"""SQLite: connections with durable commits, transactions on the items, and errors with a cause and a remedy."""

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import reduce
from operator import xor
from pathlib import Path
from typing import Any

from lam.gallery.item import COLUMNS, INDEXED, Item, hash_of, is_whole
from lam.gallery.operations import Batch, Change, DeleteWhere, Operation, Patch
from lam.gallery.refusal import Refusal, busy, full
from lam.utils.files import CorruptFileError

_PATIENCE = 5.0  # greatest wait for another process's lock, in seconds
_LOCKED, _UNWRITABLE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED), (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
_FAILING = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL)
_FILTER_SECONDS = 5.0  # greatest time of a filter over all items
_STEPS = 10_000  # SQLite's instructions between two checks of the time
_ORIGIN = COLUMNS.split(", ").index("origin")
BY_ID = f"SELECT {COLUMNS} FROM items WHERE id = ?"
_INSERT = f"INSERT INTO items ({COLUMNS}, sha256) VALUES ({', '.join('?' * (COLUMNS.count(',') + 2))})"
_KEY_OF = "SELECT key, sha256 FROM items WHERE id = ?"
_DELETE = "DELETE FROM items WHERE key = ?"


def connect(address: str | Path, *, uri: bool = False) -> sqlite3.Connection:
    """A connection that any thread may use; the caller begins and ends transactions."""
    connection = sqlite3.connect(address, uri=uri, isolation_level=None, check_same_thread=False, timeout=_PATIENCE)
    try:
        connection.execute("PRAGMA synchronous=FULL")  # in WAL mode, NORMAL acknowledges before the disk has the change
        connection.execute("PRAGMA trusted_schema=OFF")
    except BaseException:
        connection.close()
        raise
    return connection


def connect_reading(path: Path) -> sqlite3.Connection:
    """A connection that only reads an existing file, beside a process that writes."""
    connection = connect(f"{path.absolute().as_uri()}?mode=rw{'&immutable=1' * is_immutable(path)}", uri=True)
    connection.execute("PRAGMA query_only=ON")
    return connection


def is_immutable(path: Path) -> bool:
    """Whether the file cannot change: its folder is read-only and holds no log (`immutable` ignores a log)."""
    return not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()


def copy_database(source: sqlite3.Connection, path: str | Path) -> None:
    """Copy a database of one moment into a new file, while another process may write."""
    with closing(sqlite3.connect(path)) as new:
        try:
            source.backup(new)  # all pages at once: with several transactions, a write restarts the copy
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                raise
            raise OSError(f"{path} cannot be written ({error}): make room on its disk") from None


@contextmanager
def explain_errors(path: Path, *, remedy: str = "restore it from a copy") -> Iterator[None]:
    """Within the context, an error of SQLite becomes an error that names the file, a cause and a remedy.

    Raises:
        ValueError: for a file that another process has locked.
        OSError: for a file that cannot be read or written, or a disk that is full or fails.
        CorruptFileError: for other errors, with `remedy`.
    """
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = _code_of(error)
        if code in _LOCKED:
            explained = ValueError(f"{path} is locked by another process: end that, or wait until it has finished")
        elif path.exists() and not os.access(path, os.R_OK):
            explained = OSError(f"{path} cannot be read ({error}): give this user the right to read it")
        elif code in _UNWRITABLE:
            explained = OSError(
                f"{path} cannot be written ({error}): mount {path.parent} writable, for this user, or serve the run "
                "with --replica, which only reads"
            )
        elif code in _FAILING:
            explained = OSError(f"{path} cannot be used ({error}): check the disk and its free space")
        else:
            explained = CorruptFileError(f"{path} is truncated or altered: {error}; {remedy}")
        raise explained from None


@contextmanager
def refuse_locked() -> Iterator[None]:
    """Within the context, another process's lock becomes a refusal, `busy`."""
    try:
        yield
    except sqlite3.Error as error:
        if _code_of(error) in _LOCKED:
            raise busy("another process has locked the database") from error
        raise


@contextmanager
def refuse_unstored() -> Iterator[None]:
    """Within the context, an error of SQLite becomes a refusal: `busy` for another process's lock, else `full`."""
    try:
        with refuse_locked():
            yield
    except sqlite3.Error as error:
        raise full(str(error)) from error


@contextmanager
def limited_time(connection: sqlite3.Connection) -> Iterator[None]:
    """Within the context, a statement that takes too long is interrupted and becomes a refusal, `busy`."""
    until = time.monotonic() + _FILTER_SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
    try:
        yield
    except sqlite3.OperationalError as error:
        if _code_of(error) != sqlite3.SQLITE_INTERRUPT:
            raise
        what = f"looking through the items took longer than {_FILTER_SECONDS:g} s"
        raise busy(f"{what}: a filter of fewer conditions is faster") from None
    finally:
        connection.set_progress_handler(None, _STEPS)


def _code_of(error: sqlite3.Error) -> int:
    """SQLite's primary error code; for an error that lam raises, the code of corruption."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF


@contextmanager
def transaction(writer: sqlite3.Connection) -> Iterator["Transaction"]:
    """Within the context, changes and ledger are written together, or not at all.

    IMMEDIATE takes the write lock at once. A deferred transaction would read the ledger first, and could not write if
    another process wrote in between. COMMIT returns when the log is on disk (synchronous=FULL), so committed changes
    survive a power cut. Any exception rolls back.
    """
    writer.execute("BEGIN IMMEDIATE")
    try:
        rows, digest = writer.execute("SELECT rows, sha256 FROM ledger").fetchone()
        changes = Transaction(writer, rows, int.from_bytes(digest, "big"))
        yield changes
        rows, digest = changes.ledger
        writer.execute("UPDATE ledger SET rows = ?, sha256 = ?", (rows, digest.to_bytes(32, "big")))
        writer.execute("COMMIT")
    except BaseException:
        if writer.in_transaction:  # SQLite itself rolls back if the disk is full or fails
            writer.execute("ROLLBACK")
        raise


def rows_of(connection: sqlite3.Connection) -> Iterator[tuple[int, Sequence[Any], bytes]]:
    """Key, values and hash of every row, by rising key."""
    for key, *row, sha256 in connection.execute(f"SELECT key, {COLUMNS}, sha256 FROM items ORDER BY key"):
        yield key, row, sha256


class Transaction:
    """Changes the items within one transaction; `ledger` is the present number of rows, and the XOR of their hashes."""

    def __init__(self, writer: sqlite3.Connection, rows: int, digest: int) -> None:
        self._writer = writer
        self.ledger = rows, digest

    def apply(self, operation: Operation) -> Change | Refusal:
        """Apply an operation; returns its effect or its refusal."""
        if isinstance(operation, str):
            return self._delete_rows(self._writer.execute(_KEY_OF, (operation,)).fetchall())
        if isinstance(operation, Item):
            return self._put(operation)
        if isinstance(operation, Batch):
            return self._apply_batch(operation)
        try:
            if isinstance(operation, DeleteWhere):
                query = f"SELECT key, sha256 FROM items WHERE {operation.where.sql.text}"
                with limited_time(self._writer):  # only the query: an interrupted deletion would undo the transaction
                    rows = self._writer.execute(query, operation.where.sql.parameters).fetchall()
                return self._delete_rows(rows)
            is_patch = isinstance(operation, Patch)
            row = self._writer.execute(BY_ID, (operation.id if is_patch else operation.item.id,)).fetchone()
            if row is not None:
                return self._put(operation.over(Item(*row)))
            return Change() if is_patch else self._put(operation.item)
        except Refusal as refusal:
            return refusal

    def replace(self, items: Iterable[Item]) -> None:
        """Replace all items of origin `index`; see `ItemStore.replace`."""
        new = {item.id: (*row, hash_of(row)) for item in items if (row := item.row)}
        gone: list[tuple[int, bytes]] = []
        for key, row, sha256 in rows_of(self._writer):
            is_same = row[0] in new and new[row[0]][-1] == sha256 and is_whole(row, sha256)
            if row[_ORIGIN] == INDEXED and not is_same:
                gone.append((key, sha256))
            else:
                new.pop(row[0], None)
        self._delete_rows(gone)
        self._writer.executemany(_INSERT, new.values())
        self._update_ledger(len(new), *(row[-1] for row in new.values()))

    def drop(self, keys: Iterable[int]) -> None:
        """Delete altered rows, and compute the ledger of the other rows anew."""
        self._writer.executemany(_DELETE, [(key,) for key in keys])
        hashes = [sha256 for (sha256,) in self._writer.execute("SELECT sha256 FROM items")]
        self.ledger = 0, 0
        self._update_ledger(len(hashes), *hashes)

    def _apply_batch(self, batch: Batch) -> Change:
        ledger = self.ledger
        self._writer.execute("SAVEPOINT batch")
        parts = tuple(map(self.apply, batch.operations))
        if batch.whole and any(isinstance(part, Refusal) for part in parts):
            self._writer.execute("ROLLBACK TO batch")
            self.ledger, parts = ledger, tuple(part if isinstance(part, Refusal) else Change() for part in parts)
        self._writer.execute("RELEASE batch")
        return Change(parts=parts)

    def _put(self, item: Item) -> Change:
        row = self._writer.execute(_KEY_OF, (item.id,)).fetchone()
        sha256 = item.sha256
        if row is not None and row[1] == sha256:
            return Change(key=row[0], item=item)
        removed = () if row is None else self._delete_rows([row]).removed
        added = self._writer.execute(_INSERT, (*item.row, sha256))
        self._update_ledger(1, sha256)
        return Change(removed, added.lastrowid, created=row is None, item=item)

    def _delete_rows(self, rows: Sequence[tuple[int, bytes]]) -> Change:
        keys = tuple(key for key, _ in rows)
        self._writer.executemany(_DELETE, [(key,) for key in keys])
        self._update_ledger(-len(rows), *(sha256 for _, sha256 in rows))
        return Change(keys)

    def _update_ledger(self, rows: int, *changed: bytes) -> None:
        """Add `rows` to the ledger's count, and XOR the `changed` hashes into its digest."""
        count, digest = self.ledger
        self.ledger = count + rows, reduce(xor, (int.from_bytes(sha256, "big") for sha256 in changed), digest)
