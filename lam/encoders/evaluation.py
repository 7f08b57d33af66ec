"""Whether an encoder can be trusted: retrieval, calibration and out-of-distribution (OOD) detection."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lam.encoders.base import Encoder, Observations
from lam.encoders.batches import Batch, as_batches, split_batch
from lam.pairs.pairs import as_targets
from lam.pairs.relevance import Relevance, relevance_of
from lam.retrieval.index.exact import rank
from lam.retrieval.metrics.ood import NEIGHBOUR, auprc, auroc, knn_distance, prevalence
from lam.retrieval.metrics.ranking import count_without_relevant, map_at_k, recall_at_k
from lam.retrieval.metrics.reliability import answers_of
from lam.retrieval.metrics.uncertainty import CalibrationBins, ausc
from lam.vmf.embeddings import Embeddings

DEPTH = 10
"""How many hits a query gets."""


@dataclass(frozen=True)
class Evaluation:
    """What was measured, and the arrays behind it.

    Attributes:
        metrics: flat names and values; None where a metric is undefined. Higher is better but for `ece` and
            `ece_below_one`.
        embeddings: of the Q in-distribution queries.
        queries: (Q,) their positions in the evaluated set.
        gallery: embeddings of the G items that were searched.
        candidates: (G,) their positions in the evaluated set.
        hits: (Q, K) positions of the nearest of them but the query itself, by cosine of the directions.
        cosines: (Q,) of the first hits.
        correct: (Q,) whether the first hit answers the query.
        answerable: (Q,) whether any item of the gallery does; the others are left out of retrieval metrics.
        relevance: which items answer which query.
        calibration: confidence against accuracy; None for a method without samples.
        primary: the OOD score whose metrics have no suffix.
        scores: by score, (Q,) values of the queries, higher meaning more OOD.
        ood_scores: by OOD set and score, the same of its items.
        ood_embeddings: by OOD set.
    """

    metrics: dict[str, float | int | None]
    embeddings: Embeddings
    queries: Int[Tensor, " Q"]
    gallery: Embeddings
    candidates: Int[Tensor, " G"]
    hits: Int[Tensor, "Q K"]
    cosines: Float[Tensor, " Q"]
    correct: Bool[Tensor, " Q"]
    answerable: Bool[Tensor, " Q"]
    relevance: Relevance
    calibration: CalibrationBins | None
    primary: str
    scores: dict[str, Tensor]
    ood_scores: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    ood_embeddings: dict[str, Embeddings] = field(default_factory=dict)


def evaluate(
    encoder: Encoder,
    id: Iterable[Batch],
    ood: Iterable[Batch] | Mapping[str, Iterable[Batch]] | None = None,
    *,
    reference: Float[Tensor, "M P"] | None = None,
    is_query: Bool[Tensor, " N"] | None = None,
    relevant_within: float | None = None,
    n_samples: int | None = None,
    progress: bool = False,
) -> Evaluation:
    """Measure retrieval, calibration and OOD detection.

    The gallery is the evaluated set without the query itself, unless `is_query` parts them. Metrics are `recall@k` and
    `map@k` for k = 1, 5 and 10, `ece` and `ausc`; `ece_below_one` is the ECE as the authors' code has it, of queries
    whose confidence is below 1. `auroc` and `auprc` are by the encoder's own OOD score, κ unless it says otherwise, and
    by the others with a suffix: `_variance` (before normalisation), `_norm` (of the features) and `_knn` (cosine to the
    5th nearest reference feature); of further OOD sets with `@name` at the end. Where some queries have no match in the
    gallery and some have one, `no_match_auprc` says how well the cosine of the first hit tells them, and
    `no_match_auprc_kappa` how well κ does.

    Source: Warburg et al. (2023), section 4; where their code differs is listed in docs/results.md, "Definitions".

    Args:
        encoder: what to evaluate.
        id: held-out in-distribution batches (inputs, labels) or, for places, (inputs, positions), never those that
            anything was tuned on.
        ood: out-of-distribution batches, or several sets by name, the main one first.
        reference: (M, P) features of training items, for the k-NN score; without them it is left out.
        is_query: (N,) which items are queries, the others being the gallery; by default every item is both.
        relevant_within: of places, in metres; by default the distance of a positive pair in training.
        n_samples: samples S behind κ, and sampled networks behind the calibration; by default the encoder's own number.
        progress: show progress bars on standard error.

    Returns:
        The metrics and the arrays behind them.

    Raises:
        ValueError: for fewer than two items, missing labels, an empty OOD set, or OOD sets without the reference that
            the encoder's own score needs.
    """
    sets: Mapping[str, Iterable[Batch]]
    sets = {} if ood is None else ood if isinstance(ood, Mapping) else {"ood": ood}
    if sets and encoder.ood_score == "knn" and reference is None:
        raise ValueError(
            "the OOD score of this encoder is the k-NN distance: give reference, features of training items"
        )
    seen, targets = _observe_with_targets(encoder, id, n_samples, progress)
    relevance = relevance_of(encoder.relation, targets, is_query=is_query, relevant_within=relevant_within)
    queries, candidates = (found.to(targets.device) for found in (relevance.queries, relevance.candidates))
    embeddings, gallery = seen.embeddings[queries], seen.embeddings[candidates]
    hits, cosines = rank(embeddings.mean, None if relevance.gallery is None else gallery.mean, k=DEPTH)
    answers = relevance.of_hits(hits).to(hits.device)
    n_relevant = relevance.count().to(hits.device)
    answerable, correct = n_relevant > 0, answers[:, 0]
    votes = None if seen.samples is None else answers_of(seen.samples, relevance, hits).votes()
    calibration = None if votes is None else votes.binned()
    metrics: dict[str, float | int | None] = {
        **{f"recall@{k}": recall_at_k(answers, n_relevant, k=k) for k in (1, 5, 10)},
        **{f"map@{k}": map_at_k(answers, n_relevant, k=k) for k in (1, 5, 10)},
        "ece": None if calibration is None else calibration.expected_error,
        "ece_below_one": None if votes is None else votes.binned(closed="left").expected_error,
        "ausc": ausc(correct[answerable], -embeddings.kappa[answerable]),
        "n_queries": len(queries),
        "n_without_relevant": count_without_relevant(n_relevant),
        **_no_match_metrics(answerable, cosines[:, 0], embeddings.kappa),
        **encoder.diagnostics(seen.features),
    }
    scores = ood_scores(embeddings, seen.features[queries], reference)
    primary = encoder.ood_score if encoder.ood_score in scores else "kappa"
    found: dict[str, dict[str, Tensor]] = {}
    found_embeddings: dict[str, Embeddings] = {}
    for name, batches in sets.items():
        outside = _observe_outside(encoder, name, batches, n_samples, progress)
        found_embeddings[name] = outside.embeddings
        found[name] = ood_scores(outside.embeddings, outside.features, reference)
        metrics |= _ood_metrics(scores, found[name], primary, "" if len(found) == 1 else f"@{name}")
    if encoder.has_kappa and len(queries) > 1 and (embeddings.kappa == embeddings.kappa[0]).all():
        warnings.warn(
            f"κ is {float(embeddings.kappa[0]):.3g} for all {len(queries)} queries: it orders no answers and tells no "
            "outsiders; tune the posterior, or fit it on other data",
            stacklevel=2,
        )
    metrics = {name: None if value is None or value != value else value for name, value in metrics.items()}
    return Evaluation(
        metrics=metrics,
        embeddings=embeddings,
        queries=queries,
        gallery=gallery,
        candidates=candidates,
        hits=candidates[hits],
        cosines=cosines[:, 0],
        correct=correct,
        answerable=answerable,
        relevance=relevance,
        calibration=calibration,
        primary=primary,
        scores=scores,
        ood_scores=found,
        ood_embeddings=found_embeddings,
    )


def ood_scores(
    embeddings: Embeddings, features: Float[Tensor, "N P"], reference: Float[Tensor, "M P"] | None
) -> dict[str, Float[Tensor, " N"]]:
    """Give every OOD score of N items by name; higher means more OOD.

    κ and the variance before normalisation come from the posterior. The norm of the features, to which the variance
    reduces where all weights are equally uncertain, and the cosine to the 5th nearest reference feature are the cheap
    scores that any of them must be held against.
    """
    scores = {"kappa": -embeddings.kappa, "variance": embeddings.variance, "norm": features.norm(dim=1)}
    if reference is not None:
        scores["knn"] = knn_distance(features, reference, k=NEIGHBOUR)
    return scores


def _observe_with_targets(
    encoder: Encoder, batches: Iterable[Batch], n_samples: int | None, progress: bool
) -> tuple[Observations, Tensor]:
    targets: list[Tensor] = []

    def remembered() -> Iterator[Any]:
        for inputs, found in map(split_batch, as_batches(batches)):
            if found is None:
                raise ValueError("evaluation needs in-distribution batches of inputs with labels")
            targets.append(as_targets(found))
            yield inputs

    seen = encoder.observe(remembered(), n_samples=n_samples, joint=True, progress=progress)
    given = torch.cat(targets).to(seen.features.device)
    if len(given) != len(seen.features):
        raise ValueError(f"there are {len(seen.features)} items and {len(given)} labels")
    if len(given) < 2:
        raise ValueError("evaluation needs at least 2 in-distribution items")
    return seen, given


def _observe_outside(
    encoder: Encoder, name: str, batches: Iterable[Batch], n_samples: int | None, progress: bool
) -> Observations:
    rest = iter(as_batches(batches))
    first = next(rest, None)
    if first is None:
        raise ValueError(f"the OOD set {name!r} is empty")
    return encoder.observe(chain([first], rest), n_samples=n_samples, progress=progress)


def _no_match_metrics(answerable: Tensor, cosines: Tensor, kappa: Tensor) -> dict[str, float | int | None]:
    if answerable.all() or not answerable.any():
        return {}
    return {
        "no_match_auprc": auprc(-cosines[answerable], -cosines[~answerable]),
        "no_match_auprc_kappa": auprc(-kappa[answerable], -kappa[~answerable]),
        "no_match_prevalence": prevalence(kappa[answerable], kappa[~answerable]),
    }


def _ood_metrics(
    inside: dict[str, Tensor], outside: dict[str, Tensor], primary: str, suffix: str
) -> dict[str, float | int | None]:
    metrics: dict[str, float | int | None] = {}
    for name, scores in inside.items():
        by = "" if name == primary else f"_{name}"
        metrics[f"auroc{by}{suffix}"] = auroc(scores, outside[name])
        metrics[f"auprc{by}{suffix}"] = auprc(scores, outside[name])
    metrics[f"prevalence{suffix}"] = prevalence(inside[primary], outside[primary])
    return metrics
