"""A calibrated run of the demo, an engine on a copy of it, and a client that speaks to the application directly."""

import io
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient

from lam.retrieval.decisions.calibration import Targets
from lam.runs.calibrate import CalibrationOptions, calibrate_run
from lam.service.engine import Engine
from lam.service.settings import ServiceSettings
from tests.conftest import FinishedRun, unrendered_pictures
from tests.milvus_servers import CONTRACTS, MilvusLite, lite_or_own
from tests.runs.conftest import lam  # noqa: F401 - a fixture
from tests.service.asking import client_of
from tests.text_runs import faq, text_run

SMALL = ServiceSettings(
    max_body=200_000, max_held=2_000_000, max_pixels=1_000_000, body_seconds=0.5, answer_seconds=10.0
)


@pytest.fixture(scope="session")
def calibrated_run(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run with targets of ten percent, for which its 60 items suffice; tests must not change it."""
    folder = Path(shutil.copytree(finished_run.folder, tmp_path_factory.mktemp("calibrated") / "run"))
    with unrendered_pictures():
        calibrate_run(
            folder,
            CalibrationOptions(targets=Targets(far=0.1, ood=0.1, conformal_miss=0.1), flag="kappa"),
            progress=False,
        )
    return folder


@pytest.fixture
def served_run(calibrated_run: Path, tmp_path: Path) -> Path:
    """A copy of the calibrated run that a test may change."""
    return Path(shutil.copytree(calibrated_run, tmp_path / "run"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of an engine over each index that their module names as `INDEXES`."""
    indexes = getattr(metafunc.module, "INDEXES", None)
    if "index" in metafunc.fixturenames and indexes is not None:
        if "engine" in metafunc.fixturenames:  # `engine` may write
            indexes = CONTRACTS
        metafunc.parametrize("index", indexes, indirect=True, scope="module")


@pytest.fixture(scope="module")
def index(request: pytest.FixtureRequest) -> str:
    """The index of the engine: in this process, or one of `tests.milvus_servers.CONTRACTS`."""
    return getattr(request, "param", "flat")


@pytest.fixture
def engine(served_run: Path, index: str) -> Iterator[Engine]:
    """The run, opened under small limits."""
    with closing(Engine(served_run, SMALL, index=lite_or_own(index, served_run))) as opened:
        yield opened


@pytest.fixture(scope="module")
def writer(calibrated_run: Path, index: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The engine that writes to the gallery of `shared_engine`: itself, unless that is a replica."""
    run = Path(shutil.copytree(calibrated_run, tmp_path_factory.mktemp("shared") / "run"))
    with ExitStack() as stack:
        address = lite_or_own(index, run)
        if index == "replica":
            server = MilvusLite(run.with_name("milvus"))
            stack.callback(server.end)
            address = f"milvus://127.0.0.1:{server.port}/items"
        yield stack.enter_context(closing(Engine(run, SMALL, index=address)))


@pytest.fixture(scope="module")
def shared_engine(writer: Engine, index: str) -> Iterator[Engine]:
    """One engine for tests whose additions do not affect other tests."""
    if index == "replica":
        address = writer.gallery.index.factory
        with closing(Engine(writer.run.folder, SMALL, index=address, replica=True)) as opened:
            yield opened
    else:
        yield writer


@pytest.fixture(scope="module")
def client(shared_engine: Engine) -> TestClient:
    """A client of the shared engine."""
    return client_of(shared_engine)


@pytest.fixture(scope="session")
def calibrated_texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated run of questions and answers; tests must not change it."""
    folder = tmp_path_factory.mktemp("texts")
    with unrendered_pictures():
        text_run(folder / "run", faq(folder / "faq.json"), "--method.tune=none")  # votes are useless for so few words
        calibrate_run(folder / "run", CalibrationOptions(targets=Targets(far=0.2, ood=0.2)), progress=False)
    return folder / "run"


@pytest.fixture
def served_texts(calibrated_texts: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(calibrated_texts, tmp_path / "run"))


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """The file of an image."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.fixture(scope="session")
def png() -> bytes:
    """A grey gradient of 8 x 8 pixels."""
    return encoded(Image.linear_gradient("L").resize((8, 8)))
