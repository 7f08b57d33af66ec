"""`calibrate` learns a `Calibration` from searches of held-out queries; `lam.runs.calibrate` chooses the data."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from lam.retrieval.decisions.acceptance import PROBABILITY, Acceptance
from lam.retrieval.decisions.calibration import Calibration, Histogram, Targets, query_scores
from lam.retrieval.decisions.conformal import ConformalScores, conformal_depth, least_rate, needed
from lam.retrieval.decisions.evidence import Evidence, Group, folds_of
from lam.retrieval.decisions.flags import OodDetector, needs_input
from lam.retrieval.decisions.match_probability import SHARE, DensityRatio, MatchProbability
from lam.retrieval.decisions.neighbours import candidates_of, choose_nearest
from lam.retrieval.decisions.probability import probability_bins, random_order
from lam.retrieval.metrics.open_set import Searches
from lam.retrieval.metrics.reference import Reference
from lam.utils.checks import check_share
from lam.vmf.embeddings import Embeddings


@dataclass(frozen=True, eq=False)
class OtherQueries:
    """Strangers, or an unlabelled mixture of known queries and strangers, with their hits in the calibration gallery.

    Attributes:
        embeddings: O embeddings.
        cosines: (O, K) cosines of the hits.
        labels: (O, K) labels of the hits; None for a gallery without labels, or a mixture.
        features: (O, P) features of the queries, if the calibration queries have features.
        classes: (O,) classes of the queries, if known.
    """

    embeddings: Embeddings
    cosines: Float[Tensor, "O K"]
    labels: Int64[Tensor, "O K"] | None = None
    features: Float[Tensor, "O P"] | None = None
    classes: Int64[Tensor, " O"] | None = None


@dataclass(frozen=True, eq=False)
class CalibrationData:
    """Searches of held-out queries, which neither training nor tuning used.

    Attributes:
        searches: searches of Q queries of known classes.
        queries: embeddings of the queries.
        features: (Q, P) features of the queries.
        classes: (Q,) classes of the queries, numbered as in the reference. To simulate a stranger, a query is compared
            only with reference items of other classes.
        gallery_labels: (G,) labels of the gallery items.
        reference: features of known items.
        strangers: queries of classes that the gallery does not hold; by default `queries`, without their matches.
        mixture: unlabelled queries; used for P(known) if they clearly include both known queries and strangers.

    Raises:
        ValueError: if queries and searches differ in number, or no query has a match.
    """

    searches: Searches
    queries: Embeddings
    features: Float[Tensor, "Q P"] | None = None
    classes: Int64[Tensor, " Q"] | None = None
    gallery_labels: Int64[Tensor, " G"] | None = None
    reference: Reference | None = None
    strangers: OtherQueries | None = None
    mixture: OtherQueries | None = None

    def __post_init__(self) -> None:
        if len(self.queries) != len(self.searches):
            raise ValueError(
                f"queries and searches must be equal in number, got {len(self.queries)} and {len(self.searches)}"
            )
        if not self.searches.has_mate.any():
            raise ValueError("the probability of a right answer needs searches that have a match, got none")

    @property
    def has_other(self) -> Bool[Tensor, " Q"]:
        """(Q,) whether the gallery holds an item that does not match the query."""
        return self.searches.non_mated.isfinite()

    @property
    def cosines_without_match(self) -> Float[Tensor, "R K"]:
        """Cosines of the hits that do not match, for the R queries of `has_other`."""
        others = self.searches.others[self.has_other]
        width = max(1, int(others.isfinite().sum(1).min())) if len(others) else 1
        return others[:, :width]

    def labels_of(self, hits: Int64[Tensor, "N K"]) -> Int64[Tensor, "N K"] | None:
        """Labels of hits; None for a gallery without labels."""
        return None if self.gallery_labels is None else self.gallery_labels[hits]

    def nearest(self) -> dict[str, int]:
        """Number of neighbours for each score, chosen by `choose_nearest` on all calibration queries."""
        return choose_nearest(
            candidates_of(self.gallery_labels, None if self.reference is None else self.reference.labels),
            {
                "cosines": self.searches.cosines,
                "labels": self.labels_of(self.searches.hits),
                "features": self.features,
                "reference": self.reference,
            },
            self.searches.correct,
            [{"cosines": self.cosines_without_match}],
        )

    def evidence(self, nearest: dict[str, int], *, labelled: bool) -> Evidence:
        """All scores of three kinds of searches: queries in the whole gallery, queries without matches, and strangers.

        Args:
            nearest: number of neighbours for each score.
            labelled: whether scores may read labels of the hits.
        """
        searches, reference, has_other = self.searches, self.reference, self.has_other
        cosines, strangers = self.cosines_without_match, self.strangers
        whole = OtherQueries(self.queries, searches.cosines, self.labels_of(searches.hits), self.features)
        without_matches = OtherQueries(
            self.queries[has_other],
            cosines,
            self.labels_of(searches.other_hits[has_other][:, : cosines.shape[1]]),
            None if self.features is None else self.features[has_other],
        )
        scores_of = partial(self.scores_of, nearest=nearest, labelled=labelled)
        fold = folds_of(torch.arange(len(self.queries)))
        queries = Group(scores_of(whole, reference=reference), fold)
        without_own_class = reference  # after `queries`, which fits the Gaussians: the copy shares them
        if reference is not None and reference.labels is not None and self.classes is not None:
            without_own_class = reference.excluding(self.classes[has_other])
        as_strangers = Group(scores_of(without_matches, reference=without_own_class), fold[has_other])
        evidence = Evidence(
            queries,
            searches.has_mate,
            searches.correct,
            no_match=Group(scores_of(without_matches, reference=reference), fold[has_other]),
            strangers=as_strangers,
        )
        if strangers is None:
            return evidence
        units = torch.arange(len(strangers.cosines)) if strangers.classes is None else strangers.classes
        others = Group(scores_of(strangers, reference=reference), folds_of(units))
        return replace(evidence, strangers=others, simulated=as_strangers)

    def scores_of(
        self, queries: OtherQueries, *, nearest: dict[str, int], reference: Reference | None, labelled: bool
    ) -> dict[str, Float[Tensor, " O"]]:
        """All scores of the queries, by name."""
        return query_scores(
            queries.embeddings,
            queries.cosines,
            features=None if self.features is None else queries.features,
            labels=queries.labels if labelled else None,
            reference=reference,
            nearest=nearest,
        )


@dataclass(frozen=True)
class Choices:
    """Promised error rates of a calibration, and the scores that decide.

    Attributes:
        targets: the error rates. By default each is the default of `Targets` or, if the data are too few for it, the
            least rate that they can bound, with a warning.
        flag: the score that flags queries, from `lam.retrieval.decisions.flags.FLAGS`; by default `OodDetector.best`.
        accept: the accept statistic, one of `lam.retrieval.decisions.acceptance.ACCEPTS`; by default `probability`,
            unless a single score is better in cross-validation.
        of_strangers: whether the bound on false accepts is for strangers or for queries searched without their matches.
            If strangers have classes, the bound is for a random item of a new class.
        share: share of strangers expected in the future; unused if `CalibrationData.mixture` gives an estimate.
    """

    targets: Targets | None = None
    flag: str | None = None
    accept: str | None = None
    of_strangers: bool = True
    share: float = SHARE

    def __post_init__(self) -> None:
        if not isinstance(self.targets, Targets | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"targets must be a lam.retrieval.Targets, such as Targets(far=0.01), got {self.targets!r}"
            )
        check_share("the share of strangers", self.share)


def calibrate(data: CalibrationData, choices: Choices | None = None, *, key: str) -> Calibration:
    """Learn thresholds and probabilities. With a mixture, `facts` holds its `share_of_strangers` with an interval.

    Args:
        data: searches of held-out queries, and of strangers if any.
        choices: targets and scores; by default `Choices()`.
        key: see `Calibration`.

    Raises:
        ValueError: if a target needs more queries, or if the evidence for a flag or an accept score is missing.
    """
    choices, facts = Choices() if choices is None else choices, dict[str, Any]()
    if not isinstance(choices, Choices):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"choices must be a lam.retrieval.Choices, got {choices!r}: give Choices(targets=...)")
    nearest, strangers, searches = data.nearest(), data.strangers, data.searches
    evidence = data.evidence(nearest, labelled=data.gallery_labels is not None)
    detector = OodDetector.fit(evidence)
    flag = detector.best if choices.flag is None else choices.flag
    detector.conformal_scores(flag)  # raises for a flag without its evidence
    mixture = None
    if data.mixture is not None:
        scores = data.scores_of(data.mixture, nearest=nearest, reference=data.reference, labelled=False)
        ratio = DensityRatio.from_mixture(evidence.known, scores)
        facts["share_of_strangers"] = (ratio.share, *(ratio.interval or ()))
        mixture = scores if ratio.holds_both else None
    of_vectors = [name for name in _names(evidence) if not needs_input(name)]
    kinds = [evidence, evidence.only(of_vectors)]
    if data.gallery_labels is not None:
        kinds.append(data.evidence(nearest, labelled=False).only(of_vectors))
    kinds = [evidence, *(kind for before, kind in pairwise(kinds) if _names(kind) != _names(before))]
    fitted = [
        Acceptance.fit(
            kind,
            partial(MatchProbability.fit, share=choices.share, mixture=mixture),
            accept=choices.accept if kind is evidence or choices.accept in (None, *_names(kind)) else PROBABILITY,
            of_strangers=strangers is not None and choices.of_strangers,
            has_strangers=strangers is not None,
            classes=None if strangers is None else strangers.classes,
        )
        for kind in kinds
    ]
    acceptances, right_if_known = tuple(acceptance for acceptance, _ in fitted), fitted[0][1]
    accepted = None
    if strangers is not None and strangers.classes is not None:
        accepted = ConformalScores.of(acceptances[0].statistics[len(searches) :], strangers.classes)
        rows = torch.cat([torch.arange(len(searches)), len(searches) + _one_of_each(strangers.classes)])
        acceptances = tuple(
            replace(one, statistics=one.statistics[rows], is_right=one.is_right[rows]) for one in acceptances
        )
    n_units = acceptances[0].false_accepts.n_units
    targets = choices.targets or attainable_targets({}, far=n_units, ood=len(searches))
    correct, miss = searches.correct[searches.has_mate], targets.conformal_miss
    calibration = Calibration(
        key=key,
        gallery_size=searches.gallery_size,
        targets=targets,
        flag=flag,
        detector=detector,
        acceptances=acceptances,
        reliability=probability_bins(right_if_known, correct),
        depth=conformal_depth(searches.rank[searches.has_mate], target=miss) if len(correct) >= needed(miss) else None,
        kappa=Histogram.of(data.queries.kappa),
        dimension=data.queries.dimension,
        nearest=nearest,
        reference=data.reference,
        facts=facts,
    )
    _check_promises(calibration)
    if accepted is not None and not choices.of_strangers:
        calibration.facts["held_out_classes"] = accepted.n_units
        calibration.facts["strangers_accepted"] = accepted.share_above(calibration.accept_above)
    return calibration


def attainable_targets(asked: Mapping[str, float], *, far: int, ood: int) -> Targets:
    """The error rates; if `far` or `ood` scores cannot bound a default, it becomes their least rate, with a warning."""
    targets, counts = Targets(**asked), {"far": far, "ood": ood}
    usual = {name: getattr(targets, name) for name in counts if name not in asked}
    few = {name: counts[name] for name, rate in usual.items() if 0 < counts[name] < needed(rate)}
    least = {name: least_rate(n) for name, n in few.items()}
    if few:
        raised = ", ".join(
            f"{name} to {least[name]:g} ({usual[name]:g} needs {needed(usual[name])} independent scores, there are {n})"
            for name, n in few.items()
        )
        choice = " or ".join(f"--target-{name}" for name in few)
        what = f"few calibration data raise the promised rates: {raised}"
        warnings.warn(
            f"{what}; give more data, or choose the rate yourself ({choice}; in Python, `Targets`)", stacklevel=3
        )
    return replace(targets, **least)


def _one_of_each(classes: Int64[Tensor, " N"]) -> Int64[Tensor, " C"]:
    """A random row of each class, because items of one class depend on each other."""
    rows = random_order(len(classes)).tolist()
    return torch.tensor(list({int(classes[row]): row for row in rows}.values()))


def _names(evidence: Evidence) -> set[str]:
    return set(evidence.queries.scores)


def _check_promises(calibration: Calibration) -> None:
    """Compute every threshold; an error names the target that cannot be kept."""
    targets, acceptance = calibration.targets, calibration.acceptances[0]
    promises = {
        "far": lambda: acceptance.threshold(far=targets.far),
        "ood": lambda: calibration.flag_above,
        "wrong": lambda: calibration.accept_above,
    }
    for name, threshold in promises.items():
        try:
            if threshold() == math.inf:
                n_queries, n_wrong = len(acceptance.is_right), int((~acceptance.is_right).sum())
                raise ValueError(
                    f"no threshold keeps the share of wrong answers at {targets.wrong:g}: {n_wrong} of {n_queries} "
                    "calibration queries have a wrong first hit or no match, too many of them with a high statistic; "
                    "give a larger share, or more queries"
                )
        except ValueError as error:
            raise ValueError(f"target {name} (--target-{name}): {error}") from None
