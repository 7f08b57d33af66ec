"""OodDetector by each score and by several: false-flag rates hold, and `combined` detects strangers of any score."""

import math
from dataclasses import replace

import pytest
import torch

from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.evidence import Evidence, Group, folds_of
from lam.retrieval.decisions.flags import (
    COMBINED,
    FLAGS,
    OodDetector,
    needs_input,
    needs_reference,
)
from lam.retrieval.decisions.match_probability import MONOTONE_SCORES
from lam.retrieval.metrics.scores import SCORES


def _items(n: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Scores that depend on each other."""
    common = torch.randn(n, generator=generator)
    return {name: (torch.randn(n, generator=generator) + common).exp() for name in SCORES}


def _evidence(known: dict[str, torch.Tensor], strangers: dict[str, torch.Tensor]) -> Evidence:
    """Evidence of queries that all have a match."""
    n, others = len(known["kappa"]), len(strangers["kappa"])
    fold, every = folds_of(torch.arange(n)), torch.ones(n).bool()
    same, foreign = Group(known, fold), Group(strangers, folds_of(torch.arange(others)))
    return Evidence(same, every, every, no_match=same, strangers=foreign)


def _pair(cosine: torch.Tensor, distance: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"kappa": torch.zeros_like(cosine), "cosine": cosine, "knn": distance}


def _told_by(*telling: str, n: int = 200, others: int = 200, apart: float = 2.0, seed: int = 0) -> Evidence:
    """κ, cosine and distance of known queries and of strangers; the scores `telling` separate them."""
    generator = torch.Generator().manual_seed(seed)
    names = "kappa", "cosine", "knn"
    known = {name: torch.randn(n, generator=generator) for name in names}
    strangers = {name: torch.randn(others, generator=generator) + apart * (name in telling) for name in names}
    return _evidence(known, strangers)


@pytest.fixture(scope="module")
def detectors() -> list[tuple[OodDetector, dict[str, torch.Tensor]]]:
    """Detectors, each with new items of the same distribution."""
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(200):
        strangers = {name: 2 * values for name, values in _items(100, generator).items()}
        drawn.append((OodDetector.fit(_evidence(_items(200, generator), strangers)), _items(200, generator)))
    return drawn


@pytest.mark.long
@pytest.mark.parametrize("flag", FLAGS)
def test_the_false_flag_rate_is_the_target_on_average(
    flag: str, detectors: list[tuple[OodDetector, dict[str, torch.Tensor]]]
) -> None:
    rates = []
    for detector, items in detectors:
        is_flagged = detector.ood_score(flag, items) > detector.conformal_scores(flag).threshold(0.1)
        rates.append(float(is_flagged.double().mean()))
    rate = torch.tensor(rates)
    error = float(rate.std()) / math.sqrt(len(rates))
    assert 0.1 - 0.01 - 3 * error < float(rate.mean()) < 0.1 + 3 * error  # (N + 1) · target is rounded down


@pytest.mark.parametrize("score", ["kappa", "cosine", "knn"])
def test_the_combination_learns_which_score_tells_strangers(score: str) -> None:
    detector = OodDetector.fit(_told_by(score))
    assert detector.combined is not None
    weights = dict(zip(detector.combined.evidence, detector.combined.weights, strict=True))
    assert max(weights, key=lambda name: weights[name]) == score
    assert min(detector.ranking[score], detector.ranking[COMBINED]) > 0.88
    assert all(area < 0.6 for name, area in detector.ranking.items() if name not in (score, COMBINED))
    one = {name: torch.tensor([6.0 if name == score else 0.0, 0.0]) for name in weights}
    threshold = detector.conformal_scores(COMBINED).threshold(0.05)
    assert (detector.ood_score(COMBINED, one) > threshold).tolist() == [True, False]


def test_the_combination_is_the_doubt_of_being_known_out_of_fold() -> None:
    evidence = _told_by("cosine", n=50, others=30)
    detector = OodDetector.fit(evidence)
    whole = OodDetector.fit(evidence).combined
    assert whole is not None
    assert torch.equal(detector.ood_score(COMBINED, evidence.queries.scores), whole.doubt(evidence.queries.scores))
    twin = torch.empty(50, dtype=torch.float64)
    for fold in range(5):
        held = evidence.queries.fold == fold
        part = OodDetector.fit(evidence.without(fold))
        twin[held] = part.ood_score(COMBINED, evidence.queries[held].scores)
    assert torch.equal(detector.conformal_scores(COMBINED).scores, twin.sort().values)


def test_the_flag_is_what_tells_strangers_best() -> None:
    assert OodDetector.fit(_told_by("cosine", "knn")).best == COMBINED
    generator = torch.Generator().manual_seed(3)
    known, strangers = ({name: torch.randn(12, generator=generator) for name in MONOTONE_SCORES} for _ in range(2))
    strangers["norm"], known["norm"] = torch.full((12,), 9.0), torch.zeros(12)  # `combined` does not use it
    detector = OodDetector.fit(_evidence(known, strangers))
    assert detector.ranking["norm"] == 1 > detector.ranking[COMBINED]
    assert detector.best == "norm"
    by_rank = replace(detector, ranking={"knn": 0.9, COMBINED: 0.804, "kappa": 0.5})
    assert by_rank.best == COMBINED
    assert replace(detector, ranking={"knn": 0.9, COMBINED: 0.796, "kappa": 0.5}).best == "knn"
    assert list(detector.ranking.values()) == sorted(detector.ranking.values(), reverse=True)


@pytest.mark.parametrize("n", [1, 2, 5, 10, 20, 38])
def test_of_few_queries_the_flag_is_never_kappa_where_kappa_is_at_chance(n: int) -> None:
    for seed in range(5):
        detector = OodDetector.fit(_told_by("knn", n=n, others=n, apart=4.0, seed=seed))
        assert detector.best != "kappa"
        assert len(detector.conformal_scores(COMBINED)) == n


def test_without_strangers_each_score_flags_by_itself() -> None:
    evidence = _told_by("knn", others=0)
    detector = OodDetector.fit(evidence)
    assert (detector.best, detector.combined, detector.ranking) == ("kappa", None, {})
    with pytest.raises(ValueError, match="flag 'combined'.*strangers.*'kappa'"):
        detector.conformal_scores(COMBINED)


def test_the_combination_keeps_the_order_also_beyond_what_it_has_seen() -> None:
    detector = OodDetector.fit(_told_by("knn"))
    distance = torch.tensor([-9.0, 0.0, 0.5, 3.0, 4.0, 1e3, 1e9])
    ood_score = detector.ood_score(COMBINED, _pair(torch.zeros_like(distance), distance))
    assert (ood_score.diff() > 0).all()


def test_in_place_of_what_has_no_evidence_another_score_flags_and_never_kappa_of_a_vector() -> None:
    generator = torch.Generator().manual_seed(0)
    detector = OodDetector.fit(_evidence(_items(20, generator), _items(20, generator)))
    for missing, expected in {
        "input": {COMBINED: "mean_cosine", "knn": "mean_cosine", "cosine": "cosine"},
        "hits": {COMBINED: "knn", "knn": "knn", "cosine": "kappa", "mean_cosine": "kappa"},
        "labels": {COMBINED: "mean_cosine", "votes": "mean_cosine", "knn": "knn"},
    }.items():
        assert {flag: detector.substitute(flag, missing) for flag in expected} == expected
    assert all(detector.substitute(flag, "input") == "mean_cosine" for flag in FLAGS if needs_input(flag))
    assert detector.substitute("knn", "input", "hits") == "kappa"
    assert replace(detector, calibrated={}).substitute(COMBINED, "hits") == "kappa"


def test_items_may_come_by_turns_of_their_classes() -> None:
    generator = torch.Generator().manual_seed(0)
    level = 5.0 * (torch.arange(2000) % 2)
    names = "kappa", "knn", "cosine"
    known = {name: torch.randn(2000, generator=generator) + level for name in names}
    strangers = {name: torch.randn(500, generator=generator) + 8 for name in names}
    detector = OodDetector.fit(_evidence(known, strangers))
    threshold = detector.conformal_scores(COMBINED).threshold(0.1)
    new = {name: torch.randn(2000, generator=generator) + level for name in known}
    flagged = detector.ood_score(COMBINED, new) > threshold
    assert 0.06 < float(flagged.double().mean()) < 0.14


def test_items_that_are_all_alike_are_never_flagged() -> None:
    alike = dict.fromkeys(SCORES, torch.ones(40))
    for others in ({"kappa": torch.ones(0)}, alike):
        detector = OodDetector.fit(_evidence(alike, others))
        for flag in detector.calibrated:
            ood_score = detector.ood_score(flag, dict.fromkeys(SCORES, torch.ones(3)))
            margin = 1e-9 if flag == COMBINED else 0.0  # each fold's own optimum, up to rounding
            assert not (ood_score > detector.conformal_scores(flag).threshold(0.2) + margin).any(), flag


def test_what_needs_training_features_is_known_by_name() -> None:
    assert {flag for flag in FLAGS if needs_reference(flag)} == {
        "knn",
        "mahalanobis",
        "relative_mahalanobis",
        "global_mahalanobis",
        "radial_mahalanobis",
        "layer_change",
        "mahalanobis_knn",
        COMBINED,
    }


def test_what_is_refused() -> None:
    alone = OodDetector({"kappa": ConformalScores(torch.ones(5))})
    with pytest.raises(ValueError, match="flag.*kappa, .*combined.*'length'"):
        alone.conformal_scores("length")
    for flag, needs in {
        "knn": "and reference features",
        "variance": "features and embeddings",
        "p_known": "features.*encoder.*ambiguity",
    }.items():
        with pytest.raises(ValueError, match=f"{flag!r}.*{needs}.*use 'kappa'"):
            alone.conformal_scores(flag)
    both = OodDetector.fit(_told_by("knn"))
    with pytest.raises(ValueError, match="'combined'.*hits.*query.*'knn'"):
        both.ood_score(COMBINED, {"kappa": torch.ones(2)})
    with pytest.raises(ValueError, match="kappa.*hold NaN"):
        both.ood_score("kappa", {"kappa": torch.tensor([math.nan])})
