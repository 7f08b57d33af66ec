"""Full or failing disks under a service: changes that cannot be written are refused, and reads continue.

Three ways to test this: a limit on the size of files, a small file system, and failing calls.
"""

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.service.conftest import encoded
from tests.service.serving import Served, items_in, served

pytestmark = pytest.mark.long

NOISE = encoded(Image.effect_noise((128, 128), 90))


def holds(run: Path, found: Served, png: bytes, fail: Callable[[], object], mend: Callable[[], object]) -> None:
    """Acknowledged items are stored, refused ones are not, and reads always work."""
    listed = found.ask("GET", "/v1/items?limit=1")[1]
    total, indexed = listed["total"], listed["items"][0]["id"]
    acknowledged: list[str] = []
    fail()
    for number in range(500):
        status, told = found.ask("PUT", f"/v1/items/new-{number}", NOISE)
        if status != 201:
            break
        acknowledged.append(f"new-{number}")
    assert (status, told["allowed"]) == (507, "searches")
    assert "not be stored" in told["error"]
    assert found.ask("GET", f"/v1/items/new-{number}")[0] == 404
    refused = found.ask("DELETE", f"/v1/items/{indexed}")[0]
    assert refused in (507, 503)  # 503 if there was room for the deletion, but not for emptying the log
    assert found.ask("GET", f"/v1/items/{indexed}")[0] == (200 if refused == 507 else 404)
    for name in acknowledged:
        assert found.ask("GET", f"/v1/items/{name}")[0] == 200
    status, answer = found.ask("POST", "/v1/search?k=100", png)
    assert (status, answer["gallery_size"]) == (200, total + len(acknowledged) - (refused == 503))
    assert found.ask("GET", "/v1/ready")[0] == 200
    mend()
    assert found.ask("PUT", "/v1/items/later", NOISE)[0] == 201
    assert found.ask("DELETE", f"/v1/items/{indexed}")[0] == (200 if refused == 507 else 404)
    found.process.kill()
    found.process.wait()
    names = [item.id for item in items_in(run)]
    assert len(names) == len(set(names)) == total + len(acknowledged)  # one was added, one deleted
    assert {*acknowledged, "later"} <= set(names)
    assert indexed not in names


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit, which Linux has")
def test_a_process_whose_files_may_not_grow(served_run: Path, png: bytes) -> None:
    with served(served_run) as found:

        def limit(size: int) -> None:
            resource.prlimit(found.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

        holds(served_run, found, png, lambda: limit(4096), lambda: limit(resource.RLIM_INFINITY))


@contextlib.contextmanager
def small_file_system(folder: Path, size: int) -> Iterator[None]:
    """Mount a small file system, if this is allowed."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root may mount a file system")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_file_system_that_is_full(calibrated_run: Path, tmp_path: Path, png: bytes) -> None:
    disk = tmp_path / "disk"
    size = sum(path.stat().st_size for path in calibrated_run.rglob("*") if path.is_file())

    def grow() -> None:
        subprocess.run(["mount", "-o", f"remount,size={2 * size + 2**25}", str(disk)], check=True)

    with small_file_system(disk, 2 * size + 2**20):
        run = Path(shutil.copytree(calibrated_run, disk / "run"))
        with served(run) as found:
            holds(run, found, png, lambda: None, grow)


@pytest.fixture(scope="module")
def failing_calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that makes system calls fail."""
    compiler = shutil.which("cc")
    if compiler is None or not Path("/proc/self").is_dir():
        pytest.skip("needs Linux and a C compiler")
    library = tmp_path_factory.mktemp("library") / "failing_calls.so"
    source = Path(__file__).with_name("failing_calls.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_calls_that_fail(served_run: Path, tmp_path: Path, failing_calls: Path, call: str, png: bytes) -> None:
    (names := tmp_path / "names").touch()
    with served(served_run, LD_PRELOAD=str(failing_calls), FAILING_CALLS=str(names)) as found:
        holds(served_run, found, png, lambda: names.write_text(call), lambda: names.write_text(""))
