"""Loads the user's own networks, losses, methods and data sets, from installed packages or from files.

Code runs only if the user installs a package with an entry point, or names a file in a command. Files in a run's folder
never cause other code to run.
"""

import importlib.util
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from lam import datasets, hessians, losses, methods, models
from lam.encoders import load as encoders

GROUPS: Mapping[str, Callable[[str, Any], None]] = {
    "lam.networks": models.register,
    "lam.losses": losses.register,
    "lam.curvatures": hessians.register,
    "lam.encoders": encoders.register,
    "lam.methods": methods.register,
    "lam.datasets": datasets.register,
}
"""The registering function of each group of entry points."""


def load_installed() -> None:
    """Register every entry point of `GROUPS`; leave out an entry point that fails, with a warning."""
    installed = entry_points()
    for group, register in GROUPS.items():
        for entry in sorted(installed.select(group=group)):
            try:
                register(entry.name, entry.load())
            except (Exception, SystemExit) as error:
                warnings.warn(
                    f"{entry.name!r} of {group}, of the package {_package(entry)}, cannot be loaded "
                    f"({type(error).__name__}: {error}) and is left out: update or remove that package",
                    stacklevel=2,
                )


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value.partition(":")[0]


def load_file(path: str | Path) -> None:
    """Execute a Python file once, as a module with the file's name; the file may register networks, losses and so on.

    The file's folder is added to the end of `sys.path`. The file can then import its neighbours, and processes that
    read data can import the file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "my_names.py").write_text("print('executed')")
        ...     load_file(Path(folder, "my_names.py"))
        ...     load_file(Path(folder, "my_names.py"))
        executed
    """
    path = Path(path).resolve()
    name = path.stem
    if not path.is_file():
        raise ValueError(f"there is no file {path}: give a Python file as the plugin")
    if path.suffix != ".py" or not name.isidentifier():
        raise ValueError(f"a plugin must be a Python file with the name of a module, such as mine.py, got {path}")
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return
    found = importlib.util.find_spec(name) if known is None else known.__spec__
    if known is not None or not (found is None or found.origin == str(path)):  # it may be this file
        raise ValueError(f"the plugin {path} has the name of another module, {name}: rename the file")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        sys.path.remove(str(path.parent))
        raise ValueError(f"the plugin {path} fails{_line_in(path, error)}: {type(error).__name__}: {error}") from error


def _line_in(path: Path, error: BaseException) -> str:
    """The words " in line N" for the file's last line in the traceback; empty without a line of the file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f" in line {lines[-1]}" if lines else ""
