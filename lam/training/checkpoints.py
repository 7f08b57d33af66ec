"""Checkpoints: numbered folders of tensors and JSON. After a crash at any moment, the last good one is readable.

A checkpoint is written under a hidden name and then renamed. The last two are kept, in case the newest is damaged.
"""

import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lam.utils.files import CorruptFileError, FolderFormat, locked, seal, sync_folder, verify

FORMAT = FolderFormat(1, "state.json", ("tensors.safetensors",))
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """The folder of a checkpoint, its tensors on the CPU, and its other state as JSON."""

    path: Path
    tensors: dict[str, Tensor]
    state: dict[str, Any]


@contextmanager
def lock_folder(folder: str | Path) -> Iterator[None]:
    """Create a folder of checkpoints and lock it, because `save` removes the checkpoints of any other training."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        yield


def save(folder: str | Path, number: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write a checkpoint, and remove all others except the one before it.

    `number` rises with time. Tensors may share memory; `state` is JSON, without NaN or infinities.
    """
    folder = Path(folder)
    for abandoned in folder.glob(".checkpoint-*"):
        shutil.rmtree(abandoned)
    path = folder / f"checkpoint-{number:08d}"
    unfinished = folder / f".{path.name}.new"
    unfinished.mkdir()
    # clones, as safetensors does not write tensors that share memory
    FORMAT.write_files(unfinished, state, {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()})
    seal(unfinished, FORMAT.required)
    if path.exists():
        _discard(path)
    unfinished.replace(path)
    sync_folder(folder)
    present = _checkpoints(folder)
    place = present.index(path)
    for other in (*present[: max(place - 1, 0)], *present[place + 1 :]):
        _discard(other)


def load(folder: str | Path) -> Checkpoint | None:
    """The last undamaged checkpoint; None without checkpoints; a `CorruptFileError` if all are damaged."""
    paths = _checkpoints(Path(folder))
    for path in reversed(paths):
        try:
            verify(path, FORMAT.required)
            state, tensors = FORMAT.read_files(path)
            return Checkpoint(path, tensors, state)
        except CorruptFileError as error:
            warnings.warn(f"{error}; the checkpoint before {path.name} is used", stacklevel=2)
    if paths:
        raise CorruptFileError(f"every checkpoint in {folder} is damaged; remove {folder} to start again")
    return None


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*"))
    return [path for _, path in sorted((int(match[1]), path) for match, path in matches if match)]


def _discard(path: Path) -> None:
    """Rename a checkpoint, then remove it, so that a half-removed checkpoint is never loaded."""
    hidden = path.with_name(f".{path.name}.old")
    path.rename(hidden)
    shutil.rmtree(hidden)
