"""Confidence against accuracy of retrieval under sampled networks, whatever makes an answer right."""

import torch
from jaxtyping import Float
from torch import Tensor

from lam.relevance import LabelRelevance, Relevance
from lam.retrieval.neighbours import rank, sampled_nearest
from lam.retrieval.uncertainty import CalibrationBins, Votes, majority_votes

DEPTH = 10


def votes_of(samples: Float[Tensor, "S N E"], relevance: Relevance) -> Votes:
    """How many sampled networks agree with the answer to each query.

    With labels, networks agree on the label of the nearest neighbour, and the prediction is the most common one. Places
    have no names to agree on: there the prediction is the first hit of the mean embedding, and a network agrees whose
    nearest neighbour lies near that.

    Args:
        samples: (S, N, E) unit vectors under S sampled networks.
        relevance: among the N items.
    """
    mean = samples.mean(0, dtype=torch.float64)
    queries, gallery = relevance.queries.to(samples.device), relevance.gallery
    if gallery is None:
        hits, nearest = rank(mean[queries], k=DEPTH)[0], sampled_nearest(samples[:, queries])
    else:
        gallery = gallery.to(samples.device)
        hits = rank(mean[queries], mean[gallery], k=DEPTH)[0]
        nearest = sampled_nearest(samples[:, queries], samples[:, gallery])
    hits, nearest = hits.cpu(), nearest.cpu()
    if isinstance(relevance, LabelRelevance):
        labels, candidates = relevance.labels, relevance.candidates
        return majority_votes(labels[candidates[nearest]], labels[relevance.queries], labels[candidates[hits]])
    agree = relevance.alike(nearest, hits[:, 0]).sum(0)
    return Votes(agree, relevance.of_hits(hits[:, :1])[:, 0], len(samples))


def calibration_of(samples: Float[Tensor, "S N E"], relevance: Relevance) -> CalibrationBins:
    """The `votes_of` sampled networks in ten bins of confidence."""
    return votes_of(samples, relevance).binned()
