"""Rows of Excel workbooks and Parquet files, each read by an optional library; not what columns they make."""

import importlib
import zipfile
from pathlib import Path
from typing import Any

_LARGEST = 2**30  # bytes unpacked


def xlsx_rows(path: Path) -> list[tuple[int, list[Any]]]:
    """The rows of the first sheet that are not empty, each with its number, padded to the width of the first.

    Raises:
        ValueError: If it is no workbook, unpacks to over 1 GiB, or openpyxl is not installed.
    """
    library = _library("openpyxl", path)
    try:
        with zipfile.ZipFile(path) as archive:
            _check_size(path, sum(entry.file_size for entry in archive.infolist()))
        book = library.load_workbook(path, read_only=True, data_only=True)
        try:
            numbered = enumerate(book.worksheets[0].iter_rows(values_only=True), 1)
            rows = [(number, _trimmed(row)) for number, row in numbered if any(value is not None for value in row)]
        finally:
            book.close()
    except (zipfile.BadZipFile, KeyError, IndexError, SyntaxError, EOFError) as error:
        raise ValueError(f"{path} is no .xlsx workbook, or is damaged: {error}") from None
    width = len(rows[0][1]) if rows else 0
    return [(number, row + [None] * (width - len(row))) for number, row in rows]


def parquet_rows(path: Path) -> list[dict[str, Any]]:
    """The rows by column.

    Raises:
        ValueError: If it is no Parquet file, unpacks to over 1 GiB, or pyarrow is not installed.
    """
    library = _library("pyarrow.parquet", path)
    try:
        with library.ParquetFile(path) as file:
            groups = range(file.metadata.num_row_groups)
            _check_size(path, sum(file.metadata.row_group(group).total_byte_size for group in groups))
            return file.read().to_pylist()
    except (OSError, importlib.import_module("pyarrow").ArrowInvalid) as error:
        raise ValueError(f"{path} is no Parquet file, or is damaged: {error}") from None


def _library(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"{path} needs {name.split('.')[0]}: install the extra `tables`, or save it as CSV") from None


def _check_size(path: Path, size: int) -> None:
    if size > _LARGEST:
        raise ValueError(f"{path} unpacks to {size} bytes, more than {_LARGEST}: save it as CSV")


def _trimmed(row: tuple[Any, ...]) -> list[Any]:
    last = max(i for i, value in enumerate(row) if value is not None)
    return list(row[: last + 1])
