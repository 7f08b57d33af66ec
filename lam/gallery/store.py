"""The items on disk: one SQLite file in WAL mode with full sync, a content hash a row, and a ledger over all rows.

A row is never changed: an update replaces it by one under a new key, so that a key stands for one content for ever and
an index can be caught up by comparing keys. The ledger, one row that every transaction carries along, holds the number
of rows and the XOR of their hashes; with it, a row that is lost, doubled or altered without SQLite noticing is noticed
here. A mark beside the file says that there was one, so that none is begun where one was lost. Nothing in this file
knows of an index.
"""

import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from operator import xor
from pathlib import Path
from typing import Any

from lam.gallery.fusing import fuse
from lam.gallery.item import INDEXED, Item, checked_metadata, hash_of
from lam.gallery.refusal import Refusal, busy, full
from lam.utils.files import CorruptFileError, check_format, write_text

FORMAT = 1
FILE, MARK, CACHE = "items.sqlite", "items.made", "index"
FACTORY, MEAN_SAMPLES = "factory", "mean_samples"  # facts
MISSING = "{} is missing or empty: restore it from a copy, or run `lam index`, which makes one"
_MARK_TEXT = f"{FILE} was made here. Where it is missing or empty it was lost, with all that was in it.\n"
_PAGE = 2**14  # bytes, so that several vectors share one
_PATIENCE = 5.0  # seconds for which another process may keep the file locked
_LOCKED, _UNWRITABLE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED), (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
_FAILING = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL)
MAX_PAGE = 2**20  # characters of metadata
_COLUMNS = (
    "id, vector, kappa, label, metadata, thumbnail, origin, images, resultant, least_kappa, contents, paths, sums"
)
_NONE = type(None)
_TYPES = set(
    product(
        *[[str], [bytes], [float], [str], [str], [bytes, _NONE], [str], [int], [float], [float, _NONE], [bytes], [str]],
        [bytes, _NONE],
    )
)  # in which the values of an item may come
_THUMBNAIL, _ORIGIN = (_COLUMNS.split(", ").index(name) for name in ("thumbnail", "origin"))
_BY_ID = f"SELECT {_COLUMNS} FROM items WHERE id = ?"
_INSERT = f"INSERT INTO items ({_COLUMNS}, sha256) VALUES ({', '.join('?' * (_COLUMNS.count(',') + 2))})"
_OF_HIT = "id, label, metadata, images, resultant, min(kappa, ifnull(least_kappa, kappa)), thumbnail IS NOT NULL"
_PAGE_OF = f"SELECT {_OF_HIT}, kappa, sha256 FROM items WHERE id > ? ORDER BY id LIMIT ?"
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
class Change:
    """What one operation did.

    Attributes:
        removed: the keys that are gone.
        key: under which an item now is.
        created: whether its id is new.
        item: as it now is.
    """

    removed: tuple[int, ...] = ()
    key: int | None = None
    created: bool = False
    item: Item | None = None


@dataclass(frozen=True)
class Fuse:
    """An image to fuse into the item of its id, or to put where there is none."""

    image: Item


@dataclass(frozen=True)
class Replace:
    """An item to put in the place of another, some of whose fields it keeps.

    Attributes:
        item: the new one.
        keeps: `label`, `metadata`, or both. A text in the metadata is of the old content, and goes with it.
    """

    item: Item
    keeps: Sequence[str]

    def over(self, label: str, metadata: str) -> Item:
        """The new item with the fields that it keeps of an old one, given by its label and metadata.

        Raises:
            Refusal: if metadata and text together are too long.
        """
        item = replace(self.item, label=label) if "label" in self.keeps else self.item
        if "metadata" not in self.keeps:
            return item
        kept = {name: value for name, value in json.loads(metadata).items() if name != "text"}
        return replace(item, metadata=checked_metadata(kept | json.loads(item.metadata)))


Operation = Item | Replace | Fuse | str
"""An item to put, one that keeps fields of the item that is there, an image to fuse, or the id of an item to delete."""


@dataclass(frozen=True)
class HitInfo:
    """What a hit is, beside its score and κ.

    Attributes:
        id: of the item; label and metadata likewise.
        images: how many the item was made of.
        resultant: how far their directions agree.
        least_kappa: of the item and its images.
        has_thumbnail: whether there is a small picture of it.
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
    """What an item is, without its vector and picture.

    Attributes:
        kappa: its concentration.
        sha256: the hash of all of it.
    """

    kappa: float
    sha256: bytes

    @classmethod
    def of(cls, item: Item) -> "ItemInfo":
        """What a whole item is."""
        images, has_thumbnail = item.images, item.thumbnail is not None
        return cls(
            item.id, item.label, item.metadata, images.count, images.resultant, item.least_kappa, has_thumbnail,
            item.kappa, item.sha256,
        )  # fmt: skip


class ItemStore:
    """Items under stable ids. Writes are for one thread at a time, reads for any.

    Args:
        path: the SQLite file.
        read_only: write nothing, so that another process may; the file must then exist.
        make: begin one where there is none and none was lost.

    Raises:
        CorruptFileError: naming a file that SQLite cannot read, or that was lost.
        ValueError: for a file that must exist and does not, a format that this version does not know, or a file that
            another process has locked.
        OSError: for a file that cannot be written, or a disk that is full or fails.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False, make: bool = True) -> None:
        self.path, self._read_only, self._make = Path(path), read_only, make and not read_only
        self._mark = self.path.with_name(MARK)
        self._ledger = 0, 0  # number of rows and XOR of their hashes, in the transaction that is open
        self._reading, self._listing = threading.Lock(), threading.Lock()
        if not self.path.is_file() or not self.path.stat().st_size:
            self._refuse_lost()
        with self._errors_explained():
            self._writer = self._connect()
            self._prepare()
            self._reader, self._lister = self._connect(), self._connect()
        if not (read_only or self._mark.is_file()):
            write_text(self._mark, _MARK_TEXT)

    def _connect(self) -> sqlite3.Connection:
        address = f"{self.path.absolute().as_uri()}?mode={'rw' if self._read_only else 'rwc'}"
        if self._read_only and self._cannot_change():
            address += "&immutable=1"
        connection = sqlite3.connect(
            address, uri=True, isolation_level=None, check_same_thread=False, timeout=_PATIENCE
        )
        connection.execute(f"PRAGMA query_only={self._read_only}")
        connection.execute(f"PRAGMA page_size={_PAGE}")
        connection.execute("PRAGMA cache_spill=OFF")  # a large change is held in memory, and each page written once
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA secure_delete=ON")
        connection.execute("PRAGMA trusted_schema=OFF")
        return connection

    def _cannot_change(self) -> bool:
        """Whether it lies where nobody can write; a log that is there too could then not be read."""
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
        self._writer.executescript(f"BEGIN IMMEDIATE;{end}")  # which meets a lock that lets others read, too

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise self._explained(error) from None

    def _explained(self, error: sqlite3.DatabaseError) -> Exception:
        """What an error means: a file that is locked, or that cannot be written, is whole."""
        code, path = _code_of(error), self.path
        if code in _LOCKED:
            return ValueError(f"{path} is locked by another process: end that, or wait until it has finished")
        if code in _UNWRITABLE:
            return OSError(f"{path} cannot be written ({error}): mount {path.parent} writable, for this user")
        if code in _FAILING:
            return OSError(f"{path} cannot be used ({error}): see to the disk")
        return CorruptFileError(f"{path} is truncated or altered: {error}; restore it from a copy")

    def _refuse_lost(self) -> None:
        if self._mark.is_file():
            raise CorruptFileError(
                f"{self.path} is missing or empty, and there was one: its items are lost, with what was added while "
                f"serving; restore it from a copy, or delete {self._mark} and run `lam index` to begin anew"
            )
        if not self._make:
            raise ValueError(MISSING.format(self.path))

    def close(self) -> None:
        """Write everything into the one file and close it."""
        self._reader.close()
        self._lister.close()
        if not self._read_only:
            self.erase_log()
        self._writer.close()

    def check(self, *, drop_corrupt: bool = False) -> list[str]:
        """Read every row and hold it to its hash, and all of them to the ledger.

        Args:
            drop_corrupt: delete rows that are corrupt, and go on with what is there.

        Returns:
            The ids of the rows that were dropped.

        Raises:
            CorruptFileError: naming the file and the rows.
        """
        with self._errors_explained():
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
        """What is there now, whatever another process writes meanwhile: the rows of all items, and all facts.

        Returns:
            Rows by rising key, without thumbnails, each held to its hash and all to the ledger; and facts by name.

        Raises:
            CorruptFileError: naming the file and the rows.
        """
        rows: dict[int, Sequence[Any]] = {}
        with self._errors_explained():
            self._writer.execute("BEGIN")
            try:
                _, fault = self._read_whole(rows)
                facts = dict(self._writer.execute("SELECT name, value FROM facts"))
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
        if fault:
            raise self._corrupt(fault)
        return rows, facts

    def _read_whole(self, kept: dict[int, Sequence[Any]] | None = None) -> tuple[dict[int, str], str]:
        """Keep every row that is whole; the ids of the others by key, and what is wrong, in words."""
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
            return {}, f"{count} rows are there, not {rows}"
        if digest != int.from_bytes(sum_of_all, "big"):
            return {}, f"{rows} rows are there, as many as there should be, but not the same ones"
        return {}, ""

    def _corrupt(self, fault: str) -> CorruptFileError:
        return CorruptFileError(
            f"{self.path}: {fault}; restore it from a copy, or start with --drop-corrupt to go on without them"
        )

    def __len__(self) -> int:
        with self._read() as reader:
            return reader.execute("SELECT rows FROM ledger").fetchone()[0]

    def items_by_key(self) -> Iterator[tuple[int, Item]]:
        """Go through all items by rising key; nothing may be written meanwhile."""
        return ((key, Item.of_row(row)) for key, row, _ in self._rows())

    def keys(self) -> list[int]:
        """The keys of all items, in no order."""
        with self._read() as reader:
            return [row[0] for row in reader.execute("SELECT key FROM items").fetchall()]

    def items_of(self, keys: Iterable[int]) -> dict[int, Item]:
        """Look items up by key, a thousand or so at a time; keys that are gone are left out."""
        return {key: Item.of_row(row) for key, *row in self._of_keys(_COLUMNS, keys)}

    def get(self, item_id: str) -> Item | None:
        """Look an item up by id."""
        with self._read() as reader:
            row = reader.execute(_BY_ID, (item_id,)).fetchone()
        return None if row is None else Item.of_row(row)

    def hit_infos(self, keys: Iterable[int]) -> dict[int, HitInfo]:
        """Look up what hits are, by key; keys that are gone are left out."""
        rows = self._of_keys(_OF_HIT, keys)
        return {key: HitInfo(*values, has_thumbnail=bool(thumbnail)) for key, *values, thumbnail in rows}

    def _of_keys(self, columns: str, keys: Iterable[int]) -> list[Sequence[Any]]:
        known = list(keys)
        query = f"SELECT key, {columns} FROM items WHERE key IN ({', '.join('?' * len(known))})"
        with self._read() as reader:
            return reader.execute(query, known).fetchall()

    def page(self, *, after: str, limit: int) -> list[ItemInfo]:
        """What the items behind an id are, by rising id; fewer, where together they have much metadata.

        It is read on a connection of its own, so that no search waits for a long page.
        """
        items, size = list[ItemInfo](), 0
        with self._listing, _locks_told(), closing(self._lister.execute(_PAGE_OF, (after, limit))) as rows:
            for *values, thumbnail, kappa, sha256 in rows:
                items.append(ItemInfo(*values, has_thumbnail=bool(thumbnail), kappa=kappa, sha256=sha256))
                size += len(items[-1].metadata)
                if size >= MAX_PAGE:
                    break
        return items

    def fact(self, name: str) -> str | None:
        """Look up something that is remembered beside the items."""
        with self._read() as reader:
            row = reader.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def write(
        self, operations: Iterable[Operation], *, facts: Mapping[str, str] | None = None
    ) -> list[Change | Refusal]:
        """Put, fuse and delete items in one transaction, on disk when this returns; all of it, or none where it fails.

        An item whose id is there is replaced, one that is there with the same content is left alone, and an id to
        delete that is not there is no error. An image that cannot be fused is refused by itself. After a deletion the
        log holds what is gone until `erase_log`.

        Args:
            operations: done in this order.
            facts: what shall be remembered beside the items.

        Returns:
            What each operation did, or why an image was not fused.

        Raises:
            Refusal: full, where it could not be stored; busy while another process has the file locked.
        """
        with self._storing(facts or {}):
            return [self._apply(operation) for operation in operations]

    def replace(self, items: Iterable[Item], *, facts: Mapping[str, str]) -> None:
        """Put what a run or `lam index` makes in the place of what was so made before, in one transaction.

        Items whose id another item has that was added or changed while serving are left out, and one that is there with
        the same content keeps its key. Those of them that were altered are replaced like others.

        Args:
            items: whose origin is `index`; no id twice.
            facts: what shall be remembered beside the items.

        Raises:
            Refusal: full, where it could not be stored; busy while another process has the file locked.
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
        """Empty the log into the file, where erased content is overwritten; False where another process blocks it."""
        with suppress(sqlite3.Error):
            (is_blocked, *_) = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            return not is_blocked
        return False

    def _apply(self, operation: Operation) -> Change | Refusal:
        if isinstance(operation, Fuse):
            return self._fuse(operation.image)
        if isinstance(operation, Replace):
            old = self._writer.execute("SELECT label, metadata FROM items WHERE id = ?", (operation.item.id,))
            row = old.fetchone()
            try:
                return self._put(operation.item if row is None else operation.over(*row))
            except Refusal as refusal:
                return refusal
        return self._delete(operation) if isinstance(operation, str) else self._put(operation)

    def _fuse(self, image: Item) -> Change | Refusal:
        row = self._writer.execute(_BY_ID, (image.id,)).fetchone()
        try:
            return self._put(image if row is None else fuse(Item.of_row(row), image))
        except Refusal as refusal:
            return refusal

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

    def _update_ledger(self, rows: int, *changed: bytes) -> None:
        """Carry the ledger along: so many more rows, and the hashes of those that came or went."""
        count, digest = self._ledger
        self._ledger = count + rows, digest ^ _xor(changed)

    def _rows(self) -> Iterator[tuple[int, Sequence[Any], bytes]]:
        """Every row with its key and its hash."""
        for key, *row, sha256 in self._writer.execute(f"SELECT key, {_COLUMNS}, sha256 FROM items ORDER BY key"):
            yield key, row, sha256

    @contextmanager
    def _storing(self, facts: Mapping[str, str]) -> Iterator[None]:
        """A transaction that ends by remembering facts; where it fails, a refusal says so."""
        try:
            with self._transaction():
                yield
                self._writer.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())
        except sqlite3.Error as error:
            raise (_locked() if _code_of(error) in _LOCKED else full(str(error))) from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            rows, digest = self._writer.execute("SELECT rows, sha256 FROM ledger").fetchone()
            self._ledger = rows, int.from_bytes(digest, "big")
            yield
            rows, digest = self._ledger
            self._writer.execute("UPDATE ledger SET rows = ?, sha256 = ?", (rows, digest.to_bytes(32, "big")))
            self._writer.execute("COMMIT")
        except BaseException:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            raise

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        with self._reading, _locks_told():
            yield self._reader


@contextmanager
def _locks_told() -> Iterator[None]:
    """Refuse as busy what another process keeps from being read."""
    try:
        yield
    except sqlite3.Error as error:
        if _code_of(error) in _LOCKED:
            raise _locked() from error
        raise


def _code_of(error: sqlite3.Error) -> int:
    """SQLite's code without its extension; that of corruption for what was found out here."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF


def _locked() -> Refusal:
    return busy("another process has locked the database")


def _xor(hashes: Iterable[bytes]) -> int:
    return reduce(xor, (int.from_bytes(sha256, "big") for sha256 in hashes), 0)


def _is_whole(row: Sequence[Any], sha256: bytes) -> bool:
    """Whether the values of an item are of their types, and those that were stored."""
    return tuple(map(type, row)) in _TYPES and hash_of(row) == sha256
