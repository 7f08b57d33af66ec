"""Scores from hits against double loops."""

import pytest
import torch

from lam.retrieval.metrics.scores import (
    NEAREST,
    cosine_spread,
    disagreement,
    margin,
    mean_cosine,
    weighted_disagreement,
)

N, K = 40, 15


def hits(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    cosines = (2 * torch.rand(N, K, generator=generator, dtype=torch.float64) - 1).sort(1, descending=True).values
    return cosines, torch.randint(0, 3, (N, K), generator=generator)


def test_the_margin_is_over_the_first_hit_of_another_class() -> None:
    cosines, labels = hits()
    for got, row, classes in zip(margin(cosines, labels).tolist(), cosines.tolist(), labels.tolist(), strict=True):
        others = [cosine for cosine, label in zip(row, classes, strict=True) if label != classes[0]]
        assert got == pytest.approx((others or [row[-1]])[0] - row[0], abs=1e-12)
    torch.testing.assert_close(margin(cosines), cosines[:, 1] - cosines[:, 0])


def test_where_all_hits_are_of_one_class_the_last_bounds_the_margin() -> None:
    cosines, _ = hits()
    labels = torch.zeros(N, K, dtype=torch.int64)
    torch.testing.assert_close(margin(cosines, labels), cosines[:, -1] - cosines[:, 0])


def test_mean_and_spread_are_of_the_first_hits() -> None:
    cosines, _ = hits()
    torch.testing.assert_close(mean_cosine(cosines), -cosines[:, :NEAREST].mean(1))
    torch.testing.assert_close(cosine_spread(cosines, k=4), cosines[:, :4].std(1, correction=0))
    assert cosine_spread(cosines[:, :1]).tolist() == [0] * N


def test_votes_are_counted_against_the_first_label() -> None:
    cosines, labels = hits()
    weighted = weighted_disagreement(cosines, labels)
    for row in range(N):
        against = [label != labels[row, 0] for label in labels[row]]
        assert disagreement(labels)[row] == pytest.approx(sum(against[:NEAREST]) / NEAREST)
        weights = [(cosine - cosines[row, -1]) / (cosines[row, 0] - cosines[row, -1]) for cosine in cosines[row]]
        expected = sum(w for w, other in zip(weights, against, strict=True) if other) / sum(weights)
        assert weighted[row] == pytest.approx(float(expected), abs=1e-12)


def test_weighted_votes_of_the_first_hits_forget_the_others() -> None:
    cosines, labels = hits()
    for k in (1, 2, 6, K, K + 1):
        expected = weighted_disagreement(cosines[:, :k], labels[:, :k])
        assert torch.equal(weighted_disagreement(cosines, labels, k=k), expected)
    assert weighted_disagreement(cosines, labels, k=1).tolist() == [0] * N


def test_equal_cosines_weigh_alike_and_one_hit_agrees_with_itself() -> None:
    labels = torch.tensor([[1, 2, 1, 1]])
    assert weighted_disagreement(torch.full((1, 4), 0.5), labels).tolist() == [0.25]
    assert weighted_disagreement(torch.tensor([[0.5]]), labels[:, :1]).tolist() == [0]
    assert disagreement(labels[:, :1]).tolist() == [0]
