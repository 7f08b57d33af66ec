"""Laws of every metric and every score of the registry.

A new metric only needs its evidence here, under the names in its `needs`.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lam.pairs.relevance import LabelRelevance
from lam.retrieval.index.exact import rank
from lam.retrieval.metrics.probing import clustering
from lam.retrieval.metrics.ranking import relevant_ranks
from lam.retrieval.metrics.reference import Reference
from lam.retrieval.metrics.registry import METRICS, OWN, Key, Metric, describe, measure, needs_posterior
from lam.retrieval.metrics.scores import SCORES, Score, scores_of
from lam.retrieval.metrics.uncertainty import ausc
from lam.retrieval.metrics.votes import Votes
from lam.vmf.embeddings import Embeddings

N, D, S = 120, 8, 16
MEASURED = [name for name, metric in METRICS.items() if metric.function is not None]
DIRECTED = [name for name in MEASURED if METRICS[name].direction != "neither"]
LEAST = {"nauc": -1, "entropy_correlation": -1, "ari": -1}  # worse than no order at all
COUNTS = {"n_queries", "n_without_relevant"}
OF_FLOATS = [name for name in MEASURED if {"doubt", "inside", "matched", "kappa"} & set(METRICS[name].needs)]
OF_SETS = ("inside", "outside", "matched", "unmatched")

Order = Callable[[int], Tensor]


def evidence(*, n: int = N, noise: float = 1.0, seed: int = 0, order: Order | None = None) -> dict[str, Any]:
    """All evidence of metrics, with many ties; less noise means better results."""
    generator = torch.Generator().manual_seed(seed)

    def blurred(values: Tensor) -> Tensor:
        return ((values + noise * torch.randn(values.shape, generator=generator)) * 4).round() / 4

    labels = torch.arange(n) % 6
    n_hits = min(10, max(n - 1, 0))
    points = torch.nn.functional.one_hot(labels, D) + 0.5
    points = points + noise * torch.randn(n, D, generator=generator)
    right = torch.rand(n, generator=generator) < 1 - 0.5 * noise
    found = {
        "correct": right,
        "doubt": blurred((~right).double()),
        "inside": blurred(torch.zeros(n)),
        "outside": blurred(torch.full((n,), 2.0)),
        "right": right,
        "matched": blurred(torch.zeros(n)),
        "unmatched": blurred(torch.full((n,), 2.0)),
        "entropy": blurred((~right).double()),
        "kappa": blurred(torch.full((n,), 2.0)),
        "kappa_of_crop": blurred(torch.zeros(n)),
    }
    agree = torch.where(right, S - (noise * 4 * torch.rand(n, generator=generator)).long(), (noise * S / 2) // 1).long()
    rows = torch.arange(n) if order is None else order(n)
    if n > 1:
        relevance = LabelRelevance(labels[rows])
        found["n_relevant"] = relevance.count()
        found["relevance"] = relevance.of_hits(rank(points[rows], k=n_hits)[0])
        found["ranks"] = relevant_ranks(points[rows], None, relevance.of_rows)
    else:
        nothing = torch.zeros(n, dtype=torch.int64)
        found["n_relevant"], found["relevance"] = nothing, torch.zeros(n, 10, dtype=torch.bool)
        found["ranks"] = relevant_ranks(torch.zeros(n, D), torch.eye(D), lambda rows: torch.zeros(len(rows), D) > 0)
    found["agreement"] = Votes(agree[rows], right[rows], S)
    for name in ("correct", "doubt", "right", "inside", "entropy", "kappa", "kappa_of_crop"):
        found[name] = found[name][rows]
    for name in OF_SETS[1:]:
        found[name] = found[name][torch.arange(n) if order is None else order(n)]
    known = torch.nn.functional.one_hot(torch.arange(60) % 6, D) + 0.5 * torch.randn(60, D, generator=generator)
    clusters = clustering(torch.nn.functional.normalize(points[rows]), labels[rows])
    found |= {"clusters": clusters, "features": points[rows]}
    return found | {"classes": labels[rows], "labelled": Reference.of(known, torch.arange(60) % 6)}


def value(name: str, of: dict[str, Any]) -> float | int | None:
    """The value of a metric for this evidence, under its own key."""
    needed = {need: of[need] for need in METRICS[name].needs}
    (found,) = {key: one for key, one in measure(needed, costly=True).items() if Key.parse(key).metric == name}.values()
    return found


@pytest.mark.parametrize("name", MEASURED)
def test_the_order_of_items_tells_nothing(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    shuffled = evidence(order=lambda n: torch.randperm(n, generator=generator))
    backwards = evidence(order=lambda n: torch.arange(n).flip(0))
    for other in (shuffled, backwards):
        assert value(name, other) == pytest.approx(value(name, evidence()), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OF_FLOATS)
def test_the_type_of_the_numbers_tells_nothing(name: str, dtype: torch.dtype) -> None:
    exact = evidence()  # in quarters, which every type holds
    other = {need: of.to(dtype) if isinstance(of, torch.Tensor) and of.is_floating_point() else of
             for need, of in exact.items()}  # fmt: skip
    assert value(name, other) == value(name, exact)


@pytest.mark.parametrize("name", MEASURED)
def test_of_nothing_it_is_undefined_and_a_count_is_nought(name: str) -> None:
    assert value(name, evidence(n=0)) == (0 if name in COUNTS else None)


@pytest.mark.parametrize("name", MEASURED)
def test_what_a_method_does_not_have_is_undefined(name: str) -> None:
    assert value(name, dict.fromkeys(METRICS[name].needs)) is None
    assert measure({}) == {}


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("noise", [0.1, 0.5, 1.5])
def test_it_lies_between_nought_and_one(name: str, noise: float) -> None:
    found = value(name, evidence(noise=noise))
    assert found is not None
    assert LEAST.get(name, 0) <= found <= (N if name in COUNTS else 1)


@pytest.mark.parametrize("name", OF_FLOATS)
@pytest.mark.parametrize("where", [0, N - 1])
def test_nan_is_refused_with_its_index(name: str, where: int) -> None:
    if name.endswith("prevalence"):
        return  # counts items, whatever their scores
    for need in METRICS[name].needs:
        spoilt = evidence()
        if spoilt[need].is_floating_point():
            spoilt[need][where] = math.nan
            with pytest.raises(ValueError, match=f"at index {where}"):
                value(name, spoilt)


@pytest.mark.parametrize("name", DIRECTED)
def test_better_evidence_moves_it_where_its_direction_says(name: str) -> None:
    worse, better = ([value(name, evidence(noise=noise, seed=seed)) or 0 for seed in range(3)] for noise in (1.5, 0.1))
    gain = sum(better) - sum(worse)
    assert gain > 0 if METRICS[name].direction == "higher" else gain < 0


@pytest.mark.parametrize("name", [name for name in MEASURED if METRICS[name].by_score])
def test_of_equal_scores_it_is_that_of_a_useless_one(name: str) -> None:
    of = evidence()
    tied = {need: torch.zeros_like(of[need]) for need in OF_SETS}
    tied |= {"correct": of["correct"], "doubt": torch.zeros(N)}
    accuracy = float(of["correct"].double().mean())
    several = {  # as many inside as outside
        "ausc": accuracy,
        "augrc": (1 - accuracy) / 2,
        "nauc": 0,
        "scod_augrc": (1 + (1 - accuracy)) / 8,
        "mann_whitney_p": 1,
        "entropy_correlation": None,
    }
    tied |= {"right": of["right"], "entropy": of["entropy"]}
    expected = several.get(name, 0.5)
    assert value(name, tied) == (None if expected is None else pytest.approx(expected, rel=1e-12, abs=1e-12))


@pytest.mark.parametrize("name", [name for name in MEASURED if METRICS[name].by_score])
def test_it_looks_at_the_order_of_scores_alone(name: str) -> None:
    of = evidence()
    cubed = {need: part**3 if torch.is_tensor(part) and part.is_floating_point() else part for need, part in of.items()}
    assert value(name, cubed) == pytest.approx(value(name, of), rel=1e-12)


@pytest.mark.parametrize("name", METRICS)
def test_it_can_be_read(name: str) -> None:
    metric = METRICS[name]
    assert metric.name
    assert metric.meaning
    assert (metric.direction == "neither") == (metric.reading == "")
    assert metric.function is None or metric.needs
    assert Key.parse(name) == Key(name)
    assert metric.by_score in (None, OWN, *SCORES)


def test_names_of_metrics_and_scores_tell_them_apart() -> None:
    for table in (METRICS, SCORES):
        assert len({one.name for one in table.values()}) == len(table)
    assert len({score.short for score in SCORES.values()}) == len(SCORES)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("metric", [name for name in MEASURED if METRICS[name].by_score])
def test_keys_say_the_score_and_the_set(metric: str, score: str) -> None:
    needs = METRICS[metric].needs
    of = {need: part for need, part in evidence().items() if need in needs}
    own = METRICS[metric].by_score
    of_set = "a_set" if own == OWN else ""
    keys = [Key.parse(key) for key in measure(of, score=score, own="knn", ood_set=of_set)]
    expected = Key(metric, "" if score == ("knn" if own == OWN else own) else score, of_set)
    assert expected in keys
    assert Key.parse(str(expected)) == expected
    assert (f"by {SCORES[score].short}" in describe(str(expected)).name) == bool(expected.score)
    if expected.score:
        assert needs_posterior(str(expected)) == SCORES[score].of_posterior


def items(n: int = 12, *, rows: Tensor | None = None) -> dict[str, Any]:
    """All evidence of scores, for n items."""
    generator = torch.Generator().manual_seed(2)
    kappa, variance = 10 * torch.rand(n, generator=generator) + 1, torch.rand(n, generator=generator)
    features = torch.randn(n, 5, generator=generator)
    known, after = torch.randn(9, 5, generator=generator), torch.randn(9, D, generator=generator)
    reference = Reference.of(known, torch.arange(9) % 2, embeddings=after)
    cosines = (2 * torch.rand(n, 4, generator=generator) - 1).sort(dim=1, descending=True).values
    labels = torch.randint(0, 3, (n, 4), generator=generator)
    labels[0] = torch.tensor([1, 1, 2, 1])
    rows = torch.arange(n) if rows is None else rows
    mean = torch.nn.functional.normalize(torch.randn(n, D, generator=generator))
    embeddings = Embeddings(mean, kappa, torch.full((n,), 0.5), variance)
    parts = replace(embeddings, kappa_epistemic=kappa.clone(), kappa_aleatoric=2 * kappa, p_known=variance / 2)
    return {
        **{"embeddings": embeddings[rows], "features": features[rows], "cosines": cosines[rows]},
        **{"labels": labels[rows], "reference": reference, "parts": parts[rows]},
    }


@pytest.mark.parametrize("value", [torch.tensor(0.25), torch.tensor([0.25]), np.float32(0.25), 0.25])
def test_a_measured_value_is_a_plain_number(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "own", Metric("own", "lower", "", lambda _: value, ("own",)))
    measured = measure({"own": 1})["own"]
    assert type(measured) is float
    assert measured == 0.25


def test_the_name_of_a_metric_may_hold_any_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "F1 (macro)", Metric("F1", "higher", "", ausc, ("correct", "doubt"), "kappa"))
    assert Key.parse("F1 (macro)_knn") == Key("F1 (macro)", "knn")
    assert Key.parse("auroc_knn@digits") == Key("auroc", "knn", "digits")


@pytest.mark.usefixtures("as_in_production")
def test_a_metric_and_a_score_of_needs_that_are_no_tuple_are_refused() -> None:
    needs: Any = "relevance"
    for entry in (lambda: Metric("m", "lower", "", len, needs), lambda: Score("s", "s", "", len, needs)):
        with pytest.raises(ValueError, match=r"needs must.*'relevance': .*\('relevance',\)"):
            entry()
    with pytest.raises(ValueError, match="direction.*higher, lower, neither.*'up'"):
        Metric("m", "up", "")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_of_each_item_alone(name: str) -> None:
    whole = scores_of(items())[name]
    assert whole.shape == (12,)
    assert whole.isfinite().all()
    rows = torch.tensor([7, 2, 2, 11])
    torch.testing.assert_close(scores_of(items(rows=rows))[name], whole[rows])  # equal items have equal scores
    assert scores_of(items(rows=rows[:0]))[name].shape == (0,)


@pytest.mark.parametrize("name", SCORES)
def test_nan_stays_with_the_item_that_has_it(name: str) -> None:
    of, whole = items(), scores_of(items())[name]
    if not {"embeddings", "features", "cosines"} & set(SCORES[name].needs):
        return  # of labels alone, which are integers
    for need in ("features", "cosines"):
        of[need][3] = math.nan
    of["embeddings"].kappa[3] = of["embeddings"].variance[3] = math.nan
    for values in of["parts"].parts().values():
        values[3] = math.nan
    spoilt = scores_of(of)[name]
    assert spoilt.isnan().nonzero().flatten().tolist() == [3]
    torch.testing.assert_close(spoilt.nan_to_num(), whole.where(torch.arange(12) != 3, 0.0))


def between_the_classes(reference: Reference) -> Tensor:
    """The direction of the mean of all items, which is far from every class."""
    return reference.unit.mean(0)


def away_from_the_neighbours(of: dict[str, Any]) -> Tensor:
    """The direction opposite to the embeddings of the first item's nearest neighbours by feature."""
    reference = of["reference"]
    nearest = (reference.unit @ of["features"][0]).topk(3).indices
    return -torch.nn.functional.normalize(reference.embeddings[nearest].sum(0), dim=0)


DOUBTFUL: dict[str, Callable[[dict[str, Any]], None]] = {  # a change of the first item, by score
    "kappa": lambda of: of["embeddings"].kappa[:1].mul_(0.5),
    "kappa_epistemic": lambda of: of["parts"].kappa_epistemic[:1].mul_(0.5),
    "kappa_aleatoric": lambda of: of["parts"].kappa_aleatoric[:1].mul_(0.5),
    "p_known": lambda of: of["parts"].p_known[:1].mul_(0.5),
    "variance": lambda of: of["embeddings"].variance[:1].mul_(2.0),
    "norm": lambda of: of["features"][:1].mul_(2.0),
    "knn": lambda of: of["features"][:1].copy_(-of["reference"].unit.mean(0)),
    "mahalanobis": lambda of: of["features"][:1].copy_(-of["reference"].unit.mean(0)),
    "relative_mahalanobis": lambda of: of["features"][:1].copy_(between_the_classes(of["reference"])),
    "global_mahalanobis": lambda of: of["features"][:1].copy_(-of["reference"].unit.mean(0)),
    "radial_mahalanobis": lambda of: of["features"][:1].copy_(-10 * of["reference"].unit.mean(0)),
    "layer_change": lambda of: of["embeddings"].mean[:1].copy_(away_from_the_neighbours(of)),
    "mahalanobis_knn": lambda of: of["features"][:1].copy_(-of["reference"].unit.mean(0)),
    "cosine": lambda of: of["cosines"][:1].sub_(0.1),
    "margin": lambda of: of["cosines"][:1, 2].copy_(of["cosines"][0, 0]),
    "mean_cosine": lambda of: of["cosines"][:1].sub_(0.1),
    "cosine_spread": lambda of: of["cosines"][:1, 3].sub_(0.1),
    "votes": lambda of: of["labels"][:1, 1].fill_(0),
    "weighted_votes": lambda of: of["labels"][:1, 1].fill_(0),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_score_is_higher_where_there_is_more_doubt(name: str) -> None:
    of, before = items(), scores_of(items())[name]
    DOUBTFUL[name](of)
    after = scores_of(of)[name]
    assert after[0] > before[0]
    torch.testing.assert_close(after[1:], before[1:])


@pytest.mark.parametrize("name", SCORES)
def test_a_score_without_what_it_needs_is_left_out(name: str) -> None:
    whole = items()
    unit_alone = {**whole, "reference": Reference(whole["reference"].unit)}
    for need in SCORES[name].needs:
        lacking = {key: part for key, part in whole.items() if key != need}
        for evidence in [unit_alone] if need in ("labelled", "embedded") else [{**whole, need: None}, lacking]:
            assert name not in scores_of(evidence)


@pytest.mark.parametrize("name", [name for name, score in SCORES.items() if score.k is not None])
def test_a_score_looks_at_as_many_neighbours_as_it_is_told(name: str) -> None:
    whole = scores_of(items())
    assert torch.equal(scores_of(items(), nearest={name: SCORES[name].k or 0})[name], whole[name])
    told = scores_of(items(), nearest={name: 2})
    assert not torch.equal(told[name], whole[name])
    assert all(torch.equal(told[one], whole[one]) for one in SCORES if one != name and name not in SCORES[one].of)
    assert all(not torch.equal(told[one], whole[one]) for one in SCORES if name in SCORES[one].of)
    if not {"reference", "embedded"} & set(SCORES[name].needs):  # of four hits
        assert torch.equal(scores_of(items(), nearest={name: 1000})[name], scores_of(items(), nearest={name: 4})[name])


def test_what_numbers_of_neighbours_are_refused() -> None:
    with pytest.raises(ValueError, match="score with neighbours.*knn, .*votes, got 'margin'"):
        scores_of(items(), nearest={"margin": 3})
    with pytest.raises(ValueError, match="neighbours of votes.*1, got 0"):
        scores_of(items(), nearest={"votes": 0})


def test_without_a_second_hit_the_margin_is_that_over_the_least_cosine() -> None:
    scores = scores_of({"cosines": torch.tensor([[0.25]])})
    assert scores["margin"].tolist() == [-1.25]
