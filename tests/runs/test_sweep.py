"""Sweeps over seeds: kept runs, means and deviations, and the output of the command."""

import json
import math
import re
import shutil
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest

from lam.runs.config import RunConfig
from lam.runs.config_files import load_config
from lam.runs.sweep import seeds_of, summary, sweep
from tests.runs.conftest import Lam

TINY = ("--limit=60", "--training.epochs=1", "--evaluation.n_samples=4")
NORM = "digits norm"


def tiny(output: Path, *overrides: str) -> RunConfig:
    short = ("--data.limit=60", *TINY[1:], f"--output={output}")
    return load_config(NORM, [*short, *overrides])


class TestSummary:
    def test_is_mean_and_deviation_by_n_minus_one(self) -> None:
        rows = {0: {"map@1": 0.1, "n_queries": 7}, 1: {"map@1": 0.4, "n_queries": 7}, 2: {"map@1": 0.7, "n_queries": 7}}
        found = summary(rows)
        assert found["n"] == 3
        assert found["mean"] == pytest.approx({"map@1": 0.4, "n_queries": 7})
        assert found["std"] == pytest.approx({"map@1": 0.3, "n_queries": 0})
        assert found["undefined"] == {}

    def test_lists_what_is_undefined_or_absent_in_some_seed(self) -> None:
        found = summary(
            {3: {"ece": 0.1, "ausc": None}, 4: {"ece": None, "ausc": None, "no_match_auprc": 0.5, "by": "x"}}
        )
        assert found["mean"] == found["std"] == {}
        assert found["undefined"] == {"ece": [4], "ausc": [3, 4], "no_match_auprc": [3]}

    def test_has_no_mean_if_a_seed_is_infinite(self) -> None:
        found = summary({0: {"R²": 0.5}, 1: {"R²": -math.inf}})
        assert found == {"n": 2, "mean": {}, "std": {}, "undefined": {"R²": [1]}}

    def test_of_one_seed_has_no_deviation(self) -> None:
        assert summary({5: {"ece": 0.1}}) == {"n": 1, "mean": {"ece": 0.1}, "std": {}, "undefined": {}}


class TestSeeds:
    def test_go_on_from_the_configuration(self) -> None:
        assert list(seeds_of(load_config(NORM, ["--seed=3"]), 2)) == [3, 4]

    def test_of_ensembles_share_no_member(self) -> None:
        config = load_config("digits deep_ensemble", ["--method.n_members=4"])
        assert list(seeds_of(config, 3)) == [0, 4, 8]

    def test_must_be_some(self) -> None:
        with pytest.raises(ValueError, match="seeds.*1.*0"):
            seeds_of(load_config(NORM), 0)

    @pytest.mark.parametrize("seeds", [[], [1, 1]])
    def test_must_differ(self, seeds: list[int], tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"seeds.*\["):
            sweep(tiny(tmp_path), seeds)


@pytest.mark.long
def test_the_command_runs_every_seed_and_keeps_what_is_finished(tmp_path: Path, lam: Lam) -> None:
    folder = tmp_path / "sweep"
    command = ["sweep", *NORM.split(), "--seeds", "2", "--quiet", "--output", str(folder), *TINY]
    printed = lam(*command).out
    assert sorted(path.name for path in folder.iterdir()) == ["seed-0", "seed-1", "sweep.json"]
    found = json.loads((folder / "sweep.json").read_text())
    rows = [json.loads((folder / f"seed-{seed}" / "metrics.json").read_text()) for seed in (0, 1)]
    assert found["seeds"] == {"0": rows[0], "1": rows[1]}
    values = [row["map@5"] for row in rows]
    assert (found["n"], found["mean"]["map@5"]) == (2, statistics.fmean(values))
    assert found["std"]["map@5"] == statistics.stdev(values)
    *table, last = printed.splitlines()
    assert last == f"all metrics: {folder / 'sweep.json'}"
    shown = {line.split()[0]: line.split()[1:] for line in table if line.startswith(" ")}
    assert shown["map@5"] == [f"{found['mean']['map@5']:.4f}", "±", f"{found['std']['map@5']:.4f}"]
    assert {"recall@1", "ausc", "auroc", "auroc@digits_held_out"} <= shown.keys()
    assert not any(name.startswith(("seconds", "n_")) or "_knn" in name for name in shown)
    assert rows[0]["auroc"] != rows[1]["auroc"]

    before = {path: path.stat().st_mtime_ns for path in folder.glob("seed-*/*")}
    assert lam(*command).out == printed
    assert {path: path.stat().st_mtime_ns for path in folder.glob("seed-*/*")} == before


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, float | None]]:
    """Metrics by seed, which replace real runs; a seed without metrics fails."""
    given: dict[int, dict[str, float | None]] = {}

    def run(config: RunConfig, *, progress: bool) -> SimpleNamespace:
        if config.seed not in given:
            raise ValueError("the loss is not finite")
        Path(config.folder).mkdir(parents=True)
        return SimpleNamespace(metrics=given[config.seed])

    monkeypatch.setattr("lam.runs.sweep.run", run)
    return given


def test_a_sweep_that_fails_leaves_what_it_had(tmp_path: Path, measured: dict[int, dict[str, float | None]]) -> None:
    measured |= {0: {"map@1": 0.5}, 1: {"map@1": None}}
    with pytest.raises(ValueError, match="loss.*finite"):
        sweep(tiny(tmp_path / "sweep"), [0, 1, 2])
    found = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert found["undefined"] == {"map@1": [1]}
    assert found["seeds"] == {"0": {"map@1": 0.5}, "1": {"map@1": None}}


def test_the_command_says_what_is_undefined(
    tmp_path: Path, measured: dict[int, dict[str, float | None]], lam: Lam
) -> None:
    measured |= {seed: {"map@5": 0.5, "ece": None if seed else 0.1, "hidden": None} for seed in range(3)}
    command = ("sweep", *NORM.split(), f"--output={tmp_path / 'sweep'}")
    lines = [line.split() for line in lam(*command, "--seeds=3").out.splitlines()]
    assert lines[0] == ["retrieval"]
    assert [lines[1], lines[3]] == [["map@5", "0.5000", "±", "0.0000"], ["ece", "undefined", "for", "seed", "1,", "2"]]
    shutil.rmtree(tmp_path / "sweep")
    assert lam(*command, "--seeds=1").out.splitlines()[1].split() == ["map@5", "0.5000"]


def test_it_does_not_mix_with_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text("margin: 0.7\n")
    with pytest.raises(ValueError, match="not a sweep: .*--output"):
        sweep(tiny(tmp_path), [0])
    folders: list[Path] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lam.runs.sweep.run", lambda config, **_: folders.append(config.folder) or pytest.fail("stop"))
    with pytest.raises(pytest.fail.Exception):
        sweep(load_config(NORM), [0])
    assert folders == [Path("runs/digits/norm-sweep/seed-0")]


def test_short_forms_set_the_data(tmp_path: Path, lam: Lam) -> None:
    for arguments, message in (
        (["run", *NORM.split(), "--limit", "0"], "data.limit.*1, got 0"),
        (["demo", "--limit=few"], "data.limit: .*'few'"),
        (["demo", "--allow-missing"], "--allow-missing.*digits"),
        (["run", "--allow-missing", *NORM.split(), "--limit", "9"], "--allow-missing"),
        (["sweep", *NORM.split(), "--seeds", "0"], "seeds.*1, got 0"),
    ):
        assert re.search(message, lam(*arguments, code=1).err)
