"""Whether an encoder can be trusted: retrieval, calibration and out-of-distribution (OOD) detection."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lam.curvature import Batch, as_batches, split_batch
from lam.embeddings import Embeddings
from lam.encoder import BayesianEncoder
from lam.retrieval.neighbours import rank
from lam.retrieval.ood import auprc, auroc, prevalence
from lam.retrieval.ranking import count_without_relevant, map_at_k, recall_at_k
from lam.retrieval.uncertainty import CalibrationBins, ausc, calibration_bins
from lam.tuning import sampled_predictions

DEPTH = 10
"""How many hits a query gets."""

NEIGHBOUR = 5
"""The k of the k-NN score."""

PRIMARY = "kappa"
"""The paper's OOD score, whose figures have no suffix."""


@dataclass(frozen=True)
class Evaluation:
    """What was measured, and the arrays behind it.

    Attributes:
        metrics: flat names and values; None where a metric is undefined. Higher is better but for `ece`.
        embeddings: of the Q in-distribution queries.
        labels: (Q,) theirs.
        hits: (Q, K) indices of the nearest other items by cosine of the mean directions.
        correct: (Q,) whether the first hit has the query's label.
        answerable: (Q,) whether any other item has the query's label; the others are left out of retrieval metrics.
        calibration: confidence against accuracy.
        scores: by score, (Q,) values of the in-distribution items, higher meaning more OOD.
        ood_scores: by OOD set and score, the same of its items.
        ood_embeddings: by OOD set.
    """

    metrics: dict[str, float | int | None]
    embeddings: Embeddings
    labels: Int[Tensor, " Q"]
    hits: Int[Tensor, "Q K"]
    correct: Bool[Tensor, " Q"]
    answerable: Bool[Tensor, " Q"]
    calibration: CalibrationBins
    scores: dict[str, Tensor]
    ood_scores: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    ood_embeddings: dict[str, Embeddings] = field(default_factory=dict)


def evaluate(
    encoder: BayesianEncoder,
    id: Iterable[Batch],
    ood: Iterable[Batch] | Mapping[str, Iterable[Batch]] | None = None,
    *,
    reference: Float[Tensor, "M P"] | None = None,
    n_samples: int = 100,
    progress: bool = False,
) -> Evaluation:
    """Measure retrieval, calibration and OOD detection.

    The gallery is the evaluated set without the query itself. Metrics are `recall@1`, `map@1`, `map@5`, `map@10`,
    `ece` and `ausc`; `auroc` and `auprc` by κ, the same with `_variance` (before normalisation), `_norm` (of the
    features) and `_knn` (cosine to the 5th nearest reference feature); of further OOD sets with `@name` at the end.

    Source: definitions as in Warburg et al. (2023), section 4, with queries without a match left out.

    Args:
        encoder: what to evaluate.
        id: held-out in-distribution batches (inputs, labels), never those that anything was tuned on.
        ood: out-of-distribution batches, or several sets by name, the main one first.
        reference: (M, P) features of training items, for the k-NN score; without them it is left out.
        n_samples: samples S behind κ, and sampled networks behind the calibration.
        progress: show progress bars on standard error.

    Returns:
        The metrics and the arrays behind them.

    Raises:
        ValueError: for fewer than two items, missing labels, or an empty OOD set.
    """
    sets: Mapping[str, Iterable[Batch]]
    sets = {} if ood is None else ood if isinstance(ood, Mapping) else {"ood": ood}
    features, labels = _labelled_features(encoder, id)
    predict = encoder.posterior.predictor(n_samples=n_samples)
    embeddings = predict(features)
    hits, _ = rank(embeddings.mean, k=DEPTH)
    relevance = labels[hits] == labels[:, None]
    _, classes, sizes = labels.unique(return_inverse=True, return_counts=True)
    n_relevant = sizes[classes] - 1
    answerable = n_relevant > 0
    correct = relevance[:, 0]
    calibration = calibration_bins(*_sampled(encoder, features, labels, n_samples))
    metrics: dict[str, float | int | None] = {
        "recall@1": recall_at_k(relevance, n_relevant, k=1),
        **{f"map@{k}": map_at_k(relevance, n_relevant, k=k) for k in (1, 5, 10)},
        "ece": calibration.expected_error,
        "ausc": ausc(correct[answerable], -embeddings.kappa[answerable]),
        "n_queries": len(labels),
        "n_without_relevant": count_without_relevant(n_relevant),
        "share_clipped": encoder.posterior.curvature.clipped,
        "variance_clipped": encoder.posterior.clipped_variance_share(features),
    }
    scores = ood_scores(embeddings, features, reference)
    found: dict[str, dict[str, Tensor]] = {}
    found_embeddings: dict[str, Embeddings] = {}
    for name, batches in sets.items():
        outside = encoder.features(batches, progress=progress)
        if len(outside) == 0:
            raise ValueError(f"the OOD set {name!r} is empty")
        found_embeddings[name] = predict(outside)
        found[name] = ood_scores(found_embeddings[name], outside, reference)
        metrics |= _ood_metrics(scores, found[name], "" if len(found) == 1 else f"@{name}")
    metrics = {name: None if value is None or value != value else value for name, value in metrics.items()}
    return Evaluation(
        metrics, embeddings, labels, hits, correct, answerable, calibration, scores, found, found_embeddings
    )


def ood_scores(
    embeddings: Embeddings, features: Float[Tensor, "N P"], reference: Float[Tensor, "M P"] | None
) -> dict[str, Float[Tensor, " N"]]:
    """Give every OOD score of N items by name; higher means more OOD.

    κ and the variance before normalisation come from the posterior. The norm of the features, to which the variance
    reduces where all weights are equally uncertain, and the cosine to the 5th nearest reference feature are the cheap
    scores that any of them must be held against.
    """
    scores = {PRIMARY: -embeddings.kappa, "variance": embeddings.variance, "norm": features.norm(dim=1)}
    if reference is not None:
        scores["knn"] = knn_distance(features, reference)
    return scores


def knn_distance(
    features: Float[Tensor, "N P"], reference: Float[Tensor, "M P"], *, k: int = NEIGHBOUR, block: int = 512
) -> Float[Tensor, " N"]:
    """Give 1 − cosine to the k-th nearest reference feature; exact, in the type of the features.

    Source: Sun, Ming, Zhu and Li (2022).

    Raises:
        ValueError: where the reference holds fewer than k items.
    """
    if len(reference) < k:
        raise ValueError(f"the reference must hold at least k = {k} items, got {len(reference)}")
    gallery = F.normalize(reference.to(features)).T
    parts = [(F.normalize(part) @ gallery).topk(k, dim=1).values[:, -1] for part in features.split(block)]
    return 1 - torch.cat(parts)


def _labelled_features(encoder: BayesianEncoder, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    features, labels = [], []
    if encoder.relation.positive_within is not None:
        raise ValueError("evaluation needs labels; an encoder of places has positions, evaluate it on labelled data")
    for inputs, targets in map(split_batch, as_batches(batches)):
        if targets is None:
            raise ValueError("evaluation needs in-distribution batches of inputs with labels")
        features.append(encoder.features(inputs))
        labels.append(torch.as_tensor(targets).to(features[-1].device))
        if len(features[-1]) != len(labels[-1]):
            raise ValueError(f"there are {len(features[-1])} items and {len(labels[-1])} labels in a batch")
    if sum(len(part) for part in labels) < 2:
        raise ValueError("evaluation needs at least 2 in-distribution items")
    return torch.cat(features), torch.cat(labels)


def _sampled(encoder: BayesianEncoder, features: Tensor, labels: Tensor, n_samples: int) -> tuple[Tensor, ...]:
    predictions, ranked = sampled_predictions(encoder.posterior, features, labels, n_samples=n_samples)
    return predictions, labels, ranked


def _ood_metrics(inside: dict[str, Tensor], outside: dict[str, Tensor], suffix: str) -> dict[str, float | int | None]:
    metrics: dict[str, float | int | None] = {}
    for name, scores in inside.items():
        by = "" if name == PRIMARY else f"_{name}"
        metrics[f"auroc{by}{suffix}"] = auroc(scores, outside[name])
        metrics[f"auprc{by}{suffix}"] = auprc(scores, outside[name])
    metrics[f"prevalence{suffix}"] = prevalence(inside[PRIMARY], outside[PRIMARY])
    return metrics
