"""Texts of files: columns, splits, questions with answers, and errors."""

import csv
import gzip
import json
import math
import warnings
from pathlib import Path
from unicodedata import normalize

import pytest
import torch

from lam import datasets
from lam.datasets import MissingDataError, Texts
from lam.datasets.texts import Columns, read
from lam.inputs import TextPreprocessing
from lam.inputs.preprocessing import texts_of
from lam.utils.notes import Note

ROWS = [(f"text {number} of {label}", label) for label in ("cats", "dogs", "birds") for number in range(10)]


def csv_of(path: Path, header: str, rows: list[tuple[str, ...]]) -> Path:
    content = "\n".join([header, *(",".join(f'"{value}"' for value in row) for row in rows)])
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return path


@pytest.mark.parametrize("name", ["mine.csv", "mine.csv.gz", "mine.json", "mine.json.gz"])
def test_every_form_gives_the_same(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if "json" in name:
        content = json.dumps([{"text": text, "label": label} for text, label in ROWS]).encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    else:
        csv_of(path, "text,label", ROWS)
    splits = datasets.load("texts", root=path)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [18, 6, 6]
    assert splits.train.classes == ("birds", "cats", "dogs")
    parts = (splits.train, splits.validation, splits.test)
    assert sorted(text for part in parts for text in part.names) == sorted(text for text, _ in ROWS)
    inputs, label = splits.test[0]
    assert texts_of(inputs[None]) == [splits.test.names[0]]
    assert splits.test.classes[int(label)] in splits.test.names[0]


def test_the_form_of_a_file_is_told_by_the_end_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv.json"
    path.write_text(json.dumps([{"text": text, "label": label} for text, label in ROWS]))
    assert len(datasets.load("texts", root=path).train) == 18


def test_a_text_may_have_any_length(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    rows = [(f"{text} {200_000 * 'a'}", label) for text, label in ROWS]
    splits = datasets.load("texts", root=csv_of(tmp_path / "mine.csv", "text,label", rows))
    assert len(splits.test.texts[0]) > 200_000
    assert csv.field_size_limit() == limit


def test_columns_by_name_and_others_as_metadata(tmp_path: Path) -> None:
    path = csv_of(tmp_path / "mine.csv", "source,body,kind", [("page 1", *row) for row in ROWS])
    splits = datasets.load("texts", root=path, text="body", label="kind", max_bytes=64)
    assert splits.test.shape == (64,)
    shown = splits.test.preview(0)
    assert shown.text == splits.test.names[0]
    assert shown.metadata == {"source": "page 1"}


def test_parts_by_file(tmp_path: Path) -> None:
    for part, rows in (("train", ROWS[:20]), ("val", ROWS[20:25]), ("test", ROWS[25:])):
        csv_of(tmp_path / f"{part}.csv", "text,label", rows)
    splits = datasets.load("texts", root=tmp_path)
    assert splits.validation.names == tuple(text for text, _ in ROWS[20:25])
    csv_of(tmp_path / "val.csv.gz", "text,label", ROWS)
    with pytest.raises(ValueError, match=r"val\.csv and val\.csv\.gz"):
        datasets.load("texts", root=tmp_path)


def test_files_of_parts_may_be_in_upper_case_and_others_are_named(tmp_path: Path) -> None:
    for number, name in enumerate(("Train.csv", "VAL.CSV", "Test.csv", "holdout.csv", ".test.csv")):
        csv_of(tmp_path / name, "text,label", [(f"{text} {number}", label) for text, label in ROWS])
    (tmp_path / "notes.txt").write_text("x")
    with pytest.warns(Note, match=r"1 file\(s\) .* are left out: holdout.csv") as told:
        splits = datasets.load("texts", root=tmp_path)
    assert len(told) == 1
    assert [part.texts[0][-1] for part in (splits.train, splits.validation, splits.test)] == ["0", "1", "2"]
    csv_of(tmp_path / "test.csv", "text,label", ROWS)
    with pytest.raises(ValueError, match="Test.csv and test.csv"):
        datasets.load("texts", root=tmp_path)


def test_parts_by_a_column(tmp_path: Path) -> None:
    rows = [(*row, ("Training", "train", "dev", "TEST")[number % 4]) for number, row in enumerate(ROWS)]
    path = csv_of(tmp_path / "mine.csv", "text,label,Split", rows)
    with pytest.warns(Note, match="column split.*16 for train, 7 for validation, 7 for test"):
        splits = datasets.load("texts", root=path)
    parts = {"train": splits.train, "dev": splits.validation, "TEST": splits.test}
    for value, part in parts.items():
        assert [text for text, _, split in rows if split == value or (value, split) == ("train", "Training")] == list(
            part.texts
        )
    path = csv_of(tmp_path / "mine.csv", "question,answer,split", [row for row in rows if row[2] != "dev"])
    with pytest.warns(Note, match="16 for train, 7 for test"):
        splits = datasets.load("texts", root=path)
    assert [len(part.queries) for part in (splits.train, splits.validation, splits.test)] == [13, 3, 7]
    assert len(splits.train.candidates) == 3


@pytest.mark.parametrize("value", ["a", "fold 1"])
def test_a_column_split_of_another_meaning_is_metadata(tmp_path: Path, value: str) -> None:
    path = csv_of(tmp_path / "mine.csv", "text,label,split", [(*row, value) for row in ROWS])
    splits = datasets.load("texts", root=path)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [18, 6, 6]
    assert splits.train.metadata[0] == {"split": value}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("train", "holdout"), "mine.csv:3: split.*train, .*'holdout'.*column"),
        (("train", ""), "mine.csv:3: split.*''"),
        (("test", "val"), "column split.*15 for test, 15 for validation, none for train"),
    ],
)
def test_a_column_split_that_names_other_parts(tmp_path: Path, values: tuple[str, str], message: str) -> None:
    path = csv_of(tmp_path / "mine.csv", "text,label,split", [(*row, values[n % 2]) for n, row in enumerate(ROWS)])
    with pytest.raises(ValueError, match=message):
        datasets.load("texts", root=path)


def test_questions_are_parted_and_answers_are_what_every_part_searches(tmp_path: Path) -> None:
    rows = [(f"question {number}", f"answer {number // 2}") for number in range(20)]
    splits = datasets.load("texts", root=csv_of(tmp_path / "faq.csv", "question,answer", rows))
    assert splits.gallery == "identities"
    questions = set()
    for part, n_questions in ((splits.train, 12), (splits.validation, 4), (splits.test, 4)):
        assert part.is_query is not None
        assert int(part.is_query.sum()) == n_questions
        assert len(part) == n_questions + 10
        answers = {part.names[row]: int(part.labels[row]) for row in (~part.is_query).nonzero().flatten().tolist()}
        assert len(answers) == 10
        for row in part.is_query.nonzero().flatten().tolist():
            question = part.names[row]
            assert answers[dict(rows)[question]] == int(part.labels[row])
            questions.add(question)
    assert questions == set(dict(rows))


def test_answers_under_one_label(tmp_path: Path) -> None:
    rows = [(f"question {number}", f"answer {number}", f"topic {number % 3}") for number in range(15)]
    splits = datasets.load("texts", root=csv_of(tmp_path / "faq.csv", "question,answer,label", rows))
    assert splits.train.classes == ("topic 0", "topic 1", "topic 2")
    assert splits.gallery == "classes"


@pytest.mark.parametrize(("n_answers", "per_answer", "limit"), [(2, 100, 20), (100, 5, 41), (300, 1, 10), (3, 40, 500)])
def test_a_limit_leaves_questions_their_answers(tmp_path: Path, n_answers: int, per_answer: int, limit: int) -> None:
    n_questions = n_answers * per_answer
    rows = [(f"question {number}", f"answer {number % n_answers}") for number in range(n_questions)]
    test = datasets.load("texts", root=csv_of(tmp_path / "faq.csv", "question,answer", rows)).test
    few, again, other = (test.limit(limit, seed=seed) for seed in (0, 0, 1))
    assert len(few) == min(limit, len(test))
    assert few.names == again.names
    assert few is test or few.names != other.names
    without_answer = set(few.queries.labels.tolist()) - set(few.candidates.labels.tolist())
    assert len(without_answer) <= 1  # of the question that was drawn last
    assert len(few.queries) >= len(few) // 2 or few is test


@pytest.mark.parametrize("lost", [False, True])
def test_metadata_of_an_answer_that_the_gallery_does_not_keep_are_named(lost: bool, tmp_path: Path) -> None:
    rows = [("who helps?", "1", "acme"), ("whom do I ask?", "2", "other" if lost else "acme")]
    path = csv_of(tmp_path / "a.csv", "question,id,tenant,answer", [(*row, "support") for row in rows])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts = read(root=path, preprocessing=TextPreprocessing())
    assert texts.metadata[-1] == {"id": "1", "tenant": "acme"}
    assert [str(note.message) for note in caught] == lost * [
        f"{path}: rows of one answer differ in tenant: the gallery keeps the first row; for separate items, give `lam "
        "index` a table with the columns id and text"
    ]


def test_a_limit_draws_different_answers_of_a_label(tmp_path: Path) -> None:
    rows = [(f"question {number}", f"answer {number}", f"topic {number % 3}") for number in range(300)]
    test = datasets.load("texts", root=csv_of(tmp_path / "faq.csv", "question,answer,label", rows)).test
    few = test.limit(60)
    assert len(few.queries) == 30
    assert len(few.candidates) == 30
    assert set(few.queries.labels.tolist()) == set(few.candidates.labels.tolist()) == {0, 1, 2}


def test_long_labels_are_cut_and_stay_different(tmp_path: Path) -> None:
    rows = [(f"question {number}", 300 * "a" + str(number)) for number in range(10)]
    classes = datasets.load("texts", root=csv_of(tmp_path / "faq.csv", "question,answer", rows)).train.classes
    assert len(set(classes)) == 10
    assert max(map(len, classes)) < 210


@pytest.mark.parametrize(
    ("header", "options", "message"),
    [
        ("body,label", {}, "no column text.*body, label.*options text and label"),
        ("text,kind", {}, "no column label.*text, kind"),
        ("text,label", {"text": "body"}, "no column body.*text, label"),
        ("text,label", {"question": "text"}, "question and answer.*both columns"),
        ("text,label", {"question": "text", "answer": "label", "text": "text"}, "either the column"),
        ("text,label", {"validation": 0.5, "test": 0.5}, "30 items.*test and validation"),
        ("text,label", {"max_bytes": 2}, "max_bytes.*bytes.*4.*2"),
    ],
)
def test_columns_that_are_not_there(tmp_path: Path, header: str, options: dict, message: str) -> None:
    path = csv_of(tmp_path / "mine.csv", header, ROWS)
    with pytest.raises(ValueError, match=message):
        datasets.load("texts", root=path, **options)


@pytest.mark.parametrize(("header", "options"), [("text", {}), ("Question", {}), ("body", {"text": "body"})])
def test_a_table_of_texts_alone_needs_no_labels(tmp_path: Path, header: str, options: dict) -> None:
    path = csv_of(tmp_path / "mine.csv", header, [(text,) for text, _ in [*ROWS, ROWS[0]]])
    splits = datasets.load("texts", root=path, **options)
    assert splits.train.classes == tuple(sorted({text for text, _ in ROWS}))
    assert [splits.train.classes[label] for label in splits.train.labels.tolist()] == list(splits.train.texts)


def test_an_empty_text_or_label_is_named_by_its_line(tmp_path: Path) -> None:
    path = csv_of(tmp_path / "mine.csv", "text,label", [*ROWS, ("", "cats")])
    with pytest.raises(ValueError, match=r"mine\.csv: text.*'' in line 32"):
        datasets.load("texts", root=path)
    (tmp_path / "mine.json").write_text(json.dumps([{"text": "a", "label": "b"}, {"text": "a"}], indent=1))
    with pytest.raises(ValueError, match=r"mine\.json: label.*'' in object 2"):
        datasets.load("texts", root=tmp_path / "mine.json")
    with pytest.raises(ValueError, match="texts.*index 1"):
        Texts(["a", " "], torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="texts.*1 labels.*2"):
        Texts(["a", "b"], torch.tensor([0]))


@pytest.mark.parametrize("name", ["mine.csv.gz", "mine.json.gz"])
def test_damaged_files_are_named(tmp_path: Path, name: str) -> None:
    rows = [{"text": text, "label": label} for text, label in ROWS]
    content = json.dumps(rows).encode() if "json" in name else b"text,label\n" + b"\n".join(b"a,b" for _ in range(99))
    packed = gzip.compress(content)
    flipped = packed[:15] + bytes(byte ^ 255 for byte in packed[15:19]) + packed[19:]
    for damaged in (packed[:-20], packed[:5], flipped, content):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{name}.*(damaged|JSON)"):
            datasets.load("texts", root=tmp_path / name)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"no file.*none\.csv.*texts"):
        datasets.load("texts", root=tmp_path / "none.csv")
    with pytest.raises(MissingDataError, match="no file train"):
        datasets.load("texts", root=tmp_path)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=r"a\.txt.*\.csv, "):
        datasets.load("texts", root=tmp_path / "a.txt")
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ValueError, match="list of objects"):
        datasets.load("texts", root=tmp_path / "a.json")
    (tmp_path / "a.json").write_text("[")
    with pytest.raises(ValueError, match=r"a\.json.*valid JSON"):
        datasets.load("texts", root=tmp_path / "a.json")


@pytest.mark.parametrize("column", ["question", "answer", "label"])
@pytest.mark.parametrize("value", [["a", "b"], [], {"de": "a"}])
def test_a_list_or_an_object_is_no_text_and_no_label(value: object, column: str, tmp_path: Path) -> None:
    rows = [{"question": "who?", "answer": "me", "label": "a", "tags": ["x"]} for _ in range(3)]
    path = tmp_path / "a.json"
    path.write_text(json.dumps([*rows, {**rows[0], column: value}]))
    with pytest.raises(ValueError, match=f"{column}.*one value.*in object 4"):
        datasets.load("texts", root=path)
    with pytest.raises(ValueError, match=f"{column}.*one value"):
        read(root=path, preprocessing=TextPreprocessing())
    if column != "question":
        assert len(datasets.texts.ood_items(root=path, like=Texts(["a"], torch.zeros(1).long()))) == 4


def test_ood_items_of_a_file_and_of_other_inputs(tmp_path: Path) -> None:
    like = Texts(["a", "b"], torch.tensor([0, 0]), preprocessing=TextPreprocessing(max_bytes=32))
    path = csv_of(tmp_path / "others.csv", "text", [("one",), ("two",)])
    ood = datasets.load_ood("texts", root=path, like=like)
    assert ood.names == ("one", "two")
    assert ood.shape == (32,)
    digits = datasets.load("digits").test
    with pytest.raises(ValueError, match=r"descriptions.*\(4096,\).*digits.*\(1, 8, 8\)"):
        datasets.load_ood("descriptions", like=digits)


@pytest.mark.parametrize("name", ["mine.csv", "mine.json"])
@pytest.mark.parametrize("empty", [("", "cats"), ("a cat", "")])
def test_empty_cells_are_skipped_and_counted(tmp_path: Path, name: str, empty: tuple[str, str]) -> None:
    rows = [*ROWS[:3], empty, *ROWS[3:], empty]
    if name == "mine.csv":
        csv_of(tmp_path / name, "text,label", rows)
    else:
        (tmp_path / name).write_text(json.dumps([{"text": text, "label": label, "row": 7} for text, label in rows]))
    with pytest.raises(ValueError, match=r"empty.*\(2 such \w+s: \d+, \d+\).*--skip-damaged"):
        datasets.load("texts", root=tmp_path / name)
    with pytest.warns(Note, match=rf"2 of {len(ROWS) + 2} .*empty.*: \d+, \d+"):
        parts = datasets.load("texts", root=tmp_path / name, skip_empty=True).parts().values()
    assert sorted(text for part in parts for text in part.texts) == sorted(text for text, _ in ROWS)
    if name == "mine.json":
        assert all(facts == {"row": 7} for part in parts for facts in part.metadata)


def test_questions_alone_need_no_answers(tmp_path: Path) -> None:
    path = csv_of(tmp_path / "asked.csv", "question,answer", [("who won?", ""), ("how do I boil an egg?", "")])
    with pytest.raises(ValueError, match="answer.*empty"):
        datasets.texts.read(root=path, preprocessing=TextPreprocessing())
    for texts in (
        datasets.texts.read(root=path, preprocessing=TextPreprocessing(), answered=False),
        datasets.texts.ood_items(root=path, like=Texts(["a"], torch.zeros(1).long())),
    ):
        assert texts.texts == ("who won?", "how do I boil an egg?")
        assert texts.is_query is None


@pytest.mark.parametrize(("header", "found"), [("Text,label", "Text"), ("question,answer", "question")])
def test_queries_may_have_another_column_than_the_table_of_the_run(tmp_path: Path, header: str, found: str) -> None:
    path = csv_of(tmp_path / "asked.csv", header, ROWS)
    columns, options = Columns(question="title", answer="body"), {"root": path, "preprocessing": TextPreprocessing()}
    with pytest.warns(Note, match=f"asked.csv.*no column title.*column {found}"):
        assert read(**options, columns=columns, answered=False).texts == tuple(text for text, _ in ROWS)
    with pytest.raises(ValueError, match="no column title, body"):
        read(**options, columns=columns)


def test_a_part_without_a_text_is_named(tmp_path: Path) -> None:
    csv_of(tmp_path / "train.csv", "text,label", ROWS)
    csv_of(tmp_path / "test.csv", "text,label", [])
    with pytest.raises(ValueError, match=r"test\.csv.*no text"):
        datasets.load("texts", root=tmp_path)


def test_docstrings_are_parted_and_descriptions_are_others() -> None:
    splits = datasets.load("docstrings")
    names = [set(part.names) for part in (splits.train, splits.validation, splits.test)]
    assert sum(map(len, names)) == len(set.union(*names)) > 1000
    assert "math" in splits.train.classes
    assert splits.train.preview(0).metadata["name"].startswith(splits.train.classes[int(splits.train.labels[0])])
    ood = datasets.load_ood("descriptions", like=splits.test)
    assert len(ood) > 20
    assert not set(ood.names) & set.union(*names)


@pytest.mark.filterwarnings("ignore:.* is read as values separated by semicolons")
def test_a_name_in_capitals_and_semicolons_are_read(tmp_path: Path) -> None:
    for name, separator in (("A.CSV", ","), ("b.csv", ";")):
        rows = "".join(f'"t{row}"{separator}{row % 3}\n' for row in range(30))
        (tmp_path / name).write_text(f"text{separator}label\n{rows}")
        assert len(datasets.load("texts", root=tmp_path / name).train) > 10


@pytest.mark.parametrize("label", ["-1", "-1.0", "nan", "NaN", "<NA>", "NaT", "null", "N/A", "#N/A"])
def test_a_label_that_means_none(tmp_path: Path, label: str) -> None:
    path = csv_of(tmp_path / "mine.csv", "text,label", [*ROWS, ("a text", label)])
    with pytest.raises(ValueError, match=f"label.*'{label}'.*line 32"):
        datasets.load("texts", root=path)


@pytest.mark.parametrize(
    ("label", "message"), [(math.nan, "label must.*empty"), (None, "label must.*empty"), (-1, "got '-1'")]
)
def test_a_label_of_json_that_means_none(tmp_path: Path, label: float | None, message: str) -> None:
    path = tmp_path / "mine.json"
    rows = [*ROWS, ("a text", label)]
    path.write_text(json.dumps([{"text": text, "label": label} for text, label in rows]))
    with pytest.raises(ValueError, match=rf"{message}.* in object 31"):
        datasets.load("texts", root=path)


def test_usual_names_of_columns_may_be_in_capitals(tmp_path: Path) -> None:
    path = csv_of(tmp_path / "mine.csv", "Text,LABEL,Label text", [(*row, "x") for row in ROWS])
    splits = datasets.load("texts", root=path)
    assert splits.train.classes == ("birds", "cats", "dogs")
    assert splits.test.metadata[0] == {"Label text": "x"}
    path = csv_of(tmp_path / "faq.csv", "Question,Answer", ROWS)
    assert datasets.load("texts", root=path).answers
    path = csv_of(tmp_path / "two.csv", "Text,text,label", [("no", *row) for row in ROWS])
    assert "no" not in datasets.load("texts", root=path).test.texts


def test_labels_are_the_same_however_their_accents_are_written(tmp_path: Path) -> None:
    rows = [(text, normalize(form, "Café")) for (text, _), form in zip(ROWS, 15 * ["NFC", "NFD"], strict=True)]
    parts = datasets.load("texts", root=csv_of(tmp_path / "mine.csv", "text,label", [*rows, *ROWS[:10]]))
    assert parts.train.classes == ("Café", "cats")


def test_labels_that_differ_only_as_numbers_are_named(tmp_path: Path) -> None:
    rows = [{"text": f"text {row}", "label": 1 if row < 15 else 1.0} for row in range(30)]
    (tmp_path / "mine.json").write_text(json.dumps([*rows, *({"text": f"b {row}", "label": 2} for row in range(9))]))
    with pytest.warns(Note, match="'1' and '1.0'"):
        parts = datasets.load("texts", root=tmp_path / "mine.json")
    assert parts.train.classes == ("1", "1.0", "2")
