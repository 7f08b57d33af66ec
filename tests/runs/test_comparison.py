"""Comparisons: every run in one table and in each plot, and errors for runs that cannot be compared."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lam.retrieval import auprc, auroc, ausc
from lam.retrieval.metrics import plots
from lam.runs.comparison import CURVES, FIGURES, Curves, compare
from lam.runs.finished import Run
from lam.runs.run import run
from lam.utils.files import MANIFEST, CorruptFileError, seal, write_json
from tests.conftest import FinishedRun, tiny, unrendered_pictures
from tests.runs.conftest import Lam

pytestmark = pytest.mark.long

OF_OWN_SCORE = ("auroc", "auprc", "ausc", "r_auroc", "augrc", "nauc", "mann_whitney_p", "scod_augrc")
"""Metrics of a network's own score, which is constant without a posterior."""
PICTURES = {"figures", "calibration", "sparsification"} | {
    f"{kind}_{ood}" for kind in ("roc", "precision_recall") for ood in ("digits_patches", "digits_held_out")
}


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs on the data of `finished_run`: another seed, a method without uncertainty, one without samples."""
    root = tmp_path_factory.mktemp("others")
    settings: dict[str, tuple[str, ...]] = {
        "again": ("--seed=2",),
        "deterministic": ("--method=deterministic",),
        "knn_distance": ("--method=knn_distance",),
    }
    with unrendered_pictures():
        return {name: run(tiny(root / name, *options), progress=False).folder for name, options in settings.items()}


def sealed(folder: Path) -> None:
    """Write the manifest of a run again, as if its files had always been so."""
    names = json.loads((folder / MANIFEST).read_text())["sha256"]
    seal(folder, [name for name in names if (folder / name).is_file()])


def test_a_run_of_another_format_is_refused(run_copy: Path) -> None:
    data = json.loads((run_copy / "data.json").read_text())
    write_json(run_copy / "data.json", data | {"format": 99})
    sealed(run_copy)
    with pytest.raises(ValueError, match=r"data\.json.*format 99.*version.*1"):
        Run(run_copy)


def test_curves_are_those_of_the_metrics(finished_run: FinishedRun) -> None:
    curves, metrics = Curves.load(finished_run.folder), json.loads((finished_run.folder / "metrics.json").read_text())
    assert curves.tells_apart
    assert set(curves.outside) == {"digits_patches", "digits_held_out"}
    for name, suffix in (("digits_patches", ""), ("digits_held_out", "@digits_held_out")):
        assert auroc(curves.inside, curves.outside[name]) == pytest.approx(metrics[f"auroc{suffix}"], abs=1e-12)
        assert auprc(curves.inside, curves.outside[name]) == pytest.approx(metrics[f"auprc{suffix}"], abs=1e-12)
    assert ausc(curves.correct, curves.uncertainty) == pytest.approx(metrics["ausc"], abs=1e-12)
    assert curves.reliability is not None
    assert curves.reliability.expected_error == pytest.approx(metrics["ece"], abs=1e-12)


def test_every_run_is_in_the_table_and_in_the_pictures(
    finished_run: FinishedRun, others: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}
    for plot in ("plot_bars", "plot_roc", "plot_precision_recall", "plot_reliability_curves", "plot_sparsification"):
        original = getattr(plots, plot)

        def remembered(path: Path, of_runs: Any, original: Any = original) -> None:
            drawn[path.stem] = of_runs
            original(path, of_runs)

        monkeypatch.setattr(plots, plot, remembered)
    runs = [finished_run.folder, others["deterministic"], others["knn_distance"]]
    assert not list((others["deterministic"] / "plots").glob("extremes*.png"))  # whose κ is one number
    made = compare(runs, tmp_path / "new" / "comparison")
    names = ["laplace_posthoc", "deterministic", "knn_distance"]
    assert [found.name for found in made.runs] == names
    assert drawn.keys() == PICTURES == {path.stem for path in made.folder.glob("*.png")}
    assert sorted(made.written) == sorted(made.folder.iterdir())
    assert list(drawn["figures"]) == ["mAP@1", "AUROC", "AUSC", "ECE, lower is better"]
    assert all(list(values) == names for values in drawn["figures"].values())
    for kind in ("roc_digits_patches", "precision_recall_digits_held_out", "sparsification"):
        assert list(drawn[kind]) == ["laplace_posthoc", "knn_distance"], kind  # one κ for all is no curve
    assert list(drawn["calibration"]) == [found.name for found in made.runs if found.metrics["ece"] is not None]

    stored = {found["name"]: found for found in json.loads((made.folder / "comparison.json").read_text())["runs"]}
    with (made.folder / "comparison.csv").open(newline="") as stream:
        rows = {row["name"]: row for row in csv.DictReader(stream)}
    for name, folder in zip(names, runs, strict=True):
        measured = json.loads((folder / "metrics.json").read_text())
        assert (stored[name]["method"], stored[name]["folder"]) == (name, str(folder))
        for key, value in measured.items():
            unknown = name == "deterministic" and key.partition("@")[0] in OF_OWN_SCORE
            unknown |= name == "deterministic" and "_variance" in key
            assert stored[name]["metrics"][key] == (None if unknown else value), key
            assert rows[name][key] == ("" if unknown or value is None else str(value)), key


@pytest.mark.usefixtures("unrendered")
def test_the_command_prints_the_table_and_what_it_wrote(
    finished_run: FinishedRun, others: dict[str, Path], tmp_path: Path, lam: Lam
) -> None:
    output = tmp_path / "comparison"
    for _ in range(2):  # an earlier comparison is replaced
        head, *rows = lam("compare", finished_run.folder, others["again"], "-o", output).out.splitlines()
        for name in ("roc_of_another_set.png", "photograph.png"):
            (output / name).touch()
    assert (output / "photograph.png").is_file()  # a reader's own
    names = "mAP@1 mAP@5 mAP@10 AUROC AUPRC AUSC ECE ECE by chance ECE below 1"
    assert head.split() == names.split()
    for row, folder in zip(rows, (finished_run.folder, others["again"]), strict=False):
        name, *cells = row.split()
        metrics = json.loads((folder / "metrics.json").read_text())
        assert name == folder.name  # since both are of one method
        assert cells == [f"{metrics[figure]:.3f}" for figure in FIGURES]
    assert {Path(path).stem for path in rows[2:]} == PICTURES | {"comparison"}


@pytest.mark.usefixtures("unrendered")
def test_runs_of_one_name_are_called_by_the_paths_given(finished_run: FinishedRun, tmp_path: Path) -> None:
    for number in "01":
        shutil.copytree(finished_run.folder, tmp_path / number / "run")
    made = compare([tmp_path / "0" / "run", tmp_path / "1" / "run"], tmp_path / "comparison")
    assert [found.name for found in made.runs] == [str(tmp_path / number / "run") for number in "01"]


def test_what_cannot_be_compared_is_refused_before_anything_is_written(
    finished_run: FinishedRun, others: dict[str, Path], run_copy: Path, tmp_path: Path
) -> None:
    output, folder, other = tmp_path / "comparison", finished_run.folder, others["again"]
    (thesis := tmp_path / "thesis" / "thesis.tex").parent.mkdir()
    thesis.write_text("years of work")
    for runs, place, message in (
        ([folder], output, "comparing needs 2 to 24 runs, got 1"),
        ([folder] * 25, output, "comparing needs 2 to 24 runs, got 25"),
        ([folder, other, folder.parent / "." / "run"], output, "run.*twice"),
        ([folder, tmp_path], output, "run of lam"),
        ([folder, other], thesis.parent, "thesis.*comparison.*--output"),
        ([folder, other], thesis, r"thesis\.tex is a file: give another --output"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(runs, place)
    with (run_copy / CURVES).open("r+b") as stream:
        stream.write(b"x")
    with pytest.raises(CorruptFileError, match="curves.safetensors.*truncated"):
        compare([folder, run_copy], output)
    (run_copy / CURVES).unlink()
    sealed(run_copy)
    with pytest.raises(ValueError, match="no curves: .*MANIFEST.json, .*`lam run "):
        compare([folder, run_copy], output)
    (run_copy / MANIFEST).unlink()
    with pytest.raises(ValueError, match="not finished: `lam run "):
        compare([folder, run_copy], output)
    assert not output.exists()


@pytest.mark.usefixtures("unrendered")
@pytest.mark.parametrize(
    ("file", "place", "value", "named"),
    [
        ("data.json", "parts/test/sha256", "another", "test"),
        ("data.json", "parts/OOD set digits_patches/sha256", "another", "OOD set digits_patches"),
        ("data.json", "parts/train/sha256", "another", None),
        ("config.yaml", "data/soft_labels", "other.npy", "data.soft_labels"),
        ("config.yaml", "data/ood", [{"name": "digits_held_out", "title": None}], "main OOD set"),
        ("config.yaml", "evaluation/reference", 7, "evaluation.reference"),
        ("config.yaml", "evaluation/corrupted", 7, "evaluation.corrupted"),
        ("config.yaml", "evaluation/unseen", 7, "evaluation.unseen"),
        ("config.yaml", "evaluation/n_samples", 7, None),
    ],
)
def test_runs_on_different_data_or_evaluations_are_refused(
    file: str, place: str, value: object, named: str | None, finished_run: FinishedRun, run_copy: Path, tmp_path: Path
) -> None:
    content = section = yaml.safe_load((run_copy / file).read_text())
    *above, last = place.split("/")
    for name in above:
        section = section[name]
    section[last] = value
    write_json(run_copy / file, content)
    sealed(run_copy)
    runs, output = [finished_run.folder, run_copy], tmp_path / "comparison"
    if named is None:
        assert len(compare(runs, output).runs) == 2
        return
    with pytest.raises(ValueError, match=rf"same data \({named}\)"):
        compare(runs, output)


def test_an_evaluation_without_answers_or_ood_items_is_kept(tmp_path: Path) -> None:
    none = torch.empty(0)
    Curves(none.bool(), none, torch.tensor([-1.0, -2.0]), {}, None).save(tmp_path)
    found = Curves.load(tmp_path)
    assert (len(found.correct), found.outside, found.reliability, found.tells_apart) == (0, {}, None, True)
