"""What sampled networks answer, and whether that can be trusted: votes of retrieval, whatever makes an answer right."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from lam.relevance import LabelRelevance, Relevance
from lam.retrieval.neighbours import sampled_nearest
from lam.retrieval.uncertainty import Votes, label_brier, majority_votes


@dataclass(frozen=True)
class SampledAnswers:
    """The nearest neighbour of every query under each of S sampled networks.

    With labels, networks vote for the label of what they find; the prediction is the most common one, and of several
    that of the hit that is nearest by the direction that is retrieved. Places have no names to agree on: there the
    prediction is the first hit, and a network agrees whose nearest neighbour lies near that.

    Attributes:
        nearest: (S, Q) positions in the gallery.
        hits: (Q, K) positions in the gallery, ranked by the direction that is retrieved.
        relevance: which items answer which query.
    """

    nearest: Int[Tensor, "S Q"]
    hits: Int[Tensor, "Q K"]
    relevance: Relevance

    def votes(self) -> Votes:
        """How many networks agree with the prediction of each query, and whether it is right."""
        if isinstance(self.relevance, LabelRelevance):
            labels, candidates = self.relevance.labels, self.relevance.candidates
            predictions, ranked = labels[candidates[self.nearest]], labels[candidates[self.hits]]
            return majority_votes(predictions, labels[self.relevance.queries], ranked)
        agree = self.relevance.alike(self.nearest, self.hits[:, 0]).sum(0)
        return Votes(agree, self.relevance.of_hits(self.hits[:, :1])[:, 0], len(self.nearest))

    def brier(self) -> Float[Tensor, " Q"]:
        """Score the votes of each query by Brier's rule: lower is better.

        With labels Σ_c (v_c/S − [c is right])², in [0, 2]; of places (v/S − [the first hit is right])², in [0, 1].
        """
        if isinstance(self.relevance, LabelRelevance):
            labels = self.relevance.labels
            return label_brier(labels[self.relevance.candidates[self.nearest]], labels[self.relevance.queries])
        return self.votes().brier


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
