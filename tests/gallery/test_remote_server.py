"""A gallery over a Milvus server in its own process, which is killed or stopped."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lam.gallery import remote_index
from lam.gallery.gallery import Gallery
from lam.gallery.refusal import Refusal
from tests.gallery.test_gallery import D, embeddings, found, items
from tests.gallery.test_remote_index import holds_what_is_stored
from tests.milvus_servers import MILVUS, MilvusLite, MilvusProcess

pytestmark = pytest.mark.long

pytest.importorskip("pymilvus", reason="the extra milvus is not installed")
pytest.importorskip("milvus_lite", reason="Milvus Lite is not installed")


@pytest.fixture(params=MILVUS)
def process(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MilvusProcess]:
    """A server that a test may end or stop; afterwards, it runs again."""
    own = MilvusLite(tmp_path / "milvus") if request.param == "lite" else None
    used = own or request.getfixturevalue("milvus_server")
    yield used
    used.go_on()
    if own is not None:
        own.end()
    elif not used.listens():
        used.start()


def test_a_server_that_is_killed_or_stopped_over_tcp(
    process: MilvusProcess, run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One search waits for the time-out, the next ones fail at once, and later the collection gets all changes."""
    monkeypatch.setattr(remote_index, "TIMEOUT", 3.0)
    monkeypatch.setattr(remote_index, "PAUSE", 0.2)
    gallery = Gallery(run_copy / "gallery", D, index=f"milvus://127.0.0.1:{process.port}/items")
    try:
        for seed, (fail, mend) in enumerate([(process.end, process.start), (process.stop, process.go_on)]):
            fail()
            started = time.monotonic()
            with pytest.raises(Refusal, match="searched now"):
                gallery.search(embeddings(1), 1)
            assert time.monotonic() - started < 10
            started = time.monotonic()
            with pytest.raises(Refusal, match="searched now"):
                gallery.search(embeddings(1), 1)
            gallery.write(items(2, seed))
            assert gallery.write([f"{seed}-1"])[0].status == 503
            assert time.monotonic() - started < 3.0
            mend()
            until = time.monotonic() + 60
            while gallery.complaint is not None and time.monotonic() < until:
                time.sleep(0.05)
            holds_what_is_stored(gallery)
            assert found(gallery, embeddings(1, seed)) == [f"{seed}-0"]
            assert len(gallery) == 61 + seed
    finally:
        process.go_on()  # or closing would wait for it
        gallery.close()
