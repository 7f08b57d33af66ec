"""Image files that cannot be read: one pass finds all, and lists them with their reasons or leaves them out."""

import csv
import io
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
from lam.utils.files import write_text
from lam.utils.notes import Note

BATCH = 64
MANY_FILES = 1000
"""From so many on a progress bar is shown."""

Items = TypeVar("Items", bound=Dataset)
Result = TypeVar("Result")


def read_images(
    files: Sequence[tuple[Path, Preprocessing]], use: Callable[[Path, Tensor], Result], *, progress: bool = True
) -> tuple[list[Result], dict[Path, str]]:
    """Decode image files in threads, exactly as they are read later.

    Args:
        files: paths, each with its preprocessing.
        use: what to make of a path and the tensor of its image.
        progress: show a progress bar on standard error, from `MANY_FILES` files on.

    Returns:
        What `use` made of the readable files, in order, and the reason of each file that is damaged.
    """
    hidden = not progress or len(files) <= MANY_FILES
    made, damaged = list[Result](), dict[Path, str]()

    def read(file: tuple[Path, Preprocessing]) -> tuple[Result | None, str | None]:
        path, preprocessing = file
        try:
            return use(path, preprocessing(path)), None
        except ValueError as error:
            return None, str(error)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes outside of Python's lock
        results = tqdm(pool.map(read, files), total=len(files), desc="checking", unit="image", disable=hidden)
        for (path, _), (result, reason) in zip(files, results, strict=True):
            if reason is None:
                made.append(result)  # pyright: ignore[reportArgumentType]
            else:
                damaged[path] = reason
    return made, damaged


@dataclass
class DamagedFiles:
    """Image files that cannot be read: what shall become of them, and those that were met so far.

    Attributes:
        listed: the CSV file that shall list them, with columns path and reason; None for no list.
        skip: go on without them, in place of refusing all.
        reasons: why each cannot be read, by path.
    """

    listed: Path | None = None
    skip: bool = False
    reasons: dict[Path, str] = field(default_factory=dict)

    def settle(self, n_files: int) -> None:
        """After all files were read, list the damaged ones, and refuse them or say that they are left out.

        Args:
            n_files: the number of files that were read.

        Raises:
            ValueError: if there are any that shall not be skipped, or no other.
        """
        if not self.reasons:
            return
        said = f"{len(self.reasons)} of {n_files} images cannot be read"
        if self.listed is not None:
            write_damaged(self.reasons, self.listed)
            said += f", all listed in {self.listed}"
        said += f": {next(iter(self.reasons.values()))}"
        if not self.skip:
            raise ValueError(f"{said}; replace or remove them, or leave them out with --skip-damaged")
        if len(self.reasons) == n_files:
            raise ValueError(said)
        warnings.warn(f"{said}; they are left out", Note, stacklevel=2)


class ImageBatches:
    """Inputs of a network from image files, in batches, without files that are damaged.

    Args:
        files: their paths.
        preprocessing: what makes inputs of them.
        damaged: receives the damaged ones, and settles them after the last batch.
        goes_on: whether batches follow a damaged file; by default where it is skipped. The others are read in any case.
    """

    def __init__(
        self,
        files: Sequence[Path],
        preprocessing: Preprocessing,
        damaged: DamagedFiles,
        *,
        goes_on: bool | None = None,
    ) -> None:
        size = BATCH if preprocessing.shape is not None else 1
        self._parts = [files[start : start + size] for start in range(0, len(files), size)]
        self._preprocessing, self._damaged = preprocessing, damaged
        self._goes_on = damaged.skip if goes_on is None else goes_on
        self.read = list[Path]()
        """The readable files of all batches so far, in order."""

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


def readable(images: Items, damaged: DamagedFiles) -> Items:
    """The images whose files can be read; all are tried.

    Raises:
        ValueError: as `DamagedFiles.settle`.
    """
    files = [(path, images.preprocessing) for path in images.files]
    _, reasons = read_images(files, lambda path, image: None, progress=False)
    damaged.reasons |= reasons
    damaged.settle(len(files))
    return without_damaged(images, frozenset(map(path_key, reasons)))


def write_damaged(damaged: Mapping[Path, str], listed: Path) -> None:
    """Write paths and reasons as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([("path", "reason"), *((path, reason) for path, reason in damaged.items())])
    listed.parent.mkdir(parents=True, exist_ok=True)
    write_text(listed, text.getvalue())


def read_damaged(listed: Path) -> frozenset[str]:
    """Paths in such a list; none if there is no list."""
    if not listed.is_file():
        return frozenset()
    with listed.open(newline="", encoding="utf-8") as lines:
        return frozenset(row["path"] for row in csv.DictReader(lines))


def without_damaged(items: Items, damaged: frozenset[str]) -> Items:
    """The items whose files are not among these paths.

    Raises:
        ValueError: if none is left.
    """
    kept = [row for row, path in enumerate(items.files) if path_key(path) not in damaged]
    if not damaged or not items.files or len(kept) == len(items):
        return items
    if not kept:
        raise ValueError(f"all {len(items)} images are damaged, such as {items.files[0]}")
    return items.subset(torch.tensor(kept))


def path_key(path: Path) -> str:
    """The path as the list has it: without what is no text."""
    return str(path).encode(errors="replace").decode()
