"""Linear probe and k-NN accuracy against scikit-learn and by hand."""

import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from lam.retrieval.metrics.probing import knn_accuracy, linear_probe


def clusters(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = 3 * (torch.arange(n) % 4)
    centres = torch.randn(4, 6, generator=torch.Generator().manual_seed(7))
    return centres[labels // 3] + 0.9 * torch.randn(n, 6, generator=generator), labels


@pytest.mark.parametrize("k", [1, 5])
def test_the_vote_of_neighbours_is_that_of_another_library(k: int) -> None:
    (features, labels), (test, truth) = clusters(200, 0), clusters(60, 1)
    rival = KNeighborsClassifier(k, metric="cosine", algorithm="brute").fit(features.numpy(), labels.numpy())
    expected = rival.score(test.numpy(), truth.numpy())
    assert knn_accuracy(features, labels, test, truth, k=k) == pytest.approx(expected, abs=0.02)


def test_separable_classes_are_probed_whatever_the_scale_of_a_feature() -> None:
    (features, labels), (test, truth) = clusters(400, 0), clusters(200, 1)
    accuracy = linear_probe(features, labels, test, truth)
    assert accuracy > 0.6
    scale = torch.tensor([1e-3, 1.0, 1e3, 1.0, 1.0, 1.0])
    assert linear_probe(scale * features, labels, scale * test, truth) == pytest.approx(accuracy, abs=0.01)
    random = torch.randn(200, 6, generator=torch.Generator().manual_seed(3))
    assert linear_probe(features, labels, random, truth) < 0.45


def test_what_cannot_be_is_refused() -> None:
    features, labels = clusters(20, 0)
    with pytest.raises(ValueError, match="labels must be of at least two classes, got"):
        linear_probe(features, torch.zeros(20, dtype=torch.long), features, labels)
    for k, message in ((0, "k must be at least 1, got 0"), (21, "k must be at most the number of items that vote, 20")):
        with pytest.raises(ValueError, match=message):
            knn_accuracy(features, labels, features, labels, k=k)
    unchecked = getattr(knn_accuracy, "__wrapped__", knn_accuracy)
    with pytest.raises(ValueError, match="test_features must be one row a label, at least one, got 20 for 3"):
        unchecked(features, labels, features, labels[:3])
    with pytest.raises(ValueError, match="features must be one row a label, at least one, got 0 for 0"):
        knn_accuracy(features[:0], labels[:0], features, labels)
