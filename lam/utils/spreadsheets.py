"""Rows of Excel workbooks and Parquet files; reading them needs optional libraries."""

import importlib
import zipfile
import zlib
from pathlib import Path
from typing import Any

from lam.utils.extras import install_command

LARGEST = 2**30  # bytes unpacked
_CELL = 8  # least bytes of a cell
_LAST_ROW = 2**20  # last row of a sheet
_ROWS = 64  # rows unpacked at once: few, because a small file may hold a long text in every row


def xlsx_rows(path: Path) -> list[tuple[int, list[Any]]]:
    """Number and values of each non-empty row of the first sheet, padded to the width of the first such row.

    A cell of blanks counts as empty. A `ValueError` for another or damaged file, over 1 GiB unpacked, or a row beyond
    2²⁰; or without openpyxl.
    """
    library, rows, n_cells = _library("openpyxl", path), [], 0
    try:
        with zipfile.ZipFile(path) as archive:
            check_size(path, sum(entry.file_size for entry in archive.infolist()))
        book = library.load_workbook(path, read_only=True, data_only=True)
        try:
            sheet = book.worksheets[0]
            sheet.reset_dimensions()  # some programs write the dimension "A1" for every sheet
            for number, row in enumerate(sheet.iter_rows(values_only=True), 1):
                n_cells += len(row)
                check_size(path, n_cells * _CELL)
                if number > _LAST_ROW:
                    raise ValueError(f"{path} has a row beyond {_LAST_ROW}, the last of a sheet: save it as CSV")
                cells = [(value.strip() or None) if isinstance(value, str) else value for value in row]
                if filled := [i for i, value in enumerate(cells) if value is not None]:
                    rows.append((number, cells[: filled[-1] + 1]))
        finally:
            book.close()
    except (zipfile.BadZipFile, zlib.error, KeyError, IndexError, SyntaxError, EOFError) as error:
        raise ValueError(f"{path} is not an .xlsx workbook, or is damaged: {error}") from None
    width = len(rows[0][1]) if rows else 0
    return [(number, row + [None] * (width - len(row))) for number, row in rows]


def parquet_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file by column; a `ValueError` for another file, over 1 GiB unpacked, or without pyarrow."""
    library, rows = _library("pyarrow.parquet", path), []
    try:
        with library.ParquetFile(path) as file:
            metadata = file.metadata
            size = metadata.num_rows * metadata.num_columns * _CELL
            for batch in file.iter_batches(_ROWS) if size <= LARGEST else ():
                size += batch.nbytes
                if size > LARGEST:
                    break
                rows += batch.to_pylist()
    except (OSError, ValueError, importlib.import_module("pyarrow").ArrowException) as error:
        raise ValueError(f"{path} is not a Parquet file, or is damaged: {error}") from None
    check_size(path, size)
    return rows


def _library(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        library = name.partition(".")[0]
        raise ValueError(f"{path} needs {library}: {install_command('tables')}, or save it as CSV") from None


def check_size(path: Path, size: int) -> None:
    """Require a file that unpacks to at most 1 GiB."""
    if size > LARGEST:
        raise ValueError(f"{path} unpacks to over {LARGEST} bytes: unpack it, or save it as CSV, which has no limit")
