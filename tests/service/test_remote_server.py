"""A gallery over a Milvus server in a process of its own, Milvus Lite, that is killed, and one that is stopped."""

import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lam.service import remote_index
from lam.service.errors import ServiceError
from lam.service.gallery import Gallery
from tests.service.test_gallery import D, embeddings, found, items
from tests.service.test_remote_index import holds_what_is_stored

pytest.importorskip("pymilvus", reason="the extra milvus is not installed")
pytest.importorskip("milvus_lite", reason="Milvus Lite is not installed")


class Process:
    """Milvus Lite, listening at a port of this machine."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._command = [
            sys.executable,
            "-m",
            "milvus_lite",
            "server",
            "--data-dir",
            str(folder),
            "--host",
            "127.0.0.1",
        ]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [*self._command, "--port", str(self.port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + 30
        while time.monotonic() < until:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=0.2):
                return
            time.sleep(0.05)
        pytest.fail("Milvus Lite does not listen")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


def test_a_server_that_is_killed_or_stopped_over_tcp(
    run_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One search finds it out, within the time-out; the next ones fail at once, and all that was written follows."""
    monkeypatch.setattr(remote_index, "TIMEOUT", 3.0)
    monkeypatch.setattr(remote_index, "PAUSE", 0.2)
    process = Process(tmp_path / "milvus")
    gallery = Gallery(run_copy, D, index=f"milvus://127.0.0.1:{process.port}/items")
    try:
        for seed, (fail, mend) in enumerate([(process.end, process.start), (process.stop, process.go_on)]):
            fail()
            started = time.monotonic()
            with pytest.raises(ServiceError, match="the index cannot be searched now"):
                gallery.search(embeddings(1), 1)
            assert time.monotonic() - started < 10
            started = time.monotonic()
            with pytest.raises(ServiceError, match="the index cannot be searched now"):
                gallery.search(embeddings(1), 1)
            gallery.write(items(2, seed))
            assert gallery.write([f"{seed}-1"])[0].status == 503
            assert time.monotonic() - started < 3.0
            mend()
            until = time.monotonic() + 30
            while gallery.complaint is not None and time.monotonic() < until:
                time.sleep(0.05)
            holds_what_is_stored(gallery)
            assert found(gallery, embeddings(1, seed)) == [f"{seed}-0"]
            assert len(gallery) == 61 + seed
    finally:
        process.go_on()
        gallery.close()
        process.end()
