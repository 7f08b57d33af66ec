"""Lists of images as CSV files: `path`, and if wanted `id`, `label` and columns of any other name, kept as metadata."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SHOWN = 5


@dataclass(frozen=True)
class ListedImage:
    """A line of a list.

    Attributes:
        path: an image that exists.
        name: its stable id, None where the list gives none.
        label: empty where the list gives none.
        metadata: the columns beside these that are not empty.
        line: where it stands.
    """

    path: Path
    name: str | None
    label: str
    metadata: dict[str, str]
    line: int


def read_list(path: str | Path, *, repeated_ids: bool = False) -> list[ListedImage]:
    """Read a list; paths that are not absolute count from the folder of the list.

    Args:
        path: a CSV file in UTF-8, with commas and a first line that names the columns.
        repeated_ids: whether an id may stand in several lines.

    Raises:
        ValueError: with the line, for a list without `path`, a line with more or fewer columns, an empty path or a
            repeated id; and for images that do not exist, with their number and the first five.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give a CSV file with a column path")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            images = list(_images(path, csv.reader(file, strict=True)))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8: {error}") from None
    if not images:
        raise ValueError(f"{path} lists no image")
    if not repeated_ids:
        _refuse_repeated(path, images)
    if missing := [image for image in images if not image.path.is_file()]:
        named = ", ".join(f"{image.path} (line {image.line})" for image in missing[:_SHOWN])
        more = ", ..." if len(missing) > _SHOWN else ""
        raise ValueError(f"{path}: {len(missing)} of {len(images)} images do not exist: {named}{more}")
    return images


def _images(path: Path, reader: Any) -> Iterator[ListedImage]:
    try:
        columns = [name.strip() for name in next(reader, [])]
        if "path" not in columns:
            raise ValueError(f"{path}, line 1: there must be a column path, got {', '.join(columns) or 'nothing'}")
        if "" in columns or len(set(columns)) < len(columns):
            raise ValueError(f"{path}, line 1: columns must have names that differ, got {', '.join(columns)}")
        for fields in reader:
            if fields:
                yield _image(path, columns, fields, reader.line_num)
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from None


def _image(path: Path, columns: list[str], fields: list[str], line: int) -> ListedImage:
    if len(fields) != len(columns):
        raise ValueError(f"{path}, line {line}: there must be {len(columns)} columns as in line 1, got {len(fields)}")
    row = {name: field.strip() for name, field in zip(columns, fields, strict=True)}
    given, name, label = row.pop("path"), row.pop("id", ""), row.pop("label", "")
    if not given or "\0" in given:
        raise ValueError(f"{path}, line {line}: the path must be the name of a file, got {given!r}")
    kept = {name: field for name, field in row.items() if field}
    return ListedImage((path.parent / Path(given).expanduser()).absolute(), name or None, label, kept, line)


def _refuse_repeated(path: Path, images: list[ListedImage]) -> None:
    lines: dict[str, int] = {}
    for image in images:
        if image.name is None:
            continue
        first = lines.setdefault(image.name, image.line)
        if first != image.line:
            raise ValueError(
                f"{path}, line {image.line}: id {image.name!r} stands in line {first} already; ids must differ, unless "
                "images of one id are fused (--fuse)"
            )
