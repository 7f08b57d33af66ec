"""The metadata of a release: it declares all imports, and its versions and advice are right."""

import ast
import configparser
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml

import lam
from lam.utils.extras import DISTRIBUTION

ROOT = Path(__file__).parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", encoding="utf-8")
EXTRAS = SETUP["options.extras_require"]
FEATURES = sorted(EXTRAS.keys() - {"docs", "test", "gpu"})  # faiss-gpu brings the same module as faiss-cpu


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    """Distributions that lam and some extras require."""
    lines = "\n".join([SETUP["options"]["install_requires"], *(EXTRAS[extra] for extra in extras)])
    return {normal(name) for name in re.findall(r"^([A-Za-z0-9._-]+)", lines, re.MULTILINE)}


def imports(tree: ast.AST, *, within_functions: bool = True) -> Iterator[str]:
    """Modules that a file imports."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
        if within_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports(node, within_functions=within_functions)


def strings(tree: ast.AST) -> Iterator[str]:
    """Strings of a file: some are names of modules that it imports."""
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))


def distributions(folder: str, modules: Callable[[ast.AST], Iterator[str]]) -> dict[str, str]:
    """Distributions, except lam, whose modules a folder's files name, each with one of the files."""
    brought = packages_distributions()

    def bringing(module: str) -> Sequence[str]:
        """The distribution of a module; of several, the one with the module's name, or the API."""
        names = brought.get(module.partition(".")[0], ())
        own = ["-".join(module.split(".")[:2]), f"{module.partition('.')[0]}-api"]
        return next(([name] for name in own if len(names) > 1 and name in names), names)

    return {
        normal(distribution): path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / folder).rglob("*.py"))
        for module in modules(ast.parse(path.read_text(encoding="utf-8")))
        for distribution in bringing(module)
        if not module.startswith("lam")
    }


@pytest.mark.parametrize(
    ("folder", "extras"), [("lam", FEATURES), ("tests", [*FEATURES, "test"])], ids=["lam", "tests"]
)
def test_imports_are_declared(folder: str, extras: list[str]) -> None:
    assert {name: path for name, path in distributions(folder, imports).items() if name not in declared(*extras)} == {}


def test_a_file_imports_libraries_of_an_extra_within_functions() -> None:
    """The service needs its extra at once, and so does each adapter."""
    at_once = distributions("lam", lambda tree: imports(tree, within_functions=False))
    beyond = {name: path for name, path in at_once.items() if name not in declared()}
    apart = "lam/service/", "lam/integrations/", "lam/client.py"
    assert all(path.startswith(apart) for path in beyond.values()), beyond
    assert {name for name, path in beyond.items() if path.startswith("lam/service/")} <= declared("serve", "otel")


def test_the_source_names_all_that_is_declared() -> None:
    assert declared(*FEATURES) - distributions("lam", imports).keys() - distributions("lam", strings).keys() == set()


def test_each_command_to_install_names_an_extra() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "lam").rglob("*.py"))
    extras = re.findall(r"install_command\([\"'](\w+)", sources)
    assert len(extras) > 5
    assert set(extras) <= set(EXTRAS)
    assert SETUP["metadata"]["name"] == DISTRIBUTION


@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.stem
)
def test_pages_install_nothing_of_another_project(page: Path) -> None:
    for requirement in re.findall(r"pip install (?:-\S+ )*'?([\w.-]+)", page.read_text(encoding="utf-8")):
        assert requirement in (".", DISTRIBUTION, "pre-commit"), requirement


def test_versions_are_the_same() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == lam.__version__


def test_the_description_has_no_link_that_only_a_clone_resolves() -> None:
    description = (ROOT / SETUP["metadata"]["long_description"].removeprefix("file: ")).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]*)\)", description)
    assert targets
    assert all(target.startswith("https://") for target in targets), targets


def test_the_workflow_runs_each_python_that_is_promised() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    runs = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    promised = re.findall(r"Python :: (3\.\d+)$", SETUP["metadata"]["classifiers"], re.MULTILINE)
    assert {run["python"] for run in runs} == set(promised)
