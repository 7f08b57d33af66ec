"""Backup of a finished run, even while a service changes the run's items. A service can open the backup as a run.

SQLite copies the items in one read transaction, so the copy is consistent even if another process writes. `back_up`
copies the tests of promised rates in the same way. `back_up` holds the run's lock, so the other files do not change
meanwhile. The backup leaves out the sample of live queries.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from lam.gallery.database import connect_reading, copy_database, explain_errors
from lam.gallery.store import CACHE, FILE, ItemStore
from lam.runs.finished import Run
from lam.runs.folder import GALLERY, WATCH
from lam.runs.live import FOLDER as LIVE
from lam.utils.files import CorruptFileError, check_output, sha256_of, sync_folder, write_record

RECORD = "backup.json"
"""List of a new backup's files and hashes. The hash of the items is outdated once a service changes the items."""

FORMAT = 1


@dataclass(frozen=True)
class CopiedFile:
    """A file of a backup, named by its path in the folder."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Backup:
    """A backup; `created` is a time in UTC, and `items` is the number of items in the gallery."""

    folder: Path
    created: str
    items: int
    files: tuple[CopiedFile, ...]

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files)


def back_up(run: str | Path, folder: str | Path) -> Backup:
    """Copy a finished run into a new folder, which appears only after the copy is complete and checked.

    During the copy, a service may have the run open; it may answer deletions with `busy`.

    Raises:
        ValueError: for a run that has not finished, or that is being calibrated or indexed; for a folder that exists or
            lies in the run, or a parent that is missing or cannot be written.
        CorruptFileError: naming a file of the run that is missing, truncated or altered.
        OSError: for a full disk.
    """
    source, folder = Run(run), Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} exists: give a new folder")
    check_output(folder)
    if folder.resolve().is_relative_to(source.folder.resolve()):
        raise ValueError(f"{folder} lies in the run, and later backups would copy it: give a folder outside {run}")
    created = datetime.now(UTC).isoformat(timespec="seconds")
    with source.lock():
        _check(source)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".tmp"))
        try:
            for file in _fixed_files(source.folder):
                (temporary / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source.folder / file, temporary / file)
            items = _copy_items(source.folder / GALLERY / FILE, temporary / GALLERY / FILE)
            _copy_promise(source.folder / WATCH, temporary / WATCH)
            _check(Run(temporary))
            files = tuple(_synced(path, temporary) for path in sorted(temporary.rglob("*")) if path.is_file())
            record = {"created": created, "items": items, "files": [asdict(file) for file in files]}
            write_record(temporary / RECORD, record, format=FORMAT)
            shutil.copymode(source.folder, temporary)
            for each in (temporary, *(path for path in temporary.rglob("*") if path.is_dir())):
                sync_folder(each)
            temporary.rename(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_folder(folder.parent)
    return Backup(folder, created, items, files)


def _check(run: Run) -> None:
    """Check the hashes of network, posterior and calibration."""
    _ = run.fingerprint, run.calibration


def _fixed_files(folder: Path) -> Iterator[Path]:
    """Relative paths of a run's files, except databases, caches, live queries and temporary files."""
    left_out = {Path(GALLERY) / CACHE, Path(LIVE), Path(WATCH)}  # links are followed to galleries on other disks
    for path in sorted(Path(parent, file) for parent, _, files in os.walk(folder, followlinks=True) for file in files):
        name = path.relative_to(folder)
        is_left_out = left_out & {name, *name.parents} or name.match(f"{GALLERY}/{FILE}*") or name.match(".*.tmp")
        if path.is_file() and not is_left_out:
            yield name


def _copy_items(source: Path, copy: Path) -> int:
    """Copy the items, check each, and return their number."""
    with closing(ItemStore(source, read_only=True)) as store:
        store.copy(copy)
    with closing(ItemStore(copy, make=False)) as store:
        try:
            store.check()
        except CorruptFileError as error:  # the copy equals its source: the source is corrupt
            raise CorruptFileError(str(error).replace(str(copy), str(source))) from None
        return len(store)


def _copy_promise(source: Path, copy: Path) -> None:
    """Copy the tests of promised rates, and the list of judged answers; a run that was never served has none."""
    for path in source.glob("*.sqlite"):
        copy.mkdir(exist_ok=True)
        with explain_errors(path), closing(connect_reading(path)) as database:
            copy_database(database, copy / path.name)


def _synced(path: Path, folder: Path) -> CopiedFile:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return CopiedFile(str(path.relative_to(folder)), path.stat().st_size, sha256_of(path))
