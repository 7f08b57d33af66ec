"""The user's texts: a table of texts with labels, or of questions with answers, or a folder with a table per split.

The layout is FILE, or root/{train, validation, test}.{csv, tsv, json, jsonl, ndjson, xlsx, parquet}; files except xlsx
and parquet may be gzipped. See `Table.read` for the content of a file.
"""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import normalize

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from lam.datasets.base import Dataset, MissingDataError, Preview, labels_of, top_up
from lam.datasets.splits import PARTS, Splits, carve_missing, note_like_names, note_lost_metadata
from lam.inputs.decoding import THUMBNAIL_SIDE
from lam.inputs.preprocessing import MAX_BYTES, TextPreprocessing
from lam.utils.checks import first_of
from lam.utils.notes import Note
from lam.utils.tables import Table, is_no_label

FORMS = (
    *(f"{form}{packed}" for form in (".csv", ".tsv", ".json", ".jsonl", ".ndjson") for packed in ("", ".gz")),
    *(".xlsx", ".parquet"),
)
_LONGEST_NAME = 190
_FILL = "fill the cells, or leave these texts out with --skip-damaged (in Python: skip_empty=True)"


@dataclass(frozen=True)
class Columns:
    """Names of the columns to read; default names may be in upper or lower case.

    Attributes:
        text: column of texts; by default `text`, or `question` in a file of questions only.
        label: column of labels; texts with the same label match. By default `label`, if the file has this column.
        question: column of questions, which are the queries; the right answer is in the same row.
        answer: column of answers, which are the gallery.

    Raises:
        ValueError: If only one of question and answer is named, or both text and question.
    """

    text: str | None = None
    label: str | None = None
    question: str | None = None
    answer: str | None = None

    def __post_init__(self) -> None:
        if (self.question is None) != (self.answer is None):
            raise ValueError("question and answer go together: name both columns, or neither")
        if self.question is not None and self.text is not None:
            raise ValueError("name either the column of texts, or the columns of questions and answers")

    @property
    def query(self) -> str | None:
        """The column of the queries: texts or questions."""
        return self.text or self.question

    def of(self, table: Table, *, labelled: bool = True) -> "Columns":
        """The columns of a table, with defaults filled in; `labelled` requires labels or answers."""
        usual = {name.lower(): name for name in table.columns} | {name: name for name in table.columns}
        text, label, question, answer = self.text, self.label, self.question, self.answer
        if text is None and question is None and "question" in usual and "answer" in usual:
            question, answer = usual["question"], usual["answer"]
        if question is None:
            default = "question" if "question" in usual and "text" not in usual else "text"
            text = text or usual.get(default, default)
        if label is None and ("label" in usual or (labelled and question is None)):
            label = usual.get("label", "label")
        needed = [name for name in (text, label, question, answer) if name is not None]
        if absent := [name for name in needed if name not in table]:
            raise ValueError(
                f"{table.path} has no column {', '.join(absent)}; it has {', '.join(table.columns) or 'none'}: "
                "name the columns by the options text and label, or question and answer (lam run: "
                "--data.options='{text: COLUMN}'; other commands: --columns text=COLUMN)"
            )
        return Columns(text, label, question, answer)


@dataclass(frozen=True, kw_only=True)
class TextOptions(Columns):
    """Options of texts in three splits.

    Attributes:
        validation, test: fractions of the training texts that a missing split gets.
        max_bytes: length of an input; see `TextPreprocessing`.
        skip_empty: whether to leave out rows with an empty text, answer or label; by default an error.
    """

    validation: float = 0.2
    test: float = 0.2
    max_bytes: int = MAX_BYTES
    skip_empty: bool = False


_DEFAULTS = TextOptions()


class Texts(Dataset):
    """N labelled texts.

    Args:
        texts: N texts, not empty.
        labels, name, classes, preprocessing, is_query: as for `Dataset`.
        metadata: further values of each text by name; by default empty.
        paths: origin of each text; by default the name of the data set and a position.

    Raises:
        ValueError: If these arguments differ in length, or a text is empty.

    Example:
        >>> texts = Texts(["a cat", "a kitten", "a train"], torch.tensor([0, 0, 1]))
        >>> texts.shape, texts[1][1], texts.preview(2).text
        ((4096,), 0, 'a train')
    """

    texts: tuple[str, ...]
    metadata: tuple[Mapping[str, Any], ...]
    paths: tuple[str, ...]

    def __init__(
        self,
        texts: Sequence[str],
        labels: Int64[Tensor, " N"],
        *,
        name: str = "texts",
        classes: Sequence[str] | None = None,
        preprocessing: TextPreprocessing | None = None,
        is_query: Bool[Tensor, " N"] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        paths: Sequence[str] | None = None,
    ) -> None:
        per_item: Any = {
            "texts": tuple(texts),
            "is_query": is_query,
            "metadata": ({},) * len(texts) if metadata is None else tuple(metadata),
            "paths": tuple(f"{name} {index}" for index in range(len(texts))) if paths is None else tuple(paths),
        }
        preprocessing = preprocessing or TextPreprocessing()
        super().__init__(labels, name=name, classes=classes, preprocessing=preprocessing, **per_item)
        if empty := [index for index, text in enumerate(texts) if not self.preprocessing.kept(text)]:
            raise ValueError(f"texts must not be empty, got an empty one at index {empty[0]} ({len(empty)} such)")

    def __getitem__(self, index: int) -> tuple[UInt8[Tensor, " L"], int]:
        return self.preprocessing(self.texts[index]), int(self.labels[index])

    @property
    def names(self) -> Sequence[str]:
        """The texts; in a data set with a gallery, `is_query` follows as one more text."""
        return self.texts if self.is_query is None else (*self.texts, str(self.is_query.tolist()))

    def preview(self, index: int, *, side: int = THUMBNAIL_SIDE) -> Preview:
        """A preview with the part of the text that fits into an input."""
        text = self.preprocessing.kept(self.texts[index])
        return Preview(self.paths[index], text=text, metadata=self.metadata[index])

    def _draw(self, n: int, seed: int) -> Int64[Tensor, " n"]:
        """Random questions, each with one answer of its label."""
        if self.is_query is None:
            return super()._draw(n, seed)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self), generator=generator).tolist()
        answers: dict[int, list[int]] = {}
        for row in (row for row in order if not self.is_query[row]):
            answers.setdefault(int(self.labels[row]), []).append(row)
        drawn: list[int] = []
        for number, row in enumerate(row for row in order if self.is_query[row]):
            own = answers.get(int(self.labels[row]), [])
            drawn += [row, *own[number % max(1, len(own)) :][:1]]
        return top_up(drawn, n, len(self), generator)


def splits(*, root: str | Path, seed: int = 0, options: TextOptions = _DEFAULTS) -> Splits:
    """Read texts in three splits.

    A folder has the files `train` (or `training`), `validation` (or `val`, `valid`, `dev`) and `test` (or `testing`,
    `eval`). A single file may have these names in a column `split`. Missing splits are drawn from the training texts;
    see `lam.datasets.splits.carve_missing`. Questions are divided, but all galleries hold all answers. Without a column
    `label`, a question matches only its own answer. If there is only one column, a text matches only its copies.
    """
    files = {
        part: _read(path, options, labelled=True, skip_empty=options.skip_empty, alone=True)
        for part, path in _files(Path(root).expanduser()).items()
    }
    rows = {part: queries for part, (queries, _, _) in files.items()}
    rows = _by_split(rows["train"], root) if list(rows) == ["train"] else rows
    answers = _distinct([row for _, gallery, _ in files.values() for row in gallery], root)
    classes = sorted({row.key for queries in rows.values() for row in queries})
    note_like_names(classes, root)
    style: dict[str, Any] = {"classes": classes, "preprocessing": TextPreprocessing(options.max_bytes)}
    parts = {part: _texts(queries, **style) for part, queries in rows.items()}
    parts = carve_missing(
        parts, validation=options.validation, test=options.test, seed=seed, source=root, by_class=not answers
    )
    if not answers:
        return Splits(**parts)
    gallery = _texts(answers, **style)
    parts: dict[str, Any] = {name: _with_gallery(part, gallery) for name, part in parts.items()}
    is_labelled = any(columns.label for _, _, columns in files.values())
    return Splits(**parts, gallery="classes" if is_labelled else "identities", answers=True)


def read(
    *,
    root: str | Path,
    preprocessing: TextPreprocessing,
    columns: Columns | None = None,
    labelled: bool = False,
    answered: bool = True,
    skip_empty: bool = False,
    name: str = "texts",
) -> Texts:
    """All texts of a file; questions are queries, and their answers are the gallery.

    `labelled` requires a label for every text; otherwise, a missing label is empty. Without `answered`, answers are not
    read and may be missing. `skip_empty` is as for `TextOptions`.
    """
    path, columns = _existing(Path(root).expanduser()), columns or Columns()
    queries, answers, _ = _read(path, columns, labelled=labelled, answered=answered, skip_empty=skip_empty)
    answers = _distinct(answers, root)
    classes = sorted({row.key for row in (*queries, *answers)})
    style: dict[str, Any] = {"classes": classes, "preprocessing": preprocessing, "name": name}
    texts = _texts(queries, **style)
    return _with_gallery(texts, _texts(answers, **style)) if answers else texts


def ood_items(*, root: str | Path, like: Dataset, text: str | None = None, skip_empty: bool = False) -> Texts:
    """All texts or questions of a file, with the preprocessing of `like` if it holds texts; see `read`."""
    style: dict[str, Any] = {"preprocessing": preprocessing_like(like), "columns": Columns(text=text)}
    return read(root=root, answered=False, skip_empty=skip_empty, **style)


def preprocessing_like(other: Dataset) -> TextPreprocessing:
    """The preprocessing of another data set; the default if the other data set holds no texts."""
    return other.preprocessing if isinstance(other.preprocessing, TextPreprocessing) else TextPreprocessing()


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise MissingDataError(f"there is no file {path}; give a file of texts ({', '.join(FORMS)})")
    if not path.name.lower().endswith(FORMS):
        raise ValueError(f"{path} must be one of {', '.join(FORMS)}")
    return path


def _files(root: Path) -> dict[str, Path]:
    if not root.is_dir():
        return {"train": _existing(root)}
    files: dict[str, Path] = {}
    tables = [path for path in sorted(root.iterdir()) if path.is_file() and path.name.lower().endswith(FORMS)]
    for part, names in PARTS.items():
        allowed = {f"{name}{form}" for name in names for form in FORMS}
        found = [path for path in tables if path.name.lower() in allowed]
        if len(found) > 1:
            raise ValueError(f"{root} has {' and '.join(path.name for path in found)}: keep one of them")
        if found:
            files[part] = found[0]
    others = [path.name for path in tables if path not in files.values() and not path.name.startswith(".")]
    if files and others:
        note = f"{root}: {len(others)} file(s) do not have the name of a split and are left out: {first_of(others)}"
        warnings.warn(note, Note, stacklevel=3)
    if "train" not in files:
        raise MissingDataError(f"{root} has no file train ({', '.join(f'train{form}' for form in FORMS)})")
    return files


@dataclass(frozen=True)
class _Row:
    """A text of a file, its class, its metadata, and its file and line."""

    text: str
    key: str
    metadata: Mapping[str, Any]
    path: str


def _read(
    path: Path, columns: Columns, *, labelled: bool, skip_empty: bool, answered: bool = True, alone: bool = False
) -> tuple[list[_Row], list[_Row], Columns]:
    """The texts or questions of a file, its answers, and its columns; if `alone`, a single column needs no labels."""
    table = Table.read(path, optional=("id",))
    if alone and len(table.columns) == 1 and columns.question is columns.label is None:
        columns = Columns(columns.text, label=min(table.columns))
    columns = (columns if answered else _queries_of(table, columns)).of(table, labelled=labelled)
    columns = columns if answered else Columns(columns.query, columns.label)
    if skip_empty:
        needed = (columns.query, columns.answer, columns.label if labelled else None)
        table = table.filled([name for name in needed if name is not None])
    used = (columns.text, columns.label, columns.question, columns.answer)
    table.check_single(used if answered else (columns.query,))
    metadata = table.metadata(used)
    paths = [f"{table.path}:{line}" for line in table.lines]

    def rows(column: str | None) -> list[_Row]:
        if column is None:
            return []
        table.check(column, bool, "not be empty", advice=_FILL)
        if not table.lines:
            raise ValueError(f"{table.path} holds no text: give at least one")
        return list(map(_Row, table.columns[column], _keys(table, columns, labelled=labelled), metadata, paths))

    return rows(columns.query), rows(columns.answer), columns


def _queries_of(table: Table, columns: Columns) -> Columns:
    """The columns; the default columns if the table lacks the named column of queries but has a default one."""
    named = columns.query
    if named is None or named in table or not {"text", "question"} & {name.lower() for name in table.columns}:
        return columns
    usual = Columns().of(table, labelled=False)
    warnings.warn(f"{table.path} has no column {named}: its column {usual.query} is read", Note, stacklevel=4)
    return usual


def _by_split(rows: Sequence[_Row], source: object) -> dict[str, list[_Row]]:
    """The rows of each split in a column `split`; all rows as `train` if no value of the column names a split."""
    part_of = {name: part for part, names in PARTS.items() for name in names}
    columns = {name for row in rows for name in row.metadata if name.lower() == "split"}
    values = [str(row.metadata.get(min(columns, default=""), "")) for row in rows]
    if not any(value.lower() in part_of for value in values):
        return {"train": list(rows)}
    parts: dict[str, list[_Row]] = {}
    for row, value in zip(rows, values, strict=True):
        if value.lower() not in part_of:
            allowed = ", ".join(part_of)
            raise ValueError(f"{row.path}: split must be one of {allowed}, got {value!r}; or rename the column")
        parts.setdefault(part_of[value.lower()], []).append(row)
    counts = ", ".join(f"{len(part)} for {name}" for name, part in parts.items())
    if "train" not in parts:
        raise ValueError(
            f"{source}: the column split has rows {counts}, none for train: add some, or rename the column"
        )
    if len(parts) > 1:
        warnings.warn(f"{source}: the column split divides the texts, {counts}", Note, stacklevel=3)
    return parts


def _keys(table: Table, columns: Columns, *, labelled: bool) -> list[str]:
    """The class of each row: its label, else its answer, else an empty text."""
    column = columns.label or columns.answer
    if column is None:
        return [""] * len(table.lines)
    if labelled:
        table.check(column, bool, "not be empty", advice=_FILL)
    if columns.label and labelled:
        rule = "not mean that there is no label: all such texts would match each other (leave them out or rename it)"
        table.check(column, lambda label: not is_no_label(label), rule)
    return [normalize("NFC", key) for key in (table.labels(column) if columns.label else table.columns[column])]


def _distinct(rows: Sequence[_Row], source: object) -> list[_Row]:
    """One row for each text and label: the first of equal rows, at the position of the last."""
    first = {(row.text, row.key): row for row in reversed(rows)}
    note_lost_metadata(((first[row.text, row.key].metadata, row.metadata) for row in rows), source)
    return list(first.values())[::-1]


def _texts(rows: Sequence[_Row], classes: Sequence[str], name: str = "texts", **options: Any) -> Texts:
    return Texts(
        [row.text for row in rows],
        labels_of((row.key for row in rows), classes),
        name=name,
        classes=[_shortened(key) for key in classes],
        metadata=[row.metadata for row in rows],
        paths=[row.path for row in rows],
        **options,
    )


def _with_gallery(queries: Texts, gallery: Texts) -> Texts:
    texts = queries.joined(gallery)
    texts.is_query = torch.arange(len(texts)) < len(queries)
    return texts


def _shortened(key: str) -> str:
    """The name of a class; a long name is cut and gets a hash, which keeps it unique."""
    if len(key) <= _LONGEST_NAME:
        return key
    return f"{key[:_LONGEST_NAME]}… ({hashlib.sha256(key.encode()).hexdigest()[:8]})"
