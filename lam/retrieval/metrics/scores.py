"""Table of all scores, for evaluation, calibration, report and command line.

A score measures doubt about an item or about the first hit of a search; a higher value means more doubt. Scores from
the cosines and labels of the first hits are here, distances from training features in
`lam.retrieval.metrics.reference`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lam.retrieval.metrics import reference
from lam.utils.checks import check_at_least, check_choice, check_names

NEAREST = 10
"""Default number of first hits that are averaged or counted."""

N_HITS = 50
"""Number of hits that these scores use; a smaller gallery gives all its items."""


def margin(cosines: Float[Tensor, "N K"], labels: Int[Tensor, "N K"] | None = None) -> Float[Tensor, " N"]:
    """Minus the first hit's lead in cosine over the best hit with another label.

    Without labels, the lead is over the second hit; if all labels are equal, over the last hit. A missing second hit
    has cosine −1.

    Example:
        >>> cosines, labels = torch.tensor([[0.9, 0.8, 0.5]]), torch.tensor([[1, 1, 2]])
        >>> margin(cosines), margin(cosines, labels)
        (tensor([-0.1000]), tensor([-0.4000]))
    """
    if cosines.shape[1] < 2:
        return -1 - cosines[:, 0]
    if labels is None:
        return cosines[:, 1] - cosines[:, 0]
    other = (labels != labels[:, :1]).to(torch.int8)
    place = torch.where(other.any(1), other.argmax(1), cosines.shape[1] - 1)
    return cosines.gather(1, place[:, None])[:, 0] - cosines[:, 0]


def mean_cosine(cosines: Float[Tensor, "N K"], *, k: int = NEAREST) -> Float[Tensor, " N"]:
    """Minus the mean cosine of the first k hits."""
    return -cosines[:, :k].mean(1)


def cosine_spread(cosines: Float[Tensor, "N K"], *, k: int = NEAREST) -> Float[Tensor, " N"]:
    """Standard deviation of the first k cosines: large if only some hits are near."""
    centered = cosines[:, :k] - cosines[:, :k].mean(1, keepdim=True)
    return centered.square().mean(1).sqrt()


def disagreement(labels: Int[Tensor, "N K"], *, k: int = NEAREST) -> Float[Tensor, " N"]:
    """Share of the first k hits whose label differs from the first hit's."""
    return (labels[:, :k] != labels[:, :1]).float().mean(1)


def weighted_disagreement(
    cosines: Float[Tensor, "N K"], labels: Int[Tensor, "N K"], *, k: int = N_HITS
) -> Float[Tensor, " N"]:
    """Share of the first k hits whose label differs from the first hit's; near hits count more.

    The share is Σ_j w_j [label_j ≠ label_1] / Σ_j w_j, with w_j = (c_j − c_k)/(c_1 − c_k) for cosines c_j; weights are
    equal if all cosines are equal.

    Source: Dudani (1976), equation 1, with cosines instead of distances.

    Example:
        >>> weighted_disagreement(torch.tensor([[0.9, 0.8, 0.7]]), torch.tensor([[1, 2, 3]]))
        tensor([0.3333])
    """
    cosines, labels = cosines[:, :k], labels[:, :k]
    weights = cosines - cosines[:, -1:]
    weights = weights.masked_fill((weights[:, :1] == 0).expand_as(weights), 1.0)
    return (weights * (labels != labels[:, :1])).sum(1) / weights.sum(1)


@dataclass(frozen=True)
class Score:
    """Doubt about each of N items, or about the first hit of its search.

    Attributes:
        name: title in tables.
        short: label of a curve.
        meaning: one line for the reader.
        function: takes the evidence in `needs`, in that order; returns (N,) values, higher for more doubt.
        needs: names of the evidence: `embeddings`, `parts` (embeddings with the parts of κ), `features`, `reference` (a
            `Reference` of training items), `labelled` (a reference with labels), `embedded` (a reference with
            embeddings), `cosines` ((N, K) of the first hits), `labels` ((N, K) of the first hits).
        of_posterior: whether the score needs uncertainty; for a network without it, the score is constant.
        uses: optional evidence, passed by keyword.
        of: names of scores, earlier in `SCORES`; `function` takes their values instead of the evidence.
        k: default number of neighbours; None for a score without neighbours.

    Raises:
        ValueError: if `needs`, `uses` or `of` is a string instead of a tuple of strings.
    """

    name: str
    short: str
    meaning: str
    function: Callable[..., Tensor]
    needs: tuple[str, ...]
    of_posterior: bool = False
    uses: tuple[str, ...] = ()
    of: tuple[str, ...] = ()
    k: int | None = None

    def __post_init__(self) -> None:
        check_names("needs", self.needs)
        check_names("uses", self.uses)
        check_names("of", self.of)


SCORES: dict[str, Score] = {
    "kappa": Score(
        "−κ (spread on the sphere)",
        "κ",
        "how widely the sampled networks spread the embedding",
        lambda embeddings: -embeddings.kappa,
        ("embeddings",),
        of_posterior=True,
    ),
    "kappa_epistemic": Score(
        "−κ of the method itself",
        "epistemic κ",
        "how uncertain the weights are for an item",
        lambda parts: -parts.kappa_epistemic,
        ("parts",),
        of_posterior=True,
    ),
    "kappa_aleatoric": Score(
        "−κ of ambiguity",
        "κ of ambiguity",
        "this could be several things",
        lambda parts: -parts.kappa_aleatoric,
        ("parts",),
    ),
    "p_known": Score(
        "1 − p_known", "p_known", "I have not seen such a thing", lambda parts: 1 - parts.p_known, ("parts",)
    ),
    "variance": Score(
        "predictive variance, before normalisation",
        "variance",
        "how widely the sampled networks spread the embedding before normalisation",
        lambda embeddings: embeddings.variance,
        ("embeddings",),
        of_posterior=True,
    ),
    "norm": Score(
        "norm of the features",
        "feature norm",
        "proportional to the variance if all weights are equally uncertain",
        lambda features: features.norm(dim=1),
        ("features",),
    ),
    "knn": Score(
        "cosine to near training features",
        "k-NN cosine",
        "distance from the training data",
        reference.knn_distance,
        ("features", "reference"),
        k=reference.NEIGHBOUR,
    ),
    "mahalanobis": Score(
        "Mahalanobis distance to the nearest class (MDS++)",
        "Mahalanobis",
        "distance from the classes of the training data, in units of their spread",
        reference.mahalanobis,
        ("features", "reference"),
    ),
    "relative_mahalanobis": Score(
        "relative Mahalanobis distance (RMDS++)",
        "relative Mahalanobis",
        "distance from the nearest class, minus the distance from all training data",
        reference.relative_mahalanobis,
        ("features", "labelled"),
    ),
    "global_mahalanobis": Score(
        "Mahalanobis distance to all training data",
        "global Mahalanobis",
        "distance from the training data as a whole, without classes",
        reference.global_mahalanobis,
        ("features", "reference"),
    ),
    "radial_mahalanobis": Score(
        "Mahalanobis distance of partly normalised features",
        "radial Mahalanobis",
        "distance from the classes of the training data, in direction and length",
        reference.radial_mahalanobis,
        ("features", "reference"),
    ),
    "layer_change": Score(
        "change of the neighbours by the last layer",
        "layer change",
        "the last layer changes which items are near",
        lambda features, embeddings, known, k: reference.layer_change(features, embeddings.mean, known, k=k),
        ("features", "embeddings", "embedded"),
        k=reference.LAYER_NEIGHBOURS,
    ),
    "mahalanobis_knn": Score(
        "Mahalanobis distance times k-NN distance",
        "Mahalanobis × k-NN",
        "far from the classes and from single items",
        reference.mahalanobis_knn,
        ("features", "reference"),
        of=("mahalanobis", "knn"),
    ),
    "cosine": Score(
        "cosine of the first hit",
        "cosine of the first hit",
        "nothing in the gallery is similar",
        lambda cosines: -cosines[:, 0],
        ("cosines",),
    ),
    "margin": Score(
        "margin of the first hit over another class",
        "margin",
        "an item of another class is nearly as similar; without classes, a second item",
        margin,
        ("cosines",),
        uses=("labels",),
    ),
    "mean_cosine": Score(
        "mean cosine of the first hits",
        "mean cosine",
        "little in the gallery is similar",
        mean_cosine,
        ("cosines",),
        k=NEAREST,
    ),
    "cosine_spread": Score(
        "spread of the first cosines",
        "spread of cosines",
        "few of the hits are near",
        cosine_spread,
        ("cosines",),
        k=NEAREST,
    ),
    "votes": Score(
        "share of the first hits with another class than the first hit",
        "votes",
        "the hits do not agree on the class",
        disagreement,
        ("labels",),
        k=NEAREST,
    ),
    "weighted_votes": Score(
        "share of the first hits of other classes, with near hits weighted more",
        "weighted votes",
        "the hits do not agree on the class; near hits count more",
        weighted_disagreement,
        ("cosines", "labels"),
        k=N_HITS,
    ),
}
_WITH_NEIGHBOURS = [name for name, score in SCORES.items() if score.k is not None]


def scores_of(evidence: Mapping[str, Any], *, nearest: Mapping[str, int] | None = None) -> dict[str, Tensor]:
    """Every score whose evidence is complete, by name; higher means more doubt.

    Args:
        evidence: values by the names in `Score.needs`; None counts as missing.
        nearest: number of neighbours by score, instead of `Score.k`; see `lam.retrieval.decisions.neighbours`.

    Raises:
        ValueError: if `nearest` names a score without neighbours, or a number below 1.

    Example:
        >>> cosines, labels = torch.tensor([[0.9, 0.5, 0.1]]), torch.tensor([[7, 7, 8]])
        >>> scores_of({"cosines": cosines, "labels": labels}, nearest={"mean_cosine": 2, "votes": 2})["mean_cosine"]
        tensor([-0.7000])
    """
    nearest = {} if nearest is None else nearest
    for name, k in nearest.items():
        check_choice("a score with neighbours", name, _WITH_NEIGHBOURS)
        check_at_least(f"the neighbours of {name}", k, 1)
    embeddings = evidence.get("embeddings")
    if embeddings is not None and embeddings.has_parts:
        evidence = {**evidence, "parts": embeddings}
    reference = evidence.get("reference")
    if reference is not None and reference.labels is not None:
        evidence = {**evidence, "labelled": reference}
    if reference is not None and reference.embeddings is not None:
        evidence = {**evidence, "embedded": reference}
    known = {name for name, value in evidence.items() if value is not None}
    scores: dict[str, Tensor] = {}
    for name, score in SCORES.items():
        if known.issuperset(score.needs):
            arguments = [scores[one] for one in score.of] or [evidence[need] for need in score.needs]
            options = {use: evidence[use] for use in score.uses if use in known}
            if score.k is not None:
                options["k"] = nearest.get(name, score.k)
            scores[name] = score.function(*arguments, **options)
    return scores


def describe_score(name: str) -> Score:
    """The entry of `SCORES` with this name; for an unknown name, an entry with the name as title."""
    words = name.replace("_", " ")
    return SCORES.get(name, Score(words, words, "", torch.zeros_like, ()))
