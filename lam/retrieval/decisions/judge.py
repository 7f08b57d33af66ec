"""`judge` decides on hits of any vector store; `calibrate_vectors` learns the calibration from the store's vectors.

The hits must meet these conditions, because thresholds and probabilities are learned from cosines of exact searches:

- Vectors are `Embeddings.mean`, by the same encoder as for the queries, and with the same number of samples, if any.
- Scores are cosines, best first; convert other scores. pgvector (`<=>`) and Chroma (space `cosine`) give
  distances: the cosine is 1 - distance. Elasticsearch gives (1 + cosine) / 2: the cosine is 2 score - 1. Qdrant
  (`Cosine`) and Milvus (`COSINE`) give cosines. Inner products are cosines only for unit vectors.
- The search finds at least 0.95 of the 50 nearest neighbours: missed neighbours change cosines and votes.
- Each query has 50 hits (`N_HITS`), or all items of the store. Each hit has its label.
- Nothing filters the search: a filtered store is another gallery, with its own calibration.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lam.pairs.pairs import as_native
from lam.retrieval.decisions.abstention import SearchDecisions
from lam.retrieval.decisions.calibrate import CalibrationData, Choices, calibrate
from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.decisions.verification import CosineIntervals
from lam.retrieval.index.checks import unit_vectors
from lam.retrieval.index.hits import Hits, label_numbers
from lam.retrieval.metrics.open_set import search_without_self
from lam.utils.checks import check_at_least, check_finite
from lam.vmf.embeddings import KAPPA_RANGE, Embeddings

_BEYOND_ONE = 1e-3  # rounding error of half precision
_EQUAL = 1e-3  # greatest distance between equal vectors, if one is in half precision
_RISE = 1e-5  # rounding errors may let scores rise by this much

Queries = Embeddings | tuple[Any, Any]
"""Embeddings of lam, or a pair (mean, κ): Q unit vectors and Q concentrations, as tensors, arrays, tables or lists."""


def judge(
    calibration: Calibration,
    queries: Queries,
    scores: Any,
    labels: Any = None,
    *,
    gallery_size: int,
    features: Any = None,
) -> SearchDecisions:
    """Decisions on Q queries from the hits of any vector store.

    Args:
        calibration: learned with the same encoder and gallery; the gallery may have grown or shrunk by a fifth.
        queries: embeddings of the queries.
        scores: (Q, K) cosines of the hits, best first, a tensor, an array or lists; K ≥ 50, or the size of the store.
        labels: (Q, K) labels of the hits, lists, an array or a table of strings, "" for a hit without a label; None for
            a store without labels.
        gallery_size: number of items in the store now.
        features: (Q, P) features of the queries, a tensor, an array or lists, for more scores.

    Raises:
        ValueError: for scores that are not sorted cosines, queries that are not unit vectors, lists of different
            lengths, or too few hits; and as `Calibration.decide`.

    Example:
        >>> from lam.retrieval import Targets
        >>> points = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
        >>> items = torch.nn.functional.normalize(points, dim=1)
        >>> labels = [f"octant {signs}" for signs in (points > 0).tolist()]
        >>> asked, choices = (items[:200], [20.0] * 200), Choices(Targets(far=0.1, ood=0.1))
        >>> calibration = calibrate_vectors(asked, labels[:200], items[200:], labels[200:], choices)
        >>> cosines, found = (items[:1] @ items[200:].T).topk(50)
        >>> hits = [[labels[200 + place] for place in found[0].tolist()]]
        >>> judge(calibration, (items[:1], [20.0]), cosines, hits, gallery_size=200).decision
        ('match',)
    """
    embeddings = _embeddings(queries)
    cosines = _cosines(scores, len(embeddings))
    numbers = None if labels is None else _numbers(labels, tuple(cosines.shape))
    features = None if features is None else _rows("features", features)
    check_at_least("gallery_size", gallery_size, cosines.shape[1])
    hits = Hits(torch.arange(cosines.shape[1]).expand(cosines.shape), cosines, torch.ones_like(cosines))
    return calibration.decide(hits, embeddings, features=features, labels=numbers, gallery_size=gallery_size)


def calibrate_vectors(
    queries: Queries,
    query_labels: Sequence[str],
    vectors: Any,
    labels: Sequence[str],
    choices: Choices | None = None,
    *,
    key: str = "vectors",
) -> Calibration:
    """Calibration for a store of labelled vectors, by exact search; `judge` then decides on hits of the store.

    Args:
        queries: Q embeddings of items that were not used in training. A query that is itself in the store is searched
            without itself.
        query_labels: Q labels; a query whose label the store lacks counts as a search without a match.
        vectors: (G, D) vectors of all labelled items in the store, or their embeddings.
        labels: G labels of the items.
        choices: error rates and scores; no score may need features. A false-accept rate of r needs 1/r - 1 queries. The
            default rates rise, with a warning, if the queries are too few for them.
        key: name of the encoder; `load_calibration` requires the same name.

    Raises:
        ValueError: for a missing label, different lengths, vectors that are not unit vectors, or too few queries.
    """
    embeddings = _embeddings(queries)
    items = _rows("vectors", vectors.mean if isinstance(vectors, Embeddings) else vectors)
    for name, values, n_items in (("query_labels", query_labels, len(embeddings)), ("labels", labels, len(items))):
        if len(values) != n_items:
            raise ValueError(f"{name} must be one for each of {n_items} vectors, got {len(values)}")
        _check_words(name, values, "leave unlabelled items out")
        if empty := [index for index, value in enumerate(values) if not value]:
            raise ValueError(
                f"{name} must not be empty, got an empty one at index {empty[0]}: leave unlabelled items out"
            )
    _check_units("vectors", _plain(items, torch.ones(len(items))), embeddings.dimension)
    own, stored = label_numbers([[*query_labels, *labels]])[0].split([len(embeddings), len(items)])
    searches, _ = search_without_self(
        embeddings.mean.cpu(), items, lambda rows: own[rows][:, None] == stored, within=_EQUAL
    )
    known = searches.has_mate
    intervals = CosineIntervals.fit(embeddings[known], own[known], items, searches.hits[known])
    data = CalibrationData(searches, embeddings, gallery_labels=stored)
    return replace(calibrate(data, choices, key=key), intervals=intervals)


def _embeddings(queries: Queries) -> Embeddings:
    """Checked embeddings from `Queries`, with κ clamped to `KAPPA_RANGE`."""
    if not isinstance(queries, Embeddings):
        if not isinstance(queries, tuple | list) or len(queries) != 2 or queries[1] is None:
            raise ValueError(
                f"queries must be lam.Embeddings or a pair (mean, κ), got {type(queries).__name__}: κ says how certain "
                "each query is"
            )
        mean, kappa = _rows("queries", queries[0]), _tensor(queries[1]).double()
        # NaN and negative numbers stay: the check rejects them
        queries = _plain(mean, torch.where(kappa >= 0, kappa.clamp(*KAPPA_RANGE), kappa))
    _check_units("queries", queries, queries.dimension)
    return queries


def _check_units(name: str, embeddings: Embeddings, dimension: int) -> None:
    try:
        unit_vectors(embeddings, dimension)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _check_words(name: str, labels: Sequence[str], advice: str) -> None:
    """Reject labels that are not strings: elements of a tensor are all unequal, and 0 would mean a missing label."""
    for place, label in enumerate(labels):
        if not isinstance(label, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"{name} must be strings, got {label!r:.40} at index {place}: give str of each, and {advice}"
            )


def _plain(mean: Tensor, kappa: Tensor) -> Embeddings:
    """Embeddings with placeholders for the unused fields."""
    return Embeddings(mean, kappa, torch.ones_like(kappa), torch.zeros_like(kappa))


def _tensor(values: Any) -> Tensor:
    if hasattr(values, "to_numpy"):  # pandas: torch would look up rows by index labels
        values = np.stack([*values.to_numpy()])
    return torch.as_tensor(as_native(values) if isinstance(values, np.ndarray) else values)


def _rows(name: str, values: Any) -> Float[Tensor, "N D"]:
    try:
        rows = _tensor(values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name} must be a matrix of numbers, with rows of one length ({error})") from None
    if rows.ndim != 2:
        raise ValueError(f"{name} must be a matrix, a row for each query or item, got shape {tuple(rows.shape)}")
    return rows.detach().cpu().to(torch.promote_types(rows.dtype, torch.float32))


def _cosines(scores: Any, n_queries: int) -> Float[Tensor, "Q K"]:
    """Scores clamped to [-1, 1]; a `ValueError` for scores that are not cosines, best first."""
    cosines = _rows("scores", scores)
    if len(cosines) != n_queries:
        raise ValueError(f"scores must have a row for each of {n_queries} queries, got {len(cosines)}")
    check_finite("scores", cosines)
    if (is_beyond := cosines.abs() > 1 + _BEYOND_ONE).any():
        raise ValueError(
            f"scores must be cosines, from -1 to 1, got {float(cosines[is_beyond][0]):.6g}: let the store search "
            "normalised vectors by cosine, not by inner product or Euclidean distance"
        )
    if (rises := cosines[:, 1:] > cosines[:, :-1] + _RISE).any():
        row, place = rises.nonzero()[0].tolist()
        raise ValueError(
            f"scores of a query must be sorted, the best first, got {float(cosines[row, place + 1]):.6g} after "
            f"{float(cosines[row, place]):.6g} in query {row}: the cosine of a cosine distance is 1 - distance"
        )
    return cosines.clamp(-1, 1).float()  # as `lam.retrieval.Index` returns them


def _numbers(labels: Any, shape: tuple[int, ...]) -> Tensor:
    labels = labels.to_numpy().tolist() if hasattr(labels, "to_numpy") else labels  # a table
    for row in labels:
        _check_words("labels", row, '"" for a hit without a label')
    lengths = [len(row) for row in labels]
    if len(lengths) != shape[0] or set(lengths) - {shape[1]}:
        raise ValueError(
            f"labels must be {shape[0]} lists of {shape[1]}, one label for each score, got lists of {lengths[:5]}"
        )
    return label_numbers(labels).reshape(shape)
