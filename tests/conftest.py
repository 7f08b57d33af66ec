"""Fixtures of all tests: a check for leaks, and one finished run for all.

Slow imports are inside functions: the process that hands tests out needs none of them.
"""

import contextlib
import io
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from PIL import Image

from tests.milvus_servers import MilvusServer, milvus_command

if TYPE_CHECKING:
    from lam.runs.config import RunConfig

TINY = ("--data.limit=60", "--training.epochs=2", "--evaluation.n_samples=8", "--network.dimension=3")
"""Settings under which the demo takes about a second."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option for the length of the longest slow test."""
    parser.addoption("--minutes-of-traffic", type=float, default=10.0, help="good and bad requests to the service")


def pytest_collectstart() -> None:
    """Import lam before any test file, in the processes that run tests, as some builds of torchvision need it."""
    import lam  # noqa: F401


def tiny(output: Path, *overrides: str) -> "RunConfig":
    """The demo's configuration with `TINY` and further settings."""
    from lam.runs.config_files import load_config

    return load_config("digits laplace_posthoc", [*TINY, f"--output={output}", *overrides])


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    """Give every test the same random numbers, and fail if it changes environment, threads or default dtype."""
    import lightning_fabric  # noqa: F401 - its import sets an environment variable
    import sklearn  # noqa: F401 - likewise
    import torch

    environment, threads, dtype = dict(os.environ), torch.get_num_threads(), torch.get_default_dtype()
    running, random_state, numpy_state = set(threading.enumerate()), torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    torch.manual_seed(0)
    yield
    torch.set_rng_state(random_state)
    np.random.set_state(numpy_state)  # noqa: NPY002
    names = (environment.keys() | os.environ.keys()) - {"PYTEST_CURRENT_TEST"}
    leaks = [f"${name}" for name in names if os.environ.get(name) != environment.get(name)]
    if torch.get_num_threads() != threads:
        leaks.append("torch's number of threads")
    if torch.get_default_dtype() != dtype:
        leaks.append("torch's default dtype")
    new_threads = [new for new in set(threading.enumerate()) - running if not new.daemon]
    for new in new_threads:
        new.join(timeout=1)  # transformers does not wait for the threads that load weights
    leaks += [f"thread {new.name}" for new in new_threads if new.is_alive()]
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    if leaks:
        pytest.fail(f"the test left changed: {', '.join(sorted(leaks))}")


@pytest.fixture
def as_in_production(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn off the type checks of test runs, so that lam's own errors can be seen."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute in one thread, so that sums have a fixed order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@contextlib.contextmanager
def unrendered_pictures() -> Iterator[None]:
    """Write a white dot for each picture, for tests that need no pictures: rendering takes most of a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        dot = Image.new("L", (1, 1), 255)
        patch.setattr("matplotlib.figure.Figure.savefig", lambda _, path, **__: dot.save(path, format="png"))
        yield


@pytest.fixture
def unrendered() -> Iterator[None]:
    """`unrendered_pictures` for one test."""
    with unrendered_pictures():
        yield


@dataclass(frozen=True)
class FinishedRun:
    """A run of the demo with `TINY`, and its printed output."""

    folder: Path
    printed: str


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A finished run, which no test may change."""
    from lam.cli import main

    folder = tmp_path_factory.mktemp("finished") / "run"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["demo", "--quiet", f"--output={folder}", *TINY]) == 0
    return FinishedRun(folder, printed.getvalue())


@pytest.fixture
def run_copy(finished_run: FinishedRun, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change."""
    return Path(shutil.copytree(finished_run.folder, tmp_path / "run"))


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """A folder of images of several sizes, with a sub-folder a class."""
    generator = np.random.default_rng(0)
    for name, colour in (("birch", 60), ("maple", 130), ("oak", 200)):
        folder = tmp_path / "photographs" / name
        folder.mkdir(parents=True)
        for i in range(8):
            pixels = generator.normal(colour, 20, (40 + i, 48, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.jpg")
    return tmp_path / "photographs"


@pytest.fixture(scope="session")
def milvus_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusServer]:
    """A real Milvus server; a test that ends it starts it again."""
    server = MilvusServer(
        milvus_command(tmp_path_factory.mktemp("milvus") / "env"), tmp_path_factory.mktemp("milvus_data")
    )
    yield server
    server.end()


@pytest.fixture(scope="session")
def digit_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small PNG files of handwritten digits: three classes of eight in sub-folders."""
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("images")
    pixels, labels = load_digits(return_X_y=True)
    for digit in (0, 1, 2):
        (folder / str(digit)).mkdir()
        for number, row in enumerate(np.flatnonzero(labels == digit)[:8]):
            grey = np.round(pixels[row].reshape(8, 8) * 255 / 16).astype(np.uint8)
            Image.fromarray(grey).save(folder / str(digit) / f"{number}.png")
    return folder
