"""OodDetector by each score and by several: each keeps its false-flag rate, and together they see what any sees."""

import math

import pytest
import torch

from lam.retrieval.decisions.flags import (
    COMBINED,
    FLAGS,
    TOGETHER,
    OodDetector,
    needs_reference,
    without_hits,
    without_input,
)
from lam.retrieval.metrics.registry import SCORES


def _items(n: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Scores that depend on each other."""
    common = torch.randn(n, generator=generator)
    return {name: (torch.randn(n, generator=generator) + common).exp() for name in SCORES}


def _pair(cosine: torch.Tensor, distance: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"kappa": torch.zeros_like(cosine), "cosine": -cosine, "knn": distance}


@pytest.fixture(scope="module")
def detectors() -> list[tuple[OodDetector, dict[str, torch.Tensor]]]:
    """Detectors, each with other items of the same law."""
    generator = torch.Generator().manual_seed(0)
    return [(OodDetector.of(_items(200, generator)), _items(200, generator)) for _ in range(200)]


@pytest.mark.long
@pytest.mark.parametrize("flag", FLAGS)
def test_the_false_flag_rate_is_the_target_on_average(
    flag: str, detectors: list[tuple[OodDetector, dict[str, torch.Tensor]]]
) -> None:
    rates = []
    for detector, items in detectors:
        is_flagged = detector.ood_score(flag, items) > detector.known(flag).threshold(0.1)
        rates.append(float(is_flagged.double().mean()))
    rate = torch.tensor(rates)
    error = float(rate.std()) / math.sqrt(len(rates))
    assert 0.1 - 0.01 - 3 * error < float(rate.mean()) < 0.1 + 3 * error  # (N + 1) · target is rounded down


@pytest.mark.parametrize("score", TOGETHER)
def test_the_combination_sees_what_any_of_its_scores_sees(score: str) -> None:
    generator = torch.Generator().manual_seed(1)
    detector = OodDetector.of(_items(1000, generator))
    scores = {name: torch.tensor([1e6 if name == score else 1.0, 1.0]) for name in SCORES}
    flagged = detector.ood_score("combined", scores) > detector.known("combined").threshold(0.05)
    assert flagged.tolist() == [True, False]


def test_the_combination_is_a_mean_of_the_shares_above() -> None:
    learnt, new = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([2.0, 3.0])
    detector = OodDetector.of(_pair(-learnt.repeat_interleave(2), learnt.repeat_interleave(2)))
    of_one, of_other = 1 - 1.5 / 4, 1 - 2.5 / 4  # of the learnt half, ties counting half
    mean = ((of_one**-0.5 + of_other**-0.5) / 2) ** -2
    want = -torch.full((2,), mean, dtype=torch.float64).log()
    torch.testing.assert_close(detector.ood_score("combined", _pair(-new, new.flip(0))), want)


def test_the_combination_keeps_the_order_also_beyond_what_it_has_seen() -> None:
    detector = OodDetector.of(_pair(torch.arange(1.0, 41.0), torch.arange(40.0, 0.0, -1.0)))
    distance = torch.tensor([0.0, 5.0, 5.5, 39.0, 40.0, 41.0, 1e3, 1e9])
    ood_score = detector.ood_score("combined", _pair(torch.full_like(distance, 100.0), distance))
    assert (ood_score.diff() > 0).all()


def test_where_there_are_no_hits_or_no_features_a_part_of_the_combination_flags() -> None:
    assert [without_input(flag) for flag in (COMBINED, "knn", "cosine")] == ["mean_cosine", "kappa", "cosine"]
    assert [without_hits(flag) for flag in (COMBINED, "knn", "cosine")] == ["knn", "knn", "kappa"]
    assert without_hits(without_input(COMBINED)) == "kappa"


def test_items_may_come_by_turns_of_their_classes() -> None:
    generator = torch.Generator().manual_seed(0)
    level = 5.0 * (torch.arange(2000) % 2)
    known = {name: torch.randn(2000, generator=generator) + level for name in ("kappa", "knn", "cosine")}
    detector = OodDetector.of(known)
    threshold = detector.known(COMBINED).threshold(0.1)
    new = {name: torch.randn(2000, generator=generator) + level for name in known}
    flagged = detector.ood_score(COMBINED, new) > threshold
    assert 0.06 < float(flagged.double().mean()) < 0.14


def test_items_that_are_all_alike_are_never_flagged() -> None:
    detector = OodDetector.of(dict.fromkeys(SCORES, torch.ones(40)))
    for flag in FLAGS:
        ood_score = detector.ood_score(flag, dict.fromkeys(SCORES, torch.ones(3)))
        assert not (ood_score > detector.known(flag).threshold(0.2)).any()


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
    alone = OodDetector.of({"kappa": torch.ones(5)})
    with pytest.raises(ValueError, match="flag must be one of kappa, .*, combined, got 'length'"):
        alone.known("length")
    with pytest.raises(ValueError, match="'knn' needs features and reference features of known items, .* use 'kappa'"):
        alone.known("knn")
    with pytest.raises(ValueError, match="at least 2 items"):
        OodDetector.of(_pair(torch.ones(1), torch.ones(1)))
    with pytest.raises(ValueError, match="must hold those of 'kappa', got none"):
        OodDetector.of({})
    with pytest.raises(ValueError, match="votes must have shape"):
        OodDetector.of({"kappa": torch.ones(5), "votes": torch.ones(4)})
    both = OodDetector.of(_pair(torch.ones(5), torch.ones(5)))
    with pytest.raises(ValueError, match="'combined' needs features and .* hits of every query: there is no 'knn'"):
        both.ood_score("combined", {"kappa": torch.ones(2)})
    with pytest.raises(ValueError, match="kappa must not hold NaN"):
        both.ood_score("kappa", {"kappa": torch.tensor([math.nan])})
