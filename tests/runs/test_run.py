"""Runs: the contents of the folder, the same run from the same settings, and errors for damaged files."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from torch.utils.data import DataLoader

from lam import datasets
from lam.evaluation import evaluate
from lam.gallery.store import FILE, ItemStore
from lam.retrieval.decisions.calibration import Targets
from lam.runs.calibrate import CalibrationOptions, calibrate_run
from lam.runs.config import RunConfig
from lam.runs.config_files import load_config
from lam.runs.finished import Run
from lam.runs.index import index_images
from lam.runs.report import write_plots_and_report
from lam.runs.run import run
from lam.runs.search import search
from lam.utils.files import CorruptFileError, locked, verify
from tests.conftest import TINY, FinishedRun, tiny
from tests.helpers import run_python

pytestmark = pytest.mark.usefixtures("unrendered")

RETRIEVAL = ("recall@1", "map@1", "map@5", "map@10", "ece", "ausc")
OOD = ("auroc", "auprc", "auroc_variance", "auprc_variance", "auroc_norm", "auprc_norm", "auroc_knn", "auprc_knn")


def measured(folder: Path) -> dict[str, Any]:
    metrics = json.loads((folder / "metrics.json").read_text())
    return {name: value for name, value in metrics.items() if not name.startswith("seconds_")}


def posterior_bytes(folder: Path) -> bytes:
    (path,) = folder.glob("encoder/*/posterior.safetensors")
    return path.read_bytes()


def test_the_folder_holds_everything(finished_run: FinishedRun) -> None:
    folder = finished_run.folder
    for name in ("config.yaml", "data.json", "training.json", "metrics.json", "report.html", "MANIFEST.json"):
        assert (folder / name).is_file(), name
    verify(folder / "encoder")
    store = ItemStore(folder / "gallery" / FILE, read_only=True)
    assert (store.check(), len(store)) == ([], 60)
    store.close()
    plots = {path.stem for path in (folder / "plots").glob("*.png")}
    assert {"sparsification", "calibration", "kappa", "extremes", "extremes_ood"} < plots
    assert {"roc_digits_patches", "precision_recall_digits_held_out"} < plots
    verify(folder, ["config.yaml", "data.json", "training.json", "metrics.json", "report.html", "plots/kappa.png"])
    assert not list(folder.rglob("*.tmp"))
    assert not (folder / "seconds.json").exists()


def test_metrics_are_flat_and_complete(finished_run: FinishedRun) -> None:
    metrics = json.loads((finished_run.folder / "metrics.json").read_text())
    wanted = {*RETRIEVAL, *OOD, *(f"{name}@digits_held_out" for name in OOD)}
    wanted |= {f"seconds_{stage}" for stage in ("train", "fit", "tune", "evaluate", "index")}
    assert wanted <= metrics.keys()
    assert all(isinstance(metrics[name], float) and metrics[name] >= 0 for name in wanted)


def test_the_report_says_which_score_the_encoder_recommends(finished_run: FinishedRun) -> None:
    page = (finished_run.folder / "report.html").read_text(encoding="utf-8")
    metrics = json.loads((finished_run.folder / "metrics.json").read_text())
    better = "κ" if metrics["kappa_on_altered"] >= metrics["variance_on_altered"] else "the variance"
    assert f"the encoder recommends {better}." in page


def test_the_report_needs_no_other_file_or_host(finished_run: FinishedRun) -> None:
    page = (finished_run.folder / "report.html").read_text(encoding="utf-8")
    loaded = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]+)|url\(([^)]*)\)""", page)
    assert loaded
    assert all((first or second).startswith(("data:", "#")) for first, second in loaded)
    assert "<script" not in page
    assert "How well each score finds queries with a wrong first hit. ↑" in page  # all of them have a match
    assert "@import" not in page
    assert page.count("data:image/png;base64,") == len(list((finished_run.folder / "plots").glob("*.png")))


def test_the_configuration_reads_back_as_the_same(finished_run: FinishedRun) -> None:
    folder = finished_run.folder
    original = load_config("digits laplace_posthoc", TINY)
    assert load_config(folder / "config.yaml") == original
    assert load_config(folder) == replace(original, output=str(folder))
    resolved = yaml.safe_load((folder / "config.yaml").read_text())
    assert resolved["method"]["prior_ratio"] == 1e-4  # a default, written out


@pytest.mark.long
def test_the_same_settings_give_the_same_run(finished_run: FinishedRun, tmp_path: Path) -> None:
    result = run(tiny(tmp_path / "again"), progress=False)
    assert measured(result.folder) == measured(finished_run.folder)
    assert posterior_bytes(result.folder) == posterior_bytes(finished_run.folder)
    assert result.report.is_file()


def test_a_finished_run_is_not_touched_again(
    finished_run: FinishedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished_run.folder
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    monkeypatch.setattr("lam.runs.plan.Plan.start", lambda *_: pytest.fail("a network was built"))
    result = run(load_config(folder))
    assert result.metrics == json.loads((folder / "metrics.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert capsys.readouterr().err == ""


def test_a_finished_run_is_not_taken_for_that_of_other_data(
    finished_run: FinishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(finished_run.folder)
    whole = datasets.load("digits")
    fewer = replace(whole, train=whole.train.subset(torch.arange(800)))
    monkeypatch.setattr("lam.runs.data.datasets.load", lambda *_, **__: fewer)
    with pytest.raises(ValueError, match=r"data changed.*\(train\): .*--output"):
        run(config, progress=False)

    def gone(*_: object, **__: object) -> None:
        raise datasets.MissingDataError("there is no folder")

    monkeypatch.setattr("lam.runs.data.datasets.load", gone)
    assert run(config, progress=False).metrics == json.loads((config.folder / "metrics.json").read_text())


def test_a_folder_keeps_its_settings(finished_run: FinishedRun) -> None:
    with pytest.raises(ValueError, match=r"\(margin was 0.7, is 0.5; seed was 0, is 3\)"):
        run(tiny(finished_run.folder, "--margin=0.5", "--seed=3"), progress=False)


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="run of lam: .*--output"):
        run(tiny(tmp_path), progress=False)
    with pytest.raises(ValueError, match="thesis.tex is a file: give another --output"):
        run(tiny(tmp_path / "thesis.tex"), progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.long
def test_a_start_that_died_at_once_does_not_block_the_next(tmp_path: Path, finished_run: FinishedRun) -> None:
    (tmp_path / ".config.yaml.k3j2.tmp").write_text("data: {na")
    result = run(tiny(tmp_path), progress=False)
    assert measured(result.folder) == measured(finished_run.folder)
    assert not list(tmp_path.glob(".*"))


def test_two_processes_do_not_write_to_one_folder(tmp_path: Path, run_copy: Path, digit_folder: Path) -> None:
    (tmp_path / "held").mkdir()
    with locked(tmp_path / "held"), pytest.raises(ValueError, match="held.*use"):
        run(tiny(tmp_path / "held"), progress=False)
    with locked(run_copy), pytest.raises(ValueError, match="is in use"):
        index_images(run_copy, digit_folder, progress=False)


@pytest.mark.long
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_run_ends_as_if_nothing_had_happened(kills: int, tmp_path: Path) -> None:
    done = run_python("-m", "tests.runs.kill_run", tmp_path, kills, 0)
    assert done.stdout.endswith(f"{kills} kills, same end\n")


@pytest.mark.parametrize("damage", ["delete", "truncate", "flip"])
def test_a_damaged_file_is_named_and_not_read(damage: str, run_copy: Path, digit_folder: Path) -> None:
    image, vector = digit_folder / "0" / "0.png", Run(run_copy).gallery.items[30].vector
    paths = [run_copy / name for name in ("config.yaml", "data.json")]
    paths += [path for path in (run_copy / "encoder").rglob("*") if path.is_file()] + [run_copy / "gallery" / FILE]
    assert {path.name for path in paths} >= {"posterior.safetensors", "network.safetensors", "items.sqlite"}
    for path in paths:
        content = path.read_bytes()
        if damage == "delete":
            path.unlink()
        elif damage == "truncate":
            path.write_bytes(content[: len(content) // 2])
        else:
            middle = content.index(vector) if path.name == FILE else len(content) // 2
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        with pytest.raises(CorruptFileError, match=re.escape(path.name)):
            search(run_copy, image)
        path.write_bytes(content)
    for name in ("metrics.json", "report.html", "plots/kappa.png", "training.json"):  # for people: searches go on
        (run_copy / name).write_bytes(b"")
    assert search(run_copy, image, k=2).hits.ids.shape == (1, 2)


def test_a_finished_run_is_checked_when_started_again(run_copy: Path) -> None:
    (run_copy / "metrics.json").write_text("{}")
    with pytest.raises(CorruptFileError, match="metrics.json.*truncated"):
        run(load_config(run_copy), progress=False)
    (run_copy / "MANIFEST.json").unlink()  # as the error advises
    assert run(load_config(run_copy), progress=False).report.is_file()
    (run_copy / "config.yaml").write_text("data: {")
    with pytest.raises(CorruptFileError, match="config.yaml.*valid YAML"):
        run(tiny(run_copy), progress=False)


@pytest.mark.long
def test_an_unfinished_run_is_refused_and_can_be_continued(run_copy: Path, finished_run: FinishedRun) -> None:
    (run_copy / "MANIFEST.json").unlink()
    with pytest.raises(ValueError, match="not finished: `lam run "):
        _ = Run(run_copy).encoder
    result = run(load_config(run_copy), progress=False)
    assert measured(result.folder) == measured(finished_run.folder)
    _ = Run(run_copy).encoder


def test_the_folder_above_a_run_names_it(run_copy: Path) -> None:
    with pytest.raises(ValueError, match=rf"{run_copy.parent} .*run of lam; .*{run_copy}\?"):
        _ = Run(run_copy.parent).encoder


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run of lam: `lam run CONFIG` or `lam demo`"):
        _ = Run(tmp_path).encoder
    with pytest.raises(ValueError, match="no folder.*missing"):
        _ = Run(tmp_path / "missing").encoder


def reported(run: Path, test: datasets.TensorImages, evaluation: Any, *notes: str, **outside: Any) -> Any:
    """The pictures of a report on an evaluation, in the folder of the run."""
    configuration = {"data": {"name": "digits"}, "method": {"name": "laplace_posthoc"}}
    splits, encoder = datasets.Splits(test, test, test, notes=notes), Run(run).encoder
    return write_plots_and_report(run, configuration, evaluation.metrics, encoder, evaluation, {}, splits, outside)


@pytest.mark.filterwarnings("ignore:κ is 1e-06 for all 4 queries")
def test_a_report_on_queries_that_cannot_be_answered(run_copy: Path) -> None:
    test = datasets.TensorImages(torch.rand(4, 1, 8, 8), torch.arange(4))
    evaluation = evaluate(Run(run_copy).encoder, DataLoader(test, batch_size=4), n_samples=4)
    plots = reported(run_copy, test, evaluation, "a.csv is read as values separated by tabs")
    assert {path.stem for path in plots} == {"extremes", "kappa", "tuning"}
    report = (run_copy / "report.html").read_text(encoding="utf-8")
    assert "Queries without a relevant item, left out of retrieval metrics: 4." in report
    assert "a.csv is read as values separated by tabs" in report


@pytest.mark.filterwarnings("ignore:κ is 1e-06 for all 4 queries")
def test_the_extremes_of_a_report_hold_images_from_outside(
    run_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image with the smallest κ comes first, above its nearest neighbour."""
    drawn: dict[str, dict[str, Any]] = {}

    def remembered(path: Path, kappa: torch.Tensor, verdict: Any, *, query_image: Any, hit_image: Any) -> None:
        queries = kappa.argsort().tolist()
        drawn[path.stem] = {"verdict": [verdict(query) for query in queries], "kappa": kappa}
        drawn[path.stem]["images"] = [(query_image(query), hit_image(query)) for query in queries]
        Image.new("L", (1, 1)).save(path)

    monkeypatch.setattr("lam.runs.report.plot_extremes", remembered)
    test = datasets.TensorImages(torch.rand(4, 1, 8, 8), torch.tensor([0, 0, 1, 1]))
    outside = datasets.TensorImages(torch.rand(3, 1, 8, 8), torch.zeros(3, dtype=torch.int64))
    loaders = [DataLoader(images, batch_size=4) for images in (test, outside)]
    evaluation = evaluate(Run(run_copy).encoder, loaders[0], {"noise": loaders[1]}, n_samples=4)
    evaluation.ood_embeddings["noise"].kappa[1] = 1e-7
    reported(run_copy, test, evaluation, noise=outside)
    assert drawn["extremes"]["kappa"].equal(evaluation.embeddings.kappa)
    assert all(isinstance(verdict, bool) for verdict in drawn["extremes"]["verdict"])
    together = drawn["extremes_ood"]
    assert len(together["kappa"]) == 7
    assert sorted(map(str, together["verdict"])) == sorted([*map(str, drawn["extremes"]["verdict"]), *["noise"] * 3])
    assert together["verdict"][0] == "noise"
    query, hit = together["images"][0]
    nearest = (evaluation.gallery.mean @ evaluation.ood_embeddings["noise"].mean[1]).argmax()
    assert query.equal(outside[1][0])
    assert hit.equal(test[int(evaluation.candidates[nearest])][0])


def stop_after_training(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("lam.methods.laplace_posthoc.fit", stop)
        with pytest.raises(KeyboardInterrupt):
            run(config, progress=False)


@pytest.mark.long
def test_the_seconds_of_training_are_those_of_every_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_after_training(tiny(tmp_path), monkeypatch)
    metrics = run(tiny(tmp_path), progress=False).metrics
    seconds = json.loads((tmp_path / "training.json").read_text())["network"]["seconds"]
    assert len(seconds) == 2
    assert metrics["seconds_train"] == pytest.approx(sum(seconds), abs=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_a_stopped_run_does_not_go_on_with_images_exchanged_under_their_names(
    tmp_path: Path, digit_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = Path(shutil.copytree(digit_folder, tmp_path / "images"))
    network = ["--network={name: convnet8, dimension: 2}", "--data.options.preprocessing={size: 8, mode: L}"]
    folder = [f"--data.root={images}", "--training.epochs=2", f"--output={tmp_path / 'run'}"]
    config = load_config("folder laplace_posthoc", [*network, *folder])

    stop_after_training(config, monkeypatch)
    assert list((tmp_path / "run").glob("checkpoints/**/*.safetensors"))
    for names in (sorted(images.glob("0/*")), sorted(images.glob("1/*"))):
        content = [path.read_bytes() for path in names]
        for path, other in zip(names, content[1:] + content[:1], strict=True):
            path.write_bytes(other)
    with pytest.raises(ValueError, match=r"data changed.*\(train"):
        run(config, progress=False)
    assert not (tmp_path / "run" / "metrics.json").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--data.limit=4"], "train split.*5 images, got 4"),
        (["--network.name=convnet28"], r"convnet28.*\(1, 8, 8\) .*: choose"),
        (["--network.name=timm:test_vit"], r"\(1, 8, 8\) \(Input height.*: choose"),
        (["--network.options={width: 3}"], "convnet8.*--network.options={}"),
        (["--data.ood=[{name: digits_patches}, {name: digits_patches}]"], "2 sets called digits_patches: give each"),
        (["--method.head=body"], "head 'body'.*linear layer"),
        (["--method.structure=full", "--method.max_memory=10"], "takes 37,896,336 bytes, more than max_memory, 10"),
        (["--method.curvature=supcon"], "SupConCurvature needs.*temperature"),
        (["--training.precision=16-mixed", "--accelerator=cpu"], "take bf16-mixed"),
        (["--training.temperature=-1"], "training.temperature.*-1"),
        (["--training.per_class=2", "--training.batch_size=64"], "= 32 classes, .* got 8:"),
        (["--method.name=mc_dropout", "--network.options={}"], "dropout .*options.dropout=0.05"),
        (["--method.name=knn_distance", "--method.k=61", "--data.limit=60"], "k = 61.*60"),
        (["--ambiguity.learn=true", "--data.limit=16"], "20 items.*match, got 16"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run(tiny(tmp_path / "run", *overrides), progress=False)
    assert not (tmp_path / "run").exists()


def test_a_run_without_faiss_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ValueError, match=r"FAISS.*'lam-retrieval\[cpu\]'"):
        run(tiny(tmp_path / "run"), progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_head_that_is_added_keeps_the_embeddings_and_the_report_says_by_what_ood_is_told(tmp_path: Path) -> None:
    result = run(tiny(tmp_path / "run", "--method.head=identity"), progress=False)
    assert {"auroc", "auroc_kappa"} <= result.metrics.keys()
    assert "auroc_knn" not in result.metrics
    page = result.report.read_text()
    assert "The OOD score of this encoder is the k-NN distance" in page
    assert "cosine to near training features" in page
    assert Run(tmp_path / "run").encoder.ood_score == "knn"
    targets = Targets(far=0.1, ood=0.1)
    calibration = calibrate_run(tmp_path / "run", CalibrationOptions(targets=targets, reference=0), progress=False)
    assert not {"knn", "mahalanobis"} & set(calibration.detector.calibrated)


@pytest.mark.long
def test_batches_without_a_positive_pair_are_counted_and_reported(tmp_path: Path) -> None:
    result = run(tiny(tmp_path, "--training.batch_size=3", "--training.epochs=1"), progress=False)
    skipped = json.loads((tmp_path / "training.json").read_text())["network"]["batches_without_positives"]
    assert result.metrics["batches_without_positives"] == skipped > 0
    assert f"{skipped} batches of training held no positive pair" in result.report.read_text()
