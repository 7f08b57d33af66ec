"""Lists of images as CSV files: `path`, and if wanted `id`, `label` and columns of any other name, kept as metadata."""

from dataclasses import dataclass
from pathlib import Path

from lam.utils.tables import Table

_SHOWN = 5


@dataclass(frozen=True)
class ListedImage:
    """A line of a list.

    Attributes:
        path: an image that exists.
        id: its stable id, None where the list gives none.
        label: empty where the list gives none.
        metadata: the columns beside these that are not empty.
        line: where it stands.
    """

    path: Path
    id: str | None
    label: str
    metadata: dict[str, str]
    line: int


def read_list(path: str | Path, *, repeated_ids: bool = False) -> list[ListedImage]:
    """Read a list; paths that are not absolute count from the folder of the list.

    Args:
        path: a CSV file in UTF-8, with commas and a first line that names the columns.
        repeated_ids: whether an id may stand in several lines.

    Raises:
        ValueError: as `Table.read`; for a column without a name; with the line, for an empty path or a repeated id; and
            for images that do not exist, with their number and the first five.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give a CSV file with a column path")
    table = Table.read(path, needed=["path"])
    if "" in table:
        raise ValueError(f"{path}: every column must have a name, got {', '.join(map(repr, table.columns))}")
    images = [_image(table, row, line) for row, line in enumerate(table.lines)]
    if not images:
        raise ValueError(f"{path} lists no image")
    if not repeated_ids:
        _refuse_repeated(path, images)
    if missing := [image for image in images if not image.path.is_file()]:
        named = ", ".join(f"{image.path} (line {image.line})" for image in missing[:_SHOWN])
        more = ", ..." if len(missing) > _SHOWN else ""
        raise ValueError(f"{path}: {len(missing)} of {len(images)} images do not exist: {named}{more}")
    return images


def _image(table: Table, row: int, line: int) -> ListedImage:
    fields = {name: column[row] for name, column in table.columns.items()}
    file, item_id, label = fields.pop("path"), fields.pop("id", ""), fields.pop("label", "")
    if not file or "\0" in file:
        raise ValueError(f"{table.path}, line {line}: the path must be the name of a file, got {file!r}")
    metadata = {name: field for name, field in fields.items() if field}
    path = (table.path.parent / Path(file).expanduser()).absolute()
    return ListedImage(path, item_id or None, label, metadata, line)


def _refuse_repeated(path: Path, images: list[ListedImage]) -> None:
    lines: dict[str, int] = {}
    for image in images:
        if image.id is None:
            continue
        first = lines.setdefault(image.id, image.line)
        if first != image.line:
            raise ValueError(
                f"{path}, line {image.line}: id {image.id!r} stands in line {first} already; ids must differ, unless "
                "images of one id are fused (--fuse)"
            )
