"""Runs: what a folder holds, that the same settings give the same run, and that nothing damaged is believed."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.utils.data import DataLoader

from lam import datasets, gallery, models
from lam.config import DataConfig, NetworkConfig, OodConfig, RunConfig
from lam.evaluation import evaluate
from lam.files import CorruptFileError, verify, write_tensors
from lam.run import run
from lam.run_folder import locked
from lam.run_report import write_plots_and_report
from lam.settings import load_config
from lam.weights import load_weights
from tests.conftest import TINY, FinishedRun

DEMO = "configs/digits/laplace_posthoc.yaml"
RETRIEVAL = ("recall@1", "map@1", "map@5", "map@10", "ece", "ausc")
OOD = ("auroc", "auprc", "auroc_variance", "auprc_variance", "auroc_norm", "auprc_norm", "auroc_knn", "auprc_knn")


def tiny(output: Path, *overrides: str) -> RunConfig:
    return load_config(DEMO, [*TINY, f"--output={output}", *overrides])


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
    for name in ("encoder", "index", "items"):
        verify(folder / name)
    plots = {path.stem for path in (folder / "plots").glob("*.png")}
    assert {"sparsification", "calibration", "kappa", "extremes"} < plots
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


def test_the_report_needs_no_other_file_or_host(finished_run: FinishedRun) -> None:
    page = (finished_run.folder / "report.html").read_text(encoding="utf-8")
    loaded = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]+)|url\(([^)]*)\)""", page)
    assert loaded
    assert all((first or second).startswith(("data:", "#")) for first, second in loaded)
    assert "<script" not in page
    assert "@import" not in page
    assert page.count("data:image/png;base64,") == len(list((finished_run.folder / "plots").glob("*.png")))


def test_the_configuration_reads_back_as_the_same(finished_run: FinishedRun) -> None:
    folder = finished_run.folder
    original = load_config(DEMO, TINY)
    assert load_config(folder / "config.yaml") == original
    assert load_config(folder) == replace(original, output=str(folder))
    resolved = yaml.safe_load((folder / "config.yaml").read_text())
    assert resolved["laplace"]["prior_precision"] == 1.0  # a default, written out


def test_the_same_settings_give_the_same_run(finished_run: FinishedRun, tmp_path: Path) -> None:
    result = run(tiny(tmp_path / "again"), progress=False)
    assert measured(result.folder) == measured(finished_run.folder)
    assert posterior_bytes(result.folder) == posterior_bytes(finished_run.folder)
    assert result.report.is_file()


def test_another_seed_gives_another_run(finished_run: FinishedRun, tmp_path: Path) -> None:
    result = run(tiny(tmp_path / "other", "--seed=1"), progress=False)
    assert posterior_bytes(result.folder) != posterior_bytes(finished_run.folder)


def test_a_finished_run_is_not_touched_again(
    finished_run: FinishedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished_run.folder
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    monkeypatch.setattr("lam.run_data.datasets.load", lambda *_, **__: pytest.fail("the data were read"))
    result = run(load_config(folder))
    assert result.metrics == json.loads((folder / "metrics.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert capsys.readouterr().err == ""


def test_a_folder_keeps_its_settings(finished_run: FinishedRun) -> None:
    with pytest.raises(ValueError, match=r"other settings \(margin was 0.7, is 0.5; seed was 0, is 3\): give another"):
        run(tiny(finished_run.folder, "--margin=0.5", "--seed=3"), progress=False)


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="holds files that are no run of lam: give another --output"):
        run(tiny(tmp_path), progress=False)
    with pytest.raises(ValueError, match="thesis.tex is a file: give another --output"):
        run(tiny(tmp_path / "thesis.tex"), progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_start_that_died_at_once_does_not_block_the_next(tmp_path: Path, finished_run: FinishedRun) -> None:
    (tmp_path / ".config.yaml.k3j2.tmp").write_text("data: {na")
    result = run(tiny(tmp_path), progress=False)
    assert measured(result.folder) == measured(finished_run.folder)
    assert not list(tmp_path.glob(".*"))


def test_two_processes_do_not_write_to_one_folder(tmp_path: Path, run_copy: Path, digit_folder: Path) -> None:
    (tmp_path / "held").mkdir()
    with locked(tmp_path / "held"), pytest.raises(ValueError, match="another process is writing to .*held: wait"):
        run(tiny(tmp_path / "held"), progress=False)
    with locked(run_copy), pytest.raises(ValueError, match="another process is writing to"):
        gallery.index_folder(run_copy, digit_folder, progress=False)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_run_ends_as_if_nothing_had_happened(kills: int, tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_run.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(kills), "0"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"{kills} kills, same end\n")


@pytest.mark.parametrize("damage", ["delete", "truncate", "flip"])
def test_a_damaged_file_is_named_and_not_read(damage: str, run_copy: Path, digit_folder: Path) -> None:
    image = digit_folder / "0" / "0.png"
    names = ["config.yaml", "metrics.json", "report.html", "plots/kappa.png", "training.json", "data.json"]
    paths = [run_copy / name for name in names]
    paths += [path for part in ("encoder", "index", "items") for path in (run_copy / part).rglob("*") if path.is_file()]
    assert {path.name for path in paths} >= {"posterior.safetensors", "network.safetensors", "items.json", "index.json"}
    for path in paths:
        content = path.read_bytes()
        if damage == "delete":
            path.unlink()
        elif damage == "truncate":
            path.write_bytes(content[: len(content) // 2])
        else:
            middle = len(content) // 2
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        if path.name == "search.faiss":  # a cache, which is built anew
            with pytest.warns(RuntimeWarning, match=re.escape(str(path))):
                gallery.search(run_copy, image)
        else:
            with pytest.raises(CorruptFileError, match=re.escape(path.name)):
                gallery.search(run_copy, image)
        path.write_bytes(content)
    assert gallery.search(run_copy, image, k=2).hits.ids.shape == (1, 2)


def test_a_finished_run_is_checked_when_started_again(run_copy: Path) -> None:
    (run_copy / "metrics.json").write_text("{}")
    with pytest.raises(CorruptFileError, match="metrics.json is truncated or altered"):
        run(load_config(run_copy), progress=False)
    (run_copy / "config.yaml").write_text("data: {")
    with pytest.raises(CorruptFileError, match="config.yaml is not valid YAML"):
        run(tiny(run_copy), progress=False)


def test_an_unfinished_run_is_refused_and_can_be_continued(run_copy: Path, finished_run: FinishedRun) -> None:
    (run_copy / "MANIFEST.json").unlink()
    with pytest.raises(ValueError, match="has not finished: `lam run .*` continues it"):
        gallery.open_run(run_copy)
    result = run(load_config(run_copy), progress=False)
    assert measured(result.folder) == measured(finished_run.folder)
    gallery.open_run(run_copy)


def test_the_folder_above_a_run_names_it(run_copy: Path) -> None:
    with pytest.raises(ValueError, match=f"{run_copy.parent} is no run of lam; did you mean {run_copy}\\?"):
        gallery.open_run(run_copy.parent)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no run of lam: `lam run CONFIG` or `lam demo` makes one"):
        gallery.open_run(tmp_path)
    with pytest.raises(ValueError, match="there is no folder .*missing"):
        gallery.open_run(tmp_path / "missing")


@pytest.mark.filterwarnings("ignore:.*predictive variance is due")  # it is hardly trained
@pytest.mark.parametrize("suffix", ["safetensors", "pth", "wrapped.pth"])
def test_a_checkpoint_takes_the_place_of_training(suffix: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = models.build("convnet8", dimension=3, seed=5).state_dict()
    path = tmp_path / f"weights.{suffix}"
    if suffix == "safetensors":
        save_file(state, path)
    else:
        torch.save({"state_dict": state, "epoch": 3} if "wrapped" in suffix else state, path)
    result = run(tiny(tmp_path / "run", f"--checkpoint={path}"), progress=False)
    network = gallery.open_run(result.folder).network
    assert network is not None
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert "seconds_train" not in result.metrics
    path.unlink()
    assert run(load_config(result.folder), progress=False).metrics == result.metrics


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(os.environ["LAM_TEST_TOUCHED"]),)


def test_a_checkpoint_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched = tmp_path / "touched"
    monkeypatch.setenv("LAM_TEST_TOUCHED", str(touched))
    torch.save({"state_dict": Hostile()}, tmp_path / "hostile.pth")
    with pytest.raises(ValueError, match="hostile.pth holds no plain weights .*: save them with torch.save"):
        run(tiny(tmp_path / "run", f"--checkpoint={tmp_path / 'hostile.pth'}"), progress=False)
    assert not touched.exists()
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_does_not_fit_is_refused_before_any_work(tmp_path: Path) -> None:
    network = models.build("convnet8", dimension=3)
    torch.save(models.build("convnet8", dimension=4).state_dict(), tmp_path / "wide.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    (tmp_path / "noise.safetensors").write_bytes(bytes(range(100)))
    message = r"wide.pth: .*head.weight is \(3, 512\) in the network, \(4, 512\) in the file"
    with pytest.raises(ValueError, match=message):
        run(tiny(tmp_path / "run", f"--checkpoint={tmp_path / 'wide.pth'}"), progress=False)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="list.pth holds no state_dict of tensors"):
        load_weights(network, tmp_path / "list.pth")
    with pytest.raises(ValueError, match="noise.safetensors holds no plain weights"):
        load_weights(network, tmp_path / "noise.safetensors")
    with pytest.raises(ValueError, match="missing.pth does not exist"):
        load_weights(network, tmp_path / "missing.pth")
    with pytest.raises(ValueError, match="is a folder: give a file of weights, such as RUN/encoder"):
        load_weights(network, tmp_path)
    write_tensors(tmp_path / "tensors.safetensors", {"last/network/head.weight": torch.zeros(2)})
    with pytest.raises(ValueError, match="of an unfinished training, which `lam run` on its own folder continues"):
        load_weights(network, tmp_path / "tensors.safetensors")


def folder_config(root: Path, output: Path, ood: list[OodConfig]) -> RunConfig:
    """`configs/folder/laplace_posthoc.yaml`, on small images and by a small network."""
    options = {"preprocessing": {"mode": "RGB", "size": [8, 8]}}
    config = load_config("configs/folder/laplace_posthoc.yaml", [f"--output={output}", "--training.epochs=1"])
    config.data = DataConfig("folder", str(root), options, ood)
    config.network = NetworkConfig("convnet8", 3, options={"channels": 3})
    config.evaluation.n_samples = 4
    config.laplace = replace(config.laplace, tune_samples=4)
    return config


def test_a_folder_of_images_end_to_end(digit_folder: Path, tmp_path: Path) -> None:
    noise = tmp_path / "noise"
    for name in ("first", "second"):
        (noise / name).mkdir(parents=True)
        for number in range(3):
            pixels = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(noise / name / f"{number}.png")
    ood = [OodConfig("folder", str(noise / name), title=name) for name in ("first", "second")]
    result = run(folder_config(digit_folder, tmp_path / "run", ood), progress=False)
    assert {"recall@1", "auroc", "auroc@second"} <= result.metrics.keys()
    found = gallery.search(result.folder, digit_folder / "1" / "0.png", k=3)
    assert all(Path(item["path"]).is_file() and item["label"] in "012" for item in found.items)


def test_a_run_without_ood_set_and_on_changed_data(digit_folder: Path, tmp_path: Path) -> None:
    images = Path(shutil.copytree(digit_folder, tmp_path / "images"))
    config = folder_config(images, tmp_path / "run", [])
    result = run(config, progress=False)
    assert "auroc" not in result.metrics
    page = result.report.read_text(encoding="utf-8")
    assert "Sparsification" in page
    assert "Out-of-distribution detection" not in page
    (images / "0" / "0.png").rename(images / "0" / "new.png")
    (result.folder / "MANIFEST.json").unlink()
    with pytest.raises(ValueError, match=r"the data changed since the run .* began \(.*\): give another --output"):
        run(config, progress=False)


def test_a_file_that_cannot_be_read_is_named_before_any_work(digit_folder: Path, tmp_path: Path) -> None:
    images = Path(shutil.copytree(digit_folder, tmp_path / "images"))
    bad = images / "2" / "bad.png"
    whole = (images / "2" / "0.png").read_bytes()
    icon, floating = io.BytesIO(), io.BytesIO()
    Image.new("RGB", (16, 16)).save(icon, "ICO")
    Image.new("F", (8, 8)).save(floating, "TIFF")
    for content, reason in (
        (b"milk, bread", "is no image; allowed formats: .*"),
        (icon.getvalue(), "is no image; allowed formats: .*"),
        (whole[: len(whole) // 2], "cannot be read as an image: .*"),
        (floating.getvalue(), ": cannot convert pixels of mode F .*"),
    ):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=rf"2/bad.png ?{reason}: replace or remove it"):
            run(folder_config(images, tmp_path / "run", []), progress=False)
        assert not (tmp_path / "run").exists()


def test_the_check_of_many_files_shows_how_far_it_is(
    digit_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lam.run_data.MANY_FILES", 10)
    monkeypatch.setattr("lam.run._build_network", lambda *_: pytest.fail("the files are read"))
    for progress in (True, False):
        with pytest.raises(pytest.fail.Exception, match="the files are read"):
            run(folder_config(digit_folder, tmp_path / "run", []), progress=progress)
        assert ("checking: 100%" in capsys.readouterr().err) == progress


@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_a_split_in_which_nothing_can_be_found_is_refused(part: str, digit_folder: Path, tmp_path: Path) -> None:
    for name in ("train", "validation", "test"):
        for label in range(5):
            (tmp_path / name / str(label)).mkdir(parents=True)
            for number in range(1 if name == part else 2):
                shutil.copy(digit_folder / "0" / "0.png", tmp_path / name / str(label) / f"{number}.png")
    with pytest.raises(ValueError, match=f"no two images of the {part} split share a label, .*: give more data"):
        run(folder_config(tmp_path, tmp_path / "run", []), progress=False)
    assert not (tmp_path / "run").exists()


def test_a_report_on_queries_that_cannot_be_answered(run_copy: Path) -> None:
    encoder = gallery.open_run(run_copy)
    test = datasets.TensorImages(torch.rand(4, 1, 8, 8), torch.arange(4))
    evaluation = evaluate(encoder, DataLoader(test, batch_size=4), n_samples=4)
    configuration = {"data": {"name": "digits"}, "method": "laplace_posthoc"}
    plots = write_plots_and_report(run_copy, configuration, evaluation.metrics, evaluation, test)
    assert {path.stem for path in plots} == {"calibration", "extremes", "kappa"}
    assert "4 queries have no relevant item" in (run_copy / "report.html").read_text(encoding="utf-8")


def test_the_seconds_of_training_are_those_of_every_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("lam.methods.laplace_posthoc.fit", stop)
        with pytest.raises(KeyboardInterrupt):
            run(tiny(tmp_path), progress=False)
    metrics = run(tiny(tmp_path), progress=False).metrics
    seconds = json.loads((tmp_path / "training.json").read_text())["network"]["seconds"]
    assert len(seconds) == 2
    assert metrics["seconds_train"] == pytest.approx(sum(seconds), abs=1e-3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--data.limit=4"], "the train split must have at least 5 images, got 4: give more data"),
        (["--network.name=convnet28"], r"convnet28 does not take images of shape \(1, 8, 8\) .*: choose another"),
        (["--network.options={width: 3}"], "convnet8 does not take these options"),
        (["--data.ood=[{name: digits_patches}, {name: digits_patches}]"], "2 sets called digits_patches: give each"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run(tiny(tmp_path / "run", *overrides), progress=False)
    assert not (tmp_path / "run").exists()


def test_a_run_without_faiss_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ValueError, match=r"FAISS cannot be imported .*: pip install 'lam\[cpu\]'"):
        run(tiny(tmp_path / "run"), progress=False)
    assert not (tmp_path / "run").exists()


def test_a_head_that_is_added_keeps_the_embeddings_and_the_report_says_by_what_ood_is_told(tmp_path: Path) -> None:
    result = run(tiny(tmp_path / "run", "--laplace.head=identity"), progress=False)
    assert {"auroc", "auroc_kappa"} <= result.metrics.keys()
    assert "auroc_knn" not in result.metrics
    page = result.report.read_text()
    assert "The OOD score of this encoder is the k-NN distance" in page
    assert "cosine to near training features" in page
    assert gallery.open_run(tmp_path / "run").ood_score == "knn"


@pytest.mark.filterwarnings("ignore:.*predictive variance is due")
def test_batches_without_a_positive_pair_are_counted_and_reported(tmp_path: Path) -> None:
    result = run(tiny(tmp_path, "--training.batch_size=2", "--training.epochs=1"), progress=False)
    skipped = json.loads((tmp_path / "training.json").read_text())["network"]["batches_without_positives"]
    assert result.metrics["batches_without_positives"] == skipped > 0
    assert f"{skipped} batches of training held no positive pair" in result.report.read_text()
