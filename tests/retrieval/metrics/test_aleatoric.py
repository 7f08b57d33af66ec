"""Metrics of κ on ambiguous items, against SciPy and by hand."""

import itertools

import pytest
import scipy.stats
import torch

from lam.retrieval.metrics.uncertainty import label_entropy, less_sure_of_crops, rank_correlation


def random(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def test_rank_correlation_is_spearmans_with_ties() -> None:
    severity = torch.arange(100) % 5
    kappa = random(100, 0) - severity
    expected = scipy.stats.spearmanr(kappa, severity).statistic
    value = rank_correlation(kappa, severity)
    assert value == pytest.approx(expected)
    assert rank_correlation(kappa, -kappa.exp()) == pytest.approx(-1.0)
    assert rank_correlation(kappa, torch.ones(100)) is None


def test_entropy_of_labels() -> None:
    probabilities = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]])
    assert label_entropy(probabilities).tolist() == pytest.approx([scipy.stats.entropy([0.2, 0.3, 0.5]), 0.0], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entropies_tie_if_only_the_order_of_the_classes_differs(dtype: torch.dtype) -> None:
    rows = torch.tensor(list(itertools.permutations((0.7, 0.2, 0.1, 0.0))), dtype=dtype)
    entropy = label_entropy(rows)
    assert len(entropy.unique()) == 1
    assert rank_correlation(entropy, torch.arange(len(rows))) is None


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="add up to 1, .*row 1"):
        label_entropy(torch.tensor([[0.5, 0.5], [1.0, 0.5]]))
    with pytest.raises(ValueError, match="at least 2, got 1 and 1"):
        rank_correlation(torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match="one must.*nan at index 1"):
        rank_correlation(torch.tensor([1.0, torch.nan]), torch.ones(2))
    with pytest.raises(ValueError, match="kappa_of_crop, .* got 0 and 0"):
        less_sure_of_crops(torch.ones(0), torch.ones(0))
    for name, values in (("kappa", (torch.nan, 1.0)), ("kappa_of_crop", (1.0, torch.nan))):
        with pytest.raises(ValueError, match=f"{name}.*nan.*index 0"):
            less_sure_of_crops(*(torch.tensor([value]) for value in values))
