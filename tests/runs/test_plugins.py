"""Networks, losses, methods and data sets of a user in the shell: from a file, and from an installed package."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch
from PIL import Image

from lam import models
from lam.runs.plugins import GROUPS, load_file, load_installed
from tests.conftest import TINY
from tests.service.serving import ROOT, served

NETWORK = """
from pathlib import Path

from torch import nn

import lam

Path(__file__).with_suffix(".executed").open("a").write("once ")


def mine(*, dimension, width=16):
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU())
    return lam.models.EmbeddingNetwork(body, nn.Linear(width, dimension))
"""
REGISTERED = f'{NETWORK}\n\nlam.models.register("mine", mine)\n'
EVERYTHING = """
from dataclasses import dataclass

from lam import datasets, losses, methods, models
from lam.losses import Contrastive
from lam.methods import Deterministic
from my_network import mine


class Mine(Contrastive):
    pass


@dataclass(frozen=True)
class Plain(Deterministic):
    pass


models.register("mine", mine)
losses.register("my_loss", Mine)
methods.register("my_method", Plain)
datasets.register("my_digits", lambda *, seed=0, limit=None: datasets.load("digits", seed=seed))
"""
SETTINGS = """
data: {name: my_digits, limit: 60}
network: {name: mine, dimension: 3, options: {width: 8}}
training: {epochs: 1, loss: my_loss}
margin: 0.7
"""


def lam(*words: object, path: Path | None = None, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """Run `lam` in the shell; `path` is one more folder of installed packages."""
    places = [str(place) for place in (ROOT, path) if place is not None]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-P", "-m", "lam", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def done(*words: object, **where: Path) -> str:
    """The output of a command that must succeed."""
    ended = lam(*words, **where)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def install(folder: Path, entries: str, **modules: str) -> Path:
    """A folder of installed packages: one package with entry points, and its modules."""
    info = folder / "my_package-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)
    for name, code in modules.items():
        (folder / f"{name}.py").write_text(code)
    return folder


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A calibrated run with a network of a file, and the file."""
    folder = tmp_path_factory.mktemp("own")
    plugin, run = folder / "my_file.py", folder / "run"
    plugin.write_text(REGISTERED)
    options = ("--plugin", plugin, "--quiet")
    tiny = [setting for setting in TINY if "n_samples" not in setting]
    done("run", "digits", "laplace_posthoc", *options, "--network.name=mine", *tiny, f"--output={run}")
    rates = ("--target-far=0.2", "--target-ood=0.2", "--target-miss=0.2", "--flag=kappa")
    assert "calibration: " in done("calibrate", run, *options, *rates)
    return run, plugin


@pytest.mark.long
def test_a_run_with_a_network_of_a_file_is_searched(own_run: tuple[Path, Path], tmp_path: Path) -> None:
    run, plugin = own_run
    assert plugin.with_suffix(".executed").read_text() == "once once "  # by two commands
    Image.new("L", (8, 8), 100).save(tmp_path / "query.png")
    found = done("search", run, tmp_path / "query.png", "-k", 3, "--plugin", plugin, "--plugin", plugin)
    assert "decision: " in found
    assert plugin.with_suffix(".executed").read_text() == "once " * 3


@pytest.mark.long
def test_it_is_served(own_run: tuple[Path, Path]) -> None:
    run, plugin = own_run
    with served(run, "lam", "serve", "--plugin", str(plugin), "--quiet") as service:
        status, item = service.ask("PUT", "/v1/items/new", _png(), {"Content-Type": "image/png"})
        assert (status, item["id"]) == (201, "new")
        status, answer = service.ask("POST", "/v1/search?k=1", _png())
        assert (status, answer["hits"][0]["id"]) == (200, "new")
        assert answer["decision"] in ("match", "unknown", "abstain")


@pytest.mark.long
def test_the_folder_of_a_run_executes_nothing(own_run: tuple[Path, Path], tmp_path: Path) -> None:
    run, plugin = own_run
    within = run / plugin.name
    within.write_text(REGISTERED)
    (run / "mine.py").write_text(REGISTERED)
    try:
        for command in (["search", run, plugin], ["calibrate", run], ["serve", run, "--port", 0]):
            ended = lam(*command, cwd=run)
            assert ended.returncode == 1
            assert "one of convnet8" in ended.stderr
            assert "--plugin" in ended.stderr
        assert not list(run.glob("*.executed"))
    finally:
        within.unlink()
        (run / "mine.py").unlink()


@pytest.mark.long
def test_an_installed_package_adds_each_kind_and_a_broken_one_is_told(tmp_path: Path) -> None:
    entries = (
        "[lam.networks]\nmine = my_network:mine\nbroken = my_network:missing\nconvnet8 = my_network:mine\n"
        "[lam.methods]\nabsent = my_absent_module:Method\n"
    )
    packages = install(tmp_path / "packages", entries, my_network=NETWORK)
    (tmp_path / "settings.yaml").write_text(SETTINGS)
    plugin = tmp_path / "my_everything.py"
    plugin.write_text(EVERYTHING)
    run = tmp_path / "run"
    words = ("run", tmp_path / "settings.yaml", "my_method", "--plugin", plugin, "--quiet", f"--output={run}")
    ended = lam(*words, path=packages)
    assert ended.returncode == 0, ended.stderr
    assert "recall@1" in ended.stdout
    for name in ("broken", "convnet8", "absent"):
        assert f"warning: '{name}' of lam." in ended.stderr
    assert ended.stderr.count("my-package 1.0") == 3
    assert "ModuleNotFoundError" in ended.stderr
    Image.new("L", (8, 8), 100).save(tmp_path / "query.png")
    assert "score" in done("search", run, tmp_path / "query.png", "--plugin", plugin, path=packages)


def test_entry_points_of_every_kind_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: dict[str, object] = {}
    groups = {group: lambda name, entry, group=group: registered.update({group: (name, entry)}) for group in GROUPS}
    entries = EntryPoints(EntryPoint(f"new {group}", "torch.nn:Linear", group) for group in [*GROUPS, "lam.others"])
    monkeypatch.setattr("lam.runs.plugins.GROUPS", groups)
    monkeypatch.setattr("lam.runs.plugins.entry_points", lambda: entries)
    load_installed()
    assert registered == {group: (f"new {group}", torch.nn.Linear) for group in GROUPS}


def test_a_broken_entry_point_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_NETWORKS", dict(models._NETWORKS))
    entries = EntryPoints(
        [EntryPoint("a", "nowhere_at_all:a", "lam.networks"), EntryPoint("mine", "torch.nn:Linear", "lam.networks")]
    )
    monkeypatch.setattr("lam.runs.plugins.entry_points", lambda: entries)
    with pytest.warns(UserWarning, match=r"'a' of lam\.networks, .*nowhere_at_all.* left out"):
        load_installed()
    assert models._NETWORKS["mine"] is torch.nn.Linear


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("absent.py", None, r"no file.*absent\.py"),
        ("my_notes.txt", "", "plugin.*Python file"),
        ("my-network.py", "", "with the name"),
        ("json.py", "", "another module, json"),
        ("my_wrong.py", "import lam\n\nlam.nothing()\n", r"my_wrong\.py.*line 3: AttributeError"),
        ("my_syntax.py", "def\n", "fails: SyntaxError"),
        ("my_exit.py", "raise SystemExit(0)\n", "fails.*line 1: SystemExit"),
    ],
)
def test_a_wrong_file_is_refused_and_leaves_nothing(name: str, code: str | None, message: str, tmp_path: Path) -> None:
    path, modules, places = tmp_path / name, set(sys.modules), list(sys.path)
    if code is not None:
        path.write_text(code)
    with pytest.raises(ValueError, match=message):
        load_file(path)
    assert path.stem not in set(sys.modules) - modules
    assert sys.path == places


def test_a_file_in_a_folder_of_modules_is_executed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    (tmp_path / "my_neighbour.py").write_text("print('executed')\n")
    load_file(tmp_path / "my_neighbour.py")
    load_file(tmp_path / "my_neighbour.py")
    assert capsys.readouterr().out == "executed\n"


def _png() -> bytes:
    from tests.service.conftest import encoded

    return encoded(Image.new("L", (8, 8), 100))
