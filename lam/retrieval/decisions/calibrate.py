"""`calibrate` learns a `Calibration` from searches of held-out queries.

Tensors in, a calibration out: `lam.runs.calibrate` chooses the data of a run.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from lam.retrieval.decisions.acceptance import PROBABILITY, Acceptance
from lam.retrieval.decisions.calibration import Calibration, Histogram, Targets, query_scores
from lam.retrieval.decisions.conformal import ConformalScores, conformal_depth, needed
from lam.retrieval.decisions.density_ratio import SHARE, DensityRatio
from lam.retrieval.decisions.evidence import Evidence, folds_of
from lam.retrieval.decisions.flags import OodDetector, needs_input
from lam.retrieval.decisions.match_probability import MatchProbability
from lam.retrieval.decisions.neighbours import candidates_of, choose_nearest
from lam.retrieval.decisions.probability import probability_bins
from lam.retrieval.decisions.unseen_classes import UnseenClasses
from lam.retrieval.decisions.verification import Verifier
from lam.retrieval.metrics.reference import Reference
from lam.retrieval.metrics.searches import Searches
from lam.vmf.embeddings import Embeddings


@dataclass(frozen=True, eq=False)
class OtherQueries:
    """Queries beside those calibrated on, and what they found in the same gallery.

    Attributes:
        embeddings: O of them.
        cosines: (O, K) of their hits.
        labels: (O, K) of the hits; None where items have none.
        features: (O, P) of the queries, where those of the calibration queries are given.
        classes: (O,) of the queries, where their classes are known.
    """

    embeddings: Embeddings
    cosines: Float[Tensor, "O K"]
    labels: Int64[Tensor, "O K"] | None = None
    features: Float[Tensor, "O P"] | None = None
    classes: Int64[Tensor, " O"] | None = None


@dataclass(frozen=True, eq=False)
class CalibrationData:
    """Searches of queries that nothing was fitted to, in an order that carries no information.

    Attributes:
        searches: of Q queries of known classes.
        queries: their embeddings.
        features: (Q, P) of the queries.
        classes: (Q,) of the queries, in the numbering of the reference. As made strangers, queries then count as if
            their class were not in the reference either.
        gallery_labels: (G,) of the items that were searched.
        reference: features of known items.
        strangers: queries of classes that the gallery does not hold. By default the queries themselves take their
            place, with their matches taken out.
        mixture: unlabelled queries, known ones and strangers, from which P(known) is learnt, unless they may hold no
            stranger or nothing else.

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
            raise ValueError(f"queries and searches must be as many, got {len(self.queries)} and {len(self.searches)}")
        if not self.searches.has_mate.any():
            raise ValueError("the probability of a right answer needs searches that have a match, got none")

    @property
    def has_other(self) -> Bool[Tensor, " Q"]:
        """(Q,) whether something is left of the gallery when the matches of a query are taken out."""
        return self.searches.non_mated.isfinite()

    @property
    def without_match(self) -> tuple[Searches, Float[Tensor, "R K"]]:
        """The searches of such queries, and the cosines of what they find without their matches."""
        has_other = self.has_other
        others = self.searches.others[has_other]
        width = max(1, int(others.isfinite().sum(1).min())) if len(others) else 1
        return self.searches[has_other], others[:, :width]

    def labels_of(self, hits: Int64[Tensor, "N K"]) -> Int64[Tensor, "N K"] | None:
        """Labels of hits, where items have any."""
        return None if self.gallery_labels is None else self.gallery_labels[hits]

    def features_of(self, part: OtherQueries) -> Float[Tensor, "O P"] | None:
        """Features of other queries, where those of the calibration queries are given too."""
        return None if self.features is None else part.features

    def nearest(self) -> dict[str, int]:
        """How many neighbours each score looks at: the number that ranks best in cross-validation."""
        reference = self.reference
        return choose_nearest(
            candidates_of(self.gallery_labels, None if reference is None else reference.labels),
            {
                "cosines": self.searches.cosines,
                "labels": self.labels_of(self.searches.hits),
                "features": self.features,
                "reference": reference,
            },
            self.searches.correct,
            [{"cosines": self.without_match[1]}],
        )

    def evidence(self, nearest: dict[str, int], *, labelled: bool) -> Evidence:
        """All scores of the queries, of the queries without their matches, and of strangers.

        Args:
            nearest: how many neighbours each score looks at.
            labelled: whether scores may read labels of the hits.
        """
        searches, has_other, query_fold = self.searches, self.has_other, folds_of(torch.arange(len(self.queries)))
        no_match, without = self.without_match
        reference = reference_of_made = self.reference
        if reference is not None and reference.labels is not None and self.classes is not None:
            reference_of_made = reference.excluding(self.classes[has_other])
        of_other: dict[str, Any] = {
            "labels": self.labels_of(no_match.other_hits[:, : without.shape[1]]) if labelled else None,
            "features": None if self.features is None else self.features[has_other],
            "nearest": nearest,
        }
        made = query_scores(self.queries[has_other], without, reference=reference_of_made, **of_other)
        evidence = Evidence(
            queries=query_scores(
                self.queries,
                searches.cosines,
                labels=self.labels_of(searches.hits) if labelled else None,
                features=self.features,
                reference=reference,
                nearest=nearest,
            ),
            has_match=searches.has_mate,
            right=searches.correct,
            no_match=query_scores(self.queries[has_other], without, reference=reference, **of_other),
            strangers=made,
            query_fold=query_fold,
            no_match_fold=query_fold[has_other],
            stranger_fold=query_fold[has_other],
        )
        if self.strangers is None:
            return evidence
        units = self.strangers.classes
        units = torch.arange(len(self.strangers.cosines)) if units is None else units
        return replace(
            evidence,
            strangers=self.scores_of(self.strangers, nearest, labels=self.strangers.labels if labelled else None),
            stranger_fold=folds_of(units),
            simulated=made,
            simulated_fold=query_fold[has_other],
        )

    def scores_of(
        self, part: OtherQueries, nearest: dict[str, int], labels: Int64[Tensor, "O K"] | None = None
    ) -> dict[str, Float[Tensor, " O"]]:
        """All scores of other queries."""
        return query_scores(
            part.embeddings,
            part.cosines,
            features=self.features_of(part),
            labels=labels,
            reference=self.reference,
            nearest=nearest,
        )


@dataclass(frozen=True)
class Choices:
    """What a calibration promises and decides by.

    Attributes:
        targets: the error rates.
        flag: the score that flags queries, one of `lam.retrieval.decisions.flags.FLAGS`; by default the one that
            separates strangers best in cross-validation.
        accept: what decides, one of `lam.retrieval.decisions.acceptance.ACCEPTS`; by default what separates right hits
            best in cross-validation.
        of_strangers: promise false accepts of the strangers, if the data hold any: of queries like them, or, where they
            have classes, of a random item of such a class. Otherwise the promise is of queries like those of the
            searches whose matches are taken out.
        share: of strangers among future queries, used where no mixture tells it.
    """

    targets: Targets = field(default_factory=Targets)
    flag: str | None = None
    accept: str | None = None
    of_strangers: bool = True
    share: float = SHARE


def calibrate(
    data: CalibrationData,
    choices: Choices | None = None,
    *,
    key: str,
    verifier: Verifier | None = None,
    unseen: UnseenClasses | None = None,
    facts: dict[str, Any] | None = None,
) -> Calibration:
    """Learn thresholds and probabilities.

    Args:
        data: searches of held-out queries, and of strangers where there are any.
        choices: targets and scores; by default the usual rates, and the scores that do best in cross-validation.
        key: of the run; see `Calibration`.
        verifier: of pairs of images, to verify such pairs.
        unseen: made of the gallery, with labels by `label_key`, rising, to recognise items of new classes.
        facts: further facts to keep, as JSON; `share_of_strangers` of a mixture is added, with its interval.

    Raises:
        ValueError: if the queries are too few to promise a target, with the number that it needs; or if the evidence of
            the flag or of the accept score is missing.
    """
    choices, facts = choices or Choices(), dict(facts or {})
    nearest, strangers, searches = data.nearest(), data.strangers, data.searches
    evidence = data.evidence(nearest, labelled=data.gallery_labels is not None)
    detector = OodDetector.fit(evidence)
    flag = detector.best if choices.flag is None else choices.flag
    detector.conformal_scores(flag)
    of_mixture = None
    if data.mixture is not None:
        of_mixture = data.scores_of(data.mixture, nearest)
        from_mixture = DensityRatio.from_mixture(evidence.known, of_mixture)
        facts["share_of_strangers"] = (from_mixture.share, *(from_mixture.interval or ()))
        of_mixture = of_mixture if from_mixture.holds_both else None
    of_vectors = [name for name in evidence.queries if not needs_input(name)]
    kinds = [evidence, evidence.only(of_vectors)]
    if data.gallery_labels is not None:
        kinds.append(data.evidence(nearest, labelled=False).only(of_vectors))
    kinds = [
        kind for place, kind in enumerate(kinds) if place == 0 or set(kind.queries) != set(kinds[place - 1].queries)
    ]
    fit = partial(MatchProbability.fit, share=choices.share, mixture=of_mixture)
    learnt = [
        Acceptance.fit(
            kind,
            fit,
            accept=choices.accept if choices.accept in (None, PROBABILITY, *kind.queries) else PROBABILITY,
            of_strangers=strangers is not None and choices.of_strangers,
            has_strangers=strangers is not None,
            classes=None if strangers is None else strangers.classes,
        )
        for kind in kinds
    ]
    acceptances, right_if_known = tuple(one for one, _ in learnt), learnt[0][1]
    if choices.accept is not None and acceptances[0].accept != choices.accept:
        raise ValueError(f"accept must be one of {', '.join((PROBABILITY, *evidence.queries))}, got {choices.accept!r}")
    correct, miss = searches.correct[searches.has_mate], choices.targets.conformal_miss
    calibration = Calibration(
        key=key,
        gallery_size=searches.gallery_size,
        targets=choices.targets,
        flag=flag,
        detector=detector,
        acceptances=acceptances,
        reliability=probability_bins(right_if_known, correct),
        depth=conformal_depth(searches.rank[searches.has_mate], target=miss) if len(correct) >= needed(miss) else None,
        kappa=Histogram.of(data.queries.kappa),
        dimension=data.queries.dimension,
        nearest=nearest,
        reference=data.reference,
        verifier=verifier,
        unseen=unseen,
        facts=facts,
    )
    _check_promises(calibration)
    if strangers is not None and strangers.classes is not None and not choices.of_strangers:
        accepted = ConformalScores.of(acceptances[0].statistics[len(searches) :], strangers.classes)
        calibration.facts["strangers_set_aside"] = accepted.n_units
        calibration.facts["strangers_accepted"] = accepted.share_above(calibration.accept_above)
    return calibration


def _check_promises(calibration: Calibration) -> None:
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
                    "calibration queries have a wrong first hit or no match, too many of them among the surest; give a "
                    "larger share, or more queries"
                )
        except ValueError as error:
            raise ValueError(f"target {name} (--target-{name}): {error}") from None
