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
        usual: how usual the query is beside those calibrated on.
        right: P(right | known).
        contrast: P(known), learnt from queries without a match, or from unlabelled ones; None where there were none.
    """

    usual: OneClassModel
    right: Correctness
    contrast: DensityRatio | None = None

    @classmethod
    def fit(cls, evidence: Evidence, *, share: float = SHARE, mixture: Scores | None = None) -> "MatchProbability":
        """Learn both factors.

        Args:
            evidence: of the calibration queries.
            share: of queries without a match among those to come, in (0, 1).
            mixture: scores of unlabelled queries; P(known) is learnt from these where they hold both kinds for certain.

        Raises:
            ValueError: as `Correctness.fit` and `DensityRatio.from_strangers`.
        """
        right = Correctness.fit(evidence.known, evidence.right_if_known)
        contrast = None
        if mixture is not None:
            contrast = DensityRatio.from_mixture(evidence.known, mixture)
        others = [evidence.no_match, *evidence.all_strangers]
        if (contrast is None or not contrast.holds_both) and (len(evidence.no_match_fold) or len(others) > 1):
            contrast = DensityRatio.from_strangers(evidence.known, others, share=share)
        return cls(
            OneClassModel.fit(evidence.known), right, None if contrast is None or not contrast.holds_both else contrast
        )

    def p_known(self, scores: Scores) -> Float[Tensor, " N"]:
        """P(known): the lesser of how usual a query is and of how unlike those without a match."""
        usual = self.usual(scores)
        return usual if self.contrast is None else torch.minimum(usual, self.contrast(scores))

    def __call__(self, scores: Scores) -> Float[Tensor, " N"]:
        """P(known) · P(right | known), float64."""
        return self.p_known(scores) * self.right(scores)

    def cost(self, scores: Scores, *, wrong: float, stranger: float) -> Float[Tensor, " N"]:
        """Expected cost of answering: wrong · P(known and wrong) + stranger · P(not known).

        To answer where this is below the cost of not answering, and only there, is the best rule there is; it is linear
        in P(wrong | known) and in the ratio of the densities of strangers and known queries.

        Source: Franc, Paplham and Průša (2024), arXiv 2403.16916, theorem 1.

        Args:
            scores: of the queries.
            wrong: what a wrong answer to a known query costs, not negative.
            stranger: what any answer to a query without a match costs, not negative.

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
        return frozenset((*self.usual.ranks, *self.right.evidence, *contrast))
