"""Lists of images as tables: `path`, optionally `id` and `label`, in any case; other columns become metadata."""

from pathlib import Path

from lam.gallery.enrolment import SourceImage
from lam.gallery.item import file_id
from lam.utils.checks import first_of
from lam.utils.tables import Table, file_of


def read_list(path: str | Path, *, repeated_ids: bool = False) -> list[SourceImage]:
    """Read a list; relative paths start at its folder, and empty fields are left out.

    Args:
        repeated_ids: whether several lines may have the same id.

    Raises:
        ValueError: as `Table.read` and `SourceImage`; for a column without a name, an empty path, a repeated id, or
            missing images.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give a table with a column path")
    table = Table.read(path, needed=["path"], optional=["id", "label"])
    if "" in table:
        raise ValueError(f"{path}: every column must have a name, got {', '.join(map(repr, table.columns))}")
    if not table.lines:
        raise ValueError(f"{path} lists no image")
    files = [_file(table, name, line) for name, line in zip(table.columns["path"], table.lines, strict=True)]
    if "id" in table and not repeated_ids:
        _refuse_repeated_ids(table)
    if missing := [
        f"{file} ({table.unit} {line})" for file, line in zip(files, table.lines, strict=True) if not file.is_file()
    ]:
        raise ValueError(f"{path}: {len(missing)} of {len(files)} images do not exist: {first_of(missing)}")
    ids, labels = table.columns.get("id", [""] * len(files)), table.labels("label") if "label" in table else None
    metadata = table.metadata(("path", "id", "label"))
    return [
        SourceImage(str(file), labels[row] if labels else "", file_id(file), ids[row] or None, metadata[row])
        for row, file in enumerate(files)
    ]


def _file(table: Table, name: str, line: int) -> Path:
    if not name or "\0" in name:
        raise ValueError(f"{table.path}, {table.unit} {line}: the path must be the name of a file, got {name!r}")
    return file_of(table.path.parent, str(Path(name).expanduser())).absolute()


def _refuse_repeated_ids(table: Table) -> None:
    lines: dict[str, int] = {}
    for item_id, line in zip(table.columns["id"], table.lines, strict=True):
        first = lines.setdefault(item_id, line)
        if item_id and first != line:
            raise ValueError(
                f"{table.path}, {table.unit} {line}: id {item_id!r} is already in {table.unit} {first}; ids must "
                "differ, unless images with one id are fused (--fuse)"
            )
