"""A process that serves while another opens more connections than it may have files, in each way that does harm."""

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.crowding import WAYS
from tests.service.serving import ROOT, Served, Watch, served

JSON = {"Content-Type": "application/json", "X-API-Key": "key"}


@contextlib.contextmanager
def few_files(calibrated_run: Path, folder: Path, files: int) -> Iterator[Served]:
    """A run, served with a key as `lam serve` does, by a process that may open few files; a page of it is large."""
    run = Path(shutil.copytree(calibrated_run, folder / "run"))
    with served(run, "lam", "serve", files=files, LAM_API_KEY="key") as found:
        dimension = found.ask("GET", "/v1/model", headers=JSON)[1]["dimension"]
        body = {"embedding": [1.0] + [0.0] * (dimension - 1), "kappa": 50.0, "metadata": {"text": "x" * 16000}}
        for number in range(60):
            found.ask("PUT", f"/v1/items/{number}-large", json.dumps(body).encode(), JSON)
        yield found


@pytest.fixture(scope="module")
def fewer(calibrated_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with few_files(calibrated_run, tmp_path_factory.mktemp("fewer"), 512) as found:
        yield found


@pytest.fixture(scope="module")
def few(calibrated_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with few_files(calibrated_run, tmp_path_factory.mktemp("few"), 1024) as found:
        yield found


def crowded(found: Served, way: str, *, count: int, seconds: float, processes: int = 1) -> tuple[Watch, dict[str, Any]]:
    """Watch the service while connections are kept in some way; what came of it, and of them."""
    command = [sys.executable, "-m", "tests.service.crowding", str(found.port), way, str(count), str(seconds)]
    with Watch(found) as watch:
        crowds = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
        outcomes = [json.loads(crowd.communicate(timeout=seconds + 60)[0]) for crowd in crowds]
    return watch, dict(sum(map(Counter, outcomes), Counter()))


def lets_go(found: Served, before: int) -> float:
    """Seconds until the process has no more files open than before, but for a few."""
    begun = time.monotonic()
    while found.files() > before + 3:
        assert time.monotonic() - begun < 20
        time.sleep(0.01)
    return time.monotonic() - begun


@pytest.mark.parametrize("way", WAYS)
def test_a_crowd_shuts_nobody_out(fewer: Served, way: str) -> None:
    before = fewer.files()
    watch, outcomes = crowded(fewer, way, count=420, seconds=1.5)
    assert set(watch.answers) == {"200"}, outcomes
    assert watch.p99() < 2.0
    assert watch.logged < 10_000
    assert lets_go(fewer, before) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_crowd_of_1100_shuts_nobody_out(
    few: Served, way: str, record_property: Callable[[str, object], None]
) -> None:
    before = few.files()
    with Watch(few) as alone:
        time.sleep(5)
    watch, outcomes = crowded(few, way, count=1100, seconds=30.0, processes=4 if way == "closed" else 1)
    told = {**watch.told(), "crowd": outcomes, "let_go_seconds": round(lets_go(few, before), 2)}
    record_property(way, json.dumps({**told, "health_p99_ms_alone": alone.told()["health_p99_ms"]}))
    assert set(watch.answers) == {"200"}, outcomes
    assert watch.p99() < 0.05
    assert watch.logged < 10**6
    assert watch.grown < 64 * 2**20
    assert told["let_go_seconds"] < 1.0
