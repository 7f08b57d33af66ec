"""A contract that every kind of index passes, and tests of Milvus servers."""

import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lam.retrieval import Index, rank
from lam.retrieval.index.milvus_index import GREATEST_ID, MOST_HITS, TOKEN, Address, MilvusIndex
from lam.vmf.embeddings import Embeddings
from tests.milvus_servers import MILVUS, address_of

pymilvus = pytest.importorskip("pymilvus", reason="the extra milvus is not installed")
pytest.importorskip("milvus_lite", reason="Milvus Lite is not installed")

DIMENSION, COUNT = 6, 90


def embeddings(count: int, *, seed: int = 0, dimension: int = DIMENSION) -> Embeddings:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(count, dimension, generator=generator), dim=1)
    kappa = torch.logspace(-6, 8, count)[torch.randperm(count, generator=generator)]
    return Embeddings(mean, kappa, *torch.ones(2, count))


class Stored:
    """An index, and a function that opens it again as another process would."""

    def __init__(self, index: Any, again: Callable[[Any], Any], *, exact: bool) -> None:
        self.index, self.exact, self._again = index, exact, again

    def reopened(self) -> Any:
        return self._again(self.index)


def _faiss(folder: Path, factory: str) -> Stored:
    def again(index: Index) -> Any:
        index.save(folder / "index")
        return Index.open(str(folder / "index"))

    return Stored(Index(DIMENSION, factory), again, exact=factory == "Flat")


def _milvus(address: str, structure: Any) -> Stored:
    def again(index: MilvusIndex) -> Any:
        index.close()
        return Index.open(address)

    return Stored(MilvusIndex(address, DIMENSION, structure=structure), again, exact=structure == "FLAT")


STORES = [("faiss", "Flat"), ("faiss", "HNSW32")] + [
    pytest.param((kind.values[0], structure), marks=kind.marks) for kind in MILVUS for structure in ("FLAT", "HNSW")
]


@pytest.fixture(params=STORES, ids=" ".join)
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stored]:
    kind, structure = request.param
    made = _faiss(tmp_path, structure) if kind == "faiss" else _milvus(address_of(kind, request, tmp_path), structure)
    yield made
    if isinstance(made.index, MilvusIndex):
        made.index.close()


@pytest.fixture
def filled(stored: Stored) -> tuple[Stored, Embeddings, torch.Tensor]:
    items, ids = embeddings(COUNT), torch.arange(COUNT) * 7 + 3
    ids[0] = GREATEST_ID if isinstance(stored.index, MilvusIndex) else 2**63 - 1
    stored.index.add(items[:50], ids[:50])
    stored.index.add(items[50:], ids[50:].tolist())
    return stored, items, ids


def expected(items: Embeddings, ids: torch.Tensor, queries: Embeddings, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, scores = rank(queries.mean, items.mean, k=k)
    return ids[rows], scores


def check(stored: Stored, index: Any, items: Embeddings, ids: torch.Tensor, k: int, **options: Any) -> None:
    """Check that ids and cosines equal an exact ranking, for a graph nearly always, and that κ fits the ids."""
    queries = embeddings(8, seed=1)
    hits = index.search(queries, k=k, **options)
    nearest, scores = expected(items, ids, queries, k)
    assert hits.ids.shape == nearest.shape
    if stored.exact:
        assert torch.equal(hits.ids, nearest)
        torch.testing.assert_close(hits.scores, scores, rtol=0, atol=1e-6)
    assert (hits.ids == nearest).double().mean() > 0.9
    row = {item: i for i, item in enumerate(ids.tolist())}
    rows = torch.tensor([[row[item] for item in found] for found in hits.ids.tolist()])
    cosines = torch.einsum("qd,qkd->qk", queries.mean, items.mean[rows])
    torch.testing.assert_close(hits.scores, cosines, rtol=0, atol=1e-6)
    torch.testing.assert_close(hits.kappa, items.kappa[rows], rtol=0, atol=0)
    assert hits.scores.dtype == queries.mean.dtype


def test_ids_and_signed_scores_are_those_of_exact_ranking(filled: tuple[Stored, Embeddings, torch.Tensor]) -> None:
    stored, items, ids = filled
    assert len(stored.index) == COUNT
    assert stored.index.dimension == DIMENSION
    assert stored.index.is_trained
    check(stored, stored.index, items, ids, k=12)
    check(stored, stored.index, items, ids, k=COUNT)
    assert (stored.index.search(embeddings(8, seed=1), k=COUNT).scores < 0).any()


def test_means_of_samples_are_compared_with_means_of_as_many(stored: Stored) -> None:
    samples = torch.nn.functional.normalize(
        torch.randn(9, 5, DIMENSION, generator=torch.Generator().manual_seed(0)), dim=-1
    )
    nine, eight = (Embeddings.from_samples(samples[:number], torch.ones(5)) for number in (9, 8))
    own = Embeddings.from_samples(samples, torch.ones(5), mean=samples[0])
    stored.index.add(nine, range(5))
    for opened in (lambda: stored.index, stored.reopened):
        index = opened()
        assert index.search(nine, k=1).ids[:, 0].tolist() == [0, 1, 2, 3, 4]
        for other, words in ((eight, "means of 8 samples"), (own, "the network's own directions")):
            for call in (lambda: index.search(other, k=1), lambda: index.add(other, range(10, 15))):  # noqa: B023
                with pytest.raises(ValueError, match=f"{words}.*means.*9 samples"):
                    call()
        assert len(index) == 5


def test_a_search_leaves_out_items_of_low_kappa(filled: tuple[Stored, Embeddings, torch.Tensor]) -> None:
    stored, items, ids = filled
    for least in (0.0, 1e-6, 12.0, float(items.kappa[17]), 1e5, float(items.kappa.max())):
        kept = items.kappa >= least
        check(stored, stored.index, items[kept], ids[kept], k=min(9, int(kept.sum())), least_kappa=least)
    assert stored.index.search(embeddings(3), k=2, least_kappa=1e9).ids.shape == (3, 0)
    for least in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="least_kappa.*0"):
            stored.index.search(embeddings(3), k=2, least_kappa=least)


def test_what_is_removed_is_gone_and_its_id_is_free(filled: tuple[Stored, Embeddings, torch.Tensor]) -> None:
    stored, items, ids = filled
    stored.index.remove(ids[:30])
    check(stored, stored.index, items[30:], ids[30:], k=60)
    more = embeddings(5, seed=2)
    stored.index.add(more, ids[:5])
    assert torch.equal(stored.index.search(more, k=1).ids[:, 0], ids[:5])
    assert torch.equal(stored.index.kappa_of(ids[[2, 40]]), torch.stack([more.kappa[2], items.kappa[40]]).double())
    assert sorted(stored.index.ids.tolist()) == sorted(ids[:5].tolist() + ids[30:].tolist())


def test_everything_is_there_again(filled: tuple[Stored, Embeddings, torch.Tensor]) -> None:
    stored, items, ids = filled
    stored.index.remove(ids[80:])
    again = stored.reopened()
    assert len(again) == 80
    check(stored, again, items[:80], ids[:80], k=10)
    again.add(embeddings(1, seed=5), [1])
    assert len(again) == 81
    if isinstance(again, MilvusIndex):
        again.close()


@pytest.mark.parametrize("rows", [MOST_HITS, 0], ids=["deeper", "blocks"])
def test_a_search_among_many_ids_has_short_conditions(
    filled: tuple[Stored, Embeddings, torch.Tensor], monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Milvus takes longer to read a condition with 200,000 ids than a service waits for its answer."""
    stored, items, ids = filled
    conditions, call = list[str](), MilvusIndex._call

    def recorded(index: MilvusIndex, name: str, **options: Any) -> Any:
        conditions.append(options.get("filter", ""))
        return call(index, name, **options)

    monkeypatch.setattr(MilvusIndex, "_call", recorded)
    monkeypatch.setattr("lam.retrieval.index.milvus_index._LISTED", 20)
    monkeypatch.setattr("lam.retrieval.index.milvus_index._ROWS", rows)
    queries = embeddings(4, seed=3)
    cosines = queries.mean @ items.mean.T
    for among in (torch.arange(0, COUNT, 2), torch.arange(COUNT)[cosines[0] < 0], torch.arange(1, 30)):
        for k in (1, 5, 200):
            hits = stored.index.search(queries, k=k, among=ids[among])
            best = cosines[:, among].topk(min(k, len(among)))
            torch.testing.assert_close(hits.scores, best.values, atol=1e-5, rtol=0)
            assert torch.equal(hits.ids, ids[among][best.indices])
    assert all(condition.count(",") < 20 for condition in conditions)


def test_an_empty_index_answers(stored: Stored) -> None:
    nothing = embeddings(0)
    assert len(stored.index) == 0
    assert stored.index.ids.tolist() == []
    assert stored.index.search(embeddings(3), k=2).ids.shape == (3, 0)
    assert stored.index.search(embeddings(3), k=2, among=[4]).ids.shape == (3, 0)
    stored.index.add(nothing, [])
    stored.index.remove([])
    stored.index.add(embeddings(2), [4, 5])
    assert stored.index.search(nothing, k=2).ids.shape[0] == 0
    assert stored.index.search(embeddings(2), k=10**4).ids.shape == (2, 2)


def _with(embedding: Embeddings, **columns: torch.Tensor) -> Embeddings:
    return Embeddings(**{**vars(embedding), **columns})


REFUSED = [
    (embeddings(1, dimension=5), [1], "embeddings.*6.*5"),
    (_with(embeddings(1), mean=torch.full((1, 6), torch.nan)), [1], "embeddings.*got nan at index"),
    (_with(embeddings(1), mean=torch.ones(1, 6)), [1], "embeddings.*2.449"),
    (_with(embeddings(1), kappa=torch.tensor([torch.inf])), [1], "kappa.*inf.*index 0"),
    (_with(embeddings(1), kappa=torch.tensor([-1.0])), [1], "kappa.*-1.0.*index 0"),
    (embeddings(2), [1, 1], "ids must differ, got 1 twice"),
    (embeddings(1), [-1], "ids.*-1"),
    (embeddings(1), [1.5], "ids.*float64"),
    (embeddings(2), [1], r"ids.*\(2,\)"),
    (embeddings(1), [10], "ids.*new, got 10"),
]


def test_what_cannot_be_added_changes_nothing(filled: tuple[Stored, Embeddings, torch.Tensor]) -> None:
    index = filled[0].index
    for made, ids, match in REFUSED:
        with pytest.raises(ValueError, match=match):
            unwrap(type(index).add)(index, made, ids)
    assert len(index) == COUNT


def test_what_is_not_there_cannot_be_removed(filled: tuple[Stored, Embeddings, torch.Tensor]) -> None:
    index = filled[0].index
    with pytest.raises(ValueError, match="ids.*in the index, got 5"):
        index.remove([10, 5])
    with pytest.raises(ValueError, match="ids must differ, got 10 twice"):
        index.remove([10, 10])
    with pytest.raises(ValueError, match="ids.*in the index, got 4"):
        index.kappa_of([4])
    assert len(index) == COUNT


def test_k_below_one_is_refused(stored: Stored) -> None:
    for k in (0, -1, True, np.int64(0), 2.0, "3", None):
        with pytest.raises(ValueError, match="^k .*integer.*1"):
            unwrap(type(stored.index).search)(stored.index, embeddings(1), k=k)


@pytest.fixture(params=MILVUS)
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return address_of(request.param, request, tmp_path)


@pytest.fixture
def milvus(address: str) -> Iterator[MilvusIndex]:
    index = MilvusIndex(address, DIMENSION)
    yield index
    index.close()


def test_equal_cosines_stand_by_id(milvus: MilvusIndex) -> None:
    same = embeddings(1)
    for item in (9, 4, 7):
        milvus.add(same, [item])
    assert milvus.search(same, k=3).ids.tolist() == [[4, 7, 9]]


def test_more_than_one_message_is_one_addition(milvus: MilvusIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second of three messages is refused, no item of the first one stays."""
    monkeypatch.setattr("lam.retrieval.index.milvus_index._MESSAGE_ELEMENTS", 10 * DIMENSION)
    monkeypatch.setattr("lam.retrieval.index.milvus_index._MESSAGE_IDS", 7)
    items, whole = embeddings(25), milvus._client.upsert
    sent = []

    def second_fails(*given: Any, **options: Any) -> Any:
        sent.append(len(options["data"]))
        if len(sent) == 2:
            raise pymilvus.MilvusException(message="disk quota exceeded")
        return whole(*given, **options)

    monkeypatch.setattr(milvus._client, "upsert", second_fails)
    with pytest.raises(ConnectionError, match="Milvus at .*disk quota exceeded; check.*(it runs|no oth)"):
        milvus.add(items, torch.arange(25))
    assert len(milvus) == 0
    milvus.add(items, torch.arange(25))
    assert milvus.search(items, k=1).ids[:, 0].tolist() == list(range(25))
    assert len(sent) == 5


def test_an_error_of_taking_back_hides_no_other(milvus: MilvusIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(reason: str, *_: Any, **__: Any) -> None:
        raise pymilvus.MilvusException(message=reason)

    monkeypatch.setattr(milvus._client, "upsert", partial(fail, "the server is gone"))
    monkeypatch.setattr(milvus._client, "delete", partial(fail, "still gone"))
    with pytest.raises(ConnectionError, match="failed: .*gone"):
        milvus.add(embeddings(2), [1, 2])


def test_what_is_put_or_discarded_twice_comes_to_the_same(milvus: MilvusIndex) -> None:
    items, others = embeddings(5), embeddings(2, seed=1)
    for _ in range(2):
        milvus.put(items, torch.arange(5))
    for _ in range(2):
        milvus.put(others, [3, 9])
    assert len(milvus) == 6
    assert milvus.search(others, k=1).ids[:, 0].tolist() == [3, 9]
    assert milvus.kappa_of([3, 4]).tolist() == [others.kappa[0].item(), items.kappa[4].item()]
    for _ in range(2):
        milvus.discard([0, 3, 77])
    milvus.discard([])
    assert milvus.ids.tolist() == [1, 2, 4, 9]
    for made, ids, match in REFUSED[:-1]:
        with pytest.raises(ValueError, match=match):
            unwrap(MilvusIndex.put)(milvus, made, ids)
    with pytest.raises(ValueError, match="ids must differ, got 1 twice"):
        milvus.discard([1, 1])
    assert len(milvus) == 4


def test_the_one_id_that_a_server_does_not_find_again_is_refused(milvus: MilvusIndex) -> None:
    for store in (milvus.add, milvus.put):
        with pytest.raises(ValueError, match="ids.*9223372036854775806"):
            store(embeddings(2), [4, 2**63 - 1])
    assert len(milvus) == 0


def test_k_beyond_what_milvus_gives_is_refused(milvus: MilvusIndex) -> None:
    with pytest.raises(ValueError, match="^k .*16384, .*16385"):
        milvus.search(embeddings(1), k=MOST_HITS + 1)


def test_training_checks_and_does_nothing(milvus: MilvusIndex) -> None:
    milvus.train(embeddings(3))
    with pytest.raises(ValueError, match="embeddings.*6.*5"):
        milvus.train(embeddings(3, dimension=5))


def test_collections_that_do_not_fit_are_refused(milvus: MilvusIndex, address: str) -> None:
    (server, _, items), others = address.rpartition("/"), "foreign_to_" + address.rpartition("/")[2]
    with pytest.raises(ValueError, match="'faces' in .*MilvusIndex a dimension"):
        Index.open(f"{server}/faces")
    with pytest.raises(ValueError, match=f"'{items}' in .*dimension 6, got 7"):
        MilvusIndex(address, 7)
    milvus._client.create_collection(others, dimension=4)
    with pytest.raises(ValueError, match=f"'{others}' in .*not an index.*kappa, .*vector, got"):
        MilvusIndex(f"{server}/{others}", 4)


@pytest.mark.parametrize(
    ("address", "uri"),
    [
        ("milvus://host/items", "http://host:19530"),
        ("milvus://host:1234/items", "http://host:1234"),
        ("milvus+tls://host/items", "https://host:19530"),
        ("milvus://[::1]:7/items", "http://[::1]:7"),
        ("milvus:///data/my items.db/items", "/data/my items.db"),
    ],
)
def test_addresses(address: str, uri: str) -> None:
    parsed = Address.parse(address)
    assert (parsed.uri, parsed.collection) == (uri, "items")


@pytest.mark.parametrize(
    ("address", "match"),
    [
        ("http://host/items", "address.*milvus://HOST.*'http://host/items'"),
        ("milvus://host", "address must be .*letters, digits and _ .*'milvus://host'"),
        ("milvus://host/my-items", "address.*'milvus://host/my-items'"),
        ("milvus://host/9items", "address.*'milvus://host/9items'"),
        ("milvus://host/database/items", "address.*'milvus://host/database/items'"),
        ("milvus://host/items?x=1", "address.*'milvus://host/items.x=1'"),
        ("milvus:///data/items/items", "address must be .*FILE.db/COLLECTION, "),
        ("milvus+tls:///data/items.db/items", "address must be"),
        ("milvus:///data/items.db?x/items", "address must be"),
        ("milvus://host:99999/items", "port.*1 to 65535"),
        ("milvus://host:0/items", "port.*1 to 65535"),
        ("milvus://:80/items", "port.*1 to 65535"),
        ("milvus://me:secret@host/items", f"address.*no password: .*variable {TOKEN}$"),
    ],
)
def test_bad_addresses_are_refused(address: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Address.parse(address)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dimension": 0}, "dimension.*integer.*least 1.*0"),
        ({"structure": "IVF_PQ"}, "structure.*FLAT, HNSW.*'IVF_PQ'"),
        ({"timeout": 0}, "timeout.*got 0"),
        ({"timeout": float("inf")}, "timeout.*inf"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        unwrap(MilvusIndex.__init__)(object.__new__(MilvusIndex), "milvus://localhost/items", **options)


def test_a_file_in_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no folder .*nowhere.*items.db"):
        MilvusIndex(f"milvus://{tmp_path}/nowhere/items.db/items", 3)


def test_a_file_that_cannot_be_opened_is_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise pymilvus.MilvusException(message="Open local milvus failed")

    monkeypatch.setattr(pymilvus, "MilvusClient", fail)
    with pytest.raises(ConnectionError, match="items.db failed: .*check.*no other process"):
        MilvusIndex(f"milvus://{tmp_path}/items.db/items", 3)


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConnectionError, match=f"Milvus at 127.0.0.1:{port} failed: .*it runs"):
        MilvusIndex(f"milvus://127.0.0.1:{port}/items", 3, timeout=2.0)


def test_a_server_that_is_silent_keeps_nobody_waiting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port, start = silent.getsockname()[1], time.monotonic()
        with pytest.raises(ConnectionError, match=f"Milvus at 127.0.0.1:{port} failed: "):
            MilvusIndex(f"milvus://127.0.0.1:{port}/items", 3, timeout=1.0)
        assert time.monotonic() - start < 10


def test_a_missing_extra_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(ValueError, match=r"pymilvus.*'lam-retrieval\[milvus\]'"):
        Index.open("milvus://localhost/items")
