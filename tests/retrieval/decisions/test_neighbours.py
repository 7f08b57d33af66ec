"""Numbers of neighbours: at most what a class has, chosen on calibration data."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lam.retrieval.decisions.neighbours import MIN_QUERIES, candidates_of, choose_nearest, nearest_of
from lam.retrieval.metrics.ood import auroc
from lam.retrieval.metrics.open_set import search_open_set
from lam.retrieval.metrics.reference import Reference
from lam.retrieval.metrics.scores import SCORES, scores_of

CLASSES, PHOTOS = 40, 4


def people() -> tuple[torch.Tensor, torch.Tensor]:
    """Items of 40 classes around their centres, far enough from each other that few first hits are wrong."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(CLASSES).repeat(2 * PHOTOS)
    centres = torch.randn(CLASSES, 12, generator=generator)
    return F.normalize(centres[labels] + 0.9 * torch.randn(len(labels), 12, generator=generator)), labels


def calibration() -> tuple[dict[str, Any], torch.Tensor, list[dict[str, Any]], torch.Tensor]:
    items, labels = people()
    n = PHOTOS * CLASSES
    gallery, of_gallery, queries = items[:n], labels[:n], items[n:]
    found = search_open_set(queries, gallery, lambda rows: labels[n:][rows][:, None] == of_gallery)
    evidence = {
        **{"cosines": found.cosines, "labels": of_gallery[found.hits], "features": queries},
        "reference": Reference.of(gallery, of_gallery),
    }
    return evidence, found.correct, [{"cosines": found.others}], of_gallery


@pytest.mark.parametrize(
    ("counts", "expected"),
    [([4, 4, 4, 4], 4), ([1], 1), ([1, 1, 1], 1), ([9, 2], 2), ([1, 5, 5, 5, 5], 5), ([1, 1, 5, 5], 1), ([3, 700], 3)],
)
def test_three_in_four_classes_have_as_many_items(counts: list[int], expected: int) -> None:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    assert nearest_of(labels) == expected
    assert sum(count >= expected for count in counts) >= 0.75 * len(counts)
    assert nearest_of(torch.cat([labels, torch.full((99,), -1)])) == expected  # items without a label are of no class


def test_candidates_stay_within_what_a_class_has() -> None:
    four, one = torch.arange(20).repeat(4), torch.arange(20)
    assert candidates_of(four, one) == {
        **{"knn": (1,), "mean_cosine": (4, 2, 1), "votes": (4, 2, 1)},
        "weighted_votes": (20, 10, 5, 2, 1),
    }
    many = candidates_of(torch.zeros(500, dtype=torch.int64))
    assert {name: numbers[0] for name, numbers in many.items()} == {name: SCORES[name].k for name in many}
    assert candidates_of() == many
    with pytest.raises(ValueError, match="label.*3 items without"):
        candidates_of(torch.full((3,), -1))


def test_the_number_is_the_one_of_the_highest_auroc() -> None:
    queries, correct, others, of_gallery = calibration()
    candidates = candidates_of(of_gallery, of_gallery)
    chosen = choose_nearest(candidates, queries, correct, others)
    unlabelled = {**queries, "reference": Reference(queries["reference"].unit)}
    of_queries = choose_nearest(candidates, unlabelled, correct, others)
    assert {**of_queries, "knn": chosen["knn"]} == chosen
    for name, k in of_queries.items():
        areas = {}
        for number in candidates[name]:
            values = scores_of(queries, nearest={name: number})[name]
            strangers = scores_of(others[0], nearest={name: number}).get(name, values[:0])
            areas[number] = auroc(values[correct], torch.cat([values[~correct], strangers]))
        assert areas[k] == max(areas.values())
    assert chosen["mean_cosine"] < 10  # six of the first ten hits are other people
    assert scores_of(queries, nearest=chosen)["votes"].shape == correct.shape


def test_a_reference_with_classes_says_itself_at_which_neighbour_other_classes_are_told() -> None:
    queries, correct, _, of_gallery = calibration()
    unit, areas = queries["reference"].unit, {}
    for k in (4, 2, 1):
        own, other = [], []
        for i, item in enumerate(unit):
            cosines = [(float(item @ one), int(label)) for one, label in zip(unit, of_gallery, strict=True)]
            cosines = sorted(cosines[:i] + cosines[i + 1 :], reverse=True)
            own.append(cosines[k - 1][0])
            other.append([cosine for cosine, label in cosines if label != of_gallery[i]][k - 1])
        areas[k] = auroc(-torch.tensor(own), -torch.tensor(other))
    best = max(areas, key=lambda k: areas[k])
    assert best != 4  # the fourth nearest is of another class, as an item is not its own neighbour
    assert choose_nearest({"knn": (4, 2, 1)}, {"reference": queries["reference"]}, correct) == {"knn": best}
    lone = Reference.of(unit[:3], torch.arange(3))
    assert choose_nearest({"knn": (3, 2, 1)}, {"reference": lone}, correct[:0]) == {"knn": 3}


def test_of_too_little_the_largest_candidate_serves() -> None:
    queries, correct, others, of_gallery = calibration()
    candidates = candidates_of(of_gallery, of_gallery)
    largest = {name: numbers[0] for name, numbers in candidates.items()}
    few = {**{name: part[: MIN_QUERIES - 1] for name, part in queries.items() if name != "reference"}}
    assert choose_nearest(candidates, few, torch.ones(MIN_QUERIES - 1, dtype=torch.bool), others) == largest
    all_right = {name: part for name, part in queries.items() if name != "reference"}
    assert choose_nearest(candidates, all_right, torch.ones_like(correct)) == largest
    assert choose_nearest(candidates, {}, correct, others) == largest
    one = {name: part[:1] for name, part in few.items()}
    assert choose_nearest(candidates, one, correct[:1]) == largest


def test_hits_beyond_the_last_count_as_far_away() -> None:
    queries, correct, others, _ = calibration()
    spoilt = others[0]["cosines"].clone()
    spoilt[:, 2:] = -torch.inf
    assert choose_nearest({"mean_cosine": (4, 2)}, queries, correct, [{"cosines": spoilt}])["mean_cosine"] == 4


def test_what_choosing_refuses() -> None:
    queries, correct, others, _ = calibration()
    with pytest.raises(ValueError, match="correct.*shape"):
        choose_nearest({"votes": (2, 1)}, queries, correct[:5], others)
