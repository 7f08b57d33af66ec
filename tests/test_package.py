"""What is installed: the wheel holds what a run needs, and importing `lam` costs little and changes nothing."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
LIGHT = {"lam", "numpy", "PIL", "jaxtyping"}  # beside torch, what `import lam` may load


def python(code: str, *, cwd: Path, path: Path = ROOT) -> Any:
    """What the code printed as JSON, in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of what git would hand out: built in a copy, so that nothing is left behind here."""
    if not (ROOT / "setup.cfg").is_file():
        pytest.skip("not in a checkout: there is nothing to build")
    copy = tmp_path_factory.mktemp("source")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("lam", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(copy / "out"), str(copy)],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (copy / "out").glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_no_more(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source = {path.relative_to(ROOT).as_posix() for path in (ROOT / "lam").rglob("*.py")}
    source |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "lam" / "configs").rglob("*.yaml")}
    source |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "lam" / "service" / "page").iterdir()}
    source |= {f"lam/{room}/report.html.jinja" for room in ("experiments", "runs")}
    source |= {"lam/utils/page.html.jinja", "lam/utils/page.css"}
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == source | {"lam/py.typed"}
    assert "lam/configs/data/digits.yaml" in packaged
    assert any(name.endswith("LICENSE") for name in names)


def test_the_wheel_works_away_from_the_repository(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    found = python(
        "import json, lam; from lam.cli import DEMOS; from lam.runs.config_files import load_config, SHIPPED; "
        "[load_config(demo).check() for demo in DEMOS.values()]; "
        "print(json.dumps([lam.__file__, str(SHIPPED), lam.__version__]))",
        cwd=tmp_path,
        path=tmp_path / "site",
    )
    assert Path(found[0]).is_relative_to(tmp_path / "site")
    assert Path(found[1]) == tmp_path / "site" / "lam" / "configs"
    assert found[2] in wheel.name


def test_the_command_is_installed(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert "lam = lam.cli:main" in archive.read(entry_points).decode()


def test_importing_lam_is_light(tmp_path: Path) -> None:
    code = (
        "import json, sys, torch; before = set(sys.modules); import lam; "
        "print(json.dumps(sorted({name.partition('.')[0] for name in set(sys.modules) - before} "
        "- sys.stdlib_module_names)))"
    )
    assert set(python(code, cwd=tmp_path)) <= LIGHT


def test_importing_lam_changes_nothing(tmp_path: Path) -> None:
    state = (
        "[torch.get_rng_state().tolist(), repr(random.getstate()), repr(np.random.get_state()), "
        "str(torch.get_default_dtype()), torch.get_num_threads(), torch.is_grad_enabled(), dict(os.environ), "
        "repr(warnings.filters), logging.getLogger().level, len(logging.getLogger().handlers), signal_handlers(), "
        "sorted(name for name, logger in logging.root.manager.loggerDict.items() "
        "if isinstance(logger, logging.Logger) and (logger.handlers or logger.level) and name not in before)]"
    )
    code = (
        "import json, logging, os, random, signal, warnings; import numpy as np, torch, jaxtyping, PIL.Image, tqdm\n"
        "def signal_handlers(): return [repr(signal.getsignal(number)) for number in signal.valid_signals()]\n"
        "before = set(logging.root.manager.loggerDict)\n"
        f"first = {state}\n"
        "import lam\n"
        f"print(json.dumps([name for name, (a, b) in enumerate(zip(first, {state})) if a != b]))"
    )
    assert python(code, cwd=tmp_path) == []


def test_a_script_beside_the_clone_finds_the_package_and_not_the_folder_of_the_clone(tmp_path: Path) -> None:
    (tmp_path / "lam").mkdir()
    (tmp_path / "script.py").write_text("import lam\nprint(lam.fit.__module__)\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.stdout == "lam.methods.fit\n", done.stderr
