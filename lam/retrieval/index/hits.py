"""`Hits`: the result of a search in any index; `Recall`: agreement of an approximate search with an exact one."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from lam.retrieval.index.rows import Found

_ROUNDING = 1e-6  # largest difference of one cosine between two searches


@dataclass(frozen=True)
class Hits:
    """K hits for each of Q queries, best first.

    Attributes:
        ids: (Q, K) ids of the hits.
        scores: (Q, K) cosines of the hits with the query; higher is better.
        kappa: (Q, K) stored concentrations of the hits; small means uncertain.
    """

    ids: Int64[Tensor, "Q K"]
    scores: Float[Tensor, "Q K"]
    kappa: Float[Tensor, "Q K"]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> "Hits":
        """Some of the queries or hits, indexed like a tensor: `hits[:, :k]` holds the best k of each query."""
        return Hits(self.ids[index], self.scores[index], self.kappa[index])


def label_numbers(labels: Iterable[Iterable[str]]) -> Int64[Tensor, "Q K"]:
    """(Q, K) labels of hits as numbers, equal for equal labels; −1 for the empty label.

    Example:
        >>> label_numbers([["cat", ""], ["dog", "cat"]])
        tensor([[ 0, -1],
                [ 1,  0]])
    """
    numbers = {"": -1}
    rows = [[numbers.setdefault(label, len(numbers) - 1) for label in row] for row in labels]
    return torch.tensor(rows, dtype=torch.int64)


def label_key(label: str) -> int:
    """An integer for a label: 63 bits of the label's SHA-256."""
    return int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "big") >> 1


@dataclass(frozen=True)
class Recall:
    """Agreement of an index with an exact search for stored items. A query's own item does not count as a hit.

    Attributes:
        factory: the FAISS type.
        n_queries: number of stored items used as queries.
        k: number of nearest neighbours that `share` compares.
        share: share of the k nearest neighbours that the index finds, in [0, 1]; higher is better.
        depth: number of first hits that `unchanged` compares.
        unchanged: share of queries whose first `depth` hits all have the cosines of the exact search, in [0, 1].
    """

    factory: str
    n_queries: int
    k: int
    share: float
    depth: int
    unchanged: float

    def __str__(self) -> str:
        return (
            f"{self.factory} finds {percent(self.share)} of the {self.k} nearest neighbours of {self.n_queries} stored "
            f"items, and for {percent(self.unchanged)} of these items the same {self.depth} hits as an exact search"
        )

    @classmethod
    def of(
        cls, factory: str, own: Int64[np.ndarray, " Q"], found: Found, exact: Found, *, k: int, depth: int
    ) -> "Recall":
        """Compare two searches for Q stored items, by ids and cosines of K ≥ 2 hits; `own` are the ids of the Q items.

        A query's own item does not count, so at most K − 1 hits do. A hit of `found` is right if it is at least as near
        as the k-th exact hit.
        """
        k, depth = (min(count, exact[0].shape[1] - 1) for count in (k, depth))
        near, nearest = (_others(own, ids, cosines) for ids, cosines, _ in (found, exact))
        is_found = near[:, :k] >= nearest[:, k - 1 : k] - _ROUNDING
        is_same = np.abs(near[:, :depth] - nearest[:, :depth]) <= _ROUNDING
        return cls(factory, len(own), k, float(is_found.mean()), depth, float(is_same.all(axis=1).mean()))


def percent(share: float) -> str:
    """A share as text, rounded down, so that only 1 is 100 %."""
    return "100 %" if share == 1 else f"{np.floor(1000 * share + 1e-9) / 10:.1f} %"


def _others(own: np.ndarray, ids: np.ndarray, cosines: np.ndarray) -> np.ndarray:
    """Cosines of the hits without the query's own item, or without the last hit if this item is not a hit."""
    return -np.sort(-np.where(ids == own[:, None], -np.inf, cosines), axis=1)[:, :-1]
