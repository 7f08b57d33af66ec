"""The losses of Gaussian embeddings against a double loop over the pairs and torch's distributions."""

import pytest
import torch

from lam.losses.distributions import mutual_likelihood, soft_contrastive
from lam.pairs.pairs import Pairs
from tests.losses.test_losses import PAIRS


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


ONE = torch.tensor(1.0, dtype=torch.float64)


def averaged(score: dict[tuple[int, int], torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    """Σ w x / Σ w over ordered pairs, one by one."""
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for (a, b), value in score.items():
        total, count = total + float(weights[a, b]) * value, count + float(weights[a, b])
    return total / (count or 1)


def ordered_pairs(n: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(n) for b in range(n) if a != b]


@pytest.mark.parametrize("kind", PAIRS)
def test_mutual_likelihood_equals_the_density_of_the_difference_at_zero(kind: str) -> None:
    mean, log_variance = normal(6, 4).requires_grad_(), normal(6, 4, seed=1).requires_grad_()
    value = mutual_likelihood(mean, log_variance, PAIRS[kind])
    constant = 4 / 2 * torch.log(2 * torch.pi * ONE)
    score = {
        (a, b): -constant
        - torch.distributions.Normal(mean[a] - mean[b], (log_variance[a].exp() + log_variance[b].exp()).sqrt())
        .log_prob(torch.zeros(4, dtype=torch.float64))
        .sum()
        for a, b in ordered_pairs(6)
    }
    expected = averaged(score, PAIRS[kind].positive)
    assert value.dtype == torch.float64
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    if kind != "no positives":
        assert_same_gradients(value, expected, mean, log_variance)


def test_mutual_likelihood_is_least_where_the_variances_add_up_to_the_squared_difference() -> None:
    mean, pairs = torch.tensor([[0.0], [0.4]], dtype=torch.float64), Pairs.by_label(torch.tensor([0, 0]))
    log_variance = torch.full((2, 1), 0.4**2 / 2, dtype=torch.float64).log().requires_grad_()
    (gradient,) = torch.autograd.grad(mutual_likelihood(mean, log_variance, pairs), log_variance)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("size", [-150.0, 150.0])
def test_mutual_likelihood_is_finite_at_extreme_variances(size: float) -> None:
    mean, log_variance = torch.zeros(2, 3), torch.full((2, 3), size, requires_grad=True)
    value = mutual_likelihood(mean, log_variance, Pairs.by_label(torch.tensor([0, 0])))
    (gradient,) = torch.autograd.grad(value, log_variance)
    assert value.isfinite()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("n_samples", [1, 3])
@pytest.mark.parametrize("kind", PAIRS)
def test_soft_contrastive_equals_the_loop(kind: str, n_samples: int) -> None:
    samples = normal(n_samples, 6, 4).requires_grad_()
    scale, offset = (1.3 * ONE).requires_grad_(), (0.7 * ONE).requires_grad_()
    value = soft_contrastive(samples, PAIRS[kind], scale=scale, offset=offset)
    match: dict[tuple[int, int], torch.Tensor] = {}
    for a, b in ordered_pairs(6):
        probabilities = [
            torch.sigmoid(offset - scale * (samples[s, a] - samples[t, b]).norm())
            for s in range(n_samples)
            for t in range(n_samples)
        ]
        match[a, b] = torch.stack(probabilities).mean()
    expected = averaged({pair: -p.log() for pair, p in match.items()}, PAIRS[kind].positive) + averaged(
        {pair: -(1 - p).log() for pair, p in match.items()}, PAIRS[kind].negative
    )
    assert value.dtype == torch.float64
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    assert_same_gradients(value, expected, samples, scale, offset)


@pytest.mark.parametrize("distance", [0.0, 1e4])
def test_soft_contrastive_is_finite_where_a_probability_rounds(distance: float) -> None:
    samples = torch.tensor([[[0.0], [distance]]], requires_grad=True)
    for labels in ([0, 0], [0, 1]):
        pairs = Pairs.by_label(torch.tensor(labels))
        value = soft_contrastive(samples, pairs, scale=torch.tensor(5.0), offset=torch.tensor(200.0))
        (gradient,) = torch.autograd.grad(value, samples)
        assert value.isfinite()
        assert gradient.isfinite().all()


def test_without_any_pair_the_losses_are_zero_and_differentiable() -> None:
    pairs = Pairs.by_label(torch.tensor([4]))
    mean, log_variance = normal(1, 3).requires_grad_(), normal(1, 3).requires_grad_()
    for value in (
        mutual_likelihood(mean, log_variance, pairs),
        soft_contrastive(mean[None], pairs, scale=ONE, offset=ONE),
    ):
        (gradient,) = torch.autograd.grad(value, mean)
        assert value == 0
        assert (gradient == 0).all()


def test_pairs_of_another_batch_and_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="same 5.*pairs.*6"):
        mutual_likelihood(normal(5, 3), normal(5, 3), PAIRS["labels"])
    with pytest.raises(ValueError, match="same 5.*pairs.*6"):
        soft_contrastive(normal(2, 5, 3), PAIRS["labels"], scale=ONE, offset=ONE)
    unchecked = getattr(mutual_likelihood, "__wrapped__", mutual_likelihood)
    with pytest.raises(ValueError, match=r"one shape, got \(6, 3\) and \(6, 1\)"):
        unchecked(normal(6, 3), normal(6, 1), PAIRS["labels"])


def assert_same_gradients(value: torch.Tensor, expected: torch.Tensor, *inputs: torch.Tensor) -> None:
    gradients = torch.autograd.grad(value, inputs)
    for gradient, slow in zip(gradients, torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(gradient, slow, rtol=1e-10, atol=1e-12)
