"""Files that are either wholly there or not there at all, and that are checked before they are believed.

Every file is written under a temporary name in its own folder, flushed, synced and renamed. A folder's `MANIFEST.json`
holds the SHA-256 of each of its files, is written last, and is checked before anything is parsed: a flipped bit in a
safetensors file otherwise loads as another weight without a word. Nothing here knows what the files mean.
"""

import csv
import errno
import fcntl
import hashlib
import io
import json
import operator
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MANIFEST = "MANIFEST.json"
_GENERATION = "generation-"
_ALIGNMENT = 64  # bytes, as torch allocates


class CorruptFileError(ValueError):
    """A file that is missing, truncated or altered since it was written."""


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> None:
    """Write a file so that a reader sees the old one or the new one, whenever the process dies.

    Args:
        path: where the file shall be; its folder must exist.
        write: called with the path of the temporary file in the same folder.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def check_output(path: str | Path) -> None:
    """Refuse by a `ValueError` a path at which no file can be written: a folder, or one in a folder that is missing."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the path of the file to write")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} to: make it first")


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically; halves of characters, as names of files may hold, become question marks."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8", errors="replace"))


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file atomically, a number of NumPy or torch as a plain one.

    NaN and infinities are refused by the format and stored as null by the caller.
    """
    text = json.dumps(value, indent=2, allow_nan=False, default=operator.methodcaller("item"))
    write_text(path, text + "\n")


def write_csv(path: str | Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as CSV with a header, atomically; other keys than the columns are left out."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def read_csv(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header; none without a file."""
    if not Path(path).is_file():
        return []
    with Path(path).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def write_record(path: str | Path, value: Mapping[str, Any], *, format: int) -> None:
    """Write a JSON object with the number of its format."""
    write_json(path, {"format": format, **value})


def read_record(path: str | Path, *, format: int) -> dict[str, Any]:
    """Read what `write_record` wrote, without the number.

    Raises:
        CorruptFileError: naming a file that is no JSON.
        ValueError: for another format, naming the file and both.
    """
    value = read_json(path)
    check_format(path, value.pop("format", None), readable=format)
    return value


def check_format(path: str | Path, number: int | None, *, readable: int) -> None:
    """Refuse a file of another format than the one that can be read."""
    if number != readable:
        raise ValueError(f"{path} has format {number}, this version of lam reads {readable}")


def write_tensors(path: str | Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors as safetensors, atomically; a disk that is full or fails is an `OSError`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def write(temporary: Path) -> None:
        try:
            save_file(plain, temporary)
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error), str(path)) from error

    write_atomically(path, write)


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file; `verify` its folder first.

    Tensors are aligned in memory as torch aligns its own: a product with one that is not may differ in the last bit,
    and what was saved shall compute as it did before.
    """
    from safetensors.torch import load_file

    tensors = load_file(path)
    return {name: tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor for name, tensor in tensors.items()}


@dataclass(frozen=True)
class FolderFormat:
    """How a folder holds a record, as JSON with the number of its format, and tensors, as safetensors.

    Attributes:
        number: of the format.
        record: the JSON file.
        tensors: the safetensors files.
        optional: safetensors files that may be missing.
    """

    number: int
    record: str
    tensors: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def required(self) -> tuple[str, ...]:
        """The files that must be there."""
        return self.record, *self.tensors

    def write_files(self, folder: Path, record: Mapping[str, Any], *tensors: dict[str, Tensor] | None) -> None:
        """Write the record and the tensors of each file; None for an optional file that there is none of."""
        for name, contents in zip(self.tensors + self.optional, tensors, strict=True):
            if contents is not None:
                write_tensors(folder / name, contents)
        write_json(folder / self.record, {"format": self.number, **record})

    def read_files(self, folder: Path) -> tuple[Any, ...]:
        """The record and the tensors of each file, whose hashes have been checked; None for a missing optional file.

        Raises:
            CorruptFileError: naming a file that is no JSON.
            ValueError: for another format, naming the file and both.
        """
        record = read_record(folder / self.record, format=self.number)
        files = (folder / name for name in self.tensors + self.optional)
        return record, *(read_tensors(file) if file.is_file() else None for file in files)

    def write(self, folder: str | Path, record: Mapping[str, Any], *tensors: dict[str, Tensor] | None) -> None:
        """Replace what a folder holds; see `write_generation`."""
        write_generation(folder, lambda generation: self.write_files(generation, record, *tensors))

    def read(self, folder: str | Path) -> tuple[Any, ...]:
        """What `write` wrote, as `read_files`, checked before anything is parsed.

        Raises:
            CorruptFileError: naming the file that is missing, truncated, altered or not listed.
            ValueError: for another format.
        """
        return self.read_files(read_generation(folder, self.required))


def read_shapes(path: str | Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file on the meta device: shapes and types by its header, without values."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, no mapping
        return {
            name: torch.empty(
                part.get_shape(), dtype=torch.float32 if "F" in part.get_dtype() else torch.int64, device="meta"
            )
            for name, part in slices.items()
        }


def read_json(path: str | Path) -> Any:
    """Value of a JSON file; an error names a file that is none."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorruptFileError(f"{path} is missing") from None
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not valid JSON: {error}") from None


def read_yaml(path: str | Path) -> Any:
    """Value of a YAML file; an error names a file that is none."""
    import yaml

    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


def seal(folder: str | Path, names: Iterable[str]) -> None:
    """Write the folder's manifest over files, named by their paths in it; the last step of saving a folder."""
    folder = Path(folder)
    write_json(folder / MANIFEST, {"sha256": {name: sha256_of(folder / name) for name in sorted(names)}})


def verify(folder: str | Path, names: Iterable[str] = (), *, others: bool = True) -> None:
    """Check every file of a sealed folder against its manifest, before anything is parsed.

    Args:
        folder: a folder that `seal` closed.
        names: files that the manifest must hold.
        others: check those that are not named, too.

    Raises:
        CorruptFileError: naming the folder without a manifest, or the file that is missing, altered or not listed.
    """
    folder, named = Path(folder), set(names)
    hashes = _hashes(folder)
    for name in sorted(named - hashes.keys()):
        raise CorruptFileError(f"{folder / MANIFEST} does not list {name}")
    for name, expected in hashes.items():
        if not others and name not in named:
            continue
        path = folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise CorruptFileError(f"{folder / MANIFEST} lists {name}, which lies outside the folder")
        if not path.is_file():
            raise CorruptFileError(f"{path} is missing")
        if sha256_of(path) != expected:
            raise CorruptFileError(f"{path} is truncated or altered: its SHA-256 is not the one in {MANIFEST}")


def _hashes(folder: Path) -> dict[str, str]:
    """The table of a folder's manifest."""
    if not (folder / MANIFEST).is_file():
        raise CorruptFileError(
            f"{folder / MANIFEST} is missing: the folder was not written to its end, or is no lam folder"
        )
    manifest = read_json(folder / MANIFEST)
    hashes = manifest.get("sha256") if isinstance(manifest, dict) else None
    if not isinstance(hashes, dict):
        raise CorruptFileError(f"{folder / MANIFEST} holds no sha256 table")
    return hashes


def _listed(folder: Path) -> list[str]:
    """What a manifest lists; nothing where there is none, or none that can be read."""
    try:
        return list(_hashes(folder))
    except CorruptFileError:
        return []


def write_generation(folder: str | Path, write: Callable[[Path], object], *, unsealed: Iterable[str] = ()) -> None:
    """Replace what a folder holds, so that a reader sees all of the old files or all of the new ones.

    The new files go to a sub-folder of their own beside the old one; replacing the manifest, in one rename, makes it
    the current one; only then is the old one deleted.

    Args:
        folder: made where it does not exist.
        write: called with the new sub-folder, in which it writes its files.
        unsealed: names of files there that the manifest leaves out, such as caches that can be made again.

    Raises:
        ValueError: where the folder holds something else, of which no file has a name of the new ones; that stays.
    """
    folder = Path(folder)
    generation = folder / f"{_GENERATION}{uuid.uuid4().hex}"
    generation.mkdir(parents=True)
    try:
        write(generation)
        sync_folder(folder)
        names = {path.name for path in generation.iterdir()} - set(unsealed)
        held = {Path(name).name for name in _listed(folder)}
        if held and not held & names:
            raise ValueError(f"{folder} holds something else ({', '.join(sorted(held)[:3])}): give another folder")
        seal(folder, [f"{generation.name}/{name}" for name in names])
    except BaseException:
        if _generation_in(_listed(folder)) != generation.name:
            shutil.rmtree(generation, ignore_errors=True)
        raise
    for other in folder.glob(f"{_GENERATION}*"):
        if other != generation:
            shutil.rmtree(other, ignore_errors=True)
    for leftover in folder.glob(f".{MANIFEST}.*.tmp"):  # of a process that was killed
        leftover.unlink(missing_ok=True)


def read_generation(folder: str | Path, names: Iterable[str] = ()) -> Path:
    """The current sub-folder of a folder that `write_generation` wrote, checked.

    Args:
        folder: the folder.
        names: files that it must hold.

    Raises:
        CorruptFileError: naming the file that is missing, truncated, altered or not listed.
    """
    folder = Path(folder)
    generation = _generation_in(_hashes(folder))
    verify(folder, [] if generation is None else [f"{generation}/{name}" for name in names])
    if generation is None:
        raise CorruptFileError(f"{folder / MANIFEST} names no generation: the folder holds something else")
    return folder / generation


def _generation_in(names: Iterable[str]) -> str | None:
    """The sub-folder that a manifest with these names makes the current one."""
    return next((Path(name).parts[0] for name in names if name.startswith(_GENERATION)), None)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to a folder; the lock ends with the process, however it ends.

    The folder itself is locked, so that no file is left in it.

    Raises:
        ValueError: where another process holds it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is writing to {folder}: wait until it has finished") from None
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)  # as a forked process that lives on has the handle too
        os.close(handle)
