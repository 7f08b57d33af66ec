"""What sampled networks answer, and whether that can be trusted: votes of retrieval, whatever makes an answer right."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from lam.pairs.relevance import LabelRelevance, Relevance
from lam.retrieval.index.exact import sampled_nearest
from lam.retrieval.metrics.uncertainty import Votes, majority_votes


@dataclass(frozen=True)
class SampledAnswers:
    """The nearest neighbour of every query under each of S sampled networks.

    Attributes:
        nearest: (S, Q) positions in the gallery.
        hits: (Q, K) positions in the gallery, ranked by the direction that is retrieved.
        relevance: which items answer which query.
    """

    nearest: Int[Tensor, "S Q"]
    hits: Int[Tensor, "Q K"]
    relevance: Relevance

    def votes(self) -> Votes:
        """How many networks agree with the prediction of each query, and whether it is right.

        With labels, networks vote for the label of what they find; the prediction is the most common one, and of
        several that of the hit that is nearest by the direction that is retrieved. Places have no names to vote for:
        there the prediction is the first hit.
        """
        if isinstance(self.relevance, LabelRelevance):
            labels, candidates = self.relevance.labels, self.relevance.candidates
            predictions, ranked = labels[candidates[self.nearest]], labels[candidates[self.hits]]
            return majority_votes(predictions, labels[self.relevance.queries], ranked)
        return self.votes_for_first_hit()

    def votes_for_first_hit(self) -> Votes:
        """How many networks agree with the first hit, by its label or by finding a place near it; no posterior
        changes what that is, so that one posterior's votes can be held against another's."""
        agree = self.relevance.same_answer(self.nearest, self.hits[:, 0]).sum(0)
        return Votes(agree, self.relevance.of_hits(self.hits[:, :1])[:, 0], len(self.nearest))


def answers_of(samples: Float[Tensor, "S N E"], relevance: Relevance, hits: Int[Tensor, "Q K"]) -> SampledAnswers:
    """Search under S sampled networks.

    Args:
        samples: (S, N, E) unit vectors under each of them.
        relevance: among the N items.
        hits: (Q, K) positions in the gallery of what is retrieved.
    """
    queries, gallery = relevance.queries.to(samples.device), relevance.gallery
    searched = None if gallery is None else samples[:, gallery.to(samples.device)]
    return SampledAnswers(sampled_nearest(samples[:, queries], searched).cpu(), hits.cpu(), relevance)
