"""Anyone's own texts: a table of texts with labels, or of questions with answers, or a folder of such tables.

The layout is FILE, or root/{train, validation, test}.{csv, tsv, json, jsonl, ndjson, xlsx, parquet}, all but the last
two gzipped or not. See `Table.read` for what such a file holds.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unicodedata import normalize

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from lam.datasets.base import PARTS, Dataset, MissingDataError, Shown, Splits, carve_missing, top_up
from lam.inputs.texts import TextPreprocessing
from lam.inputs.thumbnails import SIZE
from lam.utils.tables import Table, is_no_label

FORMS = (
    *(f"{form}{packed}" for form in (".csv", ".tsv", ".json", ".jsonl", ".ndjson") for packed in ("", ".gz")),
    *(".xlsx", ".parquet"),
)
_LONGEST_NAME = 190


@dataclass(frozen=True)
class Columns:
    """Which columns of a file are what.

    Attributes:
        text: of the texts; by default `text`, or `question` where the file has questions alone.
        label: of what says which texts match; by default `label`, where there is one.
        question: of questions that are searched for, and whose right answer is the one beside them.
        answer: of answers, which are what is searched.

    The default names may be in upper or lower case.

    Raises:
        ValueError: for a question without an answer or the other way round, or both a text and a question.
    """

    text: str | None = None
    label: str | None = None
    question: str | None = None
    answer: str | None = None

    def __post_init__(self) -> None:
        if (self.question is None) != (self.answer is None):
            raise ValueError("question and answer go together: name both columns, or neither")
        if self.question is not None and self.text is not None:
            raise ValueError("name the column of texts, or those of questions and answers, not all of them")

    @property
    def searched_for(self) -> str | None:
        """The column of the texts, or else of the questions."""
        return self.text or self.question

    def of(self, table: Table, *, labelled: bool = True) -> "Columns":
        """The columns that a table has, defaults resolved.

        Raises:
            ValueError: where a named one, or with `labelled` one that is needed, is missing.
        """
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
                "name the columns by the options text and label, or question and answer (of lam run "
                "--data.options='{text: COLUMN}', of other commands --columns text=COLUMN)"
            )
        return Columns(text, label, question, answer)


class Texts(Dataset):
    """N labelled texts.

    Args:
        texts: N, each not empty.
        labels, name, classes, preprocessing, is_query: as of `Dataset`.
        metadata: what else is known of each; by default nothing.
        paths: where each comes from; by default the name of the data set and a position.

    Raises:
        ValueError: If these are not as many, or a text is empty.

    Example:
        >>> texts = Texts(["a cat", "a kitten", "a train"], torch.tensor([0, 0, 1]))
        >>> texts.shape, texts[1][1], texts.shown(2).text
        ((4096,), 0, 'a train')
    """

    texts: tuple[str, ...]
    metadata: tuple[Mapping[str, str], ...]
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
        metadata: Sequence[Mapping[str, str]] | None = None,
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
        """The texts themselves, and which of them are queries."""
        return self.texts if self.is_query is None else (*self.texts, str(self.is_query.tolist()))

    def shown(self, index: int, *, side: int = SIZE) -> Shown:
        """What of the text is an input."""
        text = self.preprocessing.kept(self.texts[index])
        return Shown(self.paths[index], text=text, metadata=self.metadata[index])

    def _draw(self, n: int, seed: int) -> Int64[Tensor, " n"]:
        """Of questions with answers random questions, each with one answer of its label: else none may be answered."""
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


def splits(
    *,
    root: str | Path,
    seed: int = 0,
    text: str | None = None,
    label: str | None = None,
    question: str | None = None,
    answer: str | None = None,
    validation: float = 0.2,
    test: float = 0.2,
    max_bytes: int | None = None,
) -> Splits:
    """Read texts in three parts.

    Of a folder, the files `train`, `validation` (or `val`, `valid`, `dev`) and `test` (or `eval`) are the parts; a part
    that has no file of its own is carved out of what there is to train on, see `lam.datasets.base.carve_missing`.
    Questions are parted. Their answers are the gallery, and every part has all of them. The label of both is the column
    `label`, or else the answer itself; without that column a query asks whether its one answer is in the gallery.

    Args:
        root: a file, or the folder of one a part.
        seed: of the parts that have no file.
        text, label, question, answer: columns; see `Columns`.
        validation: fraction for validation, where it has no file.
        test: fraction for testing, where it has no file.
        max_bytes: how much of a text becomes an input; see `TextPreprocessing`.

    Raises:
        MissingDataError: If there is no such file or folder.
        ValueError: If a named column is missing, a text or a label is empty, or too few texts are there to split.
    """
    columns = Columns(text, label, question, answer)
    preprocessing = TextPreprocessing() if max_bytes is None else TextPreprocessing(max_bytes)
    tables = {part: Table.read(path) for part, path in _files(Path(root).expanduser()).items()}
    named = {part: columns.of(table) for part, table in tables.items()}
    rows = {part: _rows(table, named[part], named[part].searched_for) for part, table in tables.items()}
    answers = _distinct(
        [row for part, table in tables.items() for row in _rows(table, named[part], named[part].answer)]
    )
    classes = _names([row for of_part in rows.values() for row in of_part])
    parts = {part: _texts(of_part, classes, preprocessing) for part, of_part in rows.items()}
    parts = carve_missing(parts, validation=validation, test=test, seed=seed, source=root, by_class=not answers)
    if not answers:
        return Splits.of(parts)
    gallery = _texts(answers, classes, preprocessing)
    is_labelled = any(columns.label for columns in named.values())
    parts = {name: _searching(part, gallery) for name, part in parts.items()}
    return Splits.of(parts, gallery="classes" if is_labelled else "identities", answers=True)


def read(
    *,
    root: str | Path,
    preprocessing: TextPreprocessing,
    columns: Columns | None = None,
    labelled: bool = False,
    name: str = "texts",
) -> Texts:
    """All texts of a file; of questions with answers both, the answers as the gallery of the questions.

    Args:
        root: the file.
        preprocessing: how a text becomes an input.
        columns: of the file.
        labelled: whether every text must have a label; one without has an empty one.
        name: what the data set is called in tables.

    Raises:
        MissingDataError: If there is no such file.
        ValueError: If a column is missing, or a text, or one of the labels that must be there, is empty.
    """
    table = Table.read(_existing(Path(root).expanduser()))
    columns = (Columns() if columns is None else columns).of(table, labelled=labelled)
    queries = _rows(table, columns, columns.searched_for, labelled=labelled)
    answers = _distinct(_rows(table, columns, columns.answer, labelled=labelled))
    classes = _names([*queries, *answers])
    texts = _texts(queries, classes, preprocessing, name=name)
    return _searching(texts, _texts(answers, classes, preprocessing, name=name)) if answers else texts


def outsiders(*, root: str | Path, like: Dataset, text: str | None = None) -> Texts:
    """All texts of a file, or its questions, as inputs of the length that `like` has; see `read`."""
    return read(root=root, preprocessing=preprocessing_like(like), columns=Columns(text=text)).queries


def preprocessing_like(other: Dataset) -> TextPreprocessing:
    """How the texts of another data set become inputs; the default where it has none, whose shape then differs."""
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
    for part, names in PARTS.items():
        found = [path for name in names for form in FORMS if (path := root / f"{name}{form}").is_file()]
        if len(found) > 1:
            raise ValueError(f"{root} has {' and '.join(path.name for path in found)}: keep one of them")
        if found:
            files[part] = found[0]
    if "train" not in files:
        raise MissingDataError(f"{root} has no file train ({', '.join(f'train{form}' for form in FORMS)})")
    return files


def _filled(table: Table, column: str) -> list[str]:
    for line, value in zip(table.lines, table.columns[column], strict=True):
        if not value:
            raise ValueError(f"{table.path}: {column} must not be empty, as it is in {table.unit} {line}")
    return table.columns[column]


def _labels(table: Table, column: str, *, needed: bool) -> list[str]:
    """The labels of a file. One that means none is refused where a label is needed, and empty elsewhere."""
    if not needed:
        return ["" if is_no_label(label) else label for label in table.columns[column]]
    labels = _filled(table, column)
    for line, label in zip(table.lines, labels, strict=True):
        if is_no_label(label):
            raise ValueError(
                f"{table.path}: {column} is {label!r} in {table.unit} {line}, which usually means no label, and all "
                "such texts would match each other: leave them out, or write another name for the label"
            )
    return labels


@dataclass(frozen=True)
class _Row:
    """A text of a file: what says which others match it, what else is known of it, and where it stands."""

    text: str
    key: str
    metadata: Mapping[str, str]
    path: str


def _rows(table: Table, columns: Columns, column: str | None, *, labelled: bool = True) -> list[_Row]:
    """The texts in one of the columns of a file, if it has that one."""
    if column is None:
        return []
    texts, key = _filled(table, column), columns.label or columns.answer
    if not texts:
        raise ValueError(f"{table.path} holds no text: give at least one")
    if key is None:
        keys = [""] * len(texts)
    elif columns.label:
        keys = _labels(table, key, needed=labelled)
    else:
        keys = _filled(table, key) if labelled else table.columns[key]
    used = (columns.text, columns.label, columns.question, columns.answer)
    others = {name: values for name, values in table.columns.items() if name and name not in used}
    metadata = [{name: of[row] for name, of in others.items() if of[row]} for row in range(len(texts))]
    composed = [normalize("NFC", key) for key in keys]
    paths = [f"{table.path}:{line}" for line in table.lines]
    return list(map(_Row, texts, composed, metadata, paths))


def _distinct(rows: Sequence[_Row]) -> list[_Row]:
    """Each text with each of its labels once, the first time that it stands there."""
    return list({(row.text, row.key): row for row in reversed(rows)}.values())[::-1]


def _names(rows: Sequence[_Row]) -> dict[str, int]:
    """The number of each class."""
    return {key: number for number, key in enumerate(sorted({row.key for row in rows}))}


def _texts(
    rows: Sequence[_Row], classes: Mapping[str, int], preprocessing: TextPreprocessing, *, name: str = "texts"
) -> Texts:
    return Texts(
        [row.text for row in rows],
        torch.tensor([classes[row.key] for row in rows], dtype=torch.int64),
        name=name,
        classes=[_shortened(key) for key in classes],
        preprocessing=preprocessing,
        metadata=[row.metadata for row in rows],
        paths=[row.path for row in rows],
    )


def _searching(queries: Texts, gallery: Texts) -> Texts:
    """Texts as queries of others."""
    return Texts(
        [*queries.texts, *gallery.texts],
        torch.cat([queries.labels, gallery.labels]),
        name=queries.name,
        classes=queries.classes,
        preprocessing=queries.preprocessing,
        is_query=torch.arange(len(queries) + len(gallery)) < len(queries),
        metadata=[*queries.metadata, *gallery.metadata],
        paths=[*queries.paths, *gallery.paths],
    )


def _shortened(key: str) -> str:
    """The name of a class; of a long one its beginning, and a hash by which it stays another than those like it."""
    if len(key) <= _LONGEST_NAME:
        return key
    return f"{key[:_LONGEST_NAME]}… ({hashlib.sha256(key.encode()).hexdigest()[:8]})"
