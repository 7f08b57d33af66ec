"""`Answer`: P(the first hit is right) of a query that may be a stranger."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lam.retrieval.decisions.contrast import Contrast
from lam.retrieval.decisions.known import Known
from lam.retrieval.decisions.probability import Correctness, Scores


@dataclass(frozen=True)
class Answer:
    """P(the first hit is right) = P(known) · P(right | known), of a query that has a match if it is known.

    Attributes:
        known: how usual the query is.
        right: P(right | known).
        contrast: P(known), learnt from strangers or from unlabelled queries; None where there were none.
    """

    known: Known
    right: Correctness
    contrast: Contrast | None = None

    @classmethod
    def fit(cls, scores: Scores, correct: Bool[Tensor, " N"], *, contrast: Contrast | None = None) -> "Answer":
        """Learn both from searches of known queries that have a match; see `Correctness.fit`."""
        right = Correctness.fit(scores, correct)
        return cls(Known.fit(scores), right, contrast)

    def p_known(self, scores: Scores) -> Float[Tensor, " N"]:
        """P(known): the lesser of what is usual and what is unlike strangers, which no example of these may show."""
        usual = self.known(scores)
        return usual if self.contrast is None else torch.minimum(usual, self.contrast(scores))

    def __call__(self, scores: Scores) -> Float[Tensor, " N"]:
        """P(known) · P(right | known), float64."""
        return self.p_known(scores) * self.right(scores)

    def cost(self, scores: Scores, *, wrong: float, stranger: float) -> Float[Tensor, " N"]:
        """Expected cost of answering: wrong · P(known and wrong) + stranger · P(stranger).

        To answer where this is below the cost of not answering, and only there, is the best rule there is; it is linear
        in P(wrong | known) and in the ratio of the densities of strangers and known queries.

        Source: Franc, Paplham and Průša (2024), arXiv 2403.16916, theorem 1.

        Args:
            scores: of the queries.
            wrong: what a wrong answer to a known query costs, not negative.
            stranger: what any answer to a stranger costs, not negative.

        Raises:
            ValueError: for a cost that is negative or NaN.
        """
        if not (wrong >= 0 and stranger >= 0):
            raise ValueError(f"costs must not be negative, got wrong={wrong} and stranger={stranger}")
        known = self.p_known(scores)
        return wrong * known * (1 - self.right(scores)) + stranger * (1 - known)

    @property
    def evidence(self) -> frozenset[str]:
        """The scores that all need."""
        contrast = () if self.contrast is None else self.contrast.regression.evidence
        return frozenset((*self.known.ranks, *self.right.evidence, *contrast))
