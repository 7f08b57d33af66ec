"""Anyone's own texts: a CSV or JSON file of texts with labels, or of questions with answers, or a folder of such files.

The layout is FILE, or root/{train, validation or val, test}.{csv, json}; either may be gzipped. CSV has columns by
name, JSON a list of objects.
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from lam.datasets.base import Dataset, MissingDataError, Shown, Splits, carve_missing
from lam.inputs.texts import TextPreprocessing
from lam.utils.tables import Table

FORMS = (".csv", ".csv.gz", ".json", ".json.gz")
_PARTS = {"train": ("train",), "validation": ("validation", "val"), "test": ("test",)}
_LONGEST_NAME = 200


@dataclass(frozen=True)
class Columns:
    """Which columns of a file are what.

    Attributes:
        text: of the texts; by default `text`, where the file has no `question` and `answer`.
        label: of what says which texts match; by default `label`, where there is one.
        question: of questions that are searched for, and whose right answer is the one beside them.
        answer: of answers, which are what is searched.

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

    def of(self, table: Table, *, labelled: bool = True) -> "Columns":
        """The columns that a table has, defaults resolved.

        Raises:
            ValueError: where a named one, or with `labelled` one that is needed, is missing.
        """
        text, label, question, answer = self.text, self.label, self.question, self.answer
        if text is None and question is None and "question" in table and "answer" in table:
            question, answer = "question", "answer"
        if question is None:
            text = text or "text"
        if label is None and ("label" in table or (labelled and question is None)):
            label = "label"
        needed = [name for name in (text, label, question, answer) if name is not None]
        if absent := [name for name in needed if name not in table]:
            raise ValueError(
                f"{table.path} has no column {', '.join(absent)}; it has {', '.join(table.columns) or 'none'}: "
                "name the columns by the options text and label, or question and answer"
            )
        return Columns(text, label, question, answer)


class Texts(Dataset):
    """N labelled texts.

    Args:
        texts: each not empty.
        labels: (N,) int64.
        name: what the data set is called in tables.
        classes: the name of every class; by default the labels themselves.
        preprocessing: how a text becomes an input.
        is_query: (N,) whether each is a query; see `Dataset`.
        metadata: what else is known of each; by default nothing.

    Raises:
        ValueError: If these are not as many, or a text is empty.

    Example:
        >>> texts = Texts(["a cat", "a kitten", "a train"], torch.tensor([0, 0, 1]))
        >>> texts.shape, texts[1][1], texts.shown(2).text
        ((4096,), 0, 'a train')
    """

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
    ) -> None:
        if classes is None:
            classes = tuple(map(str, range(int(labels.max()) + 1 if len(labels) else 0)))
        metadata = [{}] * len(texts) if metadata is None else metadata
        for what, values in (("labels", labels), ("is_query", is_query), ("metadata", metadata)):
            if values is not None and len(values) != len(texts):
                raise ValueError(f"{what} must be as many as the {len(texts)} texts, got {len(values)}")
        super().__init__(labels, name=name, classes=classes, preprocessing=preprocessing or TextPreprocessing())
        if empty := [index for index, text in enumerate(texts) if not self.preprocessing.kept(text)]:
            raise ValueError(f"texts must not be empty, got an empty one at index {empty[0]} ({len(empty)} such)")
        self.texts, self.is_query, self.metadata = tuple(texts), is_query, tuple(metadata)

    def __getitem__(self, index: int) -> tuple[UInt8[Tensor, " L"], int]:
        return self.preprocessing(self.texts[index]), int(self.labels[index])

    @property
    def names(self) -> Sequence[str]:
        """The texts themselves, and which of them are queries."""
        return self.texts if self.is_query is None else (*self.texts, str(self.is_query.tolist()))

    def shown(self, index: int) -> Shown:
        """What of the text is an input."""
        text = self.preprocessing.kept(self.texts[index])
        return Shown(f"{self.name} {index}", text=text, metadata=self.metadata[index])

    def _part(self, indices: Int64[Tensor, " R"]) -> "Texts":
        rows = indices.tolist()
        return Texts(
            [self.texts[row] for row in rows],
            self.labels[indices],
            name=self.name,
            classes=self.classes,
            preprocessing=self.preprocessing,
            is_query=None if self.is_query is None else self.is_query[indices],
            metadata=[self.metadata[row] for row in rows],
        )


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

    Of a folder, the files `train`, `validation` (or `val`) and `test` are the parts; a part that has no file of its own
    is carved at random, by label, out of what there is to train on. Of questions with answers the questions are parted,
    and the answers, which are what is searched, are in every part; the label of both is the column `label`, or else the
    answer itself.

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
    tables = {part: read_table(path) for part, path in _files(Path(root).expanduser()).items()}
    named = {part: columns.of(table) for part, table in tables.items()}
    pooled = {part: _queries(table, named[part]) for part, table in tables.items()}
    answers = dict.fromkeys(pair for part, table in tables.items() for pair in _answers(table, named[part]))
    classes = _names([key for _, keys in pooled.values() for key in keys])
    parts = {
        part: Texts(
            texts,
            torch.tensor([classes[key] for key in keys], dtype=torch.int64),
            classes=list(_shortened(classes)),
            preprocessing=preprocessing,
            metadata=_metadata(tables[part], named[part]),
        )
        for part, (texts, keys) in pooled.items()
    }
    return _with_answers(
        carve_missing(parts, validation=validation, test=test, seed=seed, source=root), answers, classes
    )


def read(*, root: str | Path, preprocessing: TextPreprocessing, text: str | None = None, name: str = "texts") -> Texts:
    """All texts of a file, with its labels where it has any, else as one class.

    Raises:
        MissingDataError: If there is no such file.
        ValueError: If the column is missing, or a text is empty.
    """
    table = read_table(_existing(Path(root).expanduser()))
    columns = Columns(text=text).of(table, labelled=False)
    chosen = columns.text or columns.question or ""
    labels = ["texts"] * len(table.lines) if columns.label is None else table.columns[columns.label]
    classes = _names(labels)
    return Texts(
        _filled(table, chosen),
        torch.tensor([classes[label] for label in labels], dtype=torch.int64),
        name=name,
        classes=list(_shortened(classes)),
        preprocessing=preprocessing,
    )


def outsiders(*, root: str | Path, like: Dataset, text: str | None = None) -> Texts:
    """All texts of a file, as inputs of the length that `like` has; see `read`."""
    return read(root=root, preprocessing=preprocessing_like(like), text=text)


def preprocessing_like(other: Dataset) -> TextPreprocessing:
    """How the texts of another data set become inputs; the default where it has none, whose shape then differs."""
    return other.preprocessing if isinstance(other.preprocessing, TextPreprocessing) else TextPreprocessing()


def read_table(path: Path) -> Table:
    """The columns of a CSV file, or of a JSON file that holds a list of objects.

    Raises:
        ValueError: If it is neither.
    """
    if ".csv" in path.suffixes:
        return Table.read(path)
    rows = read_json(path)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f'{path} must hold a list of objects, such as [{{"text": "...", "label": "..."}}]')
    names = dict.fromkeys(str(name) for row in rows for name in row)
    columns = {name: [_cell(row.get(name)) for row in rows] for name in names}
    return Table(path, columns, list(range(1, len(rows) + 1)))


def read_json(path: Path) -> object:
    """What a JSON file holds, gzipped or not.

    Raises:
        ValueError: If it is no JSON.
    """
    try:
        content = path.read_bytes()
        return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    except (ValueError, OSError, EOFError, RecursionError) as error:
        raise ValueError(f"{path} is no valid JSON file: {error}") from None


def _cell(value: object) -> str:
    return "" if value is None else value.strip() if isinstance(value, str) else json.dumps(value)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise MissingDataError(f"there is no file {path}; give a CSV or JSON file of texts ({', '.join(FORMS)})")
    if not path.name.endswith(FORMS):
        raise ValueError(f"{path} must be one of {', '.join(FORMS)}")
    return path


def _files(root: Path) -> dict[str, Path]:
    if not root.is_dir():
        return {"train": _existing(root)}
    files: dict[str, Path] = {}
    for part, names in _PARTS.items():
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
            raise ValueError(f"{table.path}: {column} must not be empty, as it is in line {line}")
    return table.columns[column]


def _queries(table: Table, columns: Columns) -> tuple[list[str], list[str]]:
    """The texts or questions of a file, and what says which of them match."""
    texts = _filled(table, columns.text or columns.question or "")
    return texts, _filled(table, columns.label or columns.answer or "")


def _answers(table: Table, columns: Columns) -> list[tuple[str, str]]:
    """The answers of a file, each with what says which questions it answers."""
    if columns.answer is None:
        return []
    return list(zip(_filled(table, columns.answer), _filled(table, columns.label or columns.answer), strict=True))


def _metadata(table: Table, columns: Columns) -> list[dict[str, str]]:
    """The other columns of each row that are not empty."""
    used = (columns.text, columns.label, columns.question, columns.answer)
    others = {name: values for name, values in table.columns.items() if name and name not in used}
    return [{name: values[row] for name, values in others.items() if values[row]} for row in range(len(table.lines))]


def _names(keys: Sequence[str]) -> dict[str, int]:
    """The number of each class."""
    return {key: number for number, key in enumerate(sorted(set(keys)))}


def _shortened(names: Mapping[str, int]) -> list[str]:
    """Names of classes, long ones cut, which stay different."""
    return [
        name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}… ({number})" for name, number in names.items()
    ]


def _with_answers(
    parts: dict[str, Texts], answers: Mapping[tuple[str, str], None], classes: Mapping[str, int]
) -> Splits:
    """The parts, each with all answers as the gallery of its questions; as they are where there are none."""
    if not answers:
        return Splits(**parts)
    labels = torch.tensor([classes[key] for _, key in answers], dtype=torch.int64)
    return Splits(
        **{
            name: Texts(
                [*part.texts, *(answer for answer, _ in answers)],
                torch.cat([part.labels, labels]),
                name=part.name,
                classes=part.classes,
                preprocessing=part.preprocessing,
                is_query=torch.arange(len(part) + len(answers)) < len(part),
                metadata=[*part.metadata, *({} for _ in answers)],
            )
            for name, part in parts.items()
        }
    )
