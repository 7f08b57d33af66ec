"""Promises of a calibration if a search along a graph may miss neighbours.

As in a run, calibrations use exact searches.
"""

import math
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from lam.retrieval import Index
from lam.retrieval.decisions.abstention import MATCH, SearchDecisions
from lam.retrieval.decisions.calibrate import OtherQueries
from lam.retrieval.decisions.calibration import Calibration, Targets
from lam.retrieval.index.hits import Recall
from lam.retrieval.metrics.open_set import search_open_set
from lam.retrieval.metrics.scores import N_HITS
from lam.vmf.embeddings import Embeddings
from tests.retrieval.decisions.calibrated import calibrated

D, CLASSES, SIZE, ASKED, FAR = 32, 200, 6000, 2000, 0.05
GOOD, POOR = ("HNSW32", None), ("HNSW8", "efSearch=8")
_CENTERS = torch.nn.functional.normalize(torch.randn(2 * CLASSES, D, generator=torch.Generator().manual_seed(9)), dim=1)
_ROUNDING = 1e-5  # in a statistic, from rounded cosines


def _items(count: int, seed: int, *, first: int = 0) -> tuple[Embeddings, Tensor]:
    """Points around centres, near and far; strangers have other centres than the gallery."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(first, first + CLASSES, (count,), generator=generator)
    noise = 0.25 * torch.rand(count, 1, generator=generator) * torch.randn(count, D, generator=generator)
    mean = torch.nn.functional.normalize(_CENTERS[labels] + noise, dim=1)
    return Embeddings(mean, torch.ones(count), torch.ones(count), torch.ones(count)), labels


GALLERY, LABELS = _items(SIZE, 1)


@cache
def _index(factory: str, parameters: str | None) -> Index:
    index = Index(D, factory, parameters=parameters)
    index.add(GALLERY, torch.arange(SIZE))
    return index


@cache
def _calibration(accept: str | None, flag: str | None) -> Calibration:
    queries, labels = _items(500, 4)
    searches = search_open_set(queries.mean, GALLERY.mean, lambda rows: labels[rows][:, None] == LABELS)
    strangers, _ = _items(500, 5, first=CLASSES)
    hits = _index("Flat", None).search(strangers, N_HITS)
    settings = {"accept": accept, "flag": flag, "targets": Targets(far=FAR, ood=0.05), "gallery_labels": LABELS}
    given = OtherQueries(strangers, hits.scores, labels=LABELS[hits.ids])
    return calibrated(searches, queries, strangers=given, **settings)


@dataclass
class Answers:
    """The same queries, answered by an exact search and by a graph."""

    exact: SearchDecisions
    graph: SearchDecisions
    is_changed: Tensor
    """(Q,) whether any of the hits has another cosine."""
    is_right: Tensor
    """(2, Q) whether the first hit of each search is of the query's class."""

    @property
    def accepts(self) -> tuple[int, int]:
        return int((self.exact.codes == MATCH).sum()), int((self.graph.codes == MATCH).sum())

    @property
    def share_equal(self) -> float:
        return float((self.exact.codes == self.graph.codes).double().mean())


def _answers(index: tuple[str, str | None], calibration: Calibration, *, strangers: bool) -> Answers:
    queries, labels = _items(ASKED, 3, first=CLASSES) if strangers else _items(ASKED, 2)
    hits = [_index(*kind).search(queries, N_HITS) for kind in (("Flat", None), index)]
    exact, graph = (calibration.decide(found, queries, labels=LABELS[found.ids]) for found in hits)
    is_changed = ((hits[0].scores - hits[1].scores).abs() > 1e-6).any(1)
    return Answers(exact, graph, is_changed, torch.stack([LABELS[found.ids[:, 0]] == labels for found in hits]))


def _recall(index: tuple[str, str | None]) -> Recall:
    recall = _index(*index).measure_recall()
    assert recall is not None
    return recall


CHOICES = [
    (None, None),
    ("probability", "kappa"),
    ("cosine", "kappa"),
    ("mean_cosine", "mean_cosine"),
    ("margin", "votes"),
]


@pytest.mark.parametrize(("accept", "flag"), CHOICES)
def test_a_graph_of_high_recall_keeps_the_rate_of_false_accepts(accept: str | None, flag: str | None) -> None:
    assert _recall(GOOD).share > 0.99
    calibration = _calibration(accept, flag)
    for strangers in (True, False):
        answers = _answers(GOOD, calibration, strangers=strangers)
        assert answers.share_equal >= 0.99
        exact, graph = answers.accepts
        rate = exact / ASKED
        assert abs(graph - exact) / ASKED <= math.sqrt(rate * (1 - rate) / ASKED)  # a standard error
    assert answers.is_changed.any()  # so that the test is not trivial


@pytest.mark.parametrize(("accept", "flag"), [("cosine", "kappa"), ("mean_cosine", "mean_cosine")])
def test_what_rises_with_the_cosines_accepts_no_stranger_more(accept: str, flag: str) -> None:
    """For any graph, its i-th cosine is at most the i-th cosine of an exact search."""
    assert 0.95 < _recall(POOR).share < 0.99
    answers = _answers(POOR, _calibration(accept, flag), strangers=True)
    assert (answers.graph.statistic <= answers.exact.statistic + _ROUNDING).all()
    accepted, by_graph = ((one.codes == MATCH) for one in (answers.exact, answers.graph))
    near = (answers.exact.statistic - answers.exact.accept_above).abs() < _ROUNDING
    assert not (by_graph & ~accepted & ~near).any()
    assert by_graph.sum() < accepted.sum()
    assert (answers.graph.ood_score >= answers.exact.ood_score - _ROUNDING).all()


def test_a_margin_or_a_probability_can_accept_more_strangers() -> None:
    """They look surer if a hit of another class is missed. Therefore a service reports the share of changed hits."""
    exact, graph = _answers(POOR, _calibration("margin", "votes"), strangers=True).accepts
    assert graph > 1.5 * exact
    probability = _answers(POOR, _calibration("probability", "kappa"), strangers=True)
    assert (probability.graph.statistic > probability.exact.statistic + _ROUNDING).any()


def test_a_right_first_hit_can_be_missed() -> None:
    """Then known queries get more wrong answers, and the promise on wrong answers, which assumes exact hits, fails."""
    was_right, is_right = _answers(POOR, _calibration("cosine", "kappa"), strangers=False).is_right
    assert (was_right & ~is_right).any()
    assert is_right.sum() < was_right.sum()


@pytest.mark.parametrize("index", [GOOD, POOR])
@pytest.mark.parametrize(("accept", "flag"), CHOICES)
def test_no_rate_moves_by_more_than_the_share_of_queries_whose_hits_change(
    accept: str | None, flag: str | None, index: tuple[str, str | None]
) -> None:
    for strangers in (True, False):
        answers = _answers(index, _calibration(accept, flag), strangers=strangers)
        assert not ((answers.exact.codes != answers.graph.codes) & ~answers.is_changed).any()
    assert _recall(index).unchanged == pytest.approx(1 - float(answers.is_changed.double().mean()), abs=0.1)
