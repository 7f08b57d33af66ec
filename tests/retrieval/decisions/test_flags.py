"""Flags by κ, by distance and by both: each keeps its false-flag rate, and both together see what either sees."""

import math

import pytest
import torch

from lam.retrieval.decisions.flags import FLAGS, Flags


def _items(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """κ and distances that depend on each other."""
    common = torch.randn(n, generator=generator)
    return (common + torch.randn(n, generator=generator)).exp(), (torch.randn(n, generator=generator) - common).exp()


@pytest.mark.parametrize("flag", FLAGS)
def test_the_false_flag_rate_is_the_target_on_average(flag: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rates = []
    for _ in range(200):
        flags = Flags.of(*_items(200, generator))
        surprise = flags.surprise(flag, *_items(200, generator))  # type: ignore[arg-type]
        rates.append(float((surprise > flags.tail(flag).threshold(0.1)).double().mean()))  # type: ignore[arg-type]
    rate = torch.tensor(rates)
    error = float(rate.std()) / math.sqrt(len(rates))
    assert 0.1 - 0.01 - 3 * error < float(rate.mean()) < 0.1 + 3 * error  # (N + 1) · target is rounded down


def test_the_combination_sees_what_either_sees() -> None:
    generator = torch.Generator().manual_seed(1)
    flags = Flags.of(*_items(1000, generator))
    kappa, distance = torch.tensor([1e-6, 1.0, 1.0]), torch.tensor([1.0, 1e6, 1.0])
    flagged = flags.surprise("combined", kappa, distance) > flags.tail("combined").threshold(0.05)
    assert flagged.tolist() == [True, True, False]


def test_the_combination_keeps_the_order_also_beyond_what_it_has_seen() -> None:
    flags = Flags.of(torch.arange(1.0, 41.0), torch.arange(40.0, 0.0, -1.0))
    distance = torch.tensor([0.0, 5.0, 5.5, 39.0, 40.0, 41.0, 1e3, 1e9])
    surprise = flags.surprise("combined", torch.full_like(distance, 100.0), distance)
    assert (surprise.diff() > 0).all()


def test_items_that_are_all_alike_are_never_flagged() -> None:
    flags = Flags.of(torch.ones(40), torch.ones(40))
    for flag in FLAGS:
        surprise = flags.surprise(flag, torch.ones(3), torch.ones(3))
        assert not (surprise > flags.tail(flag).threshold(0.2)).any()


def test_what_is_refused() -> None:
    alone = Flags.of(torch.ones(5))
    with pytest.raises(ValueError, match="flag must be one of kappa, knn, combined, got 'norm'"):
        alone.tail.__wrapped__(alone, "norm")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="'knn' needs k-NN distances"):
        alone.tail("knn")
    with pytest.raises(ValueError, match="at least 2 items"):
        Flags.of(torch.ones(1), torch.ones(1))
    both = Flags.of(torch.ones(5), torch.ones(5))
    with pytest.raises(ValueError, match="needs the distance of every query"):
        both.surprise("combined", torch.ones(2))
    with pytest.raises(ValueError, match="kappa must not hold NaN"):
        both.surprise("kappa", torch.tensor([math.nan]))
