"""The page on papers: each of its commands has settings that exist, and each experiment runs."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lam.experiments import conduct, load_experiment
from lam.runs.config_files import load_config
from tests.experiments.test_experiments import SHORT

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "papers.md"
COMMANDS = [shlex.split(command) for command in re.findall(r"`lam ([^`]+)`", PAGE.read_text(encoding="utf-8"))]
EXPERIMENTS = [words[1:] for words in COMMANDS if words[0] == "experiment"]
TINY: dict[str, dict[str, Any]] = {
    "posterior-recovery": SHORT["posterior-recovery"],
    "aninfonce-latents": SHORT["aninfonce-latents"] | {"hard_from": 1},
    "augmentation-readout": SHORT["augmentation-readout"],
    "varcon-accuracy": SHORT["varcon-accuracy"] | {"n_corrupted": 1, "losses": ("varcon",)},
    "explicit-concentration": SHORT["explicit-concentration"]
    | {"n_corrupted": 1, "bases": ("simclr",), "additions": ("square",), "ood": {}},
}


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] in ("run", "sweep")], ids=" ".join)
def test_the_settings_of_a_run_exist(words: list[str]) -> None:
    data, method, *settings = words[1:]
    paper = " --paper" if "--paper" in settings else ""
    load_config(f"{data} {method}{paper}", [setting for setting in settings if "." in setting])


@pytest.mark.parametrize("words", EXPERIMENTS, ids=" ".join)
def test_the_settings_of_an_experiment_exist(words: list[str]) -> None:
    load_experiment(words[0], words[1:])


@pytest.mark.long
@pytest.mark.parametrize("words", EXPERIMENTS, ids=" ".join)
def test_an_experiment_runs(words: list[str], tmp_path: Path) -> None:
    name, *settings = words
    swept = {setting.removeprefix("--").partition("=")[0] for setting in settings} - {"hard_from"}
    tiny = [
        f"--{setting}={list(value) if isinstance(value, tuple) else value}"
        for setting, value in {**TINY[name], "accelerator": "cpu"}.items()
        if setting not in swept
    ]
    tiny += ["--epochs=[1,2]"] if "epochs" in swept else ["--epochs=1"] if "epochs" in TINY[name] else []
    outcome = conduct(load_experiment(name, [*settings, *tiny]), tmp_path)
    assert outcome.rows
    assert (tmp_path / "report.html").stat().st_size > 1000
