"""OodDetector by κ, by distance and by both: each keeps its false-flag rate, and both together see what either sees."""

import math

import pytest
import torch

from lam.retrieval.decisions.flags import FLAGS, OodDetector


def _items(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """κ and distances that depend on each other."""
    common = torch.randn(n, generator=generator)
    return (common + torch.randn(n, generator=generator)).exp(), (torch.randn(n, generator=generator) - common).exp()


@pytest.mark.parametrize("flag", FLAGS)
def test_the_false_flag_rate_is_the_target_on_average(flag: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rates = []
    for _ in range(200):
        detector = OodDetector.of(*_items(200, generator))
        ood_score = detector.ood_score(flag, *_items(200, generator))  # type: ignore[arg-type]
        rates.append(float((ood_score > detector.known(flag).threshold(0.1)).double().mean()))  # type: ignore[arg-type]
    rate = torch.tensor(rates)
    error = float(rate.std()) / math.sqrt(len(rates))
    assert 0.1 - 0.01 - 3 * error < float(rate.mean()) < 0.1 + 3 * error  # (N + 1) · target is rounded down


def test_the_combination_sees_what_either_sees() -> None:
    generator = torch.Generator().manual_seed(1)
    detector = OodDetector.of(*_items(1000, generator))
    kappa, distance = torch.tensor([1e-6, 1.0, 1.0]), torch.tensor([1.0, 1e6, 1.0])
    flagged = detector.ood_score("combined", kappa, distance) > detector.known("combined").threshold(0.05)
    assert flagged.tolist() == [True, True, False]


def test_the_combination_keeps_the_order_also_beyond_what_it_has_seen() -> None:
    detector = OodDetector.of(torch.arange(1.0, 41.0), torch.arange(40.0, 0.0, -1.0))
    distance = torch.tensor([0.0, 5.0, 5.5, 39.0, 40.0, 41.0, 1e3, 1e9])
    ood_score = detector.ood_score("combined", torch.full_like(distance, 100.0), distance)
    assert (ood_score.diff() > 0).all()


def test_items_that_are_all_alike_are_never_flagged() -> None:
    detector = OodDetector.of(torch.ones(40), torch.ones(40))
    for flag in FLAGS:
        ood_score = detector.ood_score(flag, torch.ones(3), torch.ones(3))
        assert not (ood_score > detector.known(flag).threshold(0.2)).any()


def test_what_is_refused() -> None:
    alone = OodDetector.of(torch.ones(5))
    with pytest.raises(ValueError, match="flag must be one of kappa, knn, combined, got 'norm'"):
        alone.known.__wrapped__(alone, "norm")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="'knn' needs k-NN distances"):
        alone.known("knn")
    with pytest.raises(ValueError, match="at least 2 items"):
        OodDetector.of(torch.ones(1), torch.ones(1))
    both = OodDetector.of(torch.ones(5), torch.ones(5))
    with pytest.raises(ValueError, match="needs the distance of every query"):
        both.ood_score("combined", torch.ones(2))
    with pytest.raises(ValueError, match="kappa must not hold NaN"):
        both.ood_score("kappa", torch.tensor([math.nan]))
