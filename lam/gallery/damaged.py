"""Image files that cannot be read: one pass finds all, and lists them with their reasons or leaves them out."""

import csv
import io
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from lam.datasets import Dataset
from lam.inputs.preprocessing import Preprocessing
from lam.utils.files import write_text

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


def refuse_damaged(damaged: Mapping[Path, str], n_files: int, listed: Path) -> None:
    """List damaged files and refuse to go on.

    Args:
        damaged: the reason of each, by path.
        n_files: the number of files that were read.
        listed: the CSV file to write, with columns path and reason.

    Raises:
        ValueError: if there are any, with their number, the first one and the list.
    """
    if damaged:
        write_damaged(damaged, listed)
        raise ValueError(
            f"{len(damaged)} of {n_files} images cannot be read, all listed in {listed}: "
            f"{next(iter(damaged.values()))}; replace or remove them, or leave them out with --skip-damaged"
        )


def write_damaged(damaged: Mapping[Path, str], listed: Path) -> None:
    """Write paths and reasons as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([("path", "reason"), *((path, reason) for path, reason in damaged.items())])
    write_text(listed, text.getvalue().encode(errors="replace").decode())


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
