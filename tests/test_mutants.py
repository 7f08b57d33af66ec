"""The list of mutants in benchmarks/mutants.py: each can be applied, and its tests exist. None is run here."""

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("mutants")


def test_what_is_taken_out_is_there_once_and_what_is_left_compiles(mutants: Any) -> None:
    for mutant in mutants.MUTANTS:
        compile(mutant.applied(), mutant.file, "exec")


def test_the_tests_that_must_fail_exist(mutants: Any) -> None:
    for mutant in mutants.MUTANTS:
        path, _, name = mutant.test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), mutant.test


def test_what_a_function_no_longer_has_cannot_be_taken_out(mutants: Any) -> None:
    mutant = mutants.Mutant("a check", "lam.utils.files:write_atomically", "os.fsync(_)", "None", "")
    assert "fsync(file" not in mutant.applied()
    assert "fsync(handle" in mutant.applied()  # of another function of the file
    for old, count in (("check(_)", 0), ("Path(_)", 2)):
        with pytest.raises(ValueError, match=rf"a check: .*:write_atomically has `.*` {count} times, not once"):
            replace(mutant, old=old).applied()


def test_the_results_are_those_of_this_list_and_all_are_red(mutants: Any) -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "mutants.json").read_text(encoding="utf-8"))
    assert results["tests_without_mutants"] == "green"
    listed = [(mutant.name, mutant.function, mutant.test, "red") for mutant in mutants.MUTANTS]
    assert [(row["name"], row["function"], row["test"], row["outcome"]) for row in results["mutants"]] == listed
