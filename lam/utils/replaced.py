"""Read folders that another process may replace meanwhile."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from lam.utils.files import MANIFEST, CorruptFileError

_TRIES = 5
Contents = TypeVar("Contents")


def read_undisturbed(folder: str | Path, read: Callable[[], Contents]) -> Contents:
    """Call `read`, which reads a folder; call it again if another process replaces the folder's contents meanwhile.

    `lam.utils.files.write_generation` deletes the old files, so `read` may miss a file that was there when it began.
    """
    for _ in range(_TRIES - 1):
        manifest = _manifest(folder)
        with suppress(CorruptFileError, FileNotFoundError):
            contents = read()
            if _manifest(folder) == manifest:
                return contents
        if _manifest(folder) == manifest:  # nothing was replaced: reading once more raises the error
            break
    return read()


def _manifest(folder: str | Path) -> bytes | None:
    path = Path(folder) / MANIFEST
    return path.read_bytes() if path.is_file() else None
