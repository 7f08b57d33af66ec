"""Small requests that cost much work, one and eight at once: others do not wait, and memory stays small."""

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.service.serving import ROOT, Served, Watch, served
from tests.service.test_images import blank, colour

pytestmark = pytest.mark.long

JSON = "application/json"


@dataclass(frozen=True)
class Cost:
    """A request, and its allowed answers.

    Attributes:
        path: its path.
        kind: its content type.
        body: function that returns its body.
        answers: allowed statuses.
        read: whether the whole body is read, and is in memory as bytes, as text and as images.
    """

    path: str
    kind: str
    body: Callable[[], bytes]
    answers: tuple[str, ...]
    read: bool = False


def lists(name: str) -> bytes:
    """A body of lists in JSON, with the maximum size."""
    return f'{{"{name}":['.encode() + b"[]," * 3_300_000 + b"[]]}"


def noise(count: int) -> str:
    return base64.b64encode(os.urandom(count)).decode()


def batch(kind: str, content: str) -> bytes:
    return json.dumps({"queries": [{kind: content}] * 64}).encode()


def pair() -> bytes:
    image = {"image": noise(3_600_000)}
    return json.dumps({"first": image, "second": image}).encode()


BATCH = "/v1/search/batch"
REFUSED, ANSWERED = ("400", "422"), ("200", "503")


COSTS = {
    "lists to search": Cost("/v1/search", JSON, lambda: lists("embedding"), ("413",), read=True),
    "lists to add": Cost("/v1/items", JSON, lambda: lists("metadata"), ("413",), read=True),
    "lists in a batch": Cost("/v1/search/batch", JSON, lambda: lists("queries"), ("413",), read=True),
    "as many lists as a batch may have": Cost(
        BATCH, JSON, lambda: lists("queries")[:50_000] + b"]}", REFUSED, read=True
    ),
    "long texts in a batch": Cost(BATCH, JSON, lambda: batch("text", "word " * 12_000), ANSWERED, read=True),
    "large images in a batch": Cost(BATCH, JSON, lambda: batch("image", noise(110_000)), ANSWERED, read=True),
    "lists to verify": Cost("/v1/verify", JSON, lambda: lists("first"), ("413",), read=True),
    "as many lists as may be": Cost("/v1/search", JSON, lambda: lists("embedding")[:60_000] + b"]]}", ("400", "422")),
    "nested lists": Cost("/v1/items", JSON, lambda: b'{"metadata":' + b"[" * 1000 + b"]" * 1000 + b"}", ("400", "422")),
    "one long word": Cost("/v1/items", JSON, lambda: b'{"label":"' + b"x" * 1_000_000 + b'"}', ("413",), read=True),
    "a pair of large images": Cost("/v1/verify", JSON, pair, ("415", "503"), read=True),
    "a PNG of 1 x 25 million": Cost("/v1/search", "image/png", lambda: blank(1, 25_000_000), ("413",)),
    "a PNG of 16 bits": Cost("/v1/items", "image/png", lambda: blank(5000, 5000, bits=16), ("200", "201", "503")),
    "a PNG of colours": Cost("/v1/search", "image/png", lambda: blank(3900, 3900, 2), ("200", "503")),
    "a JPEG": Cost("/v1/search", "image/jpeg", lambda: colour(5000, "JPEG"), ("200", "503")),
    "a WebP": Cost("/v1/search", "image/webp", lambda: colour(1900, "WEBP", method=0), ("200", "503")),
}


@pytest.fixture(scope="module")
def found(calibrated_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A process that has answered each request once, because first uses keep memory."""
    run = Path(shutil.copytree(calibrated_run, tmp_path_factory.mktemp("costs") / "run"))
    with served(run, "lam", "serve", MALLOC_ARENA_MAX="2") as found:
        yield found


def sent_at_once(found: Served, cost: Cost, file: Path, *, count: int) -> "subprocess.Popen[str]":
    """A process that sends a request several times, and prints the answers."""
    command = [sys.executable, "-m", "tests.service.sending", str(found.port), "POST", cost.path, cost.kind, str(file)]
    return subprocess.Popen([*command, str(count)], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def costs_little(found: Served, cost: Cost, folder: Path, count: int, p99: float) -> Watch:
    file = folder / "body"
    file.write_bytes(cost.body())
    with Watch(found) as watch:
        answers = json.loads(sent_at_once(found, cost, file, count=count).communicate(timeout=100)[0])
    assert set(answers) & set(cost.answers), answers
    assert set(answers) <= {*cost.answers, "503"}, answers  # a machine at work elsewhere may be busy for long enough
    assert set(watch.answers) == {"200"}
    assert watch.p99() < p99
    assert watch.grown < 64 * 2**20 + cost.read * 3 * count * file.stat().st_size
    return watch


@pytest.mark.parametrize("name", COSTS)
def test_what_costs_more_than_it_weighs_holds_nobody_up(found: Served, tmp_path: Path, name: str) -> None:
    costs_little(found, COSTS[name], tmp_path, 8, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("name", COSTS)
def test_what_costs_more_than_it_weighs_holds_nobody_up_for_50_ms(
    found: Served, tmp_path: Path, name: str, count: int, record_property: Callable[[str, object], None]
) -> None:
    watch = costs_little(found, COSTS[name], tmp_path, count, 0.05)
    record_property(f"{name}, {count} at once", json.dumps(watch.told()))
