"""Linear probe and k-NN accuracy against scikit-learn and by hand."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.cluster import AgglomerativeClustering
from sklearn.neighbors import KNeighborsClassifier

from lam.retrieval.metrics.probing import clustering, knn_accuracy, linear_probe


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
    with pytest.raises(ValueError, match="two classes"):
        linear_probe(features, torch.zeros(20, dtype=torch.long), features, labels)
    for k, message in ((0, "^k .*1.*0"), (21, "^k .*most.*20")):
        with pytest.raises(ValueError, match=message):
            knn_accuracy(features, labels, features, labels, k=k)
    unchecked = getattr(knn_accuracy, "__wrapped__", knn_accuracy)
    with pytest.raises(ValueError, match="test_features.*20 for 3"):
        unchecked(features, labels, features, labels[:3])
    with pytest.raises(ValueError, match="features.*0 for 0"):
        knn_accuracy(features[:0], labels[:0], features, labels)
    features[3, 0] = math.nan
    with pytest.raises(ValueError, match="features.*nan.*index 3"):
        knn_accuracy(features, labels, features, labels)


def agreement_by_loops(truth: list[int], found: list[int]) -> tuple[float, float, float]:
    """NMI, ARI and purity by counting items and pairs of items."""
    n = len(truth)
    joint, rows, columns = (Counter(each) for each in (zip(truth, found, strict=True), truth, found))
    mutual = sum(c / n * math.log(n * c / (rows[a] * columns[b])) for (a, b), c in joint.items())
    entropies = [-sum(c / n * math.log(c / n) for c in counts.values()) for counts in (rows, columns)]
    together = [(truth[i] == truth[j], found[i] == found[j]) for i in range(n) for j in range(i)]
    both, one, other = (sum(map(test, together)) for test in (all, lambda pair: pair[0], lambda pair: pair[1]))
    chance = one * other / len(together)
    purity = sum(max(joint[a, b] for a in rows) for b in columns) / n
    return mutual / (sum(entropies) / 2), (both - chance) / ((one + other) / 2 - chance), purity


@pytest.mark.parametrize("seed", range(3))
def test_clusters_are_wards_and_agree_with_classes_as_counting_says(seed: int) -> None:
    features, labels = clusters(60, seed)
    unit = F.normalize(features)
    rival = AgglomerativeClustering(4, linkage="ward").fit_predict(unit.double().numpy())
    result = clustering(unit, labels)
    assert result is not None
    expected = agreement_by_loops(labels.tolist(), rival.tolist())
    assert (result.nmi, result.ari, result.purity) == pytest.approx(expected)


def test_what_cannot_be_clustered_is_undefined_or_refused() -> None:
    unit = torch.eye(4)
    assert clustering(unit, torch.zeros(4, dtype=torch.long)) is None
    assert clustering(unit, torch.arange(4)) is None
    assert clustering(unit[:0], torch.zeros(0, dtype=torch.long)) is None
    unchecked: Any = getattr(clustering, "__wrapped__", clustering)
    with pytest.raises(ValueError, match="directions .* got 4 and 3"):
        unchecked(unit, torch.arange(3))
