"""Finds all damaged image files in one pass, lists them with reasons, and raises an error or leaves them out."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from lam.datasets import Dataset
from lam.inputs.preprocessing import Preprocessing
from lam.utils.files import read_csv, write_csv
from lam.utils.notes import Note

BATCH = 64
MANY_FILES = 1000
"""Reading more files than this shows a progress bar."""

Items = TypeVar("Items", bound=Dataset)
Result = TypeVar("Result")


def read_images(
    files: Sequence[tuple[Path, Preprocessing]], use: Callable[[Path, Tensor], Result], *, progress: bool = True
) -> tuple[list[Result], dict[Path, str]]:
    """Decode image files in threads; return `use(path, tensor)` of each readable file, and why others are damaged."""
    hidden = not progress or len(files) <= MANY_FILES
    results, damaged = list[Result](), dict[Path, str]()

    def read(file: tuple[Path, Preprocessing]) -> tuple[Result | None, str | None]:
        path, preprocessing = file
        try:
            return use(path, preprocessing(path)), None
        except ValueError as error:
            return None, str(error)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes outside of Python's lock
        done = tqdm(pool.map(read, files), total=len(files), desc="checking", unit="image", disable=hidden)
        for (path, _), (result, reason) in zip(files, done, strict=True):
            if reason is None:
                results.append(result)  # pyright: ignore[reportArgumentType]
            else:
                damaged[path] = reason
    return results, damaged


@dataclass
class DamagedFiles:
    """The damaged files so far, and how to treat them.

    Attributes:
        listed: CSV file for the list, with columns path and reason; None for no list.
        skip: whether to leave damaged files out, instead of raising an error.
        reasons: reasons by path.
    """

    listed: Path | None = None
    skip: bool = False
    reasons: dict[Path, str] = field(default_factory=dict)

    def settle(self, n_files: int) -> None:
        """Write the list of damaged files, if any, and warn.

        Raises:
            ValueError: for damaged files without `skip`, or if all `n_files` files are damaged.
        """
        if not self.reasons:
            return
        message = f"{len(self.reasons)} of {n_files} images cannot be read"
        if self.listed is not None:
            write_damaged(self.reasons, self.listed)
            message += f", all listed in {self.listed}"
        message += f": {next(iter(self.reasons.values()))}"
        if not self.skip:
            raise ValueError(f"{message}; replace or remove them, or leave them out with --skip-damaged")
        if len(self.reasons) == n_files:
            raise ValueError(message)
        warnings.warn(f"{message}; they are left out", Note, stacklevel=2)


class ImageBatches:
    """Batches of network inputs from image files, without damaged files.

    Args:
        damaged: collects the damaged files; after the last batch, `damaged.settle` is called.
        goes_on: whether to yield batches after a damaged file; by default `damaged.skip`. All files are read anyway.

    Attributes:
        read: readable files of all batches so far, in order.
    """

    def __init__(
        self, files: Sequence[Path], preprocessing: Preprocessing, damaged: DamagedFiles, *, goes_on: bool | None = None
    ) -> None:
        size = BATCH if preprocessing.shape is not None else 1
        self._parts = [files[start : start + size] for start in range(0, len(files), size)]
        self._preprocessing, self._damaged = preprocessing, damaged
        self._goes_on = damaged.skip if goes_on is None else goes_on
        self.read = list[Path]()

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Tensor]:
        for part in self._parts:
            files = [(path, self._preprocessing) for path in part]
            read, damaged = read_images(files, lambda path, image: (path, image), progress=False)
            self._damaged.reasons |= damaged
            if read and (self._goes_on or not self._damaged.reasons):
                self.read += [path for path, _ in read]
                yield torch.stack([image for _, image in read])
        self._damaged.settle(sum(map(len, self._parts)))


def drop_unreadable(images: Items, damaged: DamagedFiles) -> Items:
    """The images with readable files; every file is read. Errors as in `DamagedFiles.settle`."""
    files = [(path, images.preprocessing) for path in images.files]
    _, reasons = read_images(files, lambda path, image: None, progress=False)
    damaged.reasons |= reasons
    damaged.settle(len(files))
    return without_damaged(images, frozenset(map(path_key, reasons)))


def write_damaged(damaged: Mapping[Path, str], listed: Path) -> None:
    """Write paths and reasons as CSV."""
    listed.parent.mkdir(parents=True, exist_ok=True)
    write_csv(listed, ("path", "reason"), ({"path": path, "reason": reason} for path, reason in damaged.items()))


def read_damaged(listed: Path) -> frozenset[str]:
    """The paths in a list of damaged files; empty if the list is missing."""
    return frozenset(row["path"] for row in read_csv(listed))


def without_damaged(items: Items, damaged: frozenset[str]) -> Items:
    """The items whose files are not damaged; a `ValueError` if no item is left."""
    kept = [row for row, path in enumerate(items.files) if path_key(path) not in damaged]
    if not damaged or not items.files or len(kept) == len(items):
        return items
    if not kept:
        raise ValueError(f"all {len(items)} images are damaged, such as {items.files[0]}")
    return items.subset(torch.tensor(kept))


def path_key(path: Path) -> str:
    """A path as text for the list of damaged files: bytes that are not valid text become question marks."""
    return str(path).encode(errors="replace").decode()
