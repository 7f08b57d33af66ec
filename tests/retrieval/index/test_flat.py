"""Exact searches among some ids, against FAISS's own selector."""

import faiss
import numpy as np
import pytest
import torch

from lam.retrieval import Index
from lam.retrieval.index import faiss_calls, rows
from lam.vmf import Embeddings

DIMENSION, COUNT = 16, 1000


def embeddings(mean: np.ndarray) -> Embeddings:
    ones = torch.ones(len(mean), dtype=torch.float64)
    return Embeddings(torch.from_numpy(mean), ones, ones, torch.zeros_like(ones))


def directions(rng: np.random.Generator, count: int) -> np.ndarray:
    drawn = rng.standard_normal((count, DIMENSION), dtype=np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Chunks of 256 rows and copies of 32; returns the number of rows of each product."""
    compared = list[int]()
    nearest = faiss_calls.nearest

    def counted(stored: np.ndarray, *rest: object) -> tuple[np.ndarray, np.ndarray]:
        compared.append(len(stored))
        return nearest(stored, *rest)

    monkeypatch.setattr(rows, "_CHUNK", 256 * 4 * DIMENSION)
    monkeypatch.setattr(rows, "_COPIED", 32 * DIMENSION)
    monkeypatch.setattr(faiss_calls, "nearest", counted)
    return compared


@pytest.mark.parametrize("queries", [1, 32])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("are_rising", [True, False])
def test_a_search_among_some_ids_equals_the_selector_of_faiss(
    are_rising: bool, share: float, queries: int, small_blocks: list[int]
) -> None:
    rng = np.random.default_rng(3)
    items, asked = directions(rng, COUNT), directions(rng, queries)
    ids = 3 * (np.arange(COUNT) if are_rising else rng.permutation(COUNT)) + 5
    kept = rng.permutation(COUNT)[: round(share * COUNT)]  # in no order
    index, plain = Index(DIMENSION), faiss.IndexFlatIP(DIMENSION)
    index.add(embeddings(items), ids)
    plain.add(items)
    hits = index.search(embeddings(asked), 10, among=ids[kept])
    selected = faiss.SearchParameters(sel=faiss.IDSelectorBatch(kept))
    search = getattr(plain, "search_numpy", plain.search)  # `faiss.contrib.torch_utils` takes the parameters away
    scores, places = search(asked, 10, params=selected)
    np.testing.assert_array_equal(hits.ids.numpy(), ids[places])
    np.testing.assert_allclose(hits.scores.numpy(), scores, rtol=0, atol=2e-7)
    assert max(small_blocks) <= 32  # so many rows are copied at once


def test_equal_vectors_in_several_blocks_are_in_the_order_of_adding(small_blocks: list[int]) -> None:
    rng = np.random.default_rng(4)
    distinct = directions(rng, 20)
    items = np.tile(distinct, (50, 1))  # copies 20 rows apart, in each block and each chunk
    index = Index(DIMENSION)
    index.add(embeddings(items), np.arange(COUNT))
    hits = index.search(embeddings(distinct), 50, among=np.arange(COUNT - 20))
    assert torch.equal(hits.ids[:, :49], torch.arange(20)[:, None] + 20 * torch.arange(49))
    assert len(small_blocks) > COUNT // 256


def test_a_search_among_all_ids_equals_a_search_of_all() -> None:
    rng = np.random.default_rng(5)
    index = Index(DIMENSION)
    index.add(embeddings(directions(rng, COUNT)), np.arange(COUNT))
    index.remove([3, 700])
    asked = embeddings(directions(rng, 7))
    found, wanted = index.search(asked, 12, among=np.arange(COUNT)), index.search(asked, 12)
    assert torch.equal(found.ids, wanted.ids)
    assert torch.equal(found.scores, wanted.scores)


def test_an_id_may_be_named_once() -> None:
    index = Index(DIMENSION)
    index.add(embeddings(directions(np.random.default_rng(6), 3)), [1, 2, 3])
    with pytest.raises(ValueError, match="ids must differ, got 2 twice"):
        index.search(embeddings(directions(np.random.default_rng(7), 1)), 1, among=[1, 2, 2])


@pytest.mark.parametrize("factory", ["PQ8x4", "IVF64,PQ8x4fs", "IVF64,RaBitQ"])
def test_candidates_of_codes_are_refined_by_their_vectors(factory: str) -> None:
    rng = np.random.default_rng(8)
    centres = directions(rng, 64)
    drawn = centres[rng.integers(64, size=4064)] + 0.1 * rng.standard_normal((4064, DIMENSION), dtype=np.float32)
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    items, asked = drawn[:4000], drawn[4000:]
    index, codes = Index(DIMENSION, factory), faiss.index_factory(DIMENSION, factory, faiss.METRIC_INNER_PRODUCT)
    index.train(embeddings(items))
    index.add(embeddings(items), np.arange(4000))
    codes.train(items)
    codes.add(items)
    exact = (-(asked @ items.T)).argsort(1)[:, :10]

    def found(ids: np.ndarray) -> float:
        return float(np.mean([np.isin(row, own).mean() for row, own in zip(exact, ids, strict=True)]))

    hits = index.search(embeddings(asked), 10)
    assert found(hits.ids.numpy()) > 0.97
    assert found(codes.search(asked, 10)[1]) < 0.8
    cosines = np.vecdot(items[hits.ids.numpy()], asked[:, None])
    np.testing.assert_allclose(hits.scores.numpy(), cosines, rtol=0, atol=2e-7)
