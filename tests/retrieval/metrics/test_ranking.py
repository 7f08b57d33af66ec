"""Metrics of rankings against double loops, and against pytorch-metric-learning where it has the same."""

import math
from inspect import unwrap  # without the shape checks of test runs, as for users

import pytest
import torch
from torch import Tensor

from lam.pairs.relevance import LabelRelevance
from lam.retrieval.index.exact import rank
from lam.retrieval.metrics.ranking import (
    map_at_k,
    mean_reciprocal_rank,
    precision_at_k,
    r_precision,
    recall_at_k,
    relevant_ranks,
)
from lam.retrieval.metrics.registry import METRICS


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
        for place in range(min(k, len(hits))):
            if hits[place]:
                total += sum(hits[: place + 1]) / (place + 1) / min(k, n)
    return total / counted


def _precision_slowly(relevance: list[list[bool]], n_relevant: list[int], k: int) -> float:
    shares = [sum(hits[:k]) / k for hits, n in zip(relevance, n_relevant, strict=True) if n > 0]
    return sum(shares) / len(shares)


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
    assert precision_at_k(relevance, n_relevant, k=k) == pytest.approx(_precision_slowly(*lists, k), abs=1e-12)
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
    assert precision_at_k(relevance, torch.tensor([1]), k=10) == 0.1


@pytest.mark.parametrize("size", [0, 2])
def test_no_query_with_anything_relevant_is_nan(size: int) -> None:
    relevance, n_relevant = torch.zeros(size, 3, dtype=torch.bool), torch.zeros(size, dtype=torch.long)
    assert math.isnan(recall_at_k(relevance, n_relevant, k=1))
    assert math.isnan(map_at_k(relevance, n_relevant, k=1))
    assert math.isnan(precision_at_k(relevance, n_relevant, k=1))
    assert METRICS["n_without_relevant"].function(n_relevant) == size


@pytest.mark.parametrize("metric", [recall_at_k, precision_at_k, map_at_k])
def test_refusals(metric) -> None:
    relevance = torch.tensor([[True, False]])
    with pytest.raises(ValueError, match="^k .*integer.*1, got 0"):
        metric(relevance, torch.tensor([1]), k=0)
    with pytest.raises(ValueError, match="k = 3 for 2"):
        metric(relevance, torch.tensor([5]), k=3)
    with pytest.raises(ValueError, match="0 for 1 relevant.*index 0"):
        metric(relevance, torch.tensor([0]), k=1)
    with pytest.raises(ValueError, match=r"n_relevant.*\(1,\).*queries"):
        unwrap(metric)(relevance, torch.tensor([1, 1]), k=1)


def _vectors(seed: int, *, gallery: bool, distinct: int = 1000) -> tuple[Tensor, Tensor, Tensor | None, LabelRelevance]:
    """Items, queries, gallery (None for all items) and relevance; the label of one query is unique."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(distinct, 4, generator=generator, dtype=torch.float64)
    items = vectors[torch.randint(0, distinct, (60,), generator=generator)]
    labels = torch.randint(0, 5, (60,), generator=generator)
    labels[3] = 99
    relevance = LabelRelevance(labels, torch.arange(60) < 20 if gallery else None)
    return items, items[relevance.queries], items[relevance.gallery] if gallery else None, relevance  # pyright: ignore


@pytest.mark.parametrize("gallery", [False, True])
@pytest.mark.parametrize("distinct", [1000, 7])
@pytest.mark.parametrize("block", [2**21, 100])
def test_ranks_in_the_whole_gallery_equal_a_double_loop(
    gallery: bool, distinct: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lam.retrieval.index.exact._BLOCK_ELEMENTS", block)
    _, queries, searched, relevance = _vectors(0, gallery=gallery, distinct=distinct)  # of 7 vectors most cosines tie
    ranks = relevant_ranks(queries, searched, relevance.of_rows)
    order, _ = rank(queries, searched, k=60)
    precisions, reciprocals = [], []
    for q, hits in enumerate(relevance.of_hits(order).tolist()):
        R = sum(hits)
        first = 1 + hits.index(True) if R else 0
        assert (int(ranks.first[q]), int(ranks.within_r[q]), int(ranks.n_relevant[q])) == (first, sum(hits[:R]), R)
        if R:
            precisions.append(sum(hits[:R]) / R)
            reciprocals.append(1 / first)
    assert torch.equal(ranks.n_relevant, relevance.count())
    assert len(precisions) == len(queries) - 1
    assert r_precision(ranks) == pytest.approx(sum(precisions) / len(precisions), abs=1e-12)
    assert mean_reciprocal_rank(ranks) == pytest.approx(sum(reciprocals) / len(reciprocals), abs=1e-12)


@pytest.mark.parametrize("gallery", [False, True])
def test_metrics_equal_those_of_pytorch_metric_learning(gallery: bool) -> None:
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    _, queries, searched, relevance = _vectors(1, gallery=gallery)

    def nearest(query: Tensor, k: int, reference: Tensor, ref_includes_query: bool) -> tuple[Tensor, Tensor]:
        hits, cosines = rank(query, None if ref_includes_query else reference, k=k)
        return 1 - cosines, hits

    names = ("precision_at_1", "r_precision", "mean_reciprocal_rank")
    calculator = AccuracyCalculator(include=names, k=40 if gallery else 59, knn_func=nearest)
    labels = relevance.labels
    theirs = calculator.get_accuracy(
        queries,
        labels[relevance.queries],
        queries if searched is None else searched,
        labels[relevance.candidates],
        ref_includes_query=searched is None,
    )
    ranks = relevant_ranks(queries, searched, relevance.of_rows)
    answers = relevance.of_hits(rank(queries, searched, k=1)[0])
    ours = {
        "precision_at_1": precision_at_k(answers, relevance.count(), k=1),
        "r_precision": r_precision(ranks),
        "mean_reciprocal_rank": mean_reciprocal_rank(ranks),
    }
    assert ours == pytest.approx(theirs, abs=1e-6)  # which are in float32


def test_of_an_empty_gallery_there_are_no_ranks() -> None:
    with pytest.raises(ValueError, match="gallery.*one item.*none"):
        relevant_ranks(torch.eye(2), torch.empty(0, 2), lambda rows: torch.empty(len(rows), 0, dtype=torch.bool))
    ranks = relevant_ranks(torch.ones(1, 2), None, lambda rows: torch.ones(1, 1, dtype=torch.bool))
    assert (ranks.first.tolist(), ranks.within_r.tolist(), ranks.n_relevant.tolist()) == ([0], [0], [0])
