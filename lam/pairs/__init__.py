"""Matching items: pairs within a batch, near places in a data set, mining of pairs, and matches in a gallery."""

from lam.pairs.candidates import Candidates
from lam.pairs.mining import Mining
from lam.pairs.pairs import Neighbours, Pairs
from lam.pairs.relation import Relation
from lam.pairs.relevance import LabelRelevance, PlaceRelevance, Relevance, relevance_of

__all__ = [
    "Candidates",
    "LabelRelevance",
    "Mining",
    "Neighbours",
    "Pairs",
    "PlaceRelevance",
    "Relation",
    "Relevance",
    "relevance_of",
]
