"""`Hits`: the result of a search of any index."""

from dataclasses import dataclass

from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class Hits:
    """K hits for each of Q queries, best first.

    Attributes:
        ids: (Q, K) ids of the hits.
        scores: (Q, K) their cosines with the query; higher is better.
        kappa: (Q, K) the concentration stored with each hit; small means uncertain.
        query_kappa: (Q,) the concentration of each query.
    """

    ids: Int64[Tensor, "Q K"]
    scores: Float[Tensor, "Q K"]
    kappa: Float[Tensor, "Q K"]
    query_kappa: Float[Tensor, " Q"]

    def __len__(self) -> int:
        return len(self.ids)
