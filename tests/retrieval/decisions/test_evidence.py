"""Evidence in folds: statistics of a fold are learned on the other folds, and a query is in one fold."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lam.retrieval.decisions.evidence import Evidence, Group, folds_of
from lam.retrieval.decisions.probability import FOLDS, Scores
from tests.retrieval.decisions.simulation import NAMES, WORLDS


@pytest.fixture
def evidence() -> Evidence:
    return WORLDS["useful"].evidence(23, torch.Generator().manual_seed(0))[0]


def _means(part: Evidence) -> Callable[[Scores], Tensor]:
    """Differences to two means of the training part: statistics that show the data they were learned from."""
    of_known, of_strangers = part.known["knn"].mean(), part.strangers.scores["knn"].mean()
    return lambda scores: torch.stack([scores["knn"] - of_known, scores["knn"] - of_strangers])


def test_each_is_held_against_what_the_other_folds_taught(evidence: Evidence) -> None:
    groups = (evidence.queries, evidence.no_match, evidence.strangers)
    for group, found in zip(groups, evidence.out_of_fold(_means)[:3], strict=True):
        values = group.scores["knn"]
        assert found.shape == (len(values), 2)
        for row, fold in enumerate(group.fold.tolist()):
            known = evidence.queries.scores["knn"][evidence.has_match & (evidence.queries.fold != fold)].mean()
            strangers = evidence.strangers.scores["knn"][evidence.strangers.fold != fold].mean()
            torch.testing.assert_close(found[row], values[row] - torch.stack([known, strangers]))


def test_where_a_kind_is_empty_so_is_what_is_said_of_it(evidence: Evidence) -> None:
    none = Group({name: torch.zeros(0).double() for name in NAMES})
    alone = Evidence(evidence.queries, evidence.has_match, evidence.right, none, none)
    asked, no_match, strangers, simulated = alone.out_of_fold(lambda part: lambda scores: scores["knn"][None])
    assert torch.equal(asked[:, 0], evidence.queries.scores["knn"])
    assert no_match.shape == strangers.shape == simulated.shape == (0, 1)


def test_a_fold_is_left_out_of_every_kind_unless_no_query_with_a_match_were_left(evidence: Evidence) -> None:
    part = evidence.without(2)
    kept = evidence.queries.fold != 2
    assert torch.equal(part.queries.scores["cosine"], evidence.queries.scores["cosine"][kept])
    assert torch.equal(part.right[part.has_match], evidence.right[kept & evidence.has_match])
    assert not any((group.fold == 2).any() for group in (part.queries, part.no_match, part.strangers))
    one = WORLDS["useful"].evidence(1, torch.Generator().manual_seed(0))[0]
    assert one.without(0) is one


def test_some_of_the_scores_of_all_kinds(evidence: Evidence) -> None:
    few = evidence.only({"cosine", "votes"})
    assert [list(group.scores) for group in (few.queries, few.no_match, few.strangers)] == [["cosine"]] * 3
    assert torch.equal(few.known["cosine"], evidence.queries.scores["cosine"][evidence.has_match])


def test_items_of_a_unit_are_in_one_fold_and_folds_are_as_large_as_can_be() -> None:
    units = torch.randint(0, 33, (400,), generator=torch.Generator().manual_seed(0))
    fold = folds_of(units)
    for unit in units.unique():
        assert len(fold[units == unit].unique()) == 1
    of_units = torch.stack([fold[units == unit][0] for unit in units.unique()])
    assert of_units.bincount(minlength=FOLDS).tolist() == [7, 7, 7, 6, 6]
    assert not torch.equal(of_units, torch.arange(len(of_units)) % FOLDS)  # files often list classes by turns
    assert len(folds_of(torch.arange(0))) == 0
