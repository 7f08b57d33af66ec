"""Typical folders of users, from `lam run` to an answer of the service, without changes by hand."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from lam import datasets
from lam.cli import main
from lam.inputs.preprocessing import Preprocessing
from lam.models import photographs
from tests import brought
from tests.service.asking import JSON, opened
from tests.text_runs import TOPICS

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("unrendered"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # notes on files left out, and on rates for few items
]
needs_network = pytest.mark.skipif(photographs.why_missing() is not None, reason="the extra images is not installed")


@contextmanager
def served(data: str, root: Path, run: Path) -> Iterator[TestClient]:
    """A client of the service, after the commands that a newcomer types."""
    assert main(["run", data, "laplace_posthoc", "--data.root", str(root), "--output", str(run), "--quiet"]) == 0
    assert main(["calibrate", str(run), "--quiet"]) == 0
    with opened(run) as (client, _):
        yield client


@needs_network
@pytest.mark.parametrize("bring", [brought.phone, brought.network_drive, brought.mac_zip, brought.cvat])
def test_photographs_are_searched(tmp_path: Path, bring: Callable[[Path], Path]) -> None:
    root = bring(tmp_path / "brought")
    with served("folder", root, tmp_path / "run") as client:
        for label in brought.CLASSES:
            photograph, kind = brought.jpeg(label, 99, 6), {"content-type": "image/jpeg"}
            answer = client.post("/v1/search", content=photograph, headers=kind).json()
            assert answer["hits"][0]["label"] == label
            assert answer["calibration"] == "current"
    parts = datasets.load("folder", root=root, preprocessing=Preprocessing(size=(8, 8))).parts().values()
    assert sum(map(len, parts)) == len(brought.CLASSES) * brought.EACH


@pytest.mark.parametrize("bring", [brought.spreadsheet, brought.workbook, brought.label_studio])
def test_texts_are_searched(tmp_path: Path, bring: Callable[[Path], Path]) -> None:
    pytest.importorskip("sentence_transformers", reason="the extra text is not installed")
    with served("texts", bring(tmp_path / "brought"), tmp_path / "run") as client:
        for topic, words in TOPICS.items():
            answer = client.post("/v1/search", json={"text": " and ".join(words.split()[:2])}, headers=JSON).json()
            assert answer["hits"][0]["label"] == topic
            assert answer["calibration"] == "current"
