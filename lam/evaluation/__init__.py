"""`evaluate`: retrieval, calibration and out-of-distribution (OOD) detection of an encoder."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lam.encoders.base import Encoder, Prediction
from lam.encoders.batches import Batch, HeldOut, as_batches
from lam.pairs.relevance import Relevance
from lam.retrieval.index.exact import rank
from lam.retrieval.metrics.probing import clustering
from lam.retrieval.metrics.ranking import relevant_ranks
from lam.retrieval.metrics.reference import Reference
from lam.retrieval.metrics.registry import measure
from lam.retrieval.metrics.scores import N_HITS, scores_of
from lam.retrieval.metrics.uncertainty import ReliabilityBins, label_entropy
from lam.retrieval.metrics.votes import SampledAnswers
from lam.utils.checks import check_at_least, check_tensor
from lam.vmf.embeddings import Embeddings

__all__ = ["Evaluation", "evaluate"]

DEPTH = 10
"""Number K of hits in `Evaluation.hits`; scores use `lam.retrieval.metrics.scores.N_HITS` hits."""


@dataclass(frozen=True)
class Evaluation:
    """The metrics of an encoder, and the data behind them.

    Attributes:
        metrics: values by key, see `lam.retrieval.metrics.registry`; None if undefined.
        embeddings: embeddings of the Q in-distribution queries.
        queries: (Q,) positions of the queries in the evaluated set.
        gallery: embeddings of the G searched items.
        candidates: (G,) positions of the gallery items in the evaluated set.
        hits: (Q, K) positions of the hits in the evaluated set, best first, without the query itself.
        correct: (Q,) whether the first hit matches the query.
        answerable: (Q,) whether any gallery item matches; retrieval metrics leave out queries without a match.
        relevance: which items match each query.
        reliability: accuracy in bins of confidence; None without sampled networks, or if no query has a match.
        primary: name of the score that `auroc` and `auprc` measure: the encoder's own if available, else `kappa`.
        scores: (Q,) values of each score for the queries; higher means more doubt.
        ood_scores: values of each score for OOD items, by OOD set.
        ood_embeddings: embeddings of OOD items, by OOD set.
    """

    metrics: dict[str, float | int | None]
    embeddings: Embeddings
    queries: Int[Tensor, " Q"]
    gallery: Embeddings
    candidates: Int[Tensor, " G"]
    hits: Int[Tensor, "Q K"]
    correct: Bool[Tensor, " Q"]
    answerable: Bool[Tensor, " Q"]
    relevance: Relevance
    reliability: ReliabilityBins | None
    primary: str
    scores: dict[str, Tensor]
    ood_scores: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    ood_embeddings: dict[str, Embeddings] = field(default_factory=dict)


def evaluate(
    encoder: Encoder,
    id: HeldOut | Iterable[Batch],
    ood: Iterable[Batch] | Mapping[str, Iterable[Batch]] | None = None,
    *,
    reference: Reference | Float[Tensor, "O P"] | None = None,
    n_samples: int | None = None,
    costly: bool = False,
    progress: bool = False,
) -> Evaluation:
    """Measure retrieval, calibration and OOD detection.

    Each query searches all other items, unless `HeldOut.is_query` separates queries and gallery. OOD items search the
    same gallery, so that scores of hits, such as the cosine, exist for OOD items too. Metrics such as AUROC are
    computed for every available score of `lam.retrieval.metrics.scores`. The keys `auroc` and `auprc` are for the
    encoder's own score, κ by default. Keys of other scores have a suffix, as in `auroc_variance`; keys of OOD sets
    after the first end in `@name`. If some queries lack a match, `no_match_auprc` measures how well a score finds them.

    Source: Warburg et al. (2023), section 4; docs/reference/definitions.md lists how their code differs from lam.

    Args:
        id: in-distribution items that were not used for training or tuning. If they have soft labels, scores are
            compared with the entropy of these labels.
        ood: out-of-distribution batches, or several sets by name, the main one first.
        reference: features of training items, such as `encoder.features(loader)`; some scores are distances to them. A
            `lam.retrieval.metrics.reference.Reference` may also hold labels of the items.
        n_samples: number S of samples for κ and for the calibration; by default the encoder's own.
        costly: also measure clusters and, with a labelled reference, the accuracy of k-NN and of a linear probe.
        progress: show progress bars on standard error.

    Raises:
        ValueError: for fewer than two items, missing labels, an empty OOD set, a wrong number of soft labels, or OOD
            sets without the reference that the encoder's own score needs.
    """
    if not isinstance(encoder, Encoder):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"encoder must be a lam.Encoder, got {type(encoder).__name__}: lam.fit makes one of a network")
    if isinstance(reference, Tensor):
        reference = Reference.of(reference)
    if not isinstance(reference, Reference | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"reference must be features (O, P) of training items, got {type(reference).__name__}: give "
            "encoder.features(loader)"
        )
    sets: Mapping[str, Any] = {} if ood is None else ood if isinstance(ood, Mapping) else {"ood": ood}
    if sets and encoder.ood_score == "knn" and reference is None:
        raise ValueError(
            "this encoder's OOD score is the k-NN distance: give reference, the features of training items"
        )
    options: Any = {"n_samples": n_samples, "progress": progress}
    held_out = HeldOut.of(id)
    prediction, targets = encoder.predict_labelled(
        held_out.batches, "evaluation in distribution", joint=True, **options
    )
    check_at_least("the number of in-distribution items", len(targets), 2)
    relevance = held_out.relevance(encoder.relation, targets)
    queries, candidates = (rows.to(targets.device) for rows in (relevance.queries, relevance.candidates))
    embeddings, gallery = prediction.embeddings[queries], prediction.embeddings[candidates]
    items = None if relevance.gallery is None else gallery.mean
    every_hit, cosines = rank(embeddings.mean, items, k=N_HITS)
    hits = every_hit[:, :DEPTH]
    answers, n_relevant = relevance.of_hits(hits).to(hits.device), relevance.count().to(hits.device)
    answerable, correct = n_relevant > 0, answers[:, 0]
    votes = None
    if prediction.samples is not None and answerable.any():
        votes = SampledAnswers(prediction.samples, relevance, hits).votes()
    ranks = relevant_ranks(embeddings.mean, items, relevance.of_rows)
    evidence = {"relevance": answers, "n_relevant": n_relevant, "ranks": ranks, "agreement": votes}
    if targets.ndim == 1:
        evidence["classes"] = targets[queries]
        if costly:
            evidence["clusters"] = clustering(embeddings.mean, targets[queries])
        if reference is not None and reference.labels is not None:
            evidence |= {"labelled": reference, "features": prediction.features[queries]}
    metrics = {**measure(evidence, costly=costly), **encoder.diagnostics(prediction.features)}
    entropy = None
    if (soft_labels := held_out.soft_labels) is not None:
        check_tensor("soft_labels", soft_labels)
        if soft_labels.ndim != 2 or len(soft_labels) != len(targets):
            raise ValueError(
                f"soft_labels must have shape (N, C) and a row for each of {len(targets)} items, got "
                f"{tuple(soft_labels.shape)}"
            )
        entropy = label_entropy(soft_labels.detach()).to(queries.device)[queries]
    if reference is not None:
        metrics |= {"n_reference": len(reference), "reference_bytes": reference.nbytes}

    def scores_by(of: Prediction, rows: Tensor | slice, hits: Tensor, cosines: Tensor) -> dict[str, Tensor]:
        labels = relevance.labels_of_hits(hits)
        evidence = {"embeddings": of.embeddings[rows], "features": of.features[rows], "cosines": cosines}
        labels = None if labels is None else labels.to(cosines.device)
        return scores_of({**evidence, "reference": reference, "labels": labels})

    scores = scores_by(prediction, queries, every_hit, cosines)
    own = encoder.ood_score if encoder.ood_score in scores else "kappa"  # k-NN needs a reference
    some_match = bool(answerable.any() and not answerable.all())
    for score, values in scores.items():
        metrics |= measure({"correct": correct[answerable], "doubt": values[answerable]}, score=score)
        if entropy is not None:
            metrics |= measure({"entropy": entropy, "doubt": values}, score=score)
        if some_match:
            metrics |= measure({"matched": values[answerable], "unmatched": values[~answerable]}, score=score)
    ood_scores: dict[str, dict[str, Tensor]] = {}
    ood_embeddings: dict[str, Embeddings] = {}
    for number, (name, batches) in enumerate(sets.items()):
        rest = iter(as_batches(batches))
        if (first := next(rest, None)) is None:
            raise ValueError(f"the OOD set {name!r} is empty")
        outside = encoder.predict(chain([first], rest), **options)
        ood_embeddings[name] = outside.embeddings
        ood_scores[name] = scores_by(outside, slice(None), *_nearest(outside.embeddings.mean, gallery.mean))
        for score, values in scores.items():
            evidence = {"right": correct, "inside": values, "outside": ood_scores[name][score]}
            metrics |= measure(evidence, score=score, own=own, ood_set=name if number else "")
    if encoder.has_kappa and len(queries) > 1 and (embeddings.kappa == embeddings.kappa[0]).all():
        warnings.warn(
            f"κ is {float(embeddings.kappa[0]):.3g} for all {len(queries)} queries, so it orders no answers and "
            "detects no strangers: tune the posterior, or fit it on other data",
            stacklevel=2,
        )
    metrics = {name: None if value != value else value for name, value in metrics.items()}  # NaN: undefined
    return Evaluation(
        metrics=metrics,
        embeddings=embeddings,
        queries=queries,
        gallery=gallery,
        candidates=candidates,
        hits=candidates[hits],
        correct=correct,
        answerable=answerable,
        relevance=relevance,
        reliability=None if votes is None else votes.binned(),
        primary=own,
        scores=scores,
        ood_scores=ood_scores,
        ood_embeddings=ood_embeddings,
    )


def _nearest(
    queries: Float[Tensor, "Q D"], gallery: Float[Tensor, "G D"]
) -> tuple[Int[Tensor, "Q K"], Float[Tensor, "Q K"]]:
    """First hits and their cosines; both are 0 for a zero vector, which only OOD sets may contain."""
    shape, directed = (len(queries), min(N_HITS, len(gallery))), queries.any(1)
    hits, cosines = torch.zeros(shape, dtype=torch.int64, device=queries.device), queries.new_zeros(shape)
    hits[directed], cosines[directed] = rank(queries[directed], gallery, k=N_HITS)
    return hits, cosines
