"""Exact ranking against a double loop."""

from inspect import unwrap  # without the shape checks of test runs, as for users

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lam.retrieval import rank, sampled_nearest
from lam.retrieval.index import exact as neighbours


def _rank_slowly(queries: Tensor, gallery: Tensor | None, k: int) -> list[list[int]]:
    others = queries if gallery is None else gallery
    ranked = []
    for q, query in enumerate(queries):
        scored = []
        for n, item in enumerate(others):
            if gallery is not None or n != q:
                scored.append((-float(query @ item / (query.norm() * item.norm())), n))
        ranked.append([n for _, n in sorted(scored)[:k]])
    return ranked


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("k", [1, 3, 100])
def test_rank_equals_double_loop(alone: bool, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    queries = torch.randn(17, 5, generator=generator, dtype=torch.float64)
    gallery = None if alone else torch.randn(23, 5, generator=generator, dtype=torch.float64)
    ids, scores = rank(queries, gallery, k=k)
    assert ids.tolist() == _rank_slowly(queries, gallery, k)
    assert scores.dtype == torch.float64
    assert (scores.diff(dim=1) <= 0).all()


def test_rank_leaves_out_the_query_by_index_and_keeps_its_duplicates() -> None:
    twins = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    ids, scores = rank(twins, k=3)
    assert ids.tolist() == [[1, 3, 2], [0, 3, 2], [0, 1, 3], [0, 1, 2]]
    torch.testing.assert_close(scores[0], torch.tensor([1.0, 1.0, 0.0]))


def test_rank_breaks_ties_by_the_lowest_index_at_the_cut() -> None:
    gallery = torch.tensor([[0.0, 1.0]] + [[1.0, 0.0]] * 40)
    ids, _ = rank(torch.tensor([[1.0, 0.0]]), gallery, k=5)
    assert ids.tolist() == [[1, 2, 3, 4, 5]]


def test_rank_tells_apart_what_float32_products_do_not() -> None:
    angles = torch.tensor([0.0, 3e-4, 1e-4, 2e-4], dtype=torch.float64)
    cluster = torch.stack([angles.cos(), angles.sin()], 1).float()
    assert rank(cluster, k=3)[0][0].tolist() == [2, 3, 1]


def test_rank_does_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    whole = rank(queries, k=7)
    monkeypatch.setattr(neighbours, "_BLOCK_ELEMENTS", 150)
    for one, other in zip(whole, rank(queries, k=7), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("size", "columns"), [(0, 0), (1, 0), (2, 1)])
def test_rank_of_few(size: int, columns: int) -> None:
    ids, scores = rank(torch.eye(2)[:size], k=5)
    assert ids.shape == scores.shape == (size, columns)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8])
def test_integers_have_the_cosines_and_neighbours_of_floats(dtype: torch.dtype) -> None:
    vectors = torch.randint(1, 9, (12, 9), generator=torch.Generator().manual_seed(0), dtype=dtype)
    torch.testing.assert_close(unwrap(rank)(vectors, k=3), rank(vectors.float(), k=3))
    assert unwrap(sampled_nearest)(vectors[None]).equal(sampled_nearest(vectors[None].float()))
    assert unwrap(rank)(vectors[:0], k=3)[1].dtype == torch.float32


def test_rank_takes_any_integer() -> None:
    queries = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rank(queries, k=np.int32(2))[0], rank(queries, k=2)[0])


def test_rank_refuses() -> None:
    queries = torch.eye(3)
    with pytest.raises(ValueError, match="^k .*integer.*1, got 0"):
        rank(queries, k=0)
    with pytest.raises(ValueError, match="dimension, got 3 and 2"):
        unwrap(rank)(queries, torch.eye(2), k=1)
    with pytest.raises(ValueError, match=r"queries.*\[0.0, nan, 0.0\].*index 1"):
        rank(torch.tensor([1.0, torch.nan, 1.0]).diag_embed(), k=1)
    with pytest.raises(ValueError, match=r"queries.*\[0.0, 1e-200, 0.0\].*index 1"):
        rank(
            torch.tensor([1.0, 1e-200, 1.0], dtype=torch.float64).diag_embed(), k=1
        )  # the square of its length is zero
    with pytest.raises(ValueError, match="gallery.*index 2"):
        rank(queries, torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 0]]), k=1)
    with pytest.raises(ValueError, match=r"queries.*\(N, D\).*\(1, 3, 3\)"):
        unwrap(rank)(queries[None], k=1)
    with pytest.raises(ValueError, match=r"gallery.*\(N, D\).*\(1, 3, 3\)"):
        unwrap(rank)(queries, queries[None], k=1)


@pytest.mark.parametrize("dimension", [3, 12])
@pytest.mark.parametrize("alone", [True, False])
def test_sampled_nearest_equals_rank_of_each_sample(dimension: int, alone: bool) -> None:
    generator = torch.Generator().manual_seed(dimension)
    samples = torch.nn.functional.normalize(torch.randn(4, 30, dimension, generator=generator), dim=2)
    gallery = None if alone else torch.nn.functional.normalize(torch.randn(4, 9, dimension, generator=generator), dim=2)
    nearest = sampled_nearest(samples, gallery)
    for s in range(4):
        expected = _rank_slowly(samples[s].double(), None if gallery is None else gallery[s].double(), 1)
        assert nearest[s].tolist() == [row[0] for row in expected]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sampled_nearest_compares_vectors_of_few_bits_in_many(dtype: torch.dtype) -> None:
    samples = torch.randn(1, 300, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(sampled_nearest(samples)[0], rank(samples[0].double(), k=1)[0][:, 0])


@pytest.mark.parametrize("dimension", [2, 20])
def test_sampled_nearest_never_gives_the_query_itself(dimension: int) -> None:
    same = torch.ones(2, 40, dimension)
    nearest = sampled_nearest(same)
    assert (nearest != torch.arange(40)).all()
    assert ((nearest >= 0) & (nearest < 40)).all()


@pytest.mark.parametrize("dimension", [3, 12])
def test_sampled_nearest_takes_samples_with_gradients(dimension: int) -> None:
    samples = torch.randn(2, 6, dimension, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sampled_nearest(samples.clone().requires_grad_()), sampled_nearest(samples))


def test_sampled_nearest_of_no_query_and_of_two() -> None:
    assert sampled_nearest(torch.empty(3, 0, 2)).shape == (3, 0)
    assert sampled_nearest(torch.eye(2)[None]).tolist() == [[1, 0]]


def test_sampled_nearest_refuses() -> None:
    samples = torch.eye(3)[None]
    with pytest.raises(ValueError, match="candidate for every.*0"):
        sampled_nearest(samples[:, :1])
    with pytest.raises(ValueError, match="networks as samples.*2 and 1"):
        unwrap(sampled_nearest)(samples, torch.eye(3).repeat(2, 1, 1))
    with pytest.raises(ValueError, match="dimension, got 3 and 2"):
        unwrap(sampled_nearest)(samples, torch.eye(2)[None])
    with pytest.raises(ValueError, match="samples.*index 1"):
        sampled_nearest(torch.tensor([1.0, torch.inf, 1.0]).diag_embed()[None])


class _LargestDouble(TorchDispatchMode):
    """Records the greatest number of float64 elements in a result."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float64:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("dimension", [3, 50])
@pytest.mark.parametrize("alone", [True, False])
def test_sampled_nearest_holds_one_network_in_float64_at_a_time(dimension: int, alone: bool) -> None:
    samples = torch.randn(6, 40, dimension, generator=torch.Generator().manual_seed(0))
    with _LargestDouble() as largest:
        sampled_nearest(samples, None if alone else samples)
    assert largest.elements == samples[0].numel()


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_hundred_networks_over_ten_thousand_items() -> None:
    samples = torch.randn(100, 10_000, 3, generator=torch.Generator().manual_seed(0))
    assert sampled_nearest(samples).shape == (100, 10_000)
