"""The index over many FAISS types, compared with an exact ranking of its items."""

import multiprocessing
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from inspect import unwrap  # without the shape checks of test runs, as for users
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch

from lam.retrieval import Index, rank
from lam.retrieval.index import faiss_calls as faiss_index
from lam.retrieval.index.faiss_index import search_flat
from lam.retrieval.index.rows import Store
from lam.vmf.embeddings import Embeddings

DIMENSION = 8
EXACT = ["Flat", "HNSW32", "IVF4,Flat", "IVF4,Flat,RFlat"]
ROUGH = [
    "SQ8",
    "PQ4x4",
    "PCA6,Flat",
    "PQ4x4fs",
    "PCA6,IVF2,Flat",
    "HNSW16_SQ8",
    "PQ4x4,RFlat",
    "IVF4,PQ4x4fs",
    "IVF4,RaBitQ",
]


def embeddings(
    count: int, *, seed: int = 0, dimension: int = DIMENSION, dtype: torch.dtype = torch.float32
) -> Embeddings:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(count, dimension, generator=generator, dtype=dtype), dim=1)
    return Embeddings(
        mean, torch.rand(count, generator=generator, dtype=dtype) * 100, *torch.ones(2, count, dtype=dtype)
    )


def filled(factory: str, count: int = 200, **options) -> tuple[Index, Embeddings, torch.Tensor]:
    items, ids = embeddings(count), torch.arange(count) * 7 + 3
    index = Index(DIMENSION, factory, **options)
    if not index.is_trained:
        index.train(items)
    index.add(items, ids)
    return index, items, ids


def test_searches_among_some_ids_go_on_when_faiss_learns_of_tensors() -> None:
    script = (
        "import faiss.contrib.torch_utils, torch, lam.retrieval.index.faiss_index as module\n"
        "from lam.vmf import Embeddings\n"
        "module._FEW, mean, ones = 0, torch.eye(60), torch.ones(60)\n"
        "items = Embeddings(mean, ones, ones, ones)\n"
        "index = module.Index(60, 'HNSW32')\n"
        "index.add(items, range(60))\n"
        "assert index.search(items[7:9], k=1, among=torch.arange(8, 50)).ids[1].tolist() == [8]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("few", [0, 1000])
@pytest.mark.parametrize("factory", EXACT + ROUGH)
def test_a_search_among_some_ids_finds_the_best_of_these(
    factory: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lam.retrieval.index.faiss_index._FEW", few)
    index, items, ids = filled(factory)
    index.remove(ids[:20])
    among = torch.cat([ids[torch.arange(199, 5, -2)], torch.tensor([1, 10_000])])  # two unknown, some removed
    hits = index.search(embeddings(30, seed=2), k=12, among=among)
    rows = torch.arange(200)[torch.isin(ids, among) & (torch.arange(200) >= 20)]
    nearest, cosines = rank(embeddings(30, seed=2).mean, items.mean[rows], k=12)
    assert torch.isin(hits.ids, ids[rows]).all()
    if factory in EXACT[:2] or few:
        assert torch.equal(hits.ids, ids[rows[nearest]])
        torch.testing.assert_close(hits.scores, cosines, rtol=0, atol=1e-6)
    everything = index.search(embeddings(30, seed=2), k=1000, among=among)
    assert everything.ids.shape == (30, len(rows))
    assert index.search(embeddings(2), k=3, among=[]).ids.shape == (2, 0)
    narrow = index.search(embeddings(30, seed=2), k=12, among=among, least_kappa=50.0)
    assert (narrow.kappa >= 50).all()


@pytest.mark.parametrize("order", [torch.arange(50), torch.arange(50).flip(0)])
def test_a_search_among_some_ids_needs_no_order_of_adding(order: torch.Tensor) -> None:
    index, items = Index(DIMENSION), embeddings(50)
    index.add(items, order**9)  # with wide gaps
    hits = index.search(items[:2], k=50, among=[number**9 for number in range(1, 60, 3)])
    assert hits.ids.sort().values.tolist() == [[number**9 for number in range(1, 50, 3)]] * 2


@pytest.mark.parametrize("factory", EXACT + ROUGH)
def test_search_after_removal_and_addition(factory: str) -> None:
    """Ids, scores and κ belong together for any FAISS type; removed items never come back."""
    index, items, ids = filled(factory)
    gone = torch.arange(0, 200, 3)
    index.remove(ids[gone])
    more = embeddings(40, seed=1)
    index.add(more, ids[gone[:40]])  # the ids of removed items, with other vectors
    expected = dict(zip(ids.tolist(), zip(items.mean, items.kappa, strict=True), strict=True))
    for item in ids[gone].tolist():
        del expected[item]
    expected.update(zip(ids[gone[:40]].tolist(), zip(more.mean, more.kappa, strict=True), strict=True))
    queries = embeddings(30, seed=2)
    hits = index.search(queries, k=12)

    assert len(index) == len(expected)
    assert sorted(index.ids.tolist()) == sorted(expected)
    assert hits.ids.shape == (30, 12)
    assert all(len(set(row)) == 12 for row in hits.ids.tolist())
    for q, row in enumerate(hits.ids.tolist()):
        vectors = torch.stack([expected[item][0] for item in row])
        torch.testing.assert_close(hits.scores[q], vectors @ queries.mean[q])
        torch.testing.assert_close(hits.kappa[q], torch.stack([expected[item][1] for item in row]))
    assert (hits.scores.diff(dim=1) <= 0).all()


@pytest.mark.parametrize(
    ("factory", "parameters"), [("Flat", None), ("HNSW32", "efSearch=200"), ("IVF4,Flat", "nprobe=4")]
)
def test_types_that_visit_everything_equal_exact_ranking(factory: str, parameters: str | None) -> None:
    index, items, ids = filled(factory, parameters=parameters)
    index.remove(ids[:20])
    queries = embeddings(25, seed=3)
    rows, scores = rank(queries.mean, items.mean[20:], k=9)
    hits = index.search(queries, k=9)
    assert hits.ids.tolist() == ids[20:][rows].tolist()
    torch.testing.assert_close(hits.scores, scores)


@pytest.mark.parametrize(("n_queries", "k"), [(0, 3), (1, 1), (3, 5), (40, 12), (2, 500)])
@pytest.mark.parametrize("copies", [1, 3])
def test_a_search_without_an_index_is_that_of_a_flat_one(n_queries: int, k: int, copies: int) -> None:
    """Also in ties, where hits are in the order of the items."""
    items = embeddings(200)
    items = items[torch.arange(200).repeat(copies)]
    index = Index(DIMENSION)
    index.add(items, torch.arange(len(items)))
    queries = embeddings(n_queries, seed=3, dtype=torch.float64)
    hits, expected = search_flat(items, queries, k * copies), index.search(queries, k * copies)
    torch.testing.assert_close(hits.scores, expected.scores, rtol=0, atol=3e-7)  # an index normalises again
    assert torch.equal(hits.ids, expected.ids)
    assert torch.equal(hits.kappa, expected.kappa)
    first = hits[:, :2]
    assert torch.equal(first.ids, expected.ids[:, :2])
    assert first.scores.shape == first.kappa.shape == first.ids.shape


def test_a_search_without_an_index_refuses_what_an_index_does() -> None:
    items, queries = embeddings(5), embeddings(2)
    with pytest.raises(ValueError, match="^k .*integer.*1, got 0"):
        search_flat(items, queries, 0)
    with pytest.raises(ValueError, match="embeddings.*8.*4"):
        search_flat(items, embeddings(2, dimension=4), 1)
    queries.mean[1] *= 2
    with pytest.raises(ValueError, match="embeddings.*2.*index 1"):
        search_flat(items, queries, 1)


def test_hnsw_finds_nearly_all_by_default() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(50, 64, generator=generator)

    def items(count: int) -> Embeddings:
        rows = centres[torch.arange(count) % 50] + 3.0 * torch.randn(count, 64, generator=generator)
        return Embeddings(
            torch.nn.functional.normalize(rows, dim=1), torch.ones(count), torch.ones(count), torch.zeros(count)
        )

    stored, queries = items(5000), items(200)
    truth, found = rank(queries.mean, stored.mean, k=10)[0], []
    for parameters in ("efSearch=16", None):
        index = Index(64, "HNSW32", parameters=parameters)
        index.add(stored, torch.arange(5000))
        hits = index.search(queries, 10).ids
        found.append((hits[:, :, None] == truth[:, None, :]).any(1).double().mean().item())
    assert found[0] < 0.95 < found[1]


@pytest.mark.parametrize("factory", ["Flat", "HNSW32", "IVF4,Flat"])
@pytest.mark.parametrize("left", [0, 1, 2, 5])
def test_k_above_the_size_gives_every_item_and_never_minus_one(factory: str, left: int) -> None:
    index, _, ids = filled(factory)
    index.remove(ids[left:])
    hits = index.search(embeddings(3, seed=4), k=50)
    assert [sorted(row) for row in hits.ids.tolist()] == [ids[:left].tolist()] * 3
    assert hits.scores.shape == hits.kappa.shape == (3, left)


def stored(count: int) -> tuple[Store, dict[str, np.ndarray]]:
    """A store, and its columns."""
    store, items, rows = Store(DIMENSION), embeddings(count), np.arange(count)
    columns = {"vectors": items.mean.numpy(), "kappa": items.kappa.double().numpy(), "ids": rows * 7 + 3}
    store.append(*columns.values(), store.take_slots(count))
    return store, {**columns, "slots": rows}


@pytest.mark.parametrize(
    "gone", [[0], [1999], [5, 511, 512, 513, 1024], range(0, 2000, 3), range(1, 2000), range(2000)]
)
def test_whatever_is_removed_the_others_keep_their_order_and_what_is_theirs(
    gone: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lam.retrieval.index.rows._CHUNK", 1)  # so that there are many chunks
    store, expected = stored(2000)
    left = np.delete(np.arange(2000), list(gone))
    store.remove(np.array(gone))
    for name, column in expected.items():
        np.testing.assert_array_equal(store.column(name), column[left])
    assert len(store.chunks) <= 1 + len(left) // 100
    store.append(*(column[:1] for column in expected.values()))
    assert store.column("slots").tolist() == [*left.tolist(), 0]


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """Let SIGINT raise an exception; shells make commands in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_waits_until_every_row_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lam.retrieval.index.rows._CHUNK", 1)  # so that there are many to mark and to sweep
    for delay in (0.002, 0.01, 0.03):
        store, expected = stored(20_000)
        timer = threading.Timer(delay, signal.raise_signal, [signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come during any of these
            timer.start()
            store.remove(np.arange(0, 20_000, 2))
            timer.join()
        timer.join()
        left = slice(1, None, 2) if len(store) == 10_000 else slice(None)
        for name, column in expected.items():
            np.testing.assert_array_equal(store.column(name), column[left])
        assert sorted(store._slot_of) == store.column("ids").tolist()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupted_addition_adds_every_row_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lam.retrieval.index.rows._CHUNK", 1)
    items, ids = embeddings(20_000), torch.arange(20_000)
    for delay in (0.005, 0.01, 0.02, 0.04):
        index = Index(DIMENSION)
        timer = threading.Timer(delay, signal.raise_signal, [signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come during any of these
            timer.start()
            index.add(items, ids)
            timer.join()
        timer.join()
        assert held(index) == len(index)


def held(index: Index) -> int:
    """Number of searched rows, including removed ones."""
    return sum(chunk.size for chunk in index._store.chunks) if index._faiss is None else index._faiss.ntotal


@pytest.mark.parametrize("factory", ["Flat", "HNSW32"])
def test_tombstones_are_kept_below_a_fifth_and_swept_at_it(factory: str) -> None:
    index, items, ids = filled(factory, 100)
    index.remove(ids[:19])
    assert held(index) == 100
    assert not set(index.search(items[:19], k=81).ids.flatten().tolist()) & set(ids[:19].tolist())
    index.remove(ids[19:20])
    assert held(index) == len(index) == 80
    assert index.search(items[20:], k=1).ids.flatten().tolist() == ids[20:].tolist()


@pytest.mark.parametrize("factory", ["Flat", "HNSW32"])
def test_a_query_amid_tombstones_still_gets_k_hits(factory: str) -> None:
    items, ids = embeddings(300), torch.arange(300)
    index = Index(DIMENSION, factory)
    index.add(items, ids)
    near, _ = rank(items.mean[:1], items.mean, k=50)
    index.remove(near[0])
    hits = index.search(items[:1], k=10)
    keep = torch.tensor([i for i in range(300) if i not in near[0].tolist()])
    assert hits.ids[0].tolist() == keep[rank(items.mean[:1], items.mean[keep], k=10)[0][0]].tolist()


def test_a_removed_item_is_behind_items_opposite_to_the_query() -> None:
    """The removed row scores 0 in a Flat structure, which is higher than all other items."""
    mean = torch.eye(DIMENSION)[[0] * 12] * torch.tensor([1.0] * 2 + [-1.0] * 10)[:, None]
    items, ids = Embeddings(mean, torch.ones(12), torch.ones(12), torch.ones(12)), torch.arange(12)
    index = Index(DIMENSION)
    index.add(items, ids)
    index.remove(ids[:2])
    hits = index.search(items[:1], k=1, least_kappa=0.5)
    assert (hits.ids.tolist(), hits.scores.tolist()) == ([[2]], [[-1.0]])
    assert index.search(items[:1], k=20).ids.tolist() == [list(range(2, 12))]


def test_an_addition_and_a_removal_touch_one_chunk_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lam.retrieval.index.rows._CHUNK", 1)
    index, _, ids = filled("Flat", 1000)
    before = index._store.chunks
    for name in ("vectors", "kappa", "ids", "slots"):
        getattr(before[-1], name)[before[-1].size :] = -1  # otherwise memory of an earlier index may hold the added row
    columns = [[getattr(chunk, name).copy() for name in ("vectors", "kappa", "ids", "slots")] for chunk in before]
    index.add(embeddings(1, seed=1), [1])
    index.remove(ids[300:301])
    assert index._store.chunks == before
    for number, chunk in enumerate(before):
        for name, column in zip(("vectors", "kappa", "ids", "slots"), columns[number], strict=True):
            n_same = int((getattr(chunk, name) == column).reshape(len(column), -1).all(1)[: chunk.size].sum())
            assert n_same == chunk.size - (number == 3 or (number == 1 and name in ("vectors", "kappa")))
    index.remove(ids[301:360])
    assert [new is old for new, old in zip(index._store.chunks, before, strict=True)] == [True, False, True, True]
    assert index.ids.tolist() == [*ids[:300].tolist(), *ids[360:].tolist(), 1]


def test_small_chunks_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lam.retrieval.index.rows._CHUNK", 1)
    index, items, ids = filled("Flat", 5000)
    for start in range(100):  # ever fewer are left
        index.remove(ids[start::100][:-1])
    assert len(index._store.chunks) == 1
    assert index.search(items[4900:], k=1).ids.flatten().tolist() == ids[4900:].tolist()


def test_precision_and_order_of_ties() -> None:
    index = Index(2)
    east = Embeddings(
        torch.tensor([[1.0, 0.0]] * 3).double(),
        torch.tensor([1e-6, 1e8, 3.0], dtype=torch.float64),
        *torch.ones(2, 3).double(),
    )
    index.add(east, torch.tensor([9, 4, 7]))
    hits = index.search(east[:1], k=3)
    assert hits.ids.tolist() == [[9, 4, 7]]
    assert hits.scores.dtype == hits.kappa.dtype == torch.float64
    assert hits.kappa[0].tolist() == east.kappa.tolist()
    assert index.kappa_of(torch.tensor([7, 9])).tolist() == [3.0, 1e-6]


@pytest.mark.parametrize("dimension", [3, 64, 130, 512])
@pytest.mark.parametrize("copies", [2, 3, 7])
def test_equal_vectors_score_alike_and_stand_in_the_order_of_adding(dimension: int, copies: int) -> None:
    index, items = Index(dimension), embeddings(20, dimension=dimension)
    index.add(Embeddings.concatenate([items] * copies), torch.arange(20 * copies))
    queries = embeddings(20, seed=1, dimension=dimension)
    for several in (queries, *(queries[row : row + 1] for row in range(20))):
        hits = index.search(several, k=20 * copies)
        groups = hits.ids.view(len(several), 20, copies)
        assert torch.equal(groups, groups[..., :1] % 20 + 20 * torch.arange(copies))
        assert (hits.scores.view_as(groups) == hits.scores.view_as(groups)[..., :1]).all()


def test_what_was_added_without_autograd_can_be_removed_with_it() -> None:
    with torch.inference_mode():
        index, items, ids = filled("Flat", 50)
    index.remove(ids[:30])
    assert index.search(items[30:], k=1).ids.flatten().tolist() == ids[30:].tolist()


def test_adding_one_by_one_equals_adding_at_once() -> None:
    index, items, ids = filled("Flat", 70)
    single = Index(DIMENSION)
    for i in range(70):
        single.add(items[i : i + 1], ids[i : i + 1])
    one, other = index.search(items, k=70), single.search(items, k=70)
    assert one.ids.tolist() == other.ids.tolist()
    torch.testing.assert_close(one.scores, other.scores)


def _with_mean(row: int, value: float) -> Embeddings:
    bad = embeddings(4)
    bad.mean[row, 2] = value
    return bad


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (lambda: embeddings(4, dimension=9), "embeddings.*8.*9"),
        (lambda: _with_mean(2, torch.nan), "embeddings.*nan.*index 2"),
        (lambda: _with_mean(1, torch.inf), "embeddings.*inf.*index 1"),
        (lambda: _with_mean(3, 1e38), "embeddings.*1e.38.*index 3"),
        (
            lambda: Embeddings(embeddings(4).mean, torch.tensor([1.0, torch.nan, 1, 1]), *torch.ones(2, 4)),
            "kappa.*nan.*index 1",
        ),
        (
            lambda: Embeddings(embeddings(4).mean, torch.tensor([1.0, 1, -2, 1]), *torch.ones(2, 4)),
            "kappa.*-2.0.*index 2",
        ),
    ],
)
def test_bad_embeddings_are_refused_everywhere_and_change_nothing(bad, match: str) -> None:
    index, items, ids = filled("Flat", 10)
    with pytest.raises(ValueError, match=match):
        index.add(bad(), torch.arange(4) + 1000)
    with pytest.raises(ValueError, match=match):
        index.search(bad(), k=1)
    with pytest.raises(ValueError, match=match):
        Index(DIMENSION, "IVF2,Flat").train(bad())
    assert index.ids.tolist() == ids.tolist()
    assert index.search(items, k=1).ids.flatten().tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        (torch.tensor([50, 51, 50]), "ids must differ, got 50 twice"),
        (torch.tensor([50, 3, 51]), "ids.*new, got 3"),
        (torch.tensor([50, -1, 51]), "ids.*-1"),
        (torch.tensor([50, 51]), r"ids.*\(3,\).*embeddings.*\(2,\)"),
        (torch.tensor([50.0, 51.0, 52.0]), "ids.*torch.float32"),
        (torch.tensor([True, False, True]), "ids.*torch.bool"),
        ([50, 51.5, 52], "ids.*float64 in list"),
        ([True, False, True], "ids.*bool in list"),
        (["a", "b", "c"], "ids.*str.* in list"),
        (np.array([50.0, 51.0, 52.0]), "ids.*float64 in ndarray"),
        (np.array([50, 51]), r"ids.*\(3,\).*embeddings.*\(2,\)"),
        ([[50, 51, 52]], r"ids.*\(3,\).*\(1, 3\)"),
        (50, r"ids.*\(1,\).*got \(\)"),
        ([50, 2**70, 51], "ids.*-2⁶³.*2⁶³ - 1.*1180591620717411303424"),
        ([50, 2**63, 51], "ids.*-2⁶³.*2⁶³ - 1.*9223372036854775808"),
        (torch.tensor([50, 2**63, 51], dtype=torch.uint64), "ids.*-2⁶³.*2⁶³ - 1.*9223372036854775808"),
        (np.array([50, 2**63, 51], np.uint64), "ids.*-2⁶³.*2⁶³ - 1.*9223372036854775808"),
    ],
)
def test_bad_ids_are_refused_and_change_nothing(ids, match: str) -> None:
    index, _, before = filled("Flat", 10)
    with pytest.raises(ValueError, match=match):
        unwrap(Index.add)(index, embeddings(3), ids)
    assert index.ids.tolist() == before.tolist()
    assert held(index) == 10


@pytest.mark.parametrize("as_ids", [list, tuple, np.array, lambda ids: np.array(ids, ">i4")[::-1][::-1], torch.tensor])
def test_ids_come_as_any_sequence_of_integers(as_ids) -> None:
    index, items = Index(DIMENSION), embeddings(4)
    index.add(items, as_ids([8, 3, 5, 9]))
    assert index.kappa_of(as_ids([5, 8])).tolist() == items.kappa[[2, 0]].tolist()
    index.remove(as_ids([3, 9]))
    assert index.ids.tolist() == [8, 5]
    index.remove([])
    assert index.search(items[:1], k=1).ids.tolist() == [[8]]


def test_read_only_ids_are_taken_as_they_are() -> None:
    index, ids = Index(DIMENSION), np.arange(3)
    ids.flags.writeable = False
    index.add(embeddings(3), ids)
    assert index.ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize("k", [np.int64(3), np.uint8(3), torch.tensor(3)])
def test_k_is_any_integer(k) -> None:
    index, items, _ = filled("Flat", 5)
    assert index.search(items, k=k).ids.tolist() == index.search(items, k=3).ids.tolist()
    assert Index(k).dimension == 3


def test_training_is_explicit() -> None:
    index = Index(DIMENSION, "IVF4,Flat")
    with pytest.raises(ValueError, match="'IVF4,Flat'.*call train"):
        index.add(embeddings(9), torch.arange(9))
    with pytest.raises(ValueError, match="train on 3 embeddings: .*clusters"):
        index.train(embeddings(3))
    index.train(embeddings(200))
    index.add(embeddings(9), torch.arange(9))
    with pytest.raises(ValueError, match="train.*before.*9"):
        index.train(embeddings(200))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dimension": 0}, "dimension.*integer.*least 1.*0"),
        ({"dimension": 8, "factory": "Flatt"}, "factory.*FAISS.*'Flatt'.*dimension 8: could"),
        ({"dimension": 8, "factory": "IDMap2,Flat"}, "factory.*IDMap.*'IDMap2,Flat'"),
        ({"dimension": 8, "parameters": "colour=3"}, "parameters.*FAISS.*'colour=3'"),
        ({"dimension": 8, "device": "tpu"}, "device.*'cpu', 'cuda' or 'cuda:N'.*'tpu'"),
    ],
)
def test_bad_options_are_refused(options: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Index(**options)


def test_a_device_that_this_faiss_lacks_is_refused() -> None:
    if hasattr(faiss, "StandardGpuResources"):
        pytest.skip("this FAISS is built for GPUs")
    with pytest.raises(ValueError, match=r"device 'cuda:1'.*lam-retrieval\[gpu\]"):
        Index(DIMENSION, device="cuda:1")


def test_a_type_without_a_form_for_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(resources: object, device: int, index: object) -> None:
        raise RuntimeError("Error in clone_Index at /x/GpuCloner.cpp:270: This index type is not implemented on GPU.")

    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", refuse, raising=False)
    with pytest.raises(ValueError, match="index to 'cuda:1'.*device 'cpu': .*not"):
        Index(DIMENSION, "HNSW32", device="cuda:1")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12
def test_a_forked_process_can_search() -> None:
    index, items, _ = filled("Flat", 10)
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(2)
    try:
        index.search(items, k=3)
        forked = multiprocessing.get_context("fork").Process(target=index.search, args=(items, 3))
        forked.start()
        forked.join(30)
        forked.kill()
        forked.join()
    finally:
        faiss.omp_set_num_threads(threads)
    assert forked.exitcode == 0


def test_flat_saved_on_a_cpu_is_loaded_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, items, _ = filled("Flat", 10)
    index.save(tmp_path / "index")
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(
        faiss, "index_cpu_to_gpu", lambda resources, device, structure: structure.this and structure, raising=False
    )
    monkeypatch.setattr(faiss, "index_gpu_to_cpu", lambda structure: structure, raising=False)
    loaded = Index.load(tmp_path / "index", device="cuda")
    assert torch.equal(loaded.search(items, k=3).ids, index.search(items, k=3).ids)


class _Failing:
    """A FAISS structure whose searches fail as they do on a GPU."""

    def __init__(self, reason: str) -> None:
        self.reason, self.ntotal = f"Error in search(long) at /x/GpuIndex.cu:26: Error: {reason}", 9000

    def search(self, vectors: np.ndarray, k: int) -> None:
        raise RuntimeError(self.reason)


def test_more_candidates_than_a_gpu_can_select_are_refused() -> None:
    index, items, _ = filled("HNSW32", 10)
    index._faiss = _Failing("'k <= getMaxKSelection()' failed: GPU index only supports selection up to 2048")
    with pytest.raises(ValueError, match="20 candidates; .*smaller k .*'cpu': .*2048"):
        index.search(items, k=10)


def test_a_gpu_that_is_out_of_memory_is_no_mistake_of_the_caller() -> None:
    index, items, _ = filled("HNSW32", 10)
    index._faiss = _Failing("Failed to cudaMalloc 1572864 bytes on device 0 (error 2 out of memory)")
    with pytest.raises(RuntimeError, match="out of memory"):
        index.search(items, k=10)


def test_a_failure_inside_faiss_leaves_the_index_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    index, items, ids = filled("HNSW32", 20)
    whole = faiss_index.add

    def half(structure, vectors, slots) -> None:
        monkeypatch.undo()
        whole(structure, vectors[:2], slots[:2])
        raise MemoryError("out of memory half-way")

    monkeypatch.setattr(faiss_index, "add", half)
    with pytest.raises(MemoryError, match="half-way"):
        index.add(embeddings(5, seed=9), torch.arange(5) + 1000)
    assert index.ids.tolist() == ids.tolist()
    assert index._faiss.ntotal == 20
    index.add(embeddings(5, seed=9), torch.arange(5) * 7)
    assert index.search(embeddings(5, seed=9), k=1).ids.flatten().tolist() == list(range(0, 35, 7))
    assert index.search(items, k=1).ids.flatten().tolist() == ids.tolist()


def test_a_loaded_index_reuses_no_slot_that_faiss_still_holds(tmp_path: Path) -> None:
    index, items, ids = filled("HNSW32", 20)
    index.remove(ids[-1:])
    index.save(tmp_path / "index")
    loaded = Index.load(tmp_path / "index")
    loaded.add(items[-1:], torch.tensor([1000]))
    found = loaded.search(items[-1:], k=20).ids.flatten().tolist()
    assert found[0] == 1000
    assert sorted(found) == [*ids[:-1].tolist(), 1000]


def test_what_faiss_refuses_is_a_value_error() -> None:
    index = Index(DIMENSION, "NSG16,Flat")
    index.add(embeddings(150), torch.arange(150))
    with pytest.raises(ValueError, match="add 5 embeddings"):
        index.add(embeddings(5), torch.arange(5) + 200)
    assert len(index) == 150
    assert index.search(embeddings(150), k=1).ids.flatten().tolist() == list(range(150))


@pytest.mark.slow
def test_a_hundred_random_steps_equal_a_dictionary() -> None:
    generator = np.random.default_rng(0)
    for factory in EXACT:
        index, expected = Index(DIMENSION, factory), {}
        if not index.is_trained:
            index.train(embeddings(300))
        for step in range(100):
            fresh = [i for i in generator.choice(500, 20, replace=False).tolist() if i not in expected]
            items = embeddings(len(fresh), seed=step)
            index.add(items, torch.tensor(fresh, dtype=torch.long))
            expected.update(zip(fresh, items.mean, strict=True))
            gone = generator.choice(list(expected), len(expected) // 8, replace=False).tolist()
            index.remove(torch.tensor(gone, dtype=torch.long))
            for item in gone:
                del expected[item]
            assert set(index.ids.tolist()) == set(expected)
            query = embeddings(1, seed=1000 + step)
            hits = index.search(query, k=5)
            vectors = torch.stack([expected[item] for item in hits.ids[0].tolist()])
            torch.testing.assert_close(hits.scores[0], vectors @ query.mean[0])


def test_an_index_prints_as_one_line() -> None:
    assert repr(Index(3, "HNSW32")) == "Index(3, 'HNSW32', 0 items)"
