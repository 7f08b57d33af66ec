"""Runs on texts: labels, questions with answers, and the head of the network."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lam.datasets.texts import Columns
from lam.gallery.item import Item
from lam.retrieval.decisions.calibration import Calibration, Targets
from lam.runs.calibrate import CalibrationOptions, calibrate_run
from lam.runs.data import load_data
from lam.runs.finished import Run
from lam.runs.index import index_images
from lam.runs.search import search
from lam.service.engine import Engine
from lam.utils.files import CorruptFileError
from lam.utils.notes import Note
from tests.conftest import FinishedRun, unrendered_pictures
from tests.helpers import written_hits
from tests.runs.conftest import Lam
from tests.service.asking import client_of
from tests.text_runs import TOPICS, faq, text_run, topics

pytestmark = pytest.mark.usefixtures("unrendered")  # except for the run on labelled texts


@pytest.fixture(scope="module")
def of_topics(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on labelled texts."""
    folder = tmp_path_factory.mktemp("topics")
    return text_run(folder / "run", topics(folder / "topics.json"))


@pytest.fixture(scope="module")
def of_questions(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on questions with answers."""
    folder = tmp_path_factory.mktemp("questions")
    with unrendered_pictures():
        return text_run(folder / "run", faq(folder / "faq.json"))


@pytest.mark.long
def test_a_run_on_labelled_texts(of_topics: Run) -> None:
    metrics = json.loads((of_topics.folder / "metrics.json").read_text())
    assert metrics["recall@1"] > 0.8
    assert {"corruption_words_5_recall@1", "corruption_typing_trend"} <= metrics.keys()
    texts = [item.text for item in of_topics.gallery.items]
    assert len(texts) == 24
    assert all(text is not None and " and " in text for text in texts)
    assert {item.label for item in of_topics.gallery.items} == set(TOPICS)


def test_questions_search_among_all_answers(of_questions: Run) -> None:
    texts = {item.text for item in of_questions.gallery.items}
    assert texts == {f"thing{number} is here" for number in range(60)}


def test_a_run_says_whether_its_gallery_is_of_answers(of_questions: Run, of_topics: Run) -> None:
    assert (of_questions.has_answers, of_questions.gallery_kind) == (True, "identities")
    assert (of_topics.has_answers, of_topics.gallery_kind) == (False, "classes")


def test_texts_are_searched_for(of_topics: Run, tmp_path: Path) -> None:
    result = search(of_topics.folder, texts=["rail and station", "fur and paw"], k=3)
    assert result.images == ("rail and station", "fur and paw")
    assert [items[0].label for items in result.items] == ["trains", "cats"]
    with pytest.warns(UserWarning, match="it was cut"):
        search(of_topics.folder, texts=[2000 * "fur "])
    for images, texts, message in (
        ([], [" "], "text is empty"),
        ([], "fur", r"texts.*list, .*'fur': .*\[text\]"),
        ([tmp_path / "cat.png"], [], "takes texts: .*--text"),
        ([], [], "images .*texts.*neither"),
    ):
        with pytest.raises(ValueError, match=message):
            search(of_topics.folder, *images, texts=texts)


def test_a_file_of_hits_has_their_texts(run_copy: Path) -> None:
    written, lines = written_hits(run_copy, "--text", "fur and paw", "-k2")
    found = [item.text for item in search(run_copy, texts=["fur and paw"], k=2).items[0]]
    assert [line["text"] for line in lines] == found
    assert [hit["text"] for hit in written["images"][0]["hits"]] == found


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("lines.csv", ["text", "fur and paw", "rail and station", "yeast", '"oven, crust"', "purr"]),
        ("queries.csv", ["source,text", "a,fur and paw", "b,rail and station", "c,yeast", 'd,"oven, crust"', "e,purr"]),
    ],
)
def test_each_text_of_a_file_is_answered_as_by_itself(
    of_topics: Run, tmp_path: Path, name: str, lines: list[str], lam: Lam
) -> None:
    """The first line names the column; a text with a separator is in quotes."""
    queries = ["fur and paw", "rail and station", "yeast", "oven, crust", "purr"]
    file = csv_of(tmp_path / name, *lines)
    command = ["search", str(of_topics.folder), "-k3", "--quiet"]
    blocks = lam(*command, "--file", file).out.strip().split("\n\n")
    assert blocks == [f"text: {query}\n{lam(*command, '--text', query).out.strip()}" for query in queries]
    lam(*command, "--file", file, "-o", tmp_path / "hits.json")
    written = json.loads((tmp_path / "hits.json").read_text())["images"]
    assert [len(entry["hits"]) for entry in written] == [3] * 5
    for entry, query in zip(written, queries, strict=True):
        (items,) = search(of_topics.folder, texts=[query], k=3).items
        assert [hit["text"] for hit in entry["hits"]] == [item.text for item in items]


@pytest.mark.filterwarnings("default")
def test_every_command_skips_empty_cells_and_counts_them(run_copy: Path, tmp_path: Path, lam: Lam) -> None:
    lines = [f"{text['text']},{text['label']}" for text in json.loads(topics(tmp_path / "topics.json").read_text())]
    table = str(csv_of(tmp_path / "new.csv", "text,label", ",cats", *lines, ",trains"))
    words = ["--network.name=bag_of_words", "--network.dimension=8", "--training.epochs=1", "--evaluation.n_samples=8"]
    for command in (
        ["run", "texts", "deterministic", *words, f"--data.root={table}", f"--output={tmp_path / 'other'}"],
        ["embed", str(run_copy), table, "-o", str(tmp_path / "a.npz")],
        ["index", str(run_copy), table],
        ["search", str(run_copy), "--file", table, "-o", str(tmp_path / "hits.json")],
        ["calibrate", str(run_copy), "--folder", table, "--target-far=0.2", "--target-ood=0.2"],
    ):
        assert "(2 such lines: 2, 123)" in lam(*command, "--quiet", code=1).err
        assert "2 of 122 lines" in lam(*command, "--quiet", "--skip-damaged").err
    assert "2 of 122 lines" in (tmp_path / "other" / "report.html").read_text(encoding="utf-8")
    assert len(np.load(tmp_path / "a.npz")["mean"]) == 120


def test_questions_whose_answers_are_blank_are_searched(of_topics: Run, tmp_path: Path, lam: Lam) -> None:
    asked = csv_of(tmp_path / "asked.csv", "question,answer", "fur and paw,", "yeast,")
    assert "text: yeast\n" in lam("search", of_topics.folder, "--quiet", "--file", asked).out


def test_a_search_takes_the_column_that_it_is_told(of_topics: Run, tmp_path: Path, lam: Lam) -> None:
    queries = csv_of(tmp_path / "queries.csv", "query,note", "fur and paw,a", "yeast,b")
    command = ("search", of_topics.folder, "--quiet", "--file", queries)
    assert "--columns text=COLUMN" in lam(*command, code=1).err
    printed = lam(*command, "--columns", "text=query").out
    assert "text: fur and paw\n" in printed
    assert "text: yeast\n" in printed


@pytest.mark.parametrize(
    ("name", "said"),
    [("queries.csv", "queries.csv.*no column text"), ("queries.txt", r"queries.txt.*\.csv, ")],
)
def test_a_file_that_is_no_table_of_texts_is_refused(
    of_topics: Run, tmp_path: Path, name: str, said: str, lam: Lam
) -> None:
    command = ("search", of_topics.folder, "--quiet", "--file", csv_of(tmp_path / name, "fur and paw", "yeast"))
    assert re.search(said, lam(*command, code=1).err)
    assert "by --text or by --file" in lam(*command, "--text", "yeast", code=1).err


@pytest.mark.long
def test_a_calibrated_run_of_questions_serves_texts(of_questions: Run, tmp_path: Path) -> None:
    shutil.copytree(of_questions.folder, tmp_path / "run")
    calibration = calibrated(tmp_path / "run")
    assert (calibration.gallery_size, calibration.facts["queries"]) == (60, 12)
    assert calibration.facts["false_accepts"] == "for questions like the training questions; no bound for others"
    with closing(Engine(tmp_path / "run")) as engine, client_of(engine) as client:
        answer = client.post("/v1/search?k=2", json={"text": "where is thing7"}).json()
        assert answer["decision"] in ("match", "unknown", "abstain")
        assert all(hit["metadata"]["text"].endswith("is here") for hit in answer["hits"])


@pytest.fixture
def run_copy(of_topics: Run, tmp_path: Path) -> Path:
    return Path(shutil.copytree(of_topics.folder, tmp_path / "run"))


def csv_of(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def calibrated(run: Path, **options: Any) -> Calibration:
    """The calibration of a run at rates that few texts can promise."""
    given = {"targets": Targets(far=0.2, ood=0.2), **options}
    return calibrate_run(run, CalibrationOptions(**given), progress=False)


def of_gallery(run: Path) -> list[tuple[str, str, dict[str, str]]]:
    return sorted((item.id, item.label, json.loads(item.metadata)) for item in Run(run).gallery.items)


LISTED = ("body,kind,id,page", "fur and paw,cats,a,3", "rail or track,trains,b,", "flour,,c,4")


@pytest.mark.parametrize("option", ["--list", "--csv", None])
def test_a_list_of_texts_is_indexed_with_what_is_known(
    run_copy: Path, tmp_path: Path, lam: Lam, option: str | None
) -> None:
    listed = csv_of(tmp_path / "new.csv", *LISTED)
    words = [listed] if option is None else [option, listed]
    said = lam("index", run_copy, *words, "--quiet", "--columns", "text=body", "label=kind").out
    assert said == f"3 texts: {run_copy / 'gallery'}\n"
    assert of_gallery(run_copy) == [
        ("a", "cats", {"page": 3, "text": "fur and paw"}),
        ("b", "trains", {"text": "rail or track"}),
        ("c", "", {"page": 4, "text": "flour"}),
    ]
    (item,) = search(run_copy, texts=["rail or track"], k=1).items[0]
    assert (item.id, item.path) == ("b", f"{listed}:3")


def _as_workbook(path: Path, rows: list[dict[str, str]]) -> None:
    book = pytest.importorskip("openpyxl").Workbook()
    for row in (rows[0], *(row.values() for row in rows)):
        book.active.append(list(row))
    book.save(path)


def _as_parquet(path: Path, rows: list[dict[str, str]]) -> None:
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    pytest.importorskip("pyarrow.parquet").write_table(table, path)


def _as_semicolons(path: Path, rows: list[dict[str, str]]) -> None:
    csv_of(path, ";".join(rows[0]), *(";".join(row.values()) for row in rows))


@pytest.mark.long
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("name", "write"), [("a.xlsx", _as_workbook), ("a.parquet", _as_parquet), ("a.csv", _as_semicolons)]
)
def test_a_table_goes_through_every_command(
    tmp_path: Path, lam: Lam, name: str, write: Callable[[Path, list[dict[str, str]]], None]
) -> None:
    rows = json.loads(topics(tmp_path / "topics.json").read_text())
    table, run = tmp_path / name, tmp_path / "run"
    write(table, rows)
    words = ["--network.name=bag_of_words", "--network.dimension=8", "--training.epochs=3", "--evaluation.n_samples=8"]
    words += [f"--data.root={table}", f"--output={run}", "--accelerator=cpu"]
    lam("run", "texts", "laplace_posthoc", *words, "--quiet")
    separator = f"{table} is read as"
    assert (separator in (run / "report.html").read_text(encoding="utf-8")) is (name == "a.csv")
    indexed = lam("index", run, "--list", table, "--quiet")
    assert "120 texts: " in indexed.out
    embedded = lam("embed", run, table, "-o", tmp_path / "a.npz", "--quiet")
    assert (separator in indexed.err + embedded.err) is (name == "a.csv")
    assert len(np.load(tmp_path / "a.npz")["mean"]) == 120
    (hit,) = search(run, texts=[rows[0]["text"]], k=1).items[0]
    assert (hit.text, hit.label) == (rows[0]["text"], "cats")
    assert hit.path == f"{table}:{1 if name == 'a.parquet' else 2}"


def test_columns_that_are_not_there_are_said(run_copy: Path, tmp_path: Path, lam: Lam) -> None:
    listed = str(csv_of(tmp_path / "new.csv", *LISTED))
    before = of_gallery(run_copy)
    for words in (["index"], ["embed", "-o", str(tmp_path / "out.npz")]):
        said = lam(words[0], run_copy, listed, *words[1:], "--quiet", code=1).err
        assert "no column text; it has body, kind, id, page: " in said
        assert "--columns text=COLUMN" in said
    for words in (["text"], ["body=text"], ["text=body", "text=kind"], ["text="]):
        said = lam("index", run_copy, listed, "--quiet", "--columns", *words, code=1).err
        assert " of text, label, question, answer, " in said
    said = lam("index", run_copy, tmp_path, "--quiet", code=1).err
    assert "takes texts: give a table" in said
    assert of_gallery(run_copy) == before


def test_the_columns_of_a_run_are_those_of_its_next_files(tmp_path: Path) -> None:
    rows = [{"body": row["text"], "kind": row["label"]} for row in json.loads(topics(tmp_path / "a.json").read_text())]
    (tmp_path / "b.json").write_text(json.dumps(rows), encoding="utf-8")
    finished = text_run(tmp_path / "run", tmp_path / "b.json", "--data.options={text: body, label: kind}")
    index_images(finished.folder, csv_of(tmp_path / "new.csv", *LISTED), progress=False)
    assert [label for _, label, _ in of_gallery(finished.folder)] == ["cats", "trains", ""]


@pytest.mark.parametrize(
    ("lines", "count", "labels"),
    [
        ("text,label,page a,x,0 b,y,1 c,z,2 d,x,3 e,y,4 f,z,5 g,x,6", 3, ["x"] * 3 + ["y"] * 2 + ["z"] * 2),
        ("question,answer what,fur why,fur who,paw where,rail", 2, ["fur", "paw", "rail"]),
    ],
    ids=["texts", "answers"],
)
def test_what_is_embedded_in_shards_gives_the_same_gallery(
    run_copy: Path, tmp_path: Path, lam: Lam, lines: str, count: int, labels: list[str]
) -> None:
    file = csv_of(tmp_path / "new.csv", *lines.split())
    lam("index", run_copy, file, "--quiet")
    expected = of_gallery(run_copy)
    assert sorted(label for _, label, _ in expected) == labels
    parts = [tmp_path / f"part-{number}.npz" for number in range(1, count + 1)]
    for number, part in enumerate(parts, 1):
        lam("embed", run_copy, file, "--shard", f"{number}/{count}", "-o", part, "--quiet")
    lam("index", run_copy, "--embeddings", *reversed(parts), "--quiet")
    assert of_gallery(run_copy) == expected


@pytest.mark.parametrize("facts", [b"[1, 2]", b"{", b'[{"id": 3, "metadata": {}}]', b'[{"id": null}]'])
def test_facts_that_were_altered_are_told(run_copy: Path, tmp_path: Path, lam: Lam, facts: bytes) -> None:
    part = tmp_path / "part.npz"
    lam("embed", run_copy, csv_of(tmp_path / "new.csv", "text", "fur"), "-o", part, "--quiet")
    with np.load(part) as arrays:
        np.savez(part, **{**arrays, "facts": np.frombuffer(facts, np.uint8)})
    with pytest.raises(CorruptFileError, match="part.npz.*facts.*1 rows"):
        index_images(run_copy, [part], progress=False)


def test_texts_that_are_longer_than_is_read_are_counted(run_copy: Path, tmp_path: Path) -> None:
    file = csv_of(tmp_path / "new.csv", "text", "fur", 2000 * "fur ", 3000 * "paw ")
    with pytest.warns(UserWarning, match=r"new\.csv: 2 of 3 texts.*longer.*cut"):
        index_images(run_copy, file, progress=False)


@pytest.mark.long
def test_a_run_says_that_texts_are_cut_and_shows_halves_of_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def plot(path: Path, *_: Any, query_image: Any, hit_image: Any) -> None:
        shown.extend((query_image(0), hit_image(0)))
        Image.new("L", (1, 1)).save(path)

    monkeypatch.setattr("lam.runs.report.plot_extremes", plot)
    rows = json.loads(topics(tmp_path / "topics.json").read_text())
    rows = [{**row, "text": f"\ud83d {row['text']}"} for row in rows]
    rows[0]["text"] += 2000 * " fur"
    (tmp_path / "halves.json").write_text(json.dumps(rows))
    with pytest.warns(UserWarning, match="1 of 120 texts.*longer.*cut"):
        finished = text_run(tmp_path / "run", tmp_path / "halves.json")
    assert all(item.text is not None and item.text.startswith("? ") for item in finished.gallery.items)
    assert shown  # a picture of half a character cannot be drawn
    assert all(text.startswith("? ") for text in shown)
    told = r"\d+ of the 64 training items"
    with pytest.warns(UserWarning, match=told), pytest.warns(UserWarning, match="1 of 120 texts.*longer"):
        calibrated(finished.folder, folder=tmp_path / "halves.json", gallery="held-out")


def test_a_report_says_that_all_answers_are_searched(of_questions: Run, of_topics: Run) -> None:
    line = "The gallery holds every answer of the data"
    assert line in (of_questions.folder / "report.html").read_text()
    assert line not in (of_topics.folder / "report.html").read_text()


@pytest.mark.long
def test_answers_are_indexed_and_new_questions_calibrated_on(tmp_path: Path) -> None:
    finished = text_run(tmp_path / "run", faq(tmp_path / "faq.json"))
    lines = [f"where was thing{number},thing{number} is here,{number}.html" for number in (*range(40), 3)]
    file = csv_of(tmp_path / "new.csv", "question,answer,page", *lines)
    index_images(finished.folder, file, progress=False)
    items = of_gallery(finished.folder)
    assert len(items) == 40
    assert items[0][2].keys() == {"text", "page"}
    assert {metadata["text"] for _, _, metadata in items} == {label for _, label, _ in items}
    strangers = csv_of(tmp_path / "strangers.csv", "question", *(f"why {number}" for number in range(30)))
    calibration = calibrated(finished.folder, folder=file, strangers=strangers)
    assert (calibration.gallery_size, calibration.facts["queries"]) == (40, 41)
    assert calibration.facts["queries_with_match"] == 41
    assert len(calibration.false_accepts) == 30
    calibration = calibrated(finished.folder, folder=file, gallery="held-out")
    assert (calibration.gallery_size, calibration.facts["queries"]) == (40, 41)


@pytest.mark.parametrize("named", ["strangers", "unlabelled"])
def test_what_nobody_answers_needs_the_named_column_of_questions_alone(
    run_copy: Path, tmp_path: Path, named: str
) -> None:
    lines = [f"where is {word},{word}" for word in ("fur", "paw", "rail", "dough") for _ in range(6)]
    file = csv_of(tmp_path / "new.csv", "title,body", *lines)
    outside = csv_of(tmp_path / "outside.csv", "title", *(f"why {number}" for number in range(30)))
    columns = Columns(question="title", answer="body")
    calibration = calibrated(run_copy, folder=file, columns=columns, gallery="held-out", **{named: outside})
    assert calibration.facts[named] == str(outside)


def test_queries_that_are_in_the_gallery_are_searched_without_themselves(of_topics: Run, run_copy: Path) -> None:
    index_images(run_copy, str(of_topics.config.data.root), progress=False)
    with pytest.warns(Note, match="24 of 24 queries"):
        calibration = calibrated(run_copy)
    assert calibration.facts["queries_with_match"] == 24


def test_queries_whose_only_match_is_the_query_itself_are_refused(run_copy: Path, tmp_path: Path) -> None:
    items = csv_of(tmp_path / "items.csv", "text,label", *(f"fur {number},{number}" for number in range(30)))
    index_images(run_copy, items, progress=False)
    with pytest.raises(ValueError, match="the query itself"), pytest.warns(Note, match="30 of 30"):
        calibrated(run_copy, folder=items)


def test_strangers_that_are_in_the_gallery_are_told(run_copy: Path, tmp_path: Path) -> None:
    texts = [item.text for item in Run(run_copy).gallery.items]
    strangers = csv_of(tmp_path / "strangers.csv", "text", *(f'"{text}"' for text in [*texts, "why 1", "why 2"]))
    with pytest.warns(UserWarning, match=f"{len(texts)} of {len(texts) + 2} strangers.*embedding"):
        calibrated(run_copy, strangers=strangers)


@pytest.mark.long
@pytest.mark.parametrize(
    ("parts", "reference", "told", "n_learned_from"),
    [
        (("train", "validation", "test"), 5000, "24 .*stored item and 72 .*other 24; ", 24),
        (("train", "test"), 5000, r"P\(known\).*not learned.*--unlabelled", 0),
        (("train", "validation"), 60, r"not learned, as 12 training items", 0),
        (("validation", "test"), 0, "24 .*stored item and 0 .*features", 24),
    ],
)
def test_unlabelled_queries_that_were_seen_before_are_told_and_left_out(
    run_copy: Path, tmp_path: Path, parts: tuple[str, ...], reference: int, told: str, n_learned_from: int
) -> None:
    splits: Any = load_data(Run(run_copy).config.data)[0].parts()
    seen = csv_of(tmp_path / "seen.csv", "text", *(text for part in parts for text in splits[part].texts))
    with pytest.warns(UserWarning, match=told):
        calibration = calibrated(run_copy, unlabelled=seen, reference=reference)
    assert calibration.facts["n_unlabelled"] == n_learned_from


def test_what_is_calibrated_on_needs_labels(run_copy: Path, tmp_path: Path) -> None:
    other = "24 stored items.*calibration data"
    for lines, message in (
        (["text", "fur", "paw"], "no column label.*text: .*columns"),
        (["text,label", "fur,cats", "paw,"], "label.*''.*line 3"),
        (["text,label"], "no text: "),
        (["text,label", "fur,dogs", "paw,dogs", "tail,dogs", "ear,dogs"], other),
    ):
        with pytest.raises(ValueError, match=message):
            calibrated(run_copy, folder=csv_of(tmp_path / "new.csv", *lines))


def test_columns_are_of_texts(finished_run: FinishedRun, digit_folder: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished_run.folder, tmp_path / "run"))
    columns, message = Columns(text="a"), "takes images.*columns"
    with pytest.raises(ValueError, match=message):
        index_images(run, digit_folder, columns=columns, progress=False)
    with pytest.raises(ValueError, match=message):
        calibrate_run(run, CalibrationOptions(folder=digit_folder, columns=columns), progress=False)


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_texts_whose_labels_occur_once_are_searched_and_calibrated_by_questions(tmp_path: Path, lam: Lam) -> None:
    """With an untrained head, `identity`."""
    lines = (f"thing{number} is {number % 7} here,{number}" for number in range(60))
    once = csv_of(tmp_path / "once.csv", "text,label", *lines)
    with pytest.raises(ValueError, match="no two texts.*train split.*--network.head=identity"):
        text_run(tmp_path / "run", once)
    assert not (tmp_path / "run").exists()
    words = ["--network.name=bag_of_words_as_it_is", "--network.head=identity", f"--data.root={once}"]
    printed = lam("run", "texts", "knn_distance", *words, f"--output={tmp_path / 'run'}", "--quiet")
    assert "train, validation, test split" in printed.err
    assert "recall@1                         undefined" in printed.out
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert (metrics["recall@1"], metrics["ausc"]) == (None, None)
    assert "\nnot measured: how well κ detects strangers" in printed.out
    refused = lam("calibrate", tmp_path / "run", "--quiet", code=1).err
    assert "such as '0': give a --folder" in refused
    lam("index", tmp_path / "run", once, "--quiet")
    asked = csv_of(tmp_path / "asked.csv", "text,label", *(f"where is thing{number},{number}" for number in range(60)))
    words = ["--folder", str(asked), "--target-far=0.1", "--target-ood=0.1", "--quiet"]
    lam("calibrate", tmp_path / "run", *words)
    calibration = Run(tmp_path / "run").calibration
    assert calibration is not None
    assert calibration.facts["queries_with_match"] == 60
    assert "votes is 0" in lam("calibrate", tmp_path / "run", *words, "--flag=votes").err


@pytest.mark.long
def test_a_run_that_trained_nothing_promises_nothing_of_what_it_was_trained_on(tmp_path: Path) -> None:
    as_it_is = ("--network.name=bag_of_words_as_it_is", "--network.head=identity")
    for what, data in (("questions", faq(tmp_path / "faq.json")), ("classes", topics(tmp_path / "topics.json"))):
        run = text_run(tmp_path / what, data, *as_it_is)
        calibration = calibrated(run.folder)
        assert calibration.facts["false_accepts"] == f"for {what} like the calibration {what}; no bound for others"
        assert calibration.flag == calibration.detector.best


def test_a_label_that_is_the_text_is_printed_once(of_topics: Run, of_questions: Run, lam: Lam) -> None:
    *_, header, first, _ = lam("search", of_questions.folder, "--text", "where is thing7", "-k", "2").out.splitlines()
    assert header.split() == ["score", "kappa", "text"]
    assert first.count("is here") == 1
    *_, header, first = lam("search", of_topics.folder, "--text", "fur and paw", "-k", "1").out.splitlines()
    assert header.replace("another query", "").split() == ["score", "kappa", "label", "text"]
    assert first.split()[2] == "cats"


@pytest.mark.parametrize(
    ("label", "metadata", "repeats"),
    [
        *[("a", {"text": "a"}, True), ("a", {"text": "a b"}, False), ("a", {}, False), ("", {"text": "a"}, False)],
        *[("a… (0a1b2c3d)", {"text": text}, text == "a b") for text in ("a b", 5, None, ["a"], {"a": 1})],
    ],
)
def test_a_label_repeats_a_text_where_the_metadata_have_one(label: str, metadata: Any, repeats: bool) -> None:
    item, text = Item("1", b"", 1.0, label, json.dumps(metadata)), metadata.get("text")
    assert (item.text, item.label_repeats_text) == (text if isinstance(text, str) else None, repeats)
