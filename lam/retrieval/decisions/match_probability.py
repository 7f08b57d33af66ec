"""`MatchProbability`: P(the first hit is right) of a query that may have no match in the gallery."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lam.retrieval.decisions.density_ratio import SHARE, DensityRatio
from lam.retrieval.decisions.evidence import Evidence
from lam.retrieval.decisions.one_class import OneClassModel
from lam.retrieval.decisions.probability import Correctness, Scores


@dataclass(frozen=True)
class MatchProbability:
    """P(the first hit is right) = P(known) · P(right | known); a query is known if the gallery holds a match.

    Attributes:
        usual: P(known) from the similarity of the query to the calibration queries.
        right: P(right | known).
        contrast: P(known) learnt against queries without a match, or against unlabelled queries; None without either.
    """

    usual: OneClassModel
    right: Correctness
    contrast: DensityRatio | None = None

    @classmethod
    def fit(cls, evidence: Evidence, *, share: float = SHARE, mixture: Scores | None = None) -> "MatchProbability":
        """Learn both factors.

        Args:
            evidence: scores of the calibration queries and strangers.
            share: expected share of queries without a match among future queries, in (0, 1).
            mixture: scores of unlabelled queries; used if the interval of their share of strangers excludes 0 and 1.
        """
        right = Correctness.fit(evidence.known, evidence.right_if_known)
        contrast = None if mixture is None else DensityRatio.from_mixture(evidence.known, mixture)
        if contrast is None or not contrast.holds_both:
            contrast = None
            if len(evidence.no_match) or evidence.stranger_kinds:
                others = [evidence.no_match.scores, *evidence.stranger_kinds]
                contrast = DensityRatio.from_strangers(evidence.known, others, share=share)
        return cls(OneClassModel.fit(evidence.known), right, contrast)

    def p_known(self, scores: Scores) -> Float[Tensor, " N"]:
        """P(known): the smaller of `usual` and `contrast`."""
        usual = self.usual(scores)
        return usual if self.contrast is None else torch.minimum(usual, self.contrast(scores))

    def __call__(self, scores: Scores) -> Float[Tensor, " N"]:
        """P(known) · P(right | known), float64."""
        return self.p_known(scores) * self.right(scores)

    def cost(self, scores: Scores, *, wrong: float, stranger: float) -> Float[Tensor, " N"]:
        """Expected cost of answering: wrong · P(known and wrong) + stranger · P(not known).

        The best rule answers if this cost is below the cost of not answering.

        Source: Franc, Paplham and Průša (2024), arXiv 2403.16916, theorem 1.
        """
        if not (wrong >= 0 and stranger >= 0):
            raise ValueError(f"costs must not be negative, got wrong={wrong} and stranger={stranger}")
        known = self.p_known(scores)
        return wrong * known * (1 - self.right(scores)) + stranger * (1 - known)

    @property
    def evidence(self) -> frozenset[str]:
        """Names of the scores that the two factors need."""
        contrast = () if self.contrast is None else self.contrast.regression.evidence
        return frozenset((*self.usual.ranks, *self.right.evidence, *contrast))
