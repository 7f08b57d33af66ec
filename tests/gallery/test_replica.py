"""Replicas of a gallery that another process writes, over a Milvus server."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from lam.gallery.filters import Filter
from lam.gallery.gallery import Gallery
from lam.gallery.refusal import Refusal
from lam.gallery.replica import Replica
from tests.gallery.test_gallery import D, embeddings, found, items, opened
from tests.milvus_servers import MilvusLite
from tests.service.asking import JSON
from tests.service.serving import served

pytestmark = pytest.mark.long

pytest.importorskip("pymilvus", reason="the extra milvus is not installed")
pytest.importorskip("milvus_lite", reason="Milvus Lite is not installed")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusLite]:
    process = MilvusLite(tmp_path_factory.mktemp("milvus") / "data")
    yield process
    process.end()


@pytest.fixture
def address(server: MilvusLite, tmp_path: Path) -> str:
    """A collection for each test."""
    return f"milvus://127.0.0.1:{server.port}/items_{abs(hash(tmp_path))}"


def test_replicas_follow_the_writer(run_copy: Path, address: str) -> None:
    where = Filter.parse(json.dumps({"must": [{"has_id": ["0-1", "0-2"]}]}))
    writer = Gallery(run_copy / "gallery", D, index=address)
    first, second = (Replica(run_copy / "gallery", D, index=address) for _ in range(2))
    for replica in (first, second):
        assert len(replica) == 60
        assert len(replica.matching(where)) == 0
    writer.write(items(3))
    query = embeddings(3)[1:2]
    for replica in (first, second):
        assert (len(replica), found(replica, query)) == (63, ["0-1"])
        assert replica.store.get("0-1") is not None
        assert len(replica.matching(where)) == 2
        assert replica.search(query, 9, replica.matching(where))[0].ids.shape == (1, 2)
    first.close()
    assert not isinstance(writer.write(["0-1"])[0], Refusal)  # a replica's open file does not prevent erasure
    assert found(second, query) != ["0-1"]
    assert (len(second), len(second.matching(where))) == (62, 1)
    second.close()
    writer.close()


def test_a_replica_leaves_out_what_only_the_collection_holds(run_copy: Path, address: str) -> None:
    with opened(run_copy, address) as writer, closing(Replica(run_copy / "gallery", D, index=address)) as replica:
        writer.write(items(4))
        queries = embeddings(4)
        wanted = replica.search(queries, 7)
        writer.store.write(["0-0", "0-2"])  # as if the writer had died before it reached the server
        hits, infos = replica.search(queries, 5)
        assert hits.ids.shape == (4, 5)
        assert {infos[key].id for key in hits.ids.flatten().tolist()}.isdisjoint({"0-0", "0-2"})
        for row in range(4):
            left = [key for key in wanted[0].ids[row].tolist() if wanted[1][key].id not in ("0-0", "0-2")]
            assert hits.ids[row].tolist() == left[:5]
        with pytest.raises(Refusal, match="only reads"):
            replica.write(items(1))


def test_a_replica_waits_until_the_collection_has_caught_up(run_copy: Path, address: str) -> None:
    """After an outage, a replica may reach the server before the writer does."""
    with opened(run_copy, address) as writer:
        writer.store.write(items(2))
        with closing(Replica(run_copy / "gallery", D, index=address)) as replica:
            assert replica.complaint is not None
            with pytest.raises(Refusal, match="searched now"):
                replica.search(embeddings(1), 1)
            assert writer.index.probe()
            assert replica.index.probe()
            assert found(replica, embeddings(1)) == ["0-0"]


def test_a_replica_needs_the_collection_of_a_writer(run_copy: Path, address: str, tmp_path: Path) -> None:
    for index in (None, "flat", f"milvus://{tmp_path}/items.db/items"):
        with pytest.raises(ValueError, match="process that writes"):
            Replica(run_copy / "gallery", D, index=index)
    with pytest.raises(ValueError, match="without --replica first"):
        Replica(run_copy / "gallery", D, index=address)
    with pytest.raises(ValueError, match="missing or empty"):
        Replica(tmp_path, D, index=address)


def test_a_replica_that_is_killed_loses_nothing(run_copy: Path, address: str) -> None:
    body = json.dumps({"embedding": embeddings(1).mean[0].tolist(), "kappa": 9.0}).encode()
    serve = ("lam", "serve", "--index", address)
    with served(run_copy, *serve) as writer:
        with served(run_copy, *serve, "--replica") as replica, served(run_copy, *serve, "--replica") as other:
            assert writer.ask("PUT", "/v1/items/new", body, JSON)[0] == 201
            for each in (replica, other):
                status, answer = each.ask("POST", "/v1/search?k=1", body, JSON)
                assert (status, answer["hits"][0]["id"]) == (200, "new")
            status, refusal = replica.ask("PUT", "/v1/items/more", body, JSON)
            assert status == 403
            assert "without --replica" in refusal["allowed"]
            assert replica.ask("DELETE", "/v1/items/new", None, JSON)[0] == 403
            replica.process.kill()
            replica.process.wait()
            assert writer.ask("PUT", "/v1/items/more", body, JSON)[0] == 201
            assert other.ask("GET", "/v1/items/more")[0] == 200
            assert writer.ask("DELETE", "/v1/items/new", None, JSON)[0] == 200
            assert other.ask("GET", "/v1/items/new")[0] == 404
        assert len(writer.ids()) == 61


def test_a_replica_follows_patches_batches_and_filtered_deletions(run_copy: Path, address: str) -> None:
    vectors = embeddings(5).mean.tolist()
    items_of = [{"id": f"batch/{n}", "embedding": vector, "kappa": 9.0} for n, vector in enumerate(vectors)]
    batch = json.dumps({"items": items_of}).encode()
    patch = json.dumps({"label": "renamed", "metadata": {"shelf": 1}}).encode()
    on_shelf = quote(json.dumps({"must": [{"key": "shelf", "match": {"value": 1}}]}))
    query = json.dumps({"embedding": vectors[2], "kappa": 9.0}).encode()
    serve = ("lam", "serve", "--index", address)
    with served(run_copy, *serve) as writer, served(run_copy, *serve, "--replica") as replica:

        def first(filter: str = "") -> dict[str, Any] | None:
            status, answer = replica.ask("POST", f"/v1/search?k=1{filter}", query, JSON)
            assert status == 200
            return next(iter(answer["hits"]), None)

        changes = [
            ("POST", "/v1/items/batch", batch),
            ("PATCH", "/v1/items/batch/2", patch),
            ("DELETE", f"/v1/items?filter={on_shelf}", None),
        ]
        for method, path, body in changes:
            assert replica.ask(method, path, body, JSON)[0] == 403
        assert writer.ask(*changes[0], JSON)[0] == 200
        assert first()["id"] == "batch/2"
        assert first(f"&filter={on_shelf}") is None
        assert writer.ask(*changes[1], JSON)[0] == 200
        assert (first()["label"], first(f"&filter={on_shelf}")["id"]) == ("renamed", "batch/2")
        assert writer.ask(*changes[2], JSON)[0] == 200
        assert first()["id"] != "batch/2"
        assert first(f"&filter={on_shelf}") is None
        assert replica.ask("GET", "/v1/items/batch/2")[0] == 404
