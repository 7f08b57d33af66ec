"""Columns of a table file, as text or numbers; errors name the file and the line."""

import codecs
import csv
import gzip
import itertools
import json
import logging
import math
import re
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mode
from typing import Any, TextIO
from unicodedata import normalize

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from lam.utils.checks import first_of
from lam.utils.notes import Note
from lam.utils.spreadsheets import LARGEST, check_size, parquet_rows, xlsx_rows

_LONGEST_FIELD = 2**31 - 1  # a text may have any length; this is the greatest C long of Windows
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]+)?")  # not "007" or "1e5", which may be codes
_DECIMAL_COMMA = re.compile(r"-?[0-9.]+,[0-9]+")
_CUT_ZERO = re.compile(r"-?[0-9]+\.[0-9]+0")  # 1.10 may be a version, 1.0 is how programs write the number 1
_HEAD = 20  # lines that show the separator
_FIX = "name each column in the first row, and put CSV values that hold the separator into quotes"

_NESTED = "write a row for each element of a list, and a column for each value of an object"

_LOG = logging.getLogger(__name__)
_ITEM_CONTROLS = ("choices", "taxonomy", "rating")  # controls that label a whole item, not a part of it


def is_no_label(label: str) -> bool:
    """Whether a cell says that there is no label, such as NaN or -1."""
    return label.lower() in ("-1", "-1.0", "nan", "<na>", "nat", "null", "n/a", "#n/a")


def file_of(folder: Path, name: str) -> Path:
    r"""The file that a cell names, relative to a folder.

    If no file has exactly this name, a \ counts as /, as in Windows, and accents may have another Unicode form.
    """
    plain = name.replace("\\", "/")
    paths = [folder / each for each in (name, plain, normalize("NFC", plain), normalize("NFD", plain))]
    return next((path for path in paths if path.exists()), paths[0])


@dataclass(frozen=True)
class Table:
    """The rows of a file by column.

    Attributes:
        path: the file.
        columns: the text of every row by column name, without surrounding blanks.
        lines: number of the line, from 1, at which each row ends.
        unit: unit of `lines`: line, object (of a JSON file) or row (of a sheet).
        values: values of each row by column name, if the file has types: numbers, booleans, null, lists, objects.
    """

    path: Path
    columns: dict[str, list[str]]
    lines: list[int]
    unit: str = "line"
    values: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def read(cls, path: Path, *, needed: Sequence[str] = (), optional: Sequence[str] = ()) -> "Table":
        """Read a CSV, TSV, JSON or JSON Lines file in UTF-8, or in UTF-16 with a byte order mark, gzipped (.gz) or not.

        The first line of a CSV file names its columns; a line such as `sep=;` may come before it. By default, the
        separator is a comma, semicolon, tab or bar, whichever fits the first lines; a `Note` names any but a comma.
        Blanks around values, empty lines, and final rows without a value are skipped. A JSON file holds a list of
        objects, or tasks of Label Studio. A JSON Lines file holds an object in each line. An .xlsx workbook gives its
        first sheet. Workbooks and Parquet files (.parquet) need the extra `tables`.

        Args:
            needed, optional: columns that the file must or may have, in lower case; the file may use upper case.

        Raises:
            ValueError: If a needed column is missing, two columns share a name, a row has too many or too few values,
                or the file is of another kind, damaged, or unpacks to over 1 GiB.
        """
        form = Path(path.stem if path.suffix.lower() == ".gz" else path.name).suffix.lower()
        if form == ".json":
            rows = read_json(path)
            table = cls._of_objects(path, "object", dict(enumerate(rows, 1)) if isinstance(rows, list) else None)
        elif form in (".jsonl", ".ndjson"):
            table = cls._of_objects(path, "line", _jsonl_rows(path))
        elif form == ".parquet":
            table = cls._of_objects(path, "row", dict(enumerate(parquet_rows(path), 1)))
        elif form == ".xlsx":
            sheet = xlsx_rows(path)
            table = cls._of_rows(path, [(number, list(map(_cell, row))) for number, row in sheet], "row")
            named = [zip(map(_cell, sheet[0][1]), row, strict=False) for _, row in sheet[1 : len(table.lines) + 1]]
            table = replace(table, values=[{name: _json(cell) for name, cell in row if _cell(cell)} for row in named])
        else:
            table = cls._of_rows(path, _csv_rows(path, "\t" if form == ".tsv" else None))
        usual = {name.lower(): name for name in table.columns}
        new = {usual[name]: name for name in (*needed, *optional) if name in usual and name not in table}
        if absent := [name for name in needed if name not in usual]:
            raise ValueError(f"{path} has no column {', '.join(absent)}; it has {', '.join(table.columns) or 'none'}")
        columns, *values = ({new.get(name, name): of[name] for name in of} for of in (table.columns, *table.values))
        return replace(table, columns=columns, values=values)

    @classmethod
    def _of_rows(cls, path: Path, rows: list[tuple[int, list[str]]], unit: str = "line") -> "Table":
        names, rows = (rows[0][1], rows[1:]) if rows else ([], [])
        rows = [(line, row) for line, row in rows if row != [""] or len(names) < 2]  # lines of blanks
        while rows and not any(rows[-1][1]):
            rows.pop()
        if any(names.count(name) > 1 for name in names if name):
            raise ValueError(f"{path}: columns must have different names, got {', '.join(names)}")
        for line, row in rows:
            if row == names and len(names) > 1:
                raise ValueError(f"{path} names the columns again in {unit} {line}: delete this {unit}")
            if len(row) != len(names):
                raise ValueError(f"{path} has {len(names)} columns, but {len(row)} values in {unit} {line}: {_FIX}")
        columns = {name: [row[i] for _, row in rows] for i, name in enumerate(names)}
        if rows and not any(row[i] for _, row in rows for i, name in enumerate(names) if not name):
            columns.pop("", None)
        return cls(path, columns, [line for line, _ in rows], unit)

    @classmethod
    def _of_objects(cls, path: Path, unit: str, rows: object) -> "Table":
        if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
            kind = "an object in each line" if unit == "line" else "a list of objects"
            raise ValueError(f'{path} must hold {kind}, such as [{{"text": "...", "label": "..."}}]')
        parts = [(row.get("data"), row.get("annotations")) for row in rows.values()]
        if rows and all(isinstance(data, dict) and isinstance(annotations, list) for data, annotations in parts):
            rows = rows_of_tasks(path, rows)
        names = dict.fromkeys(str(name) for row in rows.values() for name in row)
        columns = {name: [_cell(row.get(name)) for row in rows.values()] for name in names}
        values = [{str(name): _json(value) for name, value in row.items()} for row in rows.values()]
        return cls(path, columns, list(rows), unit, values)

    def metadata(self, without: Collection[str | None]) -> list[dict[str, Any]]:
        """The values of each row by column name, except the columns `without` and empty cells of CSV or Excel files.

        A CSV column of numbers, without exponents or leading zeros, becomes numbers; ids remain texts. A `Note` names
        a column of numbers that remains text, so that no range of a filter finds it: up to a tenth of its values are
        not plain numbers, all others have a decimal comma, or a last 0 distinguishes values such as 1.1 and 1.10.
        """
        named = {name: column for name, column in self.columns.items() if name and name not in without}
        if self.values:
            return [{name: row[name] for name in named if name in row} for row in self.values]
        values = {name: self._typed(name) for name in named}
        return [{name: values[name][row] for name in named if named[name][row]} for row in range(len(self.lines))]

    def _typed(self, name: str) -> Sequence[Any]:
        column = self.columns[name]
        texts = [row for row, text in enumerate(column) if text and not _NUMBER.fullmatch(text)]
        have_commas = all(_DECIMAL_COMMA.fullmatch(column[row]) for row in texts)
        if name == "id" or (len(texts) > (n_filled := sum(map(bool, column))) / 10 and not have_commas):
            return column
        problem = f"{len(texts)} of its {n_filled} values are not plain numbers like 12.50"
        if not texts:
            texts = [row for row, text in enumerate(column) if _CUT_ZERO.fullmatch(text)]
            if not texts or len({len(text.partition(".")[2]) for text in column if "." in text}) < 2:
                return [json.loads(text or "0") for text in column]
            problem = "numbers would lose a last 0, and its values have unequally many decimals"
        example = f"such as {column[texts[0]]!r} in line {self.lines[texts[0]]}"
        warnings.warn(f"{self.path}: {name} remains text: {problem}, {example}", Note, stacklevel=3)
        return column

    def labels(self, name: str) -> list[str]:
        """A column of labels, empty for labels such as NaN or -1, which mean none; a `Note` counts them."""
        column = self.columns[name]
        if rows := [row for row, label in enumerate(column) if is_no_label(label)]:
            which = f"({len(rows)} such, {self.unit} {first_of([self.lines[row] for row in rows])})"
            warnings.warn(f"{self.path}: {name} {column[rows[0]]!r} counts as no label {which}", Note, stacklevel=3)
        return ["" if is_no_label(label) else label for label in column]

    def filled(self, names: Collection[str]) -> "Table":
        """The rows without an empty value in these columns; a `Note` counts the other rows."""
        kept = [row for row in range(len(self.lines)) if all(self.columns[name][row] for name in names)]
        if len(kept) == len(self.lines):
            return self
        left_out = sorted({*range(len(self.lines))}.difference(kept))
        told = f"{len(left_out)} of {len(self.lines)} {self.unit}s have an empty {' or '.join(names)}"
        which = first_of([self.lines[row] for row in left_out])
        warnings.warn(f"{self.path}: {told} and are left out: {which}", Note, stacklevel=2)
        columns = {name: [column[row] for row in kept] for name, column in self.columns.items()}
        values = [self.values[row] for row in kept] if self.values else ()
        return replace(self, columns=columns, lines=[self.lines[row] for row in kept], values=values)

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def numbers(self, name: str, *, unknown: bool = False) -> Float64[Tensor, " N"]:
        """A column of finite numbers; `unknown` allows empty values and "nan", which become NaN. See `check`."""
        self.check(name, lambda text: _number(text, unknown) is not None, "be numbers")
        return torch.tensor([_number(text, unknown) for text in self.columns[name]], dtype=torch.float64)

    def booleans(self, name: str) -> Bool[Tensor, " N"]:
        """A column of True and False, or 1 and 0; see `check_choices`."""
        self.check_choices(name, ("True", "False", "1", "0"))
        return torch.tensor([text.lower() in ("true", "1") for text in self.columns[name]], dtype=torch.bool)

    def check_choices(self, name: str, allowed: Sequence[str]) -> None:
        """Require allowed values in a column, in upper or lower case; see `check`."""
        known = {text.lower() for text in allowed}
        self.check(name, lambda text: text.lower() in known, f"be one of {', '.join(allowed)}")

    def check_single(self, names: Iterable[str | None]) -> None:
        """Reject lists and objects in these columns; see `check`."""
        for name in filter(None, names):
            rows = zip(self.columns[name], self.values, strict=False)
            nested = {text for text, row in rows if isinstance(row.get(name), list | dict)}
            self.check(name, lambda text, nested=nested: text not in nested, "be one value", advice=_NESTED)

    def check(self, name: str, is_right: Callable[[str], object], rule: str, *, advice: str = "") -> None:
        """Require that `is_right` accepts every value of a column.

        The error states the `rule`, quotes the first wrong value, counts them, names lines and ends with the `advice`.
        """
        if wrong := [row for row, text in enumerate(self.columns[name]) if not is_right(text)]:
            first, lines = self.columns[name][wrong[0]], [self.lines[row] for row in wrong]
            such = f"{len(wrong)} such {self.unit}s: {first_of(lines)}" if len(wrong) > 1 else f"1 such {self.unit}"
            raise ValueError(
                f"{self.path}: {name} must {rule}, got {first!r} in {self.unit} {lines[0]} ({such})"
                + (f": {advice}" if advice else "")
            )


def _number(text: str, unknown: bool) -> float | None:
    if unknown and text.lower() in ("", "nan"):
        return math.nan
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


@contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    """A text file, gzipped or not: UTF-16 if it begins with a byte order mark of UTF-16, else UTF-8."""
    opened: Any = gzip.open if path.suffix.lower() == ".gz" else open
    name = "UTF-8"
    try:
        with opened(path, "rb") as stream:
            if stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                name = "UTF-16"
            if opened is gzip.open:
                check_size(path, stream.seek(LARGEST + 1))  # at most to its end
        with opened(path, "rt", encoding="utf-16" if name == "UTF-16" else "utf-8-sig", newline="") as stream:
            yield stream
    except UnicodeError as error:
        why = _first_undecodable(path, opened) if name == "UTF-8" else str(error)
        raise ValueError(f"{path} is not in {name}: {why}; save it in UTF-8 (in Excel: CSV UTF-8)") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged: {error}; get it again") from None


def _first_undecodable(path: Path, opened: Any) -> str:
    """The line and byte that are not UTF-8; the decoder of a stream reports only a position in its buffer."""
    with opened(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode()
            except UnicodeError as error:
                return f"line {number}, {error}"
    return "it ends within a character"


def _csv_rows(path: Path, separator: str | None) -> list[tuple[int, list[str]]]:
    """The non-empty rows of a CSV file, each with the line at which it ends; blanks around values are cut."""
    with _open_text(path) as stream:
        before, header, head = 0, "", list[str]()
        while not header.strip() and (header := stream.readline()):
            before += 1
        if stated := re.fullmatch(r"sep=([,;\t|])\s*", header, re.IGNORECASE):
            found = stated[1]
        else:
            before -= 1
            head = [header, *itertools.islice(stream, _HEAD)]
            found = separator or _sniff_separator(head, path)
        reader = csv.reader(itertools.chain(head, stream), strict=True, delimiter=found, skipinitialspace=True)
        try:
            with _long_fields():
                return [(before + reader.line_num, [value.strip() for value in row]) for row in reader if row]
        except csv.Error as error:
            line = before + reader.line_num
            read = f"values were separated by {_SEPARATORS[found]}"
            raise ValueError(f"{path} is not a CSV file, line {line}: {error}; {read}") from None


@contextmanager
def _long_fields() -> Iterator[None]:
    limit = csv.field_size_limit(_LONGEST_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _sniff_separator(head: Sequence[str], path: Path) -> str:
    """The separator that cuts most of a file's first lines into as many values as the line of names, at least two.

    The line of names alone would mislead: `question (long, in English);answer` has a comma and a semicolon.
    """
    found, best = ",", (0, 1)
    for separator in _SEPARATORS:
        names, *rows = _values(head, separator)
        n_columns = len(names)
        if n_columns > 1 and (fit := (sum(len(row) == n_columns for row in rows), n_columns)) > best:
            found, best = separator, fit
    if found != ",":
        warnings.warn(f"{path} is read as values separated by {_SEPARATORS[found]}", Note, stacklevel=2)
    return found


def _values(lines: Sequence[str], separator: str) -> list[list[str]]:
    """The values of a file's first lines; one empty row if they are not CSV. The last line may end within quotes."""
    with suppress(csv.Error), _long_fields():
        return [row for row in csv.reader(lines, delimiter=separator, skipinitialspace=True) if row] or [[]]
    return [[]]


def read_json(path: Path) -> object:
    """The value of a JSON file, gzipped or not; a `ValueError` if it is not valid JSON."""
    with _open_text(path) as stream:
        return _parse_json(
            stream.read(), f"{path} is not a valid JSON file (name a file with an object in each line .jsonl)"
        )


def _jsonl_rows(path: Path) -> dict[int, object]:
    with _open_text(path) as stream:
        return {
            line: _parse_json(text, f"{path} is not a valid JSON Lines file, line {line}")
            for line, text in enumerate(stream, 1)
            if text.strip()
        }


def _parse_json(text: str, refusal: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{refusal}: {error}") from None


def _cell(value: object) -> str:
    """The text of a value; null and NaN are empty."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, int | float | list | dict):
        return json.dumps(value, default=str)
    return str(value).strip()


def _json(value: object) -> Any:
    """The value as JSON: texts, numbers, booleans, lists and objects as they are, null for NaN, others as text."""
    if isinstance(value, list | dict):
        return json.loads(_cell(value))
    is_plain = isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else _cell(value) or None


def rows_of_tasks(path: Path, tasks: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """The data of each task by number, and its labels by the names of the controls (fields) in Label Studio's form.

    If some annotations of a task are marked as ground truth, only these count. The most frequent label wins. Skipped
    annotations do not count. Tasks without a label are left out; a log message counts them.
    """
    rows: dict[int, dict[str, Any]] = {}
    for number, task in tasks.items():
        try:
            labels = _labels(task["annotations"])
        except (AttributeError, KeyError, TypeError):
            raise ValueError(
                f"{path}: object {number} has no annotations of Label Studio's form: export a CSV file instead"
            ) from None
        if labels:
            rows[number] = {**task["data"], **labels}
    if n_left_out := len(tasks) - len(rows):
        _LOG.warning("%s: %d of %d tasks have no label and are left out", path, n_left_out, len(tasks))
    return rows


def _labels(annotations: list[Any]) -> dict[str, str]:
    kept = [annotation for annotation in annotations if not annotation.get("was_cancelled")]
    kept = [annotation for annotation in kept if annotation.get("ground_truth")] or kept
    labels: dict[str, list[str]] = {}
    for result in (result for annotation in kept for result in annotation["result"]):
        if result["type"] in _ITEM_CONTROLS and (value := result["value"][result["type"]]):
            one = value[0] if isinstance(value, list) and len(value) == 1 else value
            labels.setdefault(result["from_name"], []).append(one if isinstance(one, str) else json.dumps(one))
    return {name: mode(of_control) for name, of_control in labels.items()}
