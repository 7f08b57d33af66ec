import pytest
import torch

from lam.pairs.relation import Relation
from lam.pairs.relevance import LabelRelevance, PlaceRelevance, relevance_of
from lam.retrieval.metrics.votes import SampledAnswers


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kind", ["labels", "places"])
def test_relevance_is_that_of_a_double_loop(kind: str, apart: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (30,), generator=generator)
    positions = 40 * torch.rand(30, 3, generator=generator)
    is_query = torch.rand(30, generator=generator) < 0.4 if apart else None
    if kind == "labels":
        relevance = LabelRelevance(labels, is_query)
    else:
        relevance = PlaceRelevance(positions, 18.0, is_query)

    def match(one: int, other: int) -> bool:
        if kind == "labels":
            return bool(labels[one] == labels[other])
        return bool((positions[one] - positions[other]).norm() <= 18.0)

    queries = relevance.queries.tolist()
    candidates = list(range(30)) if is_query is None else (~is_query).nonzero()[:, 0].tolist()
    assert relevance.candidates.tolist() == candidates
    expected = [sum(match(q, c) for c in candidates if c != q) for q in queries]
    assert relevance.count().tolist() == expected
    hits = torch.randint(len(candidates), (len(queries), 5), generator=generator)
    twin = [[match(q, candidates[hit]) for hit in row] for q, row in zip(queries, hits.tolist(), strict=True)]
    assert relevance.of_hits(hits).tolist() == twin
    alike = relevance.same_answer(hits.T, hits[:, 0])
    assert alike.shape == (5, len(queries))
    assert alike[2].tolist() == [match(candidates[row[2]], candidates[row[0]]) for row in hits.tolist()]


def test_networks_that_find_the_same_place_agree() -> None:
    positions = torch.tensor([[0.0, 0.0], [3.0, 0.0], [500.0, 0.0], [503.0, 0.0]])
    relevance = PlaceRelevance(positions, 10.0)
    samples = torch.nn.functional.normalize(
        torch.tensor(
            [
                [[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]],
                [[1.0, 0.0], [1.0, 0.2], [0.0, 1.0], [0.2, 1.0]],
                [
                    [1.0, 0.0],
                    [0.1, 1.0],
                    [0.9, 0.1],
                    [0.0, 1.0],
                ],  # takes the first for the third, the second for the fourth
            ]
        ),
        dim=-1,
    )
    votes = SampledAnswers(samples, relevance, torch.tensor([[1], [0], [3], [2]])).votes()
    assert votes.agree.sum() == 8
    assert votes.correct.all()


def test_without_items_there_is_nothing_to_count() -> None:
    assert LabelRelevance(torch.zeros(0, dtype=torch.long)).count().tolist() == []
    assert PlaceRelevance(torch.zeros(0, 2), 1.0).count().tolist() == []


@pytest.mark.usefixtures("as_in_production")
def test_what_cannot_be_relevant_is_refused() -> None:
    labels = torch.tensor([0, 0, 1])
    with pytest.raises(ValueError, match="is_query.*3.*2"):
        LabelRelevance(labels, torch.tensor([True, False]))
    for is_query in (torch.tensor([1, 0, 0]), torch.tensor([1, 0, 0], dtype=torch.uint8), [True, False, False]):
        with pytest.raises(ValueError, match="is_query.*booleans"):
            relevance_of(Relation(), labels, is_query=is_query)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="queries.*3 queries.*3"):
        LabelRelevance(labels, torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="labels.*integers.*shape"):
        relevance_of(Relation(), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="0 < positive_within <= negative_beyond, got 0.0 and 0.0"):
        relevance_of(Relation(positive_within=5.0), torch.zeros(3, 2), relevant_within=0.0)
    with pytest.raises(ValueError, match="positions.*finite"):
        relevance_of(Relation(positive_within=5.0), torch.tensor([[0.0, float("nan")]]))
