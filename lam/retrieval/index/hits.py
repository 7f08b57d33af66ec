"""`Hits`: what a search returns, whichever store it was made in."""

from dataclasses import dataclass

from jaxtyping import Float, Int64
from torch import Tensor

from lam.retrieval.decisions.decisions import Decision


@dataclass(frozen=True)
class Hits:
    """What a search returns: K hits for each of Q queries, best first.

    Attributes:
        ids: (Q, K) ids of the hits.
        scores: (Q, K) their cosines with the query; higher is better.
        kappa: (Q, K) the concentration stored with each hit; small means uncertain.
        query_kappa: (Q,) the concentration of each query.
        decision: the answer to each query, once it was judged; see `lam.retrieval.Calibration.judge`.
        probability: (Q,) that the first hit is right, once it was judged.
    """

    ids: Int64[Tensor, "Q K"]
    scores: Float[Tensor, "Q K"]
    kappa: Float[Tensor, "Q K"]
    query_kappa: Float[Tensor, " Q"]
    decision: tuple[Decision, ...] | None = None
    probability: Float[Tensor, " Q"] | None = None

    def __len__(self) -> int:
        return len(self.ids)
