"""Hits grouped by label."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from lam.gallery.gallery import Matching
from lam.retrieval.index.hits import Hits
from lam.retrieval.metrics.hit_scores import N_HITS

_DEEPEST = 2**12  # hits of one search


@dataclass(frozen=True)
class Place:
    """A hit: its key, cosine and κ, and its rank in the first search, from 0 (None if a deeper search found it)."""

    key: int
    score: float
    kappa: float
    rank: int | None


def nearest_by_label(
    search: Callable[[int, Int64[np.ndarray, " G"] | None], Hits], items: Matching, *, n_groups: int, size: int
) -> list[list[Place]]:
    """The nearest `size` items of each of the `n_groups` nearest labels, best first; unlabelled items are left out.

    `search(k, among)` returns the k nearest hits of the query among the keys `among`, or among all keys for None. Each
    deeper search leaves out labels that already have `size` items. A search for `n_groups * size` hits completes a
    label or finds `n_groups` labels, so the loop ends.
    """
    groups: dict[int, list[Place]] = {}
    ranks: dict[int, int] = {}
    depth, among = max(N_HITS, 4 * n_groups * size), None
    while True:
        hits = search(depth, among)
        keys = hits.ids[0].tolist()
        ranks = ranks or {key: rank for rank, key in enumerate(keys)}
        groups = {label: group if len(group) == size else [] for label, group in groups.items()}
        rows = zip(
            keys, _labels_of(hits.ids[0].numpy(), items), hits.scores[0].tolist(), hits.kappa[0].tolist(), strict=True
        )
        for key, label, score, kappa in rows:
            if label >= 0 and (label in groups or len(groups) < n_groups):
                group = groups.setdefault(label, [])
                if len(group) < size:
                    group.append(Place(key, score, kappa, ranks.get(key)))
        full = [label for label, group in groups.items() if len(group) == size]
        if len(keys) < depth or len(full) == n_groups:
            return list(groups.values())
        open_items = (items.labels >= 0) & ~np.isin(items.labels, full)
        if len(groups) == n_groups:
            open_items &= np.isin(items.labels, list(groups))
        among, depth = items.keys[open_items], max(depth, min(4 * depth, _DEEPEST))


def _labels_of(keys: np.ndarray, items: Matching) -> list[int]:
    """Label numbers of keys; −1 for an item that was added after the items were listed."""
    if len(items) == 0:
        return [-1] * len(keys)
    places = items.keys.searchsorted(keys).clip(max=len(items) - 1)
    return np.where(items.keys[places] == keys, items.labels[places], -1).tolist()
