"""`Recall`: the agreement of an approximate index with an exact search, with stored items as queries."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from lam.retrieval.index.rows import Found

_ROUNDING = 1e-6  # largest difference of one cosine between two searches


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
