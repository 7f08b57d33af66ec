"""Quality of simple classifiers and clusters on features, the usual tests of self-supervised representations."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from lam.utils.checks import check_at_least, check_finite

_BLOCK = 1024  # number of test items compared at once


@dataclass(frozen=True)
class Clustering:
    """Agreement of clusters with classes; higher is better.

    Attributes:
        nmi: normalised mutual information, in [0, 1].
        ari: adjusted Rand index, at most 1; random clusters have a mean of 0.
        purity: share of items that belong to the most common class of their cluster.
    """

    nmi: float
    ari: float
    purity: float


class LinearProbe:
    """Multinomial logistic regression on standardised features, with scikit-learn's default penalty.

    Example:
        >>> probe = LinearProbe(torch.tensor([[-1.0], [-2.0], [1.0], [2.0]]), torch.tensor([0, 0, 7, 7]))
        >>> probe.predict(torch.tensor([[3.0], [-3.0]]))
        tensor([7, 0])
    """

    def __init__(self, features: Float[Tensor, "N P"], labels: Shaped[Tensor, " N"]) -> None:
        _check_rows("features", features, labels)
        if len(labels.unique()) < 2:
            raise ValueError(f"labels must hold at least two classes, got {labels.unique().tolist()}")
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        self._classifier: Any = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        self._classifier.fit(features.double().cpu().numpy(), labels.cpu().numpy())

    def predict(self, features: Float[Tensor, "O P"]) -> Shaped[Tensor, " O"]:
        """(O,) predicted classes of O items, on the CPU."""
        return torch.from_numpy(self._classifier.predict(features.double().cpu().numpy()))


def linear_probe(
    features: Float[Tensor, "N P"],
    labels: Shaped[Tensor, " N"],
    test_features: Float[Tensor, "O P"],
    test_labels: Shaped[Tensor, " O"],
) -> float:
    """Accuracy of `LinearProbe`; higher is better.

    Source: Chen et al. (2020), "A simple framework for contrastive learning of visual representations", section 2.3.
    """
    _check_rows("test_features", test_features, test_labels)
    predicted = LinearProbe(features, labels).predict(test_features)
    return float((predicted == test_labels.cpu()).double().mean())


def knn_accuracy(
    features: Float[Tensor, "N P"],
    labels: Shaped[Tensor, " N"],
    test_features: Float[Tensor, "O P"],
    test_labels: Shaped[Tensor, " O"],
    *,
    k: int = 20,
) -> float:
    """Accuracy of a vote of the k nearest items by cosine; higher is better. The smallest class number wins a tie."""
    _check_rows("features", features, labels)
    _check_rows("test_features", test_features, test_labels)
    check_at_least("k", k, 1)
    if k > len(features):
        raise ValueError(f"k must be at most the number of items that vote, {len(features)}, got {k}")
    classes, numbers = labels.unique(return_inverse=True)
    directions, right = F.normalize(features), 0
    for rows, truth in zip(F.normalize(test_features).split(_BLOCK), test_labels.split(_BLOCK), strict=True):
        found = numbers[(rows @ directions.T).topk(k).indices]
        votes = numbers.new_zeros(len(rows), len(classes)).scatter_add_(1, found, torch.ones_like(found))
        right += int((classes[votes.argmax(1)] == truth).sum())
    return right / len(test_labels)


def clustering(directions: Float[Tensor, "N D"], classes: Shaped[Tensor, " N"]) -> Clustering | None:
    """Agreement of C classes with C clusters by Ward's method, which takes 4 N² bytes for N items.

    None for fewer than two classes, or if every item has a class of its own.

    Source: Ward (1963) for the clusters; Wang et al. (2025), "Variational supervised contrastive learning", table 6.
    """
    if len(directions) != len(classes):
        raise ValueError(f"directions and classes must be equal in number, got {len(directions)} and {len(classes)}")
    n_classes = len(classes.unique())
    if n_classes < 2 or n_classes == len(classes):
        return None
    from scipy.cluster.hierarchy import fcluster, ward
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
    from sklearn.metrics.cluster import contingency_matrix

    truth, rows = classes.cpu().numpy(), directions.double().cpu().numpy()
    clusters = fcluster(ward(rows), n_classes, criterion="maxclust")
    purity = contingency_matrix(truth, clusters).max(0).sum() / len(truth)
    nmi, ari = normalized_mutual_info_score(truth, clusters), adjusted_rand_score(truth, clusters)
    return Clustering(float(nmi), float(ari), float(purity))


def _check_rows(name: str, items: Tensor, classes: Tensor) -> None:
    if len(items) == 0 or len(items) != len(classes):
        raise ValueError(f"{name} must have one row for each label, at least one, got {len(items)} for {len(classes)}")
    check_finite(name, items)
