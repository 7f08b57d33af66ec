"""What metrics and scores are called in a report, how they are read, and what they mean. No number is made here."""

import re
from dataclasses import dataclass
from typing import Literal

Direction = Literal["higher", "lower", "neither"]


@dataclass(frozen=True)
class Words:
    """A metric in words.

    Attributes:
        name: as a reader knows it.
        direction: which values are better.
        meaning: one line on what it says.
    """

    name: str
    direction: Direction
    meaning: str


_WORDS = {
    "ece": Words("ECE", "lower", "mean gap between confidence and accuracy, over ten bins"),
    "ece_below_one": Words(
        "ECE below 1", "lower", "the same as the authors' code has it: without the queries of confidence 1"
    ),
    "ausc": Words("AUSC", "higher", "mean accuracy of the first hit as the most uncertain queries are dropped"),
    "auroc": Words("AUROC", "higher", "chance that an OOD item is less certain than a known one"),
    "auprc": Words("AUPRC", "higher", "average precision of finding OOD items by their uncertainty"),
    "n_queries": Words("queries", "neither", "how many were evaluated"),
    "n_without_relevant": Words(
        "queries without a relevant item", "neither", "left out of recall, mAP and AUSC: nothing could be found"
    ),
    "no_match_auprc": Words(
        "AUPRC of no match", "higher", "average precision of finding queries without a match by the first hit's cosine"
    ),
    "no_match_auprc_kappa": Words("AUPRC of no match, by κ", "higher", "the same by κ of the query"),
    "no_match_prevalence": Words("share without a match", "neither", "the AUPRC of a useless score"),
    "batches_without_positives": Words(
        "batches without a positive pair", "neither", "skipped in training: nothing can be learned from them"
    ),
    "share_clipped": Words(
        "curvature entries clipped",
        "neither",
        "share that is negative and counts as zero: these weights keep the prior",
    ),
    "variance_clipped": Words(
        "variance of clipped entries",
        "lower",
        "their share of the predictive variance, which no likelihood scale changes",
    ),
    "tuned_scale": Words("likelihood scale s", "neither", "the largest within one standard error of the best score"),
    "tuned_scale_low": Words("s, from", "neither", "the least within one standard error of the best score"),
    "tuned_scale_high": Words("s, to", "neither", "the greatest within one standard error of the best score"),
    "tuned_score": Words(
        "log score", "lower", "of the votes of sampled networks for the first hits, on the validation split"
    ),
    "tuned_score_behind": Words("log score, above the best", "lower", "by how much the chosen s is behind the best"),
    "tuned_score_error": Words("standard error of that", "neither", "of the difference, query by query"),
    "tuned_ece": Words("ECE, validation", "lower", "mean gap between confidence and accuracy at the chosen s"),
    "tuned_cosine": Words(
        "cosine of sampled and own direction",
        "higher",
        "below 0.9 the posterior is so wide that the mean of its samples points elsewhere than the network",
    ),
}
_AT_K = {
    "recall": Words("recall@{k}", "higher", "share of queries with a relevant item among the first {k} hits"),
    "map": Words("mAP@{k}", "higher", "mean precision at the relevant items among the first {k} hits"),
}
_SCORES = {
    "kappa": "−κ (spread on the sphere)",
    "variance": "predictive variance, before normalisation",
    "norm": "norm of the features",
    "knn": "cosine to near training features",
    "mahalanobis": "Mahalanobis distance of the features",
}
_READINGS: dict[Direction, str] = {"higher": "↑ higher is better", "lower": "↓ lower is better", "neither": ""}


def describe(key: str) -> Words:
    """Give the words for a metric by its flat key; a key that is not known is its own name.

    Example:
        >>> describe("map@5").name, describe("ece").direction, describe("clipped_share").name
        ('mAP@5', 'lower', 'clipped share')
    """
    if key in _WORDS:
        return _WORDS[key]
    at_k = re.fullmatch(r"(recall|map)@(\d+)", key)
    if at_k is None:
        return Words(key.replace("_", " "), "neither", "")
    words, k = _AT_K[at_k[1]], at_k[2]
    return Words(words.name.format(k=k), words.direction, words.meaning.format(k=k))


def word_on_direction(key: str) -> str:
    """Say which values of a metric are better, with an arrow; nothing where neither is.

    Example:
        >>> word_on_direction("ece")
        '↓ lower is better'
    """
    return _READINGS[describe(key).direction]


def name_of_score(score: str) -> str:
    """Give the name of an OOD score by its part of a flat key.

    Example:
        >>> name_of_score("variance"), name_of_score("my_score")
        ('predictive variance, before normalisation', 'my score')
    """
    return _SCORES.get(score, score.replace("_", " "))
