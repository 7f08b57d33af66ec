"""The installed package: the wheel holds all files of a run; importing `lam` is fast and changes nothing."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import urllib.request
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lam.utils.extras import install_command
from tests.conftest import TINY

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
LIGHT = {"lam", "numpy", "PIL", "jaxtyping"}  # beside torch, what `import lam` may load
ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def python(code: str, *, cwd: Path, path: Path = ROOT) -> Any:
    """The JSON that code prints in a new interpreter."""
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
    """The wheel of the files in git, built in a copy, so that no build files are left here."""
    if not (ROOT / "setup.cfg").is_file():
        pytest.skip("not in a checkout: there is nothing to build")
    copy = tmp_path_factory.mktemp("source")
    for name in ("setup.cfg", "pyproject.toml", "lam_command.py", "DESCRIPTION.md", "LICENSE"):
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
    assert packaged == source | {"lam/py.typed", "lam_command.py"}
    assert "lam/configs/data/digits.yaml" in packaged
    assert any(name.endswith("LICENSE") for name in names)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the installed wheel and the libraries of this environment."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")  # .pth files in that folder are not read
    pip(environment / "bin", "install", f"{wheel}[cpu,serve]")
    return environment / "bin"


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command that cannot find this checkout."""
    done = subprocess.run(command, cwd=cwd, env=ALONE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(programs: Path, *arguments: str) -> str:
    """The output of pip for an environment without pip, without an index."""
    python = str(programs / "python")
    return run(sys.executable, "-m", "pip", "--python", python, *arguments, "--no-index", cwd=programs)


def test_ctrl_c_during_the_imports_ends_the_command_quietly(tmp_path: Path) -> None:
    (tmp_path / "lam").mkdir()
    (tmp_path / "lam" / "__init__.py").write_text("print('imported', flush=True)\nimport time\ntime.sleep(60)\n")
    shutil.copy(ROOT / "lam_command.py", tmp_path)
    enter = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # shells may disable it
    program = [sys.executable, "-c", f"{enter}; import lam_command; lam_command.main()"]
    with subprocess.Popen(program, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        assert command.stdout
        assert command.stdout.readline() == "imported\n"
        command.send_signal(signal.SIGINT)
        assert command.communicate(timeout=30)[1] == ""
    assert command.returncode == 130


def test_pip_finds_the_installed_wheel_when_an_extra_is_added(installed: Path) -> None:
    assert "already satisfied: lam-retrieval" in pip(installed, *shlex.split(install_command("serve"))[1:])


def test_the_installed_wheel_runs_the_demo_and_serves_it(installed: Path, tmp_path: Path) -> None:
    run(installed / "lam", "demo", *TINY, "--output=digits", "--quiet", cwd=tmp_path)
    where = run(installed / "python", "-c", "import lam; print(lam.__file__)", cwd=tmp_path)
    assert Path(where).is_relative_to(installed.parent)
    command = [installed / "lam", "serve", "digits", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, env=ALONE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        (address,) = re.findall(r"http://\S+:\d+", server.stdout.readline())
        for file in ("", *(path.name for path in (ROOT / "lam" / "service" / "page").iterdir())):
            with urllib.request.urlopen(f"{address}/{file}") as answer:
                assert answer.status == 200, file
        server.terminate()
    assert server.returncode == 0


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
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=ALONE, capture_output=True, text=True, check=False
    )
    assert done.stdout == "lam.methods.fit\n", done.stderr


def test_importing_lam_fills_the_registry_of_metrics_and_loads_nothing_of_the_product(tmp_path: Path) -> None:
    found = python(
        "import importlib, json, pkgutil, sys, lam; from lam.retrieval import METRICS; at_first = sorted(METRICS); "
        "rooms = sorted({name.split('.')[1] for name in sys.modules if name.startswith('lam.')}); "
        "[importlib.import_module(module.name) for module in pkgutil.walk_packages(lam.__path__, 'lam.')"
        " if not module.name.endswith('__main__')]; "
        "print(json.dumps([sorted(set(METRICS) - set(at_first)), rooms]))",
        cwd=tmp_path,
    )
    assert found[0] == []
    assert not {"runs", "gallery", "service", "experiments", "cli"} & set(found[1])
