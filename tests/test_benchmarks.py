"""Every benchmark can be started: its imports exist, also from other benchmarks."""

import argparse
import contextlib
import runpy
import sys
from pathlib import Path

import pytest

from lam.service.engine import Engine

SCRIPTS = sorted((Path(__file__).parent.parent / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_benchmark_finds_what_it_imports(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(script.parent))
    runpy.run_path(str(script), run_name="not main")
    for name in [other.stem for other in SCRIPTS]:
        sys.modules.pop(name, None)


def test_a_cell_of_the_suite_needs_no_more_than_other_benchmarks_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SCRIPTS[0].parent
    monkeypatch.syspath_prepend(str(folder))
    suite = runpy.run_path(str(folder / "suite.py"), run_name="not main")
    given = argparse.Namespace(work=tmp_path, **suite["NOT_ASKED"])
    config = suite["configured"](given, "digits", suite["digits"](given), "laplace_posthoc", 0)
    assert config.output == str(tmp_path / "digits-laplace_posthoc-0")
    assert config.checkpoint == str(tmp_path / "digits-deterministic-0")


@pytest.mark.long
def test_the_made_run_of_the_service_can_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SCRIPTS[0].parent
    monkeypatch.syspath_prepend(str(folder))
    service = runpy.run_path(str(folder / "service.py"), run_name="not main")
    with contextlib.closing(Engine(service["make_run"](tmp_path, "convnet28", 20, "Flat"))) as engine:
        assert len(engine.gallery) == 20
