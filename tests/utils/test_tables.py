"""Tables in the formats of spreadsheets and data sets; errors name the lines of the file."""

import csv
import gzip
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lam.utils.notes import Note
from lam.utils.tables import Table, file_of

pytestmark = pytest.mark.filterwarnings("ignore:.* is read as values separated by")

_COLUMNS = {"text": ["one, two", "three"], "label": ["a", "b"]}


def _csv(separator: str) -> str:
    return f'text{separator}label\n"one, two"{separator}a\nthree{separator}b\n'


def _shown(value: str | bytes) -> str:
    """A parameter for the name of a test. gzip files hold the time, and all processes must use the same names."""
    return "" if isinstance(value, bytes) else value


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((f"{ord(separator)}.csv", _csv(separator).encode()) for separator in ",;\t|"),
        ("tabs.tsv", _csv("\t").encode()),
        ("quoted.csv", _csv(";").replace("text", '"text"').replace("label", '"label"').encode()),
        ("stated.csv", b"sep=;\r\n" + _csv(";").replace("\n", "\r\n").encode()),
        ("mark.csv", _csv(";").encode("utf-8-sig")),
        ("utf16.csv", _csv("\t").encode("utf-16")),
        ("big_endian.csv", b"\xfe\xff" + _csv(";").encode("utf-16-be")),
        ("utf16.csv.gz", gzip.compress(_csv(";").encode("utf-16"))),
        ("rows.csv", (_csv(";") + ";\n ; \n").encode()),
        ("columns.csv", b'text;label;;\n"one, two";a;;\nthree;b;;\n;;;\n'),
        ("objects.json", json.dumps([{"text": "one, two", "label": "a"}, {"text": "three", "label": "b"}]).encode()),
        ("lines.jsonl", b'{"text": "one, two", "label": "a"}\n\n{"text": "three", "label": "b"}\n'),
        ("LINES.NDJSON.GZ", gzip.compress(b'{"text": "one, two", "label": "a"}\r\n{"text": "three", "label": "b"}')),
    ],
    ids=_shown,
)
def test_every_form_gives_the_same_columns(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert Table.read(tmp_path / name, needed=["text", "label"]).columns == _COLUMNS


def test_a_single_column_may_hold_separators(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\na;b\nc|d\n")
    assert Table.read(tmp_path / "a.csv").columns == {"text": ["a;b", "c|d"]}


@pytest.mark.parametrize(
    "content",
    [
        "text;label (a, b, c, d)\none, two;a\nthree;b\n",  # more commas than semicolons in the line of names
        "text, long;label (a, b)\none, two;a\nthree;b\n",
        'text;label, too\n"one\n; two";a\n"three\nfour, five";b\n',
        "text\tlabel, or class\none\ta\ntwo\tb\n",
        "text|label;class\none|a\ntwo|b\n",
        "text,label;class\none,a\ntwo,b\n",
    ],
)
def test_the_rows_show_the_separator_where_names_hold_others(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    assert list(Table.read(tmp_path / "a.csv").columns.values())[1] == ["a", "b"]


def test_quotes_after_a_blank_hold_separators(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('"text", "label"\n1,  "one, two"\n')
    assert Table.read(tmp_path / "a.csv").columns == {"text": ["1"], "label": ["one, two"]}


def test_a_line_of_blanks_is_an_empty_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\none,a\n  \ntwo,b\n")
    table = Table.read(tmp_path / "a.csv")
    assert (table.columns, table.lines) == ({"text": ["one", "two"], "label": ["a", "b"]}, [2, 4])


@pytest.mark.filterwarnings("default:.* is read as values")
def test_the_separator_found_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(_csv(";"))
    with pytest.warns(UserWarning, match="a.csv.*read as.*semicolons"):
        Table.read(tmp_path / "a.csv")


def test_a_long_text_is_read_where_a_c_long_has_32_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit, limits = csv.field_size_limit, []
    monkeypatch.setattr(csv, "field_size_limit", lambda limit: (limits.append(limit), set_limit(limit))[1])
    (tmp_path / "a.csv").write_text("text,label\n" + "x" * 200_000 + ",a\n")
    assert len(Table.read(tmp_path / "a.csv").columns["text"][0]) == 200_000
    assert max(limits) < 2**31


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"sep=;\n\ntext;label\none;a\ntwo\n", "2 columns.*1 values in line 5"),
        ("a.csv", b"text;label\n;\none;a\ntwo\n", "2 columns.*1 values in line 4"),
        ("a.csv", b"text,label\nhello, you,a\n", "3 values in line 2: .*separator into quotes"),
        ("a.csv", b'sep=;\ntext;label\n"one"x;a\n', "CSV file, line 3: .*semicolons"),
        ("a.csv", b"\xff\xfet", "not in UTF-16"),
        ("a.csv", b"text\n\xe9\n", "not in UTF-8: line 2, "),
        ("a.csv", b"text\n" + 40_000 * b"ok\n" + b"caf\xe9\n", "UTF-8: line 40002, .*0xe9 in position 3"),
        ("a.csv.gz", gzip.compress(b"text\n" + 40_000 * b"ok\n" + b"\xe9"), "UTF-8: line 40002, .*0xe9"),
        ("a.csv.gz", gzip.compress(b"text\n" * 99)[:-9], "is damaged: .*again"),
        ("a.jsonl", b'{"text": "one"}\n\n{"text": \n', "JSON Lines.*line 3: "),
        ("a.jsonl", b'{"text": "one"}\n3\n', "hold an object"),
        ("a.jsonl", b"[" * 200_000, "JSON Lines.*line 1: "),
        ("a.json", b'{"text": "one"}\n{"text": "two"}\n', r"JSON file \(.*\.jsonl\)"),
        ("a.json", b'{"1": {"text": "one"}}', "list of objects"),
    ],
    ids=_shown,
)
def test_refusals_name_the_line_of_the_file(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Table.read(tmp_path / name)


def test_a_number_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n\n{"x": "two"}\n')
    with pytest.raises(ValueError, match=r"x.*'two'.*line 3 \(1.*line\)"):
        Table.read(tmp_path / "a.jsonl").numbers("x")


def test_the_first_sheet_of_a_workbook_is_read(tmp_path: Path) -> None:
    book = pytest.importorskip("openpyxl").Workbook()
    for row in ([None], ["text", "label", "n"], ["one, two", "a", 3], [None], ["three", "b"]):
        book.active.append(row)
    book.save(tmp_path / "a.xlsx")
    table = Table.read(tmp_path / "a.xlsx")
    assert table.columns == {**_COLUMNS, "n": ["3", ""]}
    assert (table.lines, table.unit) == ([3, 5], "row")


@pytest.mark.parametrize("form", ["jsonl", "parquet", "xlsx", "csv"])
def test_metadata_keep_the_types_of_the_file(tmp_path: Path, form: str) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "one", "year": 1999, "ok": True, "size": 0.5, "none": None},
        {"text": "two", "year": None, "ok": False, "size": 2.5, "none": None},
    ]
    path = tmp_path / f"a.{form}"
    if form == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif form == "parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    elif form == "xlsx":
        book = pytest.importorskip("openpyxl").Workbook()
        for row in ([*rows[0]], *([*row.values()] for row in rows)):
            book.active.append([*row[:1], None, *row[1:]])  # with a column that has no name
        book.save(path)
    else:
        path.write_text("\n".join(",".join(map(str, row)) for row in ([*rows[0]], [*[*rows[0].values()][:4], ""])))
    first = {"year": 1999, "ok": True, "size": 0.5}
    nulls = {"year": None, "none": None} if form in ("jsonl", "parquet") else {}
    expected = nulls | first | ({"ok": "True"} if form == "csv" else {})
    found = Table.read(path).metadata(("text",))[0]
    assert found == expected
    assert {name: type(value) for name, value in found.items()} == {name: type(of) for name, of in expected.items()}
    if form != "csv":
        assert Table.read(path).metadata(("text",))[1] == {"ok": False, "size": 2.5} | nulls


def test_texts_and_nulls_of_a_json_file_stay_as_they_are(tmp_path: Path) -> None:
    facts = {"empty": "", "padded": " a ", "null": None, "version": "1.10"}
    (tmp_path / "a.json").write_text(json.dumps([{"text": " one ", **facts, "nan": float("nan")}, {"text": "two"}]))
    table = Table.read(tmp_path / "a.json")
    assert table.columns["text"] == ["one", "two"]
    assert table.metadata(("text",)) == [{**facts, "nan": None}, {}]


def test_cells_of_blanks_in_a_workbook_are_empty(tmp_path: Path) -> None:
    book = pytest.importorskip("openpyxl").Workbook()
    for row in (["text ", "note", "more"], [" one", "  ", " a "], ["  ", None]):
        book.active.append(row)
    book.save(tmp_path / "a.xlsx")
    table = Table.read(tmp_path / "a.xlsx")
    assert (table.columns["text"], table.metadata(("text",))) == (["one"], [{"more": "a"}])


@pytest.mark.parametrize("values", [["1.9", "1.10", "1.11"], ["12,50", "3", "1.250,00"]], ids=["versions", "commas"])
def test_a_column_stays_text_where_numbers_would_change_it(tmp_path: Path, values: list[str]) -> None:
    (tmp_path / "a.csv").write_text("value;name\n" + "".join(f"{value};x\n" for value in values))
    with pytest.warns(Note, match="value remains text"):
        rows = Table.read(tmp_path / "a.csv").metadata(())
    assert [row["value"] for row in rows] == values


def test_floats_with_a_last_zero_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("price,float\n19.90,2.0\n5,3.25\n0.50,1\n")
    rows = Table.read(tmp_path / "a.csv").metadata(())
    assert [(row["price"], row["float"]) for row in rows] == [(19.9, 2.0), (5, 3.25), (0.5, 1)]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_labels_that_mean_none_are_counted(tmp_path: Path, name: str) -> None:
    labels = ["NA", "null", "None", "N/A", "a", "NaN", ""]
    rows = [json.dumps({"label": label}) if name == "a.jsonl" else f"x,{label}" for label in labels]
    (tmp_path / name).write_text("\n".join((["text,label"] if name == "a.csv" else []) + rows))
    with pytest.warns(Note, match="3 such"):
        assert Table.read(tmp_path / name).labels("label") == ["NA", "", "None", "", "a", "", ""]


def test_a_second_line_of_names_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\none,a\ntext,label\ntwo,b\n")
    with pytest.raises(ValueError, match="again in line 3"):
        Table.read(tmp_path / "a.csv")


def test_a_column_that_few_values_keep_from_being_numbers_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("price\n" + "2.50\n" * 19 + "n/a\n")
    with pytest.warns(Note, match="price.*'n/a' in line 21"):
        rows = Table.read(tmp_path / "a.csv").metadata(())
    assert rows[0] == {"price": "2.50"}


def test_columns_of_numbers_in_a_csv_file_become_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "id,price,empty,zip,code,mixed,large,n,sign\n"
        "1.50,2.50,,007,1e5,1,9999999999999999999,-1,+1\n"
        "2.50,3,,123,2e5,x,1,0,1\n"
        "3,,,1,3,2,2,,1\n"
    )
    price, texts = [2.5, 3, None], [("007", "1e5", "1"), ("123", "2e5", "x"), ("1", "3", "2")]
    rows = Table.read(tmp_path / "a.csv").metadata(())
    assert [row.get("price") for row in rows] == price
    assert [row.get("n") for row in rows] == [-1, 0, None]
    assert [(row["zip"], row["code"], row["mixed"]) for row in rows] == texts
    assert [row["id"] for row in rows] == ["1.50", "2.50", "3"]
    assert rows[0]["large"] == "9999999999999999999"
    assert rows[0]["sign"] == "+1"
    assert all("empty" not in row for row in rows)


def test_files_are_found_however_their_folders_and_accents_are_written(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "caf\u00e9.png"
    file.touch()
    for name in ("a/caf\u00e9.png", "a\\caf\u00e9.png", "a/cafe\u0301.png"):
        assert file_of(tmp_path, name) == file
    assert file_of(tmp_path, "b\\c.png") == tmp_path / "b\\c.png"


def test_a_number_that_no_float_holds_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one", "key": 10**400}))
    assert Table.read(tmp_path / "a.jsonl").metadata(("text",)) == [{"key": 10**400}]


def test_parquet_is_read(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        arrow.table({**_COLUMNS, "n": [3, None]}), tmp_path / "a.parquet"
    )
    assert Table.read(tmp_path / "a.parquet").columns == {**_COLUMNS, "n": ["3", ""]}


_SHEET = """<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main">{}</worksheet>"""


def _workbook(path: Path, sheet: str) -> Path:
    """A workbook with this sheet, as another program would write it."""
    pytest.importorskip("openpyxl").Workbook().save(path.with_suffix(".zip"))
    with (
        zipfile.ZipFile(path.with_suffix(".zip")) as source,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for entry in source.namelist():
            target.writestr(entry, _SHEET.format(sheet) if "sheet1" in entry else source.read(entry))
    return path


def test_a_workbook_that_states_a_wrong_size_is_read(tmp_path: Path) -> None:
    cells = "".join(f'<row r="{row}"><c r="A{row}"><v>{row}</v></c><c r="B{row}"><v>3</v></c></row>' for row in (1, 2))
    path = _workbook(tmp_path / "a.xlsx", f'<dimension ref="A1"/><sheetData>{cells}</sheetData>')
    assert Table.read(path).columns == {"1": ["2"], "3": ["3"]}


def _bomb_of_text(path: Path) -> Path:
    arrow = pytest.importorskip("pyarrow")
    text = arrow.DictionaryArray.from_arrays(arrow.array([0] * 4096, arrow.int32()), ["x" * 2**18])
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"text": text}), path, store_schema=False)
    return path


def _bomb_of_nulls(path: Path) -> Path:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"text": arrow.nulls(2**28)}), path)
    return path


def _bomb_of_zip(path: Path) -> Path:
    _workbook(path, "")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive, archive.open("xl/media", "w") as entry:
        for _ in range(64):
            entry.write(bytes(2**24))
    return path


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "bomb"), [("a.parquet", _bomb_of_text), ("a.parquet", _bomb_of_nulls), ("a.xlsx", _bomb_of_zip)]
)
def test_what_unpacks_to_over_a_gibibyte_is_refused(tmp_path: Path, name: str, bomb: Callable[[Path], Path]) -> None:
    path = bomb(tmp_path / name)
    assert path.stat().st_size < 2**21
    with pytest.raises(ValueError, match=f"{name}.*{2**30} bytes.*CSV"):
        Table.read(path)


def _row(number: int, column: str) -> str:
    return f'<row r="{number}"><c r="{column}{number}"><v>1</v></c></row>'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv.gz", gzip.compress(b"text\n" + b"a\n" * 50_000), "over 100000 bytes"),
        ("wide.xlsx", "".join(_row(number, "ZZZ") for number in range(1, 9)), "over 100000 bytes"),
        ("high.xlsx", _row(1, "A") + _row(10**12, "A"), "row beyond 1000.*CSV"),
    ],
    ids=("gzip", "wide", "high"),
)
def test_little_files_of_large_tables_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | str, message: str
) -> None:
    monkeypatch.setattr("lam.utils.tables.LARGEST", 100_000)
    monkeypatch.setattr("lam.utils.spreadsheets.LARGEST", 100_000)
    monkeypatch.setattr("lam.utils.spreadsheets._LAST_ROW", 1000)
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        _workbook(tmp_path / name, f"<sheetData>{content}</sheetData>")
    with pytest.raises(ValueError, match=message):
        Table.read(tmp_path / name)


@pytest.mark.parametrize(("name", "library"), [("a.xlsx", "openpyxl"), ("a.parquet", "pyarrow.parquet")])
def test_files_of_optional_libraries_are_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    (tmp_path / name).write_bytes(b"no such file")
    with pytest.raises(ValueError, match=f"{name}.*damaged|{name} needs"):
        Table.read(tmp_path / name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=r"lam-retrieval\[tables\]'.*CSV"):
        Table.read(tmp_path / name)


def _task(text: str, *annotations: tuple[dict[str, bool], list[str]]) -> dict[str, object]:
    """A task of Label Studio with its annotations, each with its state and its choices."""
    results = [
        {
            **state,
            "result": [
                {"from_name": "topic", "to_name": "text", "type": "choices", "value": {"choices": chosen}},
                {"from_name": "note", "to_name": "text", "type": "textarea", "value": {"text": ["seen"]}},
            ],
        }
        for state, chosen in annotations
    ]
    return {"id": 1, "data": {"text": text, "source": "web"}, "annotations": results, "predictions": []}


def test_tasks_of_a_labelling_tool_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tasks = [
        _task("one", ({}, ["a"])),
        _task("several", ({}, ["a"]), ({}, ["b"]), ({}, ["b"])),
        _task("true", ({}, ["a"]), ({"ground_truth": True}, ["c"]), ({}, ["a"])),
        _task("two choices", ({}, ["a", "b"])),
        _task("skipped", ({"was_cancelled": True}, ["a"])),
        _task("not labelled"),
    ]
    (tmp_path / "a.json").write_text(json.dumps(tasks))
    assert Table.read(tmp_path / "a.json").columns == {
        "text": ["one", "several", "true", "two choices"],
        "source": 4 * ["web"],
        "topic": ["a", "b", "c", '["a", "b"]'],
    }
    assert "a.json: 2 of 6 tasks have no label and are left out" in caplog.text


@pytest.mark.parametrize("result", [3, [3], [{}], [{"type": "choices", "value": 3, "from_name": "a"}]])
def test_a_task_of_another_form_is_named(tmp_path: Path, result: object) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"data": {"text": "a"}, "annotations": [{"result": result}]}]))
    with pytest.raises(ValueError, match="a.json: object 1.*no annotations.*Label Studio"):
        Table.read(tmp_path / "a.json")
