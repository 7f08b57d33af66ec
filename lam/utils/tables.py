"""Columns of a CSV file as text and numbers, with errors that name the file and the line; not what they mean."""

import csv
import gzip
import math
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Table:
    """The rows of a CSV file by column.

    Attributes:
        path: the file.
        columns: of each name, the text in every row, without blanks around it.
        lines: where in the file each row ends, the header being line 1.
    """

    path: Path
    columns: dict[str, list[str]]
    lines: list[int]

    @classmethod
    def read(cls, path: Path, *, needed: Sequence[str] = ()) -> "Table":
        """The table of a file in UTF-8, with commas and a first line that names the columns; empty lines are skipped.

        A file whose name ends in .gz is unpacked.

        Raises:
            ValueError: If it lacks a needed column, names two alike, or a row has more or fewer values than there are
                columns; or it is no CSV file in UTF-8, or is damaged.
        """
        opened = gzip.open if path.suffix.lower() == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, strict=True)
            limit = csv.field_size_limit(sys.maxsize)  # a text may be as long as it is
            try:
                names = [name.strip() for name in next((row for row in reader if row), [])]
                rows = [(reader.line_num, row) for row in reader if row]
            except csv.Error as error:
                told = "columns are told apart by commas, not by semicolons or tabs"
                raise ValueError(f"{path} is no CSV file, line {reader.line_num}: {error}; {told}") from None
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not in UTF-8: {error}") from None
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"{path} is damaged: {error}; get it again") from None
            finally:
                csv.field_size_limit(limit)
        if absent := [name for name in needed if name not in names]:
            raise ValueError(f"{path} has no column {', '.join(absent)}; it has {', '.join(names) or 'none'}")
        if any(names.count(name) > 1 for name in names if name):
            raise ValueError(f"{path}: columns must have names that differ, got {', '.join(names)}")
        for line, row in rows:
            if len(row) != len(names):
                raise ValueError(f"{path} has {len(names)} columns, but {len(row)} values in line {line}")
        columns = {name: [row[i].strip() for _, row in rows] for i, name in enumerate(names)}
        return cls(path, columns, [line for line, _ in rows])

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def numbers(self, name: str, *, unknown: bool = False) -> Float64[Tensor, " N"]:
        """A column of numbers.

        Args:
            name: of the column.
            unknown: whether a value may be empty or "nan"; it becomes NaN.

        Raises:
            ValueError: If a value is no finite number: how many, and the first with its line.
        """
        values = [_number(text, unknown) for text in self.columns[name]]
        if wrong := [row for row, value in enumerate(values) if value is None]:
            first, line = self.columns[name][wrong[0]], self.lines[wrong[0]]
            raise ValueError(
                f"{self.path}: {name} must be numbers, got {first!r} in line {line} ({len(wrong)} such lines)"
            )
        return torch.tensor(values, dtype=torch.float64)

    def booleans(self, name: str) -> Bool[Tensor, " N"]:
        """A column of True and False, or 1 and 0; see `check_choices`."""
        self.check_choices(name, ("True", "False", "1", "0"))
        return torch.tensor([_BOOLEANS[text.lower()] for text in self.columns[name]], dtype=torch.bool)

    def check_choices(self, name: str, allowed: Sequence[str]) -> None:
        """Refuse by a `ValueError` a column with a value that is not allowed, upper or lower case, naming the first."""
        known = {text.lower() for text in allowed}
        for line, text in zip(self.lines, self.columns[name], strict=True):
            if text.lower() not in known:
                raise ValueError(
                    f"{self.path}: {name} must be one of {', '.join(allowed)}, got {text!r} in line {line}"
                )


def _number(text: str, unknown: bool) -> float | None:
    if unknown and text.lower() in ("", "nan"):
        return math.nan
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
