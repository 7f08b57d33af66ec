"""Table of all metrics, for evaluation, report, command line, sweeps and comparisons.

Metrics with a `by_score` are computed once for every score of `lam.retrieval.metrics.scores`.

`metrics.json` has flat keys `METRIC[_SCORE][@SET]`, such as `auroc`, `auprc_knn@digits_held_out`, `ausc_margin`. A key
without `_SCORE` means the default score (`by_score`). A key without `@SET` means the first OOD set.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from lam.retrieval.metrics.ood import auprc, auroc, prevalence
from lam.retrieval.metrics.probing import knn_accuracy, linear_probe
from lam.retrieval.metrics.ranking import map_at_k, mean_reciprocal_rank, precision_at_k, r_precision, recall_at_k
from lam.retrieval.metrics.reference import Reference
from lam.retrieval.metrics.scores import SCORES, describe_score
from lam.retrieval.metrics.uncertainty import (
    abstention_nauc,
    augrc,
    ausc,
    less_sure_of_crops,
    mann_whitney_p,
    r_auroc,
    rank_correlation,
    scod_augrc,
)
from lam.utils.checks import check_choice, check_names

Direction = Literal["higher", "lower", "neither"]
Place = Literal["tile", "table", "bars"]
OWN = "own"
"""The encoder's own score, `Encoder.ood_score`."""
DEPTHS = (1, 5, 10)
"""Each k of recall@k, precision@k and mAP@k."""


@dataclass(frozen=True)
class Metric:
    """One number of an evaluation.

    Attributes:
        name: title in the report.
        direction: which values are better.
        meaning: one line for the reader of a report.
        function: takes the evidence in `needs`, in that order; None for a number that an encoder or a run reports.
        needs: names of the function's arguments in the evidence of `measure`.
        by_score: default score; None if the metric depends on no score.
        shown: further places that show the metric: the report's tiles, and a comparison's table and bars.
        costly: whether the metric is measured only on request.

    Raises:
        ValueError: for an unknown direction, or a word instead of a tuple of needs.
    """

    name: str
    direction: Direction
    meaning: str
    function: Callable[..., float | int | None] | None = None
    needs: tuple[str, ...] = ()
    by_score: str | None = None
    shown: tuple[Place, ...] = ()
    costly: bool = False

    def __post_init__(self) -> None:
        check_choice("direction", self.direction, get_args(Direction))
        check_names("needs", self.needs)

    @property
    def reading(self) -> str:
        """Which values are better, with an arrow; empty for "neither"."""
        return {"higher": "↑ higher is better", "lower": "↓ lower is better", "neither": ""}[self.direction]


def _probe_accuracy(
    probe: Callable[..., float], reference: Reference, features: Tensor, classes: Tensor
) -> float | None:
    """Accuracy of a classifier; None without queries, or with training items of fewer than two classes."""
    if len(features) == 0 or reference.labels is None or len(reference.labels.unique()) < 2:
        return None
    options: dict[str, Any] = {"k": min(20, len(reference))} if probe is knn_accuracy else {}
    unit = reference.directions_of(features.cpu().to(reference.unit))
    return probe(reference.unit, reference.labels, unit, classes.cpu().to(reference.labels), **options)


_of_doubt = partial(Metric, needs=("correct", "doubt"), by_score="kappa")
_LISTS = ("relevance", "n_relevant")
_PROBES = ("labelled", "features", "classes")
_OOD = ("inside", "outside")
_SHOWN_AT_DEPTHS: dict[str, tuple[Place, ...]] = {
    "recall@1": ("tile",),
    "mAP@1": ("table", "bars"),
    "mAP@5": ("table", "tile"),
    "mAP@10": ("table",),
}
METRICS: dict[str, Metric] = {
    **{
        f"{name.lower()}@{k}": Metric(
            f"{name}@{k}",
            "higher",
            f"{meaning} among the first {k} hits" if k > 1 else "share of queries whose first hit is relevant",
            partial(function, k=k),
            _LISTS,
            shown=_SHOWN_AT_DEPTHS.get(f"{name}@{k}", ()),
        )
        for name, meaning, function in (
            ("recall", "share of queries with a relevant item", recall_at_k),
            ("precision", "mean share of relevant items", precision_at_k),
            ("mAP", "mean precision at the relevant items", map_at_k),
        )
        for k in DEPTHS
    },
    "r_precision": Metric(
        "R-precision", "higher", "mean precision of the first R hits, for R relevant items", r_precision, ("ranks",)
    ),
    "mrr": Metric("MRR", "higher", "mean of 1 / rank of the first relevant item", mean_reciprocal_rank, ("ranks",)),
    "auroc": Metric(
        "AUROC",
        "higher",
        "chance that an OOD item is less certain than a known one",
        auroc,
        _OOD,
        OWN,
        ("tile", "table", "bars"),
    ),
    "auprc": Metric(
        "AUPRC",
        "higher",
        "average precision of finding OOD items by their uncertainty",
        auprc,
        _OOD,
        OWN,
        ("tile", "table"),
    ),
    "prevalence": Metric("prevalence", "neither", "share of OOD items, the AUPRC of a useless score", prevalence, _OOD),
    "ausc": _of_doubt(
        "AUSC",
        "higher",
        "mean accuracy of the first hit as the most uncertain queries are dropped",
        ausc,
        shown=("tile", "table", "bars"),
    ),
    "r_auroc": _of_doubt(
        "R-AUROC",
        "higher",
        "chance that a query with a wrong first hit is less certain than one with a right first hit",
        r_auroc,
    ),
    "augrc": _of_doubt(
        "AUGRC", "lower", "mean share of queries that are kept and wrong, as the most uncertain are dropped", augrc
    ),
    "nauc": _of_doubt(
        "nAUC of abstention",
        "higher",
        "accuracy gained by dropping the most uncertain queries, relative to dropping the wrong ones",
        abstention_nauc,
    ),
    "mann_whitney_p": _of_doubt(
        "p of Mann-Whitney", "neither", "two-sided p-value of the R-AUROC against 0.5", mann_whitney_p
    ),
    "entropy_correlation": Metric(
        "correlation with people's labels",
        "higher",
        "rank correlation of doubt with the entropy of the labels that people gave an item",
        lambda entropy, doubt: rank_correlation(entropy, doubt) if len(doubt) > 1 else None,
        ("entropy", "doubt"),
        "kappa",
    ),
    "scod_augrc": Metric(
        "SCOD-AUGRC",
        "lower",
        "AUGRC of known and OOD items together; a kept OOD item costs as much as a wrong answer",
        scod_augrc,
        ("right", "inside", "outside"),
        OWN,
    ),
    "ece": Metric(
        "ECE",
        "lower",
        "mean gap between confidence and accuracy, over ten bins",
        lambda agreement: agreement.binned().expected_error,
        ("agreement",),
        shown=("tile", "table", "bars"),
    ),
    "ece_by_chance": Metric(
        "ECE by chance",
        "neither",
        "bound on the ECE of a perfect predictor with the same confidences, in 95 of 100 draws",
        lambda agreement: agreement.binned().error_by_chance,
        ("agreement",),
        shown=("table",),
    ),
    "ece_below_one": Metric(
        "ECE below 1",
        "lower",
        "the ECE of Warburg et al.'s code, without the queries of confidence 1",
        lambda agreement: agreement.binned(closed="left").expected_error,
        ("agreement",),
        shown=("table",),
    ),
    "crop_less_sure": Metric(
        "crops less sure",
        "higher",
        "share of images whose centre, half as wide and high, has a smaller κ than the whole",
        lambda whole, crop: less_sure_of_crops(whole, crop) if len(whole) else None,
        ("kappa", "kappa_of_crop"),
    ),
    "unseen_recall@1": Metric(
        "recall@1 of classes never trained on", "higher", "recall@1 among items of held-out classes"
    ),
    "knn_accuracy": Metric(
        "accuracy of neighbours",
        "higher",
        "share of queries that their 20 nearest training items, by features, classify right",
        partial(_probe_accuracy, knn_accuracy),
        _PROBES,
        costly=True,
    ),
    "linear_probe": Metric(
        "accuracy of a linear probe",
        "higher",
        "share of queries that logistic regression on the features of training items classifies right",
        partial(_probe_accuracy, linear_probe),
        _PROBES,
        costly=True,
    ),
    **{
        agreement: Metric(
            name,
            "higher",
            f"{meaning} of Ward's clusters of embeddings and the classes",
            attrgetter(agreement),
            ("clusters",),
            costly=True,
        )
        for agreement, name, meaning in (
            ("nmi", "NMI", "normalised mutual information"),
            ("ari", "ARI", "adjusted Rand index"),
            ("purity", "purity", "agreement by majority"),
        )
    },
    "n_queries": Metric("queries", "neither", "number of evaluated queries", len, ("n_relevant",)),
    "batches_without_positives": Metric(
        "batches without a positive pair", "neither", "skipped in training: nothing can be learned from them"
    ),
    "n_reference": Metric("reference items", "neither", "training items in the reference of the scores"),
    "reference_bytes": Metric("bytes of the reference", "neither", "memory of the reference's features and embeddings"),
    "n_without_relevant": Metric(
        "queries without a relevant item",
        "neither",
        "left out of retrieval metrics and AUSC",
        lambda n_relevant: int((n_relevant == 0).sum()),
        ("n_relevant",),
    ),
    "no_match_auprc": Metric(
        "AUPRC of no match",
        "higher",
        "average precision of finding the queries without a match in the gallery",
        auprc,
        ("matched", "unmatched"),
        "cosine",
    ),
    "no_match_prevalence": Metric(
        "share without a match", "neither", "the AUPRC of a useless score", prevalence, ("matched", "unmatched")
    ),
    "kappa_on_altered": Metric(
        "AUROC of κ, altered images",
        "higher",
        "mean over three alterations of validation images: inverted, pixels permuted, blurred",
    ),
    "variance_on_altered": Metric(
        "AUROC of the variance, altered images", "higher", "the same mean, by the variance before normalisation"
    ),
    "tuned_scale": Metric("likelihood scale s", "neither", "chosen by the log score on the validation split"),
    "tuned_scale_low": Metric("s, from", "neither", "the least within one standard error of the best score"),
    "tuned_scale_high": Metric("s, to", "neither", "the greatest within one standard error of the best score"),
    "tuned_score": Metric(
        "log score", "lower", "mean log score of sampled networks' votes for the first hits, on the validation split"
    ),
    "tuned_score_behind": Metric("log score, above the best", "lower", "log score of the chosen s minus the best one"),
    "tuned_score_error": Metric("standard error of the difference", "neither", "of the mean difference, over queries"),
    "tuned_ece": Metric("ECE, validation", "lower", "mean gap between confidence and accuracy at the chosen s"),
    "tuned_cosine": Metric(
        "cosine of sampled and network direction",
        "higher",
        "below 0.9 the posterior is so wide that the mean of its samples points elsewhere than the network",
    ),
    "share_clipped": Metric(
        "curvature entries clipped",
        "neither",
        "share of negative entries, which count as zero: their weights keep the prior",
    ),
    "share_left": Metric(
        "second moment left to the diagonal", "lower", "share of the features' second moment outside the low-rank part"
    ),
    "variance_clipped": Metric(
        "variance of clipped entries",
        "lower",
        "share of the predictive variance from clipped entries, which no likelihood scale changes",
    ),
}


class Key(NamedTuple):
    """The three parts of a key of `metrics.json`; an empty `score` or `ood_set` means the default."""

    metric: str
    score: str = ""
    ood_set: str = ""

    def __str__(self) -> str:
        return self.metric + (f"_{self.score}" if self.score else "") + (f"@{self.ood_set}" if self.ood_set else "")

    @classmethod
    def parse(cls, key: str) -> "Key":
        """Split a key into its parts; an unknown key is the `metric` as a whole.

        Example:
            >>> Key.parse("auprc_knn@digits"), Key.parse("recall@5").metric, str(Key("ausc", "margin"))
            (Key(metric='auprc', score='knn', ood_set='digits'), 'recall@5', 'ausc_margin')
        """
        if key in METRICS:
            return cls(key)
        by_score_or_set = [name for name, metric in METRICS.items() if metric.by_score or metric.needs == _OOD]
        found = re.fullmatch(rf"({'|'.join(map(re.escape, by_score_or_set))})(?:_([^@]+))?(?:@(.+))?", key)
        return cls(key) if found is None else cls(*(part or "" for part in found.groups()))


def measure(
    evidence: Mapping[str, Any], *, score: str = "", own: str = "kappa", ood_set: str = "", costly: bool = False
) -> dict[str, float | int | None]:
    """Every metric whose evidence is complete, by flat key.

    Args:
        evidence: values by the names in `Metric.needs`; if one is None, the metrics that need it are None.
        score: name of the score in the evidence.
        own: name of the encoder's own score.
        ood_set: the OOD set of the evidence; empty for the first.
        costly: include costly metrics.

    Returns:
        Values of the metrics, None for an undefined metric.

    Example:
        >>> import torch
        >>> outside, inside = torch.tensor([0.9, 0.15]), torch.tensor([0.1, 0.2])
        >>> measure({"inside": inside, "outside": outside}, score="knn")
        {'auroc_knn': 0.75, 'auprc_knn': 0.83..., 'prevalence': 0.5}
    """
    measured: dict[str, float | int | None] = {}
    value: Any
    for name, metric in METRICS.items():
        if metric.function is None or (metric.costly and not costly) or not evidence.keys() >= set(metric.needs):
            continue
        by = own if metric.by_score == OWN else metric.by_score
        arguments = [evidence[need] for need in metric.needs]
        value = None if any(argument is None for argument in arguments) else metric.function(*arguments)
        value = value.item() if hasattr(value, "item") else value  # numbers of torch and NumPy become plain ones
        measured[str(Key(name, "" if by in (None, score) else score, ood_set))] = None if value != value else value
    return measured


def describe(key: str) -> Metric:
    """The metric of a key, with score and OOD set in its name; for an unknown key, a metric with the key as name.

    Example:
        >>> describe("map@5").name, describe("ausc_margin").name, describe("ece").reading, describe("my_share").name
        ('mAP@5', 'AUSC, by margin', '↓ lower is better', 'my share')
    """
    name, score, ood_set = Key.parse(key)
    metric = METRICS.get(name, Metric(key.replace("_", " "), "neither", ""))
    parts = [metric.name]
    if score:
        parts.append(f"by {describe_score(score).short}")
    if ood_set:
        parts.append(f"{'against' if set(_OOD) & set(metric.needs) else 'on'} {ood_set}")
    return replace(metric, name=", ".join(parts))


def shown_in(place: Place) -> list[str]:
    """Keys of the metrics that a place shows, in order.

    Example:
        >>> shown_in("bars")
        ['map@1', 'auroc', 'ausc', 'ece']
    """
    return [name for name, metric in METRICS.items() if place in metric.shown]


def needs_posterior(key: str) -> bool:
    """Whether a metric uses a score that is constant, and so meaningless, for a network without uncertainty."""
    name, score, _ = Key.parse(key)
    by = METRICS[name].by_score if name in METRICS else None
    return by is not None and (describe_score(score).of_posterior if score else by == OWN or SCORES[by].of_posterior)
