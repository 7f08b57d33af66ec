"""`Recall`: how much an approximate index finds of what an exact search finds, measured on items of its own."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int64

_ROUNDING = 1e-6  # by which one cosine may differ between two searches


@dataclass(frozen=True)
class Recall:
    """How much is found of an exact search. The queries are items of the index, each without itself.

    Attributes:
        factory: the FAISS type.
        n_queries: how many items were searched for.
        k: how many neighbours of each were looked for.
        share: of these nearest neighbours, how many are found, in [0, 1]; higher is better.
        depth: how many hits are compared as a whole.
        unchanged: the share of the queries whose first `depth` hits all have the cosines of the exact ones, in [0, 1].
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
        cls,
        factory: str,
        own: Int64[np.ndarray, " Q"],
        found: tuple[Int64[np.ndarray, "Q K"], Float32[np.ndarray, "Q K"]],
        exact: tuple[Int64[np.ndarray, "Q K"], Float32[np.ndarray, "Q K"]],
        *,
        k: int,
        depth: int,
    ) -> "Recall":
        """Compare two searches for Q items; an item that is as near as an exact neighbour counts as that neighbour.

        Args:
            factory: the FAISS type.
            own: (Q,) ids of the items.
            found: (Q, K) ids and cosines of the approximate search, best first, with 2 ≤ K.
            exact: likewise of the exact one.
            k: how many neighbours; at most K − 1 are looked at.
            depth: how many hits; likewise.
        """
        k, depth = (min(count, exact[0].shape[1] - 1) for count in (k, depth))
        near, nearest = _others(own, *found), _others(own, *exact)
        is_found = near[:, :k] >= nearest[:, k - 1 : k] - _ROUNDING
        is_same = np.abs(near[:, :depth] - nearest[:, :depth]) <= _ROUNDING
        return cls(factory, len(own), k, float(is_found.mean()), depth, float(is_same.all(axis=1).mean()))


def percent(share: float) -> str:
    """A share in words, rounded down, so that only all of it is 100 %.

    Example:
        >>> percent(0.9999), percent(1.0)
        ('99.9 %', '100 %')
    """
    return "100 %" if share == 1 else f"{np.floor(1000 * share + 1e-9) / 10:.1f} %"


def _others(own: np.ndarray, ids: np.ndarray, cosines: np.ndarray) -> np.ndarray:
    """The cosines of all hits but the query's own, best first; the last one goes where the query is not among them."""
    return -np.sort(-np.where(ids == own[:, None], -np.inf, cosines), axis=1)[:, :-1]
