"""What all tests share: nothing may leak out of a test, and one finished run serves all that need one.

What takes long to import is imported where it is used: the process that hands tests out needs none of it.
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
    """How long the longest of the slow tests takes is for whoever runs it."""
    parser.addoption("--minutes-of-traffic", type=float, default=10.0, help="good and bad requests to the service")


def pytest_collectstart() -> None:
    """Import lam before any file of tests, as some builds of torchvision can be imported after it alone.

    Only who runs tests collects them: with xdist, the workers.
    """
    import lam  # noqa: F401


def tiny(output: Path, *overrides: str) -> "RunConfig":
    """The demo's configuration under `TINY` and further settings."""
    from lam.runs.config_files import load_config

    return load_config("digits laplace_posthoc", [*TINY, f"--output={output}", *overrides])


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    """Give every test the same random numbers; fail where environment, threads or default dtype are left changed."""
    import lightning_fabric  # noqa: F401 - sets an environment variable when it is imported, as it would be in some test
    import sklearn  # noqa: F401 - likewise
    import torch

    environment, threads, dtype = dict(os.environ), torch.get_num_threads(), torch.get_default_dtype()
    running, random_state, numpy_state = set(threading.enumerate()), torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    torch.manual_seed(0)
    yield
    torch.set_rng_state(random_state)
    np.random.set_state(numpy_state)  # noqa: NPY002
    leaks = [f"${name}" for name in environment.keys() | os.environ.keys() if _changed(name, environment)]
    if torch.get_num_threads() != threads:
        leaks.append("torch's number of threads")
    if torch.get_default_dtype() != dtype:
        leaks.append("torch's default dtype")
    leaks += [
        f"thread {thread.name}" for thread in threading.enumerate() if not thread.daemon and thread not in running
    ]
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    if leaks:
        pytest.fail(f"the test left changed: {', '.join(sorted(leaks))}")


def _changed(name: str, before: dict[str, str]) -> bool:
    return name != "PYTEST_CURRENT_TEST" and os.environ.get(name) != before.get(name)


@contextlib.contextmanager
def unrendered_pictures() -> Iterator[None]:
    """Have pictures drawn up to the last step, and a white dot written: three quarters of a tiny run are rendering.

    For tests that look at no picture; those of `finished_run`, and of runs on images and texts, are rendered.
    """
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
    """A run of the demo under `TINY`, and what it printed."""

    folder: Path
    printed: str


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """One finished run for all tests, which must not change it."""
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
    """An image folder as a user has it: a sub-folder a class, of images of several sizes."""
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
    """A real Milvus server, which a test that ends it starts again."""
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
