"""Mated and non-mated searches against a double loop, and against a search of the index."""

import math

import pytest
import torch

from lam.retrieval.index.faiss_index import Index
from lam.retrieval.metrics.open_set import search_open_set, search_without_self
from lam.retrieval.metrics.scores import N_HITS
from lam.utils.notes import Note
from lam.vmf.embeddings import Embeddings
from tests.helpers import unchecked


def _points(n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(n, 3, generator=generator), dim=1)


@pytest.mark.parametrize("kind", ["alone", "apart", "stored"])
def test_searches_equal_a_double_loop(kind: str) -> None:
    queries, gallery = _points(25, 0), _points(30, 1)
    alone, own = kind == "alone", [-1] * 25
    gallery = queries if alone else gallery
    labels, others = torch.arange(25) % 7, torch.arange(len(gallery)) % 7
    labels[3] = 99  # matches nothing
    others = labels if alone else others
    if kind == "stored":  # the first ten queries are items
        own[:10] = range(15, 25)
        gallery[15:25], others[15:25] = queries[:10], labels[:10]
    own = list(range(25)) if alone else own
    found = search_open_set(
        queries,
        None if alone else gallery,
        lambda rows: labels[rows][:, None] == others,
        own=torch.tensor(own) if kind == "stored" else None,
    )
    assert found.gallery_size == len(gallery) - (kind != "apart")
    for q in range(25):
        scores = {i: float(queries[q].double() @ gallery[i].double()) for i in range(len(gallery)) if i != own[q]}
        mates = {i: score for i, score in scores.items() if labels[q] == others[i]}
        rest = {i: score for i, score in scores.items() if i not in mates}
        ranked = sorted(scores, key=lambda i: -scores[i])
        assert int(found.nearest[q]) == ranked[0]
        kept = found.hits.shape[1]
        assert kept == found.gallery_size
        assert found.hits[q].tolist() == ranked[:kept]
        assert found.cosines[q].tolist() == pytest.approx([scores[i] for i in ranked[:kept]], abs=1e-6)
        assert bool(found.correct[q]) == (ranked[0] in mates)
        assert float(found.mated[q]) == pytest.approx(max(mates.values(), default=-math.inf), abs=1e-6)
        assert float(found.non_mated[q]) == pytest.approx(max(rest.values()), abs=1e-6)
        best = sorted(rest.values(), reverse=True)[: found.hits.shape[1]]
        assert found.others[q][: len(best)].tolist() == pytest.approx(best, abs=1e-6)
        assert found.others[q][len(best) :].isneginf().all()
        assert int(found.rank[q]) == min((1 + ranked.index(i) for i in mates), default=0)
    assert found.has_mate.tolist() == [q != 3 for q in range(25)]


def test_queries_that_are_items_are_searched_without_themselves() -> None:
    gallery, labels = _points(60, 4), torch.arange(60) % 5
    own = torch.tensor([7, -1, 30, -1])
    queries = gallery[own] + 1e-7
    queries[[1, 3]] = _points(2, 5)
    labels_of_queries = labels[own]
    labels_of_queries[2] += 1  # stored under another label
    with pytest.warns(Note, match="1 of 4 queries"):
        found, positions = search_without_self(
            queries, gallery, lambda rows: labels_of_queries[rows][:, None] == labels
        )
    assert positions.tolist() == [7, -1, -1, -1]
    assert 7 not in found.hits[0].tolist()
    assert (int(found.nearest[2]), bool(found.correct[2])) == (30, False)


def test_scores_are_those_of_the_index() -> None:
    queries, gallery = _points(40, 2), _points(50, 3)
    found = search_open_set(queries, gallery, lambda rows: torch.zeros(len(rows), 50, dtype=torch.bool))
    index = Index(3)
    index.add(Embeddings(gallery, torch.ones(50), torch.ones(50), torch.ones(50)), torch.arange(50))
    hits = index.search(Embeddings(queries, torch.ones(40), torch.ones(40), torch.ones(40)), 50)
    torch.testing.assert_close(found.cosines, hits.scores, rtol=0, atol=2e-7)
    assert torch.equal(found.hits, hits.ids)


def test_fifty_hits_are_kept() -> None:
    queries, gallery = _points(5, 2), _points(80, 3)
    found = search_open_set(queries, gallery, lambda rows: torch.zeros(len(rows), 80, dtype=torch.bool))
    assert found.hits.shape == found.cosines.shape == (5, N_HITS)
    assert torch.equal(found.score, found.cosines[:, 0])


def test_equal_scores_rank_the_match_last() -> None:
    n = torch.tensor([[1.0, 0.0]]).expand(4, 2)
    found = search_open_set(n[:1], n, lambda rows: torch.tensor([[True, False, False, False]]))
    assert found.rank.tolist() == [4]


def test_a_gallery_of_one_has_no_second() -> None:
    n = torch.eye(2)
    found = search_open_set(n, n[:1], lambda rows: torch.ones(len(rows), 1, dtype=torch.bool))
    assert found.hits.tolist() == [[0], [0]]
    assert found.non_mated.tolist() == [-math.inf, -math.inf]


def test_what_is_refused() -> None:
    n = torch.eye(2)
    with pytest.raises(ValueError, match="candidate for every.*0"):
        search_open_set(n[:1], None, lambda rows: torch.ones(1, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="dimension, got 2 and 3"):
        unchecked(search_open_set)(n, torch.eye(3), lambda rows: torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="queries.*finite"):
        search_open_set(n * torch.nan, n, lambda rows: torch.ones(2, 2, dtype=torch.bool))
