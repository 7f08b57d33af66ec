"""A gallery over a Milvus collection: the same answers, and the effects of an outage."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lam.gallery import remote_index
from lam.gallery.filters import Filter
from lam.gallery.gallery import Gallery
from lam.gallery.item import Item
from lam.gallery.refusal import Refusal
from lam.retrieval.index.milvus_index import MilvusIndex
from lam.service.engine import Engine
from lam.vmf.embeddings import Embeddings
from tests.gallery.test_gallery import D, adding_and_searching, embeddings, found, items
from tests.milvus_servers import MILVUS, address_of
from tests.service.asking import client_of
from tests.service.conftest import SMALL, calibrated_run, served_run  # noqa: F401 - fixtures

pymilvus = pytest.importorskip("pymilvus", reason="the extra milvus is not installed")
pytest.importorskip("milvus_lite", reason="Milvus Lite is not installed")

NEVER = 1e6


class Server:
    """Intercepts every call to Milvus: lets it through, or fails as pymilvus does if the server is down."""

    def __init__(self) -> None:
        self.down = False  # before a call
        self.mute = False  # after a call, whose answer is lost
        self.calls = 0

    @contextmanager
    def stands_before(self) -> Iterator[None]:
        self.calls += 1
        if self.down:
            raise pymilvus.MilvusException(message="server unavailable")
        yield
        if self.mute:
            raise pymilvus.MilvusException(message="deadline exceeded")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server that fails on demand; only the test tries to reach it again."""
    made, told = Server(), MilvusIndex._connection_errors

    @contextmanager
    def guarded(index: MilvusIndex) -> Iterator[None]:
        with told(index), made.stands_before():
            yield

    monkeypatch.setattr(MilvusIndex, "_connection_errors", guarded)
    monkeypatch.setattr(remote_index, "PAUSE", NEVER)
    return made


@pytest.fixture(params=MILVUS)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return address_of(request.param, request, tmp_path)


@pytest.fixture
def gallery(server: Server, run_copy: Path, address: str) -> Iterator[Gallery]:
    opened = Gallery(run_copy / "gallery", D, index=address)
    yield opened
    opened.close()


def holds_what_is_stored(gallery: Gallery) -> None:
    """The collection has every key of the store once, and no other."""
    index = gallery.index._index
    assert sorted(gallery.store.keys()) == index.ids.tolist()
    assert len(index) == len(gallery)


def refused(gallery: Gallery, server: Server) -> None:
    """A search is a 503, and the server is not asked."""
    before = server.calls
    with pytest.raises(Refusal, match="searched now") as error:
        gallery.search(embeddings(1), 1)
    assert error.value.status == 503
    assert int(error.value.headers["Retry-After"]) >= 1
    assert server.calls == before


def trip(gallery: Gallery, server: Server) -> None:
    server.down = True
    with pytest.raises(Refusal, match="searched now"):
        gallery.search(embeddings(1), 1)
    assert gallery.complaint is not None


def put_back(gallery: Gallery, server: Server) -> None:
    server.down = server.mute = False
    assert gallery.index.probe()
    assert gallery.complaint is None
    holds_what_is_stored(gallery)


def test_hits_are_those_of_the_own_index(
    run_copy: Path, tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids, scores, κ and order, while items are added, replaced and deleted."""
    monkeypatch.setattr(time, "time_ns", lambda: 0)  # both galleries give the same keys
    changes = ([], items(6), [items(1, seed=4)[0], "0-2", "7"], [Item("0-1", items(1)[0].vector, 4.0)])
    copy, queries = shutil.copytree(run_copy, tmp_path / "copy"), embeddings(8, seed=3)
    own, remote = Gallery(run_copy / "gallery", D), Gallery(copy / "gallery", D, index=address)
    for operations in changes:
        own.write(operations)
        remote.write(operations)
        assert len(remote) == len(own)
        for k in (1, 7, 500):
            (wanted, named), (got, also_named) = own.search(queries, k), remote.search(queries, k)
            assert also_named == named
            assert torch.equal(got.ids, wanted.ids)
            torch.testing.assert_close(got.scores, wanted.scores, rtol=0, atol=1e-6)
            torch.testing.assert_close(got.kappa, wanted.kappa, rtol=0, atol=0)
    own.close()
    remote.close()


def test_filtered_hits_are_those_of_the_own_index(run_copy: Path, tmp_path: Path, address: str) -> None:
    copy, queries = shutil.copytree(run_copy, tmp_path / "copy"), embeddings(8, seed=3)
    own, remote = Gallery(run_copy / "gallery", D), Gallery(copy / "gallery", D, index=address)
    labels = sorted({info.label for info in own.store.page(after="", limit=1000).values()})
    for chosen in (labels[:1], labels[1:4], ["none"]):
        where = Filter.parse(json.dumps({"must": [{"has_label": chosen}]}))
        for k in (1, 7, 500):
            parts = own.matching(where), remote.matching(where)
            (wanted, named), (got, also_named) = own.search(queries, k, parts[0]), remote.search(queries, k, parts[1])
            assert also_named == named
            assert {info.label for info in named.values()} <= set(chosen)
            assert torch.equal(got.ids, wanted.ids)
            torch.testing.assert_close(got.scores, wanted.scores, rtol=0, atol=1e-6)
    own.close()
    remote.close()


def test_items_come_and_go(gallery: Gallery) -> None:
    one, other = items(2)
    for item in (one, Item(one.id, other.vector, 9.0), one):
        (change,) = gallery.write([item])
        assert change.key is not None
        query = Embeddings(torch.from_numpy(item.embedding.copy())[None], *torch.ones(3, 1))
        assert found(gallery, query) == [one.id]
        holds_what_is_stored(gallery)
    gallery.write([one])  # as it is
    gallery.write([other, other.id])  # there and gone at once
    (change,) = gallery.write([one.id])
    assert change.removed
    assert one.id not in found(gallery, embeddings(1), 100)
    holds_what_is_stored(gallery)
    assert len(gallery) == 60


def test_a_restart_catches_up(run_copy: Path, address: str, server: Server) -> None:
    first = Gallery(run_copy / "gallery", D, index=address)
    first.write(items(3))
    first.close()
    own = Gallery(run_copy / "gallery", D)  # the collection learns nothing of this
    own.write([*items(2, seed=1), "0-0", "7", Item("0-1", items(1)[0].vector, 4.0)])
    own.close()
    again = Gallery(run_copy / "gallery", D, index=address)
    assert again.complaint is None
    holds_what_is_stored(again)
    assert len(again) == 60 + 3 + 2 - 2
    assert found(again, embeddings(1)) == ["0-1"]
    assert found(again, embeddings(1, seed=1)) == ["1-0"]
    before = server.calls
    again.close()
    Gallery(run_copy / "gallery", D, index=address).close()
    assert server.calls - before < 20  # stored items are not sent again


def test_a_failing_search_opens_the_circuit(gallery: Gallery, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    trip(gallery, server)
    refused(gallery, server)
    assert "server unavailable" in caplog.text
    assert "server" not in (gallery.complaint or "")  # the server's error is only in the log
    assert len(gallery) == 60
    assert gallery.store.get("7") is not None
    put_back(gallery, server)
    assert len(found(gallery, embeddings(1), 3)) == 3


def test_what_is_written_in_an_outage_follows(gallery: Gallery, server: Server) -> None:
    """No item is lost, none is stored twice, and deleted items are gone."""
    gallery.write(items(4))
    trip(gallery, server)
    before = server.calls
    added, updated, deleted, unknown = gallery.write(
        [items(1, seed=1)[0], Item("0-1", items(1, seed=2)[0].vector, 9.0), "0-2", "nobody"]
    )
    assert added.created
    assert updated.key is not None
    for refusal in (deleted, unknown):  # not reported as erased while this is unknown
        assert isinstance(refusal, Refusal)
        assert refusal.status == 503
        assert "does not answer" in refusal.error
    gallery.write(items(3, seed=3))
    assert gallery.write(["3-1"])[0].status == 503
    assert server.calls == before
    assert len(gallery) == 60 + 4 + 1 - 1 + 2
    assert gallery.store.get("0-2") is None
    put_back(gallery, server)
    assert [found(gallery, embeddings(1, seed=seed)) for seed in (1, 2)] == [["1-0"], ["0-1"]]
    assert not {"0-2", "3-1"} & set(found(gallery, embeddings(4)[2:3], 100))
    assert gallery.write(["0-2"])[0].removed == ()


@pytest.mark.parametrize("failing", ["down", "mute"])
def test_a_failing_write_opens_the_circuit_and_is_stored(gallery: Gallery, server: Server, failing: str) -> None:
    """Also if the server carried out the write, and its answer was lost."""
    setattr(server, failing, True)
    (change,) = gallery.write(items(1))
    assert change.created
    refused(gallery, server)
    put_back(gallery, server)
    assert found(gallery, embeddings(1)) == ["0-0"]
    setattr(server, failing, True)
    assert gallery.write(["0-0"])[0].status == 503
    put_back(gallery, server)
    assert "0-0" not in found(gallery, embeddings(1), 100)


def test_a_trial_that_fails_keeps_the_circuit_open(
    gallery: Gallery, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the server answers, but the update of the collection fails for any reason."""
    trip(gallery, server)
    gallery.write(items(3))
    assert not gallery.index.probe()
    refused(gallery, server)
    server.down = False
    for error in (ConnectionError("out of quota"), KeyError("a bug of the client")):
        with monkeypatch.context() as patched:
            patched.setattr(MilvusIndex, "put", lambda *_, error=error: (_ for _ in ()).throw(error))
            assert not gallery.index.probe()
        refused(gallery, server)
    put_back(gallery, server)


def test_searches_wait_for_the_replay_and_changes_meanwhile_are_in_it(
    gallery: Gallery, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items are added and deleted during and after the comparison of collection and store."""
    trip(gallery, server)
    gallery.write(items(3))
    server.down, put = False, MilvusIndex.put

    def put_while_others_write(index: MilvusIndex, *given: object) -> None:
        refused(gallery, server)
        monkeypatch.setattr(MilvusIndex, "put", put)
        gallery.write([items(1, seed=1)[0], "0-0", Item("0-1", items(1, seed=2)[0].vector, 9.0)])
        put(index, *given)

    monkeypatch.setattr(MilvusIndex, "put", put_while_others_write)
    put_back(gallery, server)
    assert [found(gallery, embeddings(1, seed=seed)) for seed in (1, 2)] == [["1-0"], ["0-1"]]
    assert "0-0" not in found(gallery, embeddings(1), 100)


def test_a_late_failure_of_an_earlier_call_opens_nothing(gallery: Gallery, server: Server) -> None:
    before = gallery.index._index
    trip(gallery, server)
    put_back(gallery, server)
    gallery.index._open_circuit(before, ConnectionError("deadline exceeded"))
    assert gallery.complaint is None


def test_a_collection_that_was_lost_is_made_again(gallery: Gallery, server: Server) -> None:
    gallery.write(items(2))
    gallery.index._index._client.drop_collection(gallery.index._index.address.collection)
    with pytest.raises(Refusal, match="searched now"):
        gallery.search(embeddings(1), 1)
    put_back(gallery, server)
    assert found(gallery, embeddings(1)) == ["0-0"]


def test_it_starts_without_the_server_and_tries_by_itself(
    run_copy: Path, address: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    Gallery(run_copy / "gallery", D, index=address).close()
    server.down = True
    monkeypatch.setattr(remote_index, "PAUSE", 0.01)
    gallery = Gallery(run_copy / "gallery", D, index=address)
    assert gallery.complaint is not None
    gallery.write(items(1))
    server.down = False
    until = time.monotonic() + 10
    while gallery.complaint is not None and time.monotonic() < until:
        time.sleep(0.01)
    holds_what_is_stored(gallery)
    assert found(gallery, embeddings(1)) == ["0-0"]
    gallery.close()
    assert not any(thread.name == "lam circuit" for thread in threading.enumerate())


def test_the_first_use_needs_the_server(run_copy: Path, address: str, server: Server) -> None:
    server.down = True
    with pytest.raises(ConnectionError, match="Milvus at .*server unavailable.*(it runs|no other)"):
        Gallery(run_copy / "gallery", D, index=address)
    server.down = False
    Gallery(run_copy / "gallery", D, index=address).close()


def test_a_collection_of_others_is_refused_and_left_alone(run_copy: Path, tmp_path: Path, address: str) -> None:
    others = MilvusIndex(address, D)
    others.add(embeddings(2), [5, 6])
    with pytest.raises(ValueError, match="'items.*' in .*2 items of another"):
        Gallery(run_copy / "gallery", D, index=address)
    assert others.ids.tolist() == [5, 6]
    others.close()
    with pytest.raises(ValueError, match="address.*milvus://HOST"):
        Gallery(run_copy / "gallery", D, index="http://host/items")


def test_a_copy_leaves_the_collection_to_the_original(gallery: Gallery, tmp_path: Path, address: str) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    gallery.store.copy(copy / "items.sqlite")
    gallery.write(items(1, 99))
    with pytest.raises(ValueError, match="original of this"):
        Gallery(copy, D, index=address)
    holds_what_is_stored(gallery)
    Gallery(copy, D, index=f"{address}_2").close()
    Gallery(copy, D, index=f"{address}_2").close()


def test_items_of_another_encoder_are_refused(run_copy: Path, address: str) -> None:
    with pytest.raises(ValueError, match="item .*dimension 3.*4"):
        Gallery(run_copy / "gallery", 4, index=address)


def test_adding_and_searching_at_once(gallery: Gallery) -> None:
    adding_and_searching(gallery, 0.7, 2)


@pytest.mark.long
def test_an_outage_over_http(served_run: Path, address: str, server: Server) -> None:  # noqa: F811 - a fixture
    engine = Engine(served_run, SMALL, index=address)
    client = client_of(engine)
    axis = [1.0] + [0.0] * (engine.gallery.dimension - 1)
    body = {"embedding": axis, "kappa": 9.0}
    assert client.get("/v1/model").json()["index"] == address
    assert len(client.post("/v1/search", json=body).json()["hits"]) == 10
    server.down = True
    assert client.post("/v1/search", json=body).status_code == 503
    answer = client.post("/v1/search", json=body)
    assert (answer.status_code, "Retry-After" in answer.headers) == (503, True)
    assert "index does not" in client.get("/v1/ready").json()["error"]
    assert client.get("/v1/health").status_code == 200
    assert "lam_index_searchable 0.0" in client.get("/metrics").text
    added = client.post("/v1/items", json={**body, "id": "axis"})
    assert (added.status_code, added.json()["gallery_size"]) == (201, 61)
    assert client.get("/v1/items/axis").status_code == 200
    assert client.delete("/v1/items/7").status_code == 503
    assert client.delete("/v1/items/7").status_code == 503  # and not 404, which would say that it is gone
    assert client.get("/v1/items/7").status_code == 404
    server.down = False
    assert engine.gallery.index.probe()
    assert "lam_index_searchable 1.0" in client.get("/metrics").text
    assert client.get("/v1/ready").json() == {"status": "ready", "gallery_size": 60}
    assert client.post("/v1/search", json=body).json()["hits"][0]["id"] == "axis"
    assert client.delete("/v1/items/7").status_code == 404
    assert client.delete("/v1/items/axis").status_code == 200
    engine.close()
