"""The registered method of `own_method.py`, from outside lam, works like the other methods."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

import lam
from lam import methods
from lam.cli import main
from lam.encoders import load as encoders
from lam.methods import METHODS, Deterministic, Hib
from lam.runs.config import RunConfig
from lam.runs.config_files import describe_settings, load_config
from tests.conftest import TINY
from tests.methods.own_method import Length, LengthEncoder
from tests.methods.test_laws import LAWS

pytestmark = pytest.mark.usefixtures("unrendered")


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    encoders.register("length", LengthEncoder)
    methods.register("length", Length)
    yield
    for registry in (METHODS, encoders.ENCODERS):
        registry.pop("length", None)


def test_it_takes_fewer_than_forty_lines() -> None:
    lines = Path(__file__).with_name("own_method.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) < 40


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__.removeprefix("law_"))
def test_it_keeps_the_law(law: Callable[[str, Path], None], tmp_path: Path) -> None:
    law("length", tmp_path)


def test_it_is_configured_as_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config("digits length", ["--method.level=20"])
    config.check()
    assert config.method.settings() == {"name": "length", "level": 20.0}
    assert RunConfig.parsed(config.resolved()) == config
    assert str(config.folder) == "runs/digits/length"
    assert "of length:" in describe_settings()
    assert "method.level  " in describe_settings()
    with pytest.raises(ValueError, match="no setting method.levl.*`lam run --help`"):
        load_config("digits length", ["--method.levl=20"])
    with pytest.raises(ValueError, match="method.level.*valid.*'high'"):
        load_config("digits length", ["--method.level=high"])
    assert main(["run", "folder", "length", "--print", "--method.level=3"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["method"] == {"name": "length", "level": 3.0}


@pytest.mark.long
def test_it_runs_and_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["run", "digits", "length", "--quiet", f"--output={folder}", "--method.level=7", *TINY]) == 0
    assert f"report: {folder / 'report.html'}" in capsys.readouterr().out
    assert (lam.load(folder / "encoder").kind, load_config(folder).method.settings()["level"]) == ("length", 7.0)


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="method 'hib' already.*Hib"):
        methods.register("hib", Deterministic)
    with pytest.raises(ValueError, match="kind 'norm' already.*NormEncoder"):
        encoders.register("norm", Deterministic.encoder)
    methods.register("hib", Hib)


def test_what_is_not_registered_is_refused_and_what_is_known_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert main(["run", "digits", "length", "--quiet", f"--output={folder}", *TINY]) == 0
    del encoders.ENCODERS["length"], METHODS["length"]
    with pytest.raises(ValueError, match="kind 'length'.*laplace, .*, gaussian"):
        lam.load(folder / "encoder")
    with pytest.raises(ValueError, match="method.*deterministic, .*laplace_online.*'length'"):
        load_config(folder)
