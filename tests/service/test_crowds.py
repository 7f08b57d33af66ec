"""A service whose clients open more connections than its limit on files, in each harmful way."""

import contextlib
import json
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.asking import embedding
from tests.service.crowding import WAYS
from tests.service.serving import ROOT, Served, Watch, served, until
from tests.service.test_costs import COSTS, sent_at_once
from tests.service.test_images import colour

pytestmark = pytest.mark.long

JSON = {"Content-Type": "application/json", "X-API-Key": "key"}


def dimension_of(found: Served) -> int:
    return found.ask("GET", "/v1/model", headers=JSON)[1]["dimension"]


@contextlib.contextmanager
def few_files(calibrated_run: Path, folder: Path, files: int) -> Iterator[Served]:
    """A run, served by `lam serve` with a key and a low limit on files; a page of its items is large."""
    run = Path(shutil.copytree(calibrated_run, folder / "run"))
    with served(run, "lam", "serve", files=files, LAM_API_KEY="key") as found:
        body = embedding(dimension_of(found), metadata={"text": "x" * 16000})
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


def crowd(found: Served, way: str, *, count: int, seconds: float, addresses: int = 1) -> Counter[str]:
    """Keep `count` connections in one way, or close `count` new ones per second; returns counts of outcomes."""
    processes = 4 if way == "closed" and count > 1000 else 1
    arguments = (found.port, way, count // processes, seconds, addresses)
    command = [sys.executable, "-m", "tests.service.crowding", *map(str, arguments)]
    crowds = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    outcomes = [json.loads(crowd.communicate(timeout=seconds + 60)[0]) for crowd in crowds]
    return sum(map(Counter, outcomes), Counter())


class Good:
    """A good client, which searches, and adds and deletes items, during the block.

    Attributes:
        stored: ids that must exist at the end.
    """

    def __init__(self, found: Served) -> None:
        self.stored: set[str] = set()
        self._found, self._end, self._thread = found, threading.Event(), threading.Thread(target=self._ask)
        self._answers: Counter[str] = Counter()
        self._seconds: list[float] = []
        self._embedding = json.dumps(embedding(dimension_of(found))).encode()

    def __enter__(self) -> "Good":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def told(self) -> dict[str, Any]:
        """The answers, with durations in milliseconds, for a record."""
        seconds = sorted(self._seconds)
        return {"good": dict(self._answers), "good_p99_ms": round(1000 * seconds[int(0.99 * len(seconds))], 1)}

    def _ask(self) -> None:
        png, number = colour(200, "PNG"), 0
        while not self._end.wait(0.05):
            number += 1
            name = f"good-{number}"
            self._one("POST", "/v1/search", png, {"X-API-Key": "key", "Content-Type": "image/png"})
            self._one("POST", "/v1/search", self._embedding, JSON)
            if self._one("PUT", f"/v1/items/{name}", self._embedding, JSON):
                self.stored.add(name)
            if number % 2 and name in self.stored and self._one("DELETE", f"/v1/items/{name}", None, JSON):
                self.stored.remove(name)

    def _one(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> bool:
        begun = time.monotonic()
        status = self._found.ask(method, path, body, headers)[0]
        self._seconds.append(time.monotonic() - begun)
        self._answers[str(status)] += 1
        return status < 300


def lets_go(found: Served, before: int) -> float:
    """Seconds until the process has at most three more open files than before."""
    begun = time.monotonic()
    until(lambda: found.files() <= before + 3)
    return time.monotonic() - begun


def left_alone(found: Served) -> float:
    """The 99 % quantile of the durations of health checks without other requests, in seconds."""
    with Watch(found) as watch:
        time.sleep(3)
    return watch.p99()


@pytest.mark.parametrize("way", WAYS)
def test_a_crowd_shuts_nobody_out(fewer: Served, way: str) -> None:
    before = fewer.files()
    with Watch(fewer) as watch:
        outcomes = crowd(fewer, way, count=420, seconds=1.5, addresses=8)
    assert set(watch.answers) == {"200"}, outcomes
    assert watch.p99() < 2.0
    assert watch.logged < 10_000
    assert lets_go(fewer, before) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("addresses", [1, 8])
@pytest.mark.parametrize("way", WAYS)
def test_a_crowd_of_1100_shuts_nobody_out(
    few: Served, way: str, addresses: int, record_property: Callable[[str, object], None]
) -> None:
    before, alone = few.files(), left_alone(few)
    with Watch(few) as watch:
        outcomes = crowd(few, way, count=1100, seconds=12.0, addresses=addresses)
    told = {**watch.told(), "crowd": outcomes, "let_go_seconds": round(lets_go(few, before), 2)}
    told["health_p99_ms_alone"] = round(1000 * alone, 1)
    record_property(f"{way}, of {addresses} addresses", json.dumps(told))
    assert set(watch.answers) == {"200"}, outcomes
    assert watch.p99() < alone + 0.05
    assert watch.logged < 10**6
    assert watch.grown < (384 if way == "unread" else 64) * 2**20  # unread bytes count as memory
    assert told["let_go_seconds"] < 1.0


def amid(found: Served, folder: Path, *, seconds: float, round_seconds: float, count: int) -> dict[str, Any]:
    """Send good requests while crowds and costly bodies alternate; returns all measurements."""
    bad, rounds, end = Counter[str](), 0, time.monotonic() + seconds
    costs, before = list(COSTS.values()), found.files()
    with Watch(found) as watch, Good(found) as good:
        while time.monotonic() < end:
            way, cost = WAYS[rounds % len(WAYS)], costs[rounds % len(costs)]
            (file := folder / "body").write_bytes(cost.body())
            sending = sent_at_once(found, cost, file, count=4)
            bad += crowd(found, way, count=count, seconds=round_seconds, addresses=8)
            bad += Counter(json.loads(sending.communicate(timeout=60)[0]))
            rounds += 1
    assert good.stored == {name for name in found.ids(JSON) if name.startswith("good-")}
    return {
        "seconds": seconds,
        "rounds": rounds,
        **watch.told(),
        **good.told(),
        "bad": dict(sorted(bad.items())),
        "let_go_seconds": round(lets_go(found, before), 2),
    }


def test_good_requests_among_bad_ones_are_answered(fewer: Served, tmp_path: Path) -> None:
    told = amid(fewer, tmp_path, seconds=2.0, round_seconds=1.0, count=420)
    assert set(told["health"]) == {"200"}
    assert set(told["good"]) <= {"200", "201", "503"}
    assert told["good"]["200"] > told["good"].get("503", 0)


@pytest.mark.slow
def test_good_requests_among_bad_ones_are_answered_for_minutes(
    few: Served, tmp_path: Path, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    seconds = request.config.getoption("--minutes-of-traffic") * 60
    alone = left_alone(few)
    told = amid(few, tmp_path, seconds=seconds, round_seconds=10.0, count=1100)
    told["health_p99_ms_alone"] = round(1000 * alone, 1)
    record_property("traffic", json.dumps(told))
    assert set(told["health"]) == {"200"}
    assert set(told["good"]) <= {"200", "201", "503"}
    assert told["good"].get("503", 0) < 0.05 * sum(told["good"].values())
    assert told["health_p99_ms"] < 1000 * alone + 50
    assert told["memory_mib"] < 512
    assert told["logged_bytes"] < 10**6
    assert told["let_go_seconds"] < 1.0
