"""The recall that an index measures against an exact search."""

import pytest
import torch

from lam.retrieval import Index
from lam.retrieval.index.hits import Recall, percent
from lam.vmf.embeddings import Embeddings

D = 16


def items(count: int, seed: int = 0) -> Embeddings:
    mean = torch.nn.functional.normalize(torch.randn(count, D, generator=torch.Generator().manual_seed(seed)), dim=1)
    return Embeddings(mean, torch.ones(count), torch.ones(count), torch.zeros(count))


def filled(factory: str, count: int, parameters: str | None = None) -> Index:
    index = Index(D, factory, parameters=parameters)
    index.add(items(count), torch.arange(count) * 3 + 1)
    return index


def measured(index: Index, **options: int) -> Recall:
    recall = index.measure_recall(**options)
    assert recall is not None
    return recall


@pytest.mark.parametrize("parameters", ["efSearch=12", "efSearch=64"])
def test_recall_is_what_two_loops_count(parameters: str) -> None:
    count, k, depth = 1200, 4, 6
    index, stored = filled("HNSW4", count, parameters), items(count).mean
    index.remove(torch.arange(5) * 3 + 1)
    n_found = n_same = 0
    for own in range(5, count):
        cosines = stored @ stored[own]
        cosines[[*range(5), own]] = -2
        nearest = (cosines.topk(depth).indices * 3 + 1).tolist()
        found = index.search(items(count)[own : own + 1], depth + 1).ids[0].tolist()
        found = [item for item in found if item != own * 3 + 1][:depth]
        n_found += len(set(nearest[:k]) & set(found[:k]))
        n_same += nearest == found
    recall = measured(index, n_queries=count, k=k, depth=depth)
    assert (recall.factory, recall.n_queries, recall.k, recall.depth) == ("HNSW4", count - 5, k, depth)
    assert recall.share == pytest.approx(n_found / (k * (count - 5)), abs=1e-9)
    assert recall.unchanged == pytest.approx(n_same / (count - 5), abs=1e-9)
    assert 0 < recall.unchanged < recall.share < 1


def test_a_sample_tells_nearly_what_all_items_tell_and_draws_no_random_number() -> None:
    index = filled("HNSW4", 2000, "efSearch=12")
    state = torch.get_rng_state()
    some = measured(index)
    assert some == measured(index)
    assert torch.equal(state, torch.get_rng_state())
    assert some.n_queries == 200
    assert some.share == pytest.approx(measured(index, n_queries=2000).share, abs=0.05)


@pytest.mark.parametrize("count", [2, 3, 30])
def test_an_exact_search_finds_all_of_what_there_is(count: int) -> None:
    for factory in ("Flat", "HNSW8"):
        recall = measured(filled(factory, count))
        assert (recall.share, recall.unchanged) == (1, 1)
        assert (recall.k, recall.depth, recall.n_queries) == (min(10, count - 1), min(50, count - 1), count)


@pytest.mark.parametrize("count", [0, 1])
def test_there_is_no_recall_without_neighbours(count: int) -> None:
    assert filled("HNSW8", count).measure_recall() is None


def test_copies_of_an_item_are_as_near_as_each_other() -> None:
    """The result does not depend on which copies are found, or whether the query is one of them."""
    index, one = Index(D, "HNSW8"), items(1)
    index.add(one[torch.zeros(400, dtype=torch.int64)], torch.arange(400))
    recall = measured(index)
    assert (recall.share, recall.unchanged) == (1, 1)


@pytest.mark.parametrize("name", ["n_queries", "k", "depth"])
def test_numbers_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} .*1.*0"):
        filled("Flat", 5).measure_recall(**{name: 0})


def test_a_recall_says_itself_in_words() -> None:
    said = (
        "HNSW32 finds 99.6 % of the 10 nearest neighbours of 200 stored items, and for 91.0 % of these items the same "
    )
    assert str(Recall("HNSW32", 200, 10, 0.9965, 50, 0.91)) == f"{said}50 hits as an exact search"
    assert [percent(share) for share in (0.0, 0.5, 0.99999, 1.0)] == ["0.0 %", "50.0 %", "99.9 %", "100 %"]


@pytest.mark.parametrize(("factory", "holds"), [("Flat", False), ("HNSW8", True), ("IVF4,Flat", False)])
def test_a_type_says_whether_it_holds_what_was_removed(factory: str, holds: bool) -> None:
    index = Index(D, factory)
    if not index.is_trained:
        index.train(items(200))
    index.add(items(200), torch.arange(200))
    assert not index.holds_removed
    index.remove([7])
    assert index.holds_removed is holds
    index.remove(torch.arange(100, 150))  # a fifth is swept
    assert not index.holds_removed
