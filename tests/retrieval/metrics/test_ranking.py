"""recall@k and mAP@k against double loops."""

import math
from inspect import unwrap  # past the shape checks of test runs, to what a user meets

import pytest
import torch
from torch import Tensor

from lam.retrieval import count_without_relevant, map_at_k, recall_at_k


def _recall_slowly(relevance: list[list[bool]], n_relevant: list[int], k: int) -> float:
    found, counted = 0, 0
    for hits, n in zip(relevance, n_relevant, strict=True):
        if n > 0:
            counted += 1
            found += any(hits[:k])
    return found / counted


def _map_slowly(relevance: list[list[bool]], n_relevant: list[int], k: int) -> float:
    total, counted = 0.0, 0
    for hits, n in zip(relevance, n_relevant, strict=True):
        if n == 0:
            continue
        counted += 1
        for rank in range(min(k, len(hits))):
            if hits[rank]:
                total += sum(hits[: rank + 1]) / (rank + 1) / min(k, n)
    return total / counted


def _case(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    relevance = torch.rand(40, 12, generator=generator) < 0.3
    n_relevant = relevance.sum(1) + torch.randint(0, 9, (40,), generator=generator)
    relevance[:3], n_relevant[:3] = False, 0
    return relevance, n_relevant


@pytest.mark.parametrize("k", [1, 5, 12])
@pytest.mark.parametrize("seed", [0, 1])
def test_metrics_equal_double_loops(k: int, seed: int) -> None:
    relevance, n_relevant = _case(seed)
    lists = relevance.tolist(), n_relevant.tolist()
    assert recall_at_k(relevance, n_relevant, k=k) == pytest.approx(_recall_slowly(*lists, k), abs=1e-12)
    assert map_at_k(relevance, n_relevant, k=k) == pytest.approx(_map_slowly(*lists, k), abs=1e-12)


def test_map_at_1_is_recall_at_1() -> None:
    relevance, n_relevant = _case(2)
    assert map_at_k(relevance, n_relevant, k=1) == pytest.approx(recall_at_k(relevance, n_relevant, k=1))


def test_perfect_lists_reach_one_where_fewer_than_k_are_relevant() -> None:
    relevance = torch.tensor([[True, True, False, False]])
    assert map_at_k(relevance, torch.tensor([2]), k=4) == 1


def test_a_gallery_smaller_than_k_is_measured() -> None:
    relevance = torch.tensor([[False, True]])
    assert recall_at_k(relevance, torch.tensor([1]), k=10) == 1
    assert map_at_k(relevance, torch.tensor([1]), k=10) == 0.5


@pytest.mark.parametrize("size", [0, 2])
def test_no_query_with_anything_relevant_is_nan(size: int) -> None:
    relevance, n_relevant = torch.zeros(size, 3, dtype=torch.bool), torch.zeros(size, dtype=torch.long)
    assert math.isnan(recall_at_k(relevance, n_relevant, k=1))
    assert math.isnan(map_at_k(relevance, n_relevant, k=1))
    assert count_without_relevant(n_relevant) == size


@pytest.mark.parametrize("metric", [recall_at_k, map_at_k])
def test_refusals(metric) -> None:
    relevance = torch.tensor([[True, False]])
    with pytest.raises(ValueError, match="k must be an integer of at least 1, got 0"):
        metric(relevance, torch.tensor([1]), k=0)
    with pytest.raises(ValueError, match="k must not exceed the length of the ranked lists, got k = 3 for 2"):
        metric(relevance, torch.tensor([5]), k=3)
    with pytest.raises(ValueError, match="got 0 for 1 relevant hits at index 0"):
        metric(relevance, torch.tensor([0]), k=1)
    with pytest.raises(ValueError, match=r"n_relevant must have shape \(1,\), one value for each of the queries"):
        unwrap(metric)(relevance, torch.tensor([1, 1]), k=1)
