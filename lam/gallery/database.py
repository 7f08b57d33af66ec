"""SQLite: connections with durable commits, and errors with a cause and a remedy."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lam.gallery.refusal import busy, full
from lam.utils.files import CorruptFileError

_PATIENCE = 5.0  # greatest wait for another process's lock, in seconds
_LOCKED, _UNWRITABLE = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED), (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
_FAILING = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL)
_FILTER_SECONDS = 5.0  # greatest time of a filter over all items
_STEPS = 10_000  # SQLite's instructions between two checks of the time


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
            explained = OSError(f"{path} cannot be used ({error}): check the disk")
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
        raise busy(f"the filter took longer than {_FILTER_SECONDS:g} s: give fewer conditions") from None
    finally:
        connection.set_progress_handler(None, _STEPS)


def _code_of(error: sqlite3.Error) -> int:
    """SQLite's primary error code; for an error that lam raises, the code of corruption."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
