"""Pairs are drawn as asked; false matches are at the target, and probabilities are right for balanced pairs."""

import math

import torch

from lam.retrieval.decisions.probability import probability_bins
from lam.retrieval.decisions.verification import Verifier, draw_pairs


def _pairs(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs: cosines are higher for one identity, above all for a large κ."""
    generator = torch.Generator().manual_seed(seed)
    same = torch.rand(n, generator=generator) < 0.5
    kappa, other = (10 ** (1 + 2 * torch.rand(n, generator=generator)) for _ in range(2))
    distance = torch.rand(n, generator=generator) * torch.where(same, 4 / torch.minimum(kappa, other).sqrt(), 1.0)
    return (1 - distance).clamp(-1, 1), kappa, other, same


def test_each_query_is_paired_with_a_match_and_with_another() -> None:
    labels, others = torch.tensor([0, 0, 1, 1, 2, 0]), torch.tensor([0, 1, 1])
    rows, partners, same = draw_pairs(
        lambda rows: labels[rows][:, None] == others,
        6,
        len(others),
        generator=torch.Generator().manual_seed(0),
    )
    assert torch.equal(labels[rows] == others[partners], same)
    assert rows[same].tolist() == [0, 1, 2, 3, 5]  # nothing matches the item of class 2
    assert rows[~same].tolist() == [0, 1, 2, 3, 4, 5]


def test_false_matches_are_at_the_target_and_probabilities_are_right() -> None:
    verifier = Verifier.of(*_pairs(2000, 0))
    cosine, kappa, other, same = _pairs(4000, 1)
    rate = float((cosine[~same] > verifier.impostors.threshold(0.05)).double().mean())
    assert rate < 0.05 + 4 * math.sqrt(0.05 * 0.95 * (1 / 1000 + 1 / 2000))
    probability = verifier.probability(cosine, kappa, other)
    assert probability_bins(probability, same).expected_error < 0.04
    torch.testing.assert_close(probability, verifier.probability(cosine, other, kappa))


def test_pairs_may_require_gradients() -> None:
    cosine, kappa, other, same = _pairs(200, 0)
    verifier = Verifier.of(cosine, kappa, other, same)
    probability = verifier.probability(cosine.clone().requires_grad_(), kappa, other)
    assert torch.equal(probability, verifier.probability(cosine, kappa, other))


def test_the_probability_does_not_depend_on_which_kind_there_is_more_of() -> None:
    pairs = _pairs(4000, 2)
    kept = pairs[3] | (torch.arange(4000) % 8 == 0)
    verifier = Verifier.of(*(column[kept] for column in pairs))
    cosine, kappa, other, same = _pairs(4000, 3)
    assert probability_bins(verifier.probability(cosine, kappa, other), same).expected_error < 0.06


def test_the_order_of_the_pairs_tells_nothing() -> None:
    cosine, kappa, other, same = pairs = _pairs(2000, 2)
    few = pairs[3] & (torch.arange(2000) < 500)
    falling = torch.cat([few.nonzero()[:, 0], (~same).nonzero()[:, 0][cosine[~same].argsort()]])  # far impostors first
    shuffled = falling[torch.randperm(len(falling), generator=torch.Generator().manual_seed(0))]
    cosine, kappa, other, same = _pairs(4000, 3)
    for order in (falling, shuffled):
        verifier = Verifier.of(*(column[order] for column in pairs))
        assert probability_bins(verifier.probability(cosine, kappa, other), same).expected_error < 0.06
