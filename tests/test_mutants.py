"""The list of mutants in benchmarks/mutants.py: each can still be made, and its test is there. None is run here."""

import importlib
import json
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
        changed = mutant.applied(ROOT)
        assert changed != (ROOT / mutant.file).read_text(encoding="utf-8"), mutant.name
        compile(changed, mutant.file, "exec")


def test_the_tests_that_must_fail_exist(mutants: Any) -> None:
    for mutant in mutants.MUTANTS:
        for test in mutant.tests:
            path, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), test


def test_what_a_file_no_longer_has_cannot_be_taken_out(mutants: Any, tmp_path: Path) -> None:
    mutant = mutants.Mutant("a check", "file.py", "check()\n", "", ())
    for text, found in (("", 0), ("check()\ncheck()\n", 2)):
        (tmp_path / "file.py").write_text(text)
        with pytest.raises(ValueError, match=f"a check: file.py has what is to be taken out {found} times, not once"):
            mutant.applied(tmp_path)


def test_the_results_are_those_of_this_list_and_all_are_red(mutants: Any) -> None:
    results = json.loads((ROOT / "benchmarks" / "results" / "mutants.json").read_text(encoding="utf-8"))
    assert results["tests_without_mutants"] == "green"
    assert [row["name"] for row in results["mutants"]] == [mutant.name for mutant in mutants.MUTANTS]
    assert {row["outcome"] for row in results["mutants"]} == {"red"}
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    for row in results["mutants"]:
        assert f"| {row['name']} | `{row['file']}` | " in page, row["name"]
