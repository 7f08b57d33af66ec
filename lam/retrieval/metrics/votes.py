"""Votes of sampled networks on the answer to a query; their agreement is a confidence."""

from dataclasses import dataclass
from typing import Literal, SupportsIndex, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lam.pairs.relevance import LabelRelevance, Relevance
from lam.retrieval.index.exact import sampled_nearest
from lam.retrieval.metrics.uncertainty import ReliabilityBins
from lam.utils.checks import check_at_least, check_choice, check_length, positive_integer

Closed = Literal["right", "left"]


@dataclass(frozen=True)
class Votes:
    """Agreement of S sampled networks with the prediction for each of Q queries, and whether the prediction is right.

    The confidence in a prediction is the share v/S of networks that agree.

    Attributes:
        agree: (Q,) number v of networks that agree, from 0 to S.
        correct: (Q,) whether the prediction is right.
        n_samples: S, at least 1.
    """

    agree: Int[Tensor, " Q"]
    correct: Bool[Tensor, " Q"]
    n_samples: int

    def __post_init__(self) -> None:
        check_length("correct", self.correct, "votes", len(self.agree))
        check_at_least("n_samples", self.n_samples, 1)
        if (outside := (self.agree < 0) | (self.agree > self.n_samples)).any():
            raise ValueError(f"votes must be from 0 to {self.n_samples}, got {int(self.agree[outside][0])}")

    @property
    def log_score(self) -> Float[Tensor, " Q"]:
        """(Q,) minus the log of the probability that the votes give to the outcome, float64; lower is better.

        P(the prediction is right) = (v + ½)/(S + 1), which is never 0 or 1.

        Source: Krichevsky and Trofimov (1981) for the probability; Good (1952) for the score, which is proper.
        """
        right = (self.agree.double() + 0.5) / (self.n_samples + 1)
        return -torch.where(self.correct, right, 1 - right).log()

    def binned(self, bins: SupportsIndex = 10, *, closed: Closed = "right") -> ReliabilityBins:
        """Sort the queries into B confidence bins of equal width, in exact integer arithmetic.

        Source: Guo, Pleiss, Sun and Weinberger (2017), with bins closed on the right. Warburg et al. (2023), eq. 121,
            do not say which end belongs to a bin; their code has `closed="left"`.

        Args:
            bins: number of bins B, at least 1.
            closed: the end that belongs to a bin. "right": v/S is in bin ⌈B·v/S⌉, or 1 if v = 0. "left": v/S is
                in bin ⌊B·v/S⌋ + 1, and v = S in no bin, as in Warburg et al.'s code.

        Raises:
            ValueError: for fewer than one bin, or another value of `closed`.

        Example:
            >>> votes = Votes(torch.tensor([4, 3]), torch.tensor([True, True]), n_samples=4)
            >>> votes.binned().expected_error, votes.binned(closed="left").expected_error
            (0.125, 0.25)
        """
        bins = positive_integer("bins", bins)
        check_choice("closed", closed, get_args(Closed))
        scaled = self.agree.long() * bins
        in_bin = (scaled - 1).clamp(min=0) // self.n_samples if closed == "right" else scaled // self.n_samples
        inside = in_bin < bins
        confidence = self.agree[inside].double() / self.n_samples
        return ReliabilityBins.of(in_bin[inside], confidence, self.correct[inside], bins=bins)


def majority_votes(
    predictions: Int[Tensor, "S Q"], labels: Int[Tensor, " Q"], ranked_labels: Int[Tensor, "Q K"]
) -> Votes:
    """Votes of S sampled networks on the label of each query; the most common label is the prediction.

    Args:
        predictions: (S, Q) the label of each query's nearest neighbour under each sampled network.
        labels: (Q,) the true labels.
        ranked_labels: (Q, K) labels of the hits, best first. In a tie, the tied label of the best hit wins; if no hit
            has a tied label, the lowest label wins.
    """
    if len(predictions) == 0:
        raise ValueError("predictions must hold at least one sampled network, got none")
    check_length("labels", labels, "the queries in predictions", predictions.shape[1])
    if len(ranked_labels) != len(labels):
        raise ValueError(f"ranked_labels must have a row for each of {len(labels)} queries, got {len(ranked_labels)}")
    mode, agree = _mode(predictions, ranked_labels)
    return Votes(agree, mode == labels, len(predictions))


def _mode(predictions: Tensor, ranked_labels: Tensor) -> tuple[Tensor, Tensor]:
    """The label with most votes, and its number of votes; the time is independent of the number of classes."""
    votes = torch.stack([(predictions == row).sum(0) for row in predictions])
    never = ranked_labels.shape[1]
    places = torch.full_like(votes, never)
    for k in reversed(range(never)):
        places = places.masked_fill(predictions == ranked_labels[:, k], k)
    standing = votes * (never + 1) - places  # by votes, and among equal votes by rank
    wins = standing == standing.amax(0)
    return predictions.masked_fill(~wins, torch.iinfo(predictions.dtype).max).amin(0), votes.amax(0)


class SampledAnswers:
    """The nearest neighbour of every query under each of S sampled networks.

    Args:
        samples: (S, N, E) unit vectors of the items under each network.
        relevance: matches among the N items.
        hits: (Q, K) the hits by the embeddings' directions, as positions in the gallery, best first.

    Attributes:
        nearest: (S, Q) positions in the gallery.
    """

    def __init__(self, samples: Float[Tensor, "S N E"], relevance: Relevance, hits: Int[Tensor, "Q K"]) -> None:
        queries, gallery = relevance.queries.to(samples.device), relevance.gallery
        searched = None if gallery is None else samples[:, gallery.to(samples.device)]
        self.nearest: Int[Tensor, "S Q"] = sampled_nearest(samples[:, queries], searched).cpu()
        self.hits, self.relevance = hits.cpu(), relevance

    def votes(self) -> Votes:
        """Votes on the label, as in `majority_votes`; if items match by place, `votes_for_first_hit`."""
        if isinstance(self.relevance, LabelRelevance):
            labels, candidates = self.relevance.labels, self.relevance.candidates
            predictions, ranked = labels[candidates[self.nearest]], labels[candidates[self.hits]]
            return majority_votes(predictions, labels[self.relevance.queries], ranked)
        return self.votes_for_first_hit()

    def votes_for_first_hit(self) -> Votes:
        """Votes for the first hit; a network agrees if its nearest neighbour matches this hit.

        The first hit is the same for all posteriors, so votes of two posteriors can be compared.
        """
        agree = self.relevance.same_answer(self.nearest, self.hits[:, 0]).sum(0)
        return Votes(agree, self.relevance.of_hits(self.hits[:, :1])[:, 0], len(self.nearest))
