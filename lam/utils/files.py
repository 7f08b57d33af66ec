"""Files that are written atomically and checked by hashes before they are parsed.

Every file is written under a temporary name in its own folder, flushed, synced and renamed. A folder's `MANIFEST.json`
holds the SHA-256 of each of its files and is written last. Readers check these hashes first: otherwise a flipped bit in
a safetensors file would load as another weight.
"""

import csv
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

MANIFEST = "MANIFEST.json"
_GENERATION = "generation-"
_ALIGNMENT = 64  # bytes, as torch allocates
_TRIES = 5  # reads of a folder that other processes keep replacing


class CorruptFileError(ValueError):
    """A file is missing, or was truncated or altered after it was written."""


def write_atomically(path: str | Path, write: Callable[[Path], object]) -> None:
    """Write a file so that readers see either the old file or the new one, even if the process dies.

    `write` is called with the path of a temporary file in the same folder, which must exist.
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
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(path)  # a full disk fails a write, which knows no name
        raise
    sync_folder(path.parent)


def check_output(path: str | Path) -> None:
    """Raise a `ValueError` if a path is a folder, or if its folder is missing or cannot be written."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the path of the file to write")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} to: make it first")
    check_writable(path.parent)


def check_writable(folder: Path) -> None:
    """Require a folder that can be written, or created in the nearest existing folder above it."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        why = f"{there} is a file" if there.is_file() else f"this user may not write to {there}"
        raise ValueError(f"{folder} cannot be written, because {why}: give another folder, or change its permissions")


def sync_folder(folder: Path) -> None:
    """Make a rename in the folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically; lone surrogates, as in names of files, become question marks."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8", errors="replace"))


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file atomically; dataclasses become objects, and numbers of NumPy or torch become plain numbers.

    Callers must replace NaN and infinities by None: JSON does not have them.
    """
    text = json.dumps(value, indent=2, allow_nan=False, default=_plain)
    write_text(path, text + "\n")


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else asdict(value)


def write_csv(path: str | Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as CSV with a header, atomically; keys without a column are left out."""
    lines: list[str] = []
    sink: Any = SimpleNamespace(write=lambda line: lines.append(line.removesuffix("\r\n") + "\n"))
    writer = csv.DictWriter(sink, columns, extrasaction="ignore", lineterminator="\r\n")  # else it would not quote \r
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, "".join(lines))


def read_csv(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV file with a header; empty if the file is missing."""
    if not Path(path).is_file():
        return []
    with Path(path).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def write_record(path: str | Path, value: Mapping[str, Any], *, format: int) -> None:
    """Write a JSON object, with its format number."""
    write_json(path, {"format": format, **value})


def read_record(path: str | Path, *, format: int) -> dict[str, Any]:
    """Read a JSON object of `write_record`, without its format number; a `ValueError` for another format."""
    value = read_json(path)
    check_format(path, value.pop("format", None), readable=format)
    return value


def check_format(path: str | Path, number: int | None, *, readable: int) -> None:
    """Raise a `ValueError` unless a file has the format that this version reads."""
    if number != readable:
        raise ValueError(f"{path} has format {number}, this version of lam reads {readable}")


def write_tensors(path: str | Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors as safetensors, atomically; raises `OSError` if the disk is full or fails."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def write(temporary: Path) -> None:
        try:
            save_file(plain, temporary)
        except SafetensorError as error:
            number = int(found[1]) if (found := re.search(r"os error (\d+)", str(error))) else errno.EIO
            raise OSError(number, os.strerror(number), str(path)) from error

    write_atomically(path, write)


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file; `verify` its folder first.

    The tensors are aligned in memory as torch aligns its own. Otherwise a matrix product may differ in the last bit
    from the product before saving.
    """
    from safetensors.torch import load_file

    tensors = load_file(path)
    return {name: tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor for name, tensor in tensors.items()}


@dataclass(frozen=True)
class FolderFormat:
    """The files of a folder: a record, as JSON with a format number, and tensors, as safetensors.

    `tensors` are names of files that must exist; files of `optional` may be missing.
    """

    number: int
    record: str
    tensors: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def required(self) -> tuple[str, ...]:
        """Names of the files that must exist."""
        return self.record, *self.tensors

    def write_files(self, folder: Path, record: Mapping[str, Any], *tensors: dict[str, Tensor] | None) -> None:
        """Write the record and the tensors of each file; None leaves an optional file out."""
        for name, contents in zip(self.tensors + self.optional, tensors, strict=True):
            if contents is not None:
                write_tensors(folder / name, contents)
        write_record(folder / self.record, record, format=self.number)

    def read_files(self, folder: Path) -> tuple[Any, ...]:
        """The record and the tensors of each file, None for a missing optional file. Callers check hashes first."""
        record = read_record(folder / self.record, format=self.number)
        files = (folder / name for name in self.tensors + self.optional)
        return record, *(read_tensors(file) if file.is_file() else None for file in files)

    def write(self, folder: str | Path, record: Mapping[str, Any], *tensors: dict[str, Tensor] | None) -> None:
        """Replace a folder's contents; see `write_generation`."""
        write_generation(folder, lambda generation: self.write_files(generation, record, *tensors))

    def read(self, folder: str | Path, read: Callable[[Path], Any] | None = None) -> Any:
        """Contents of the current sub-folder that `write` wrote, by default as `read_files`. Hashes are checked first.

        If another process replaces the folder's contents and deletes the old files meanwhile, `read` is called again.
        """
        read = self.read_files if read is None else read
        for _ in range(_TRIES - 1):
            manifest = _manifest_bytes(folder)
            with suppress(CorruptFileError, FileNotFoundError):
                contents = read(read_generation(folder, self.required))
                if _manifest_bytes(folder) == manifest:
                    return contents
            if _manifest_bytes(folder) == manifest:  # nothing was replaced: reading once more raises the error
                break
        return read(read_generation(folder, self.required))


def read_shapes(path: str | Path) -> dict[str, Tensor]:
    """Tensors on the meta device with the shapes in a safetensors file: float32 for floating point, else int64."""
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
    """Value of a JSON file; raises `CorruptFileError` if it is missing or not valid."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorruptFileError(f"{path} is missing") from None
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path} is not valid JSON: {error}") from None


def read_yaml(path: str | Path) -> Any:
    """Value of a YAML file; raises `CorruptFileError` if it is not valid."""
    import yaml

    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


def seal(folder: str | Path, names: Iterable[str]) -> None:
    """Write the manifest of a folder with the hashes of these files, the last step of saving a folder."""
    folder = Path(folder)
    write_json(folder / MANIFEST, {"sha256": {name: sha256_of(folder / name) for name in sorted(names)}})


def verify(folder: str | Path, names: Iterable[str] = (), *, others: bool = True) -> None:
    """Check files of a sealed folder against its manifest: all files or, without `others`, only these names.

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
    if not (folder / MANIFEST).is_file():
        raise CorruptFileError(
            f"{folder / MANIFEST} is missing: writing the folder was interrupted, or lam did not write it"
        )
    manifest = read_json(folder / MANIFEST)
    hashes = manifest.get("sha256") if isinstance(manifest, dict) else None
    if not isinstance(hashes, dict):
        raise CorruptFileError(f"{folder / MANIFEST} holds no sha256 table")
    return hashes


def _manifest_bytes(folder: str | Path) -> bytes | None:
    path = Path(folder) / MANIFEST
    return path.read_bytes() if path.is_file() else None


def _manifest_names(folder: Path) -> list[str]:
    """File names in a manifest; empty if it is missing or cannot be read."""
    try:
        return list(_hashes(folder))
    except CorruptFileError:
        return []


def write_generation(folder: str | Path, write: Callable[[Path], object], *, unsealed: Iterable[str] = ()) -> None:
    """Replace a folder's contents, so that readers see either all old files or all new ones.

    The new files are written to a new sub-folder beside the old one. A new manifest then replaces the old manifest and
    makes the new sub-folder current. Only then is the old sub-folder deleted.

    Args:
        folder: the folder; created if it does not exist.
        write: function that writes files into the new sub-folder, its argument.
        unsealed: names of files that the manifest leaves out, such as caches that can be rebuilt.

    Raises:
        ValueError: if `folder` is a file, or its manifest lists only files with other names; nothing changes then.
    """
    folder = Path(folder)
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give a folder")
    generation = folder / f"{_GENERATION}{uuid.uuid4().hex}"
    generation.mkdir(parents=True)
    try:
        write(generation)
        sync_folder(folder)
        names = {path.name for path in generation.iterdir()} - set(unsealed)
        held = {Path(name).name for name in _manifest_names(folder)}
        if held and not held & names:
            raise ValueError(f"{folder} holds other files ({', '.join(sorted(held)[:3])}): give another folder")
        seal(folder, [f"{generation.name}/{name}" for name in names])
    except BaseException:
        if _generation_in(_manifest_names(folder)) != generation.name:
            shutil.rmtree(generation, ignore_errors=True)
        raise
    for other in folder.glob(f"{_GENERATION}{'[0-9a-f]' * 32}"):  # no folder of another name, such as generation-1
        if other != generation:
            shutil.rmtree(other, ignore_errors=True)
    for leftover in folder.glob(f".{MANIFEST}.*.tmp"):  # of a process that was killed
        leftover.unlink(missing_ok=True)


def read_generation(folder: str | Path, names: Iterable[str] = ()) -> Path:
    """The current sub-folder of a folder that `write_generation` wrote; it must hold these names.

    Raises:
        CorruptFileError: naming the file that is missing, truncated, altered or not listed.
    """
    folder = Path(folder)
    generation = _generation_in(_hashes(folder))
    verify(folder, [] if generation is None else [f"{generation}/{name}" for name in names])
    if generation is None:
        raise CorruptFileError(f"{folder / MANIFEST} names no generation: lam did not write the folder")
    return folder / generation


def _generation_in(names: Iterable[str]) -> str | None:
    """The name of the current sub-folder, from the file names in a manifest."""
    return next((Path(name).parts[0] for name in names if name.startswith(_GENERATION)), None)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other writers until the process ends or is killed; a `ValueError` if one holds the lock."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is in use: end its service, or wait until the command has finished") from None
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)  # closing is not enough: a forked process may hold the handle too
        os.close(handle)
