"""`Calibration`: the thresholds, probabilities and sets behind an answer, with the error rates that they promise.

`lam.retrieval.decisions.calibrate` learns one, `lam.retrieval.decisions.files` writes it, and
`lam.retrieval.decisions.conformal` states the assumptions of each promise.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from lam.retrieval.decisions.abstention import Decisions, SearchDecisions, decision_codes
from lam.retrieval.decisions.acceptance import Acceptance
from lam.retrieval.decisions.conformal import LEVEL, ConformalScores
from lam.retrieval.decisions.flags import OodDetector, needs_input, without_hits, without_input, without_labels
from lam.retrieval.decisions.match_probability import MatchProbability
from lam.retrieval.decisions.unseen_classes import UnseenClasses
from lam.retrieval.decisions.verification import Verifier
from lam.retrieval.index.hits import Hits
from lam.retrieval.metrics.hit_scores import N_HITS
from lam.retrieval.metrics.reference import Reference
from lam.retrieval.metrics.registry import scores_of
from lam.retrieval.metrics.uncertainty import ReliabilityBins
from lam.utils.checks import check_share
from lam.vmf.distribution import VonMisesFisher
from lam.vmf.embeddings import KAPPA_RANGE, Embeddings

STALE_BEYOND = 0.2
"""How far, as a share, the gallery's size may be from that at calibration."""

_HISTOGRAM_BINS = 40


@dataclass(frozen=True)
class Targets:
    """The error rates that are asked for, each in (0, 1).

    Attributes:
        far: the share of searches without a match in the gallery that are answered all the same (FPIR), of searches
            like those calibrated on.
        ood: the share of in-distribution queries that are flagged.
        conformal_miss: the share of queries whose conformal set holds no match.
        wrong: the share of wrong answers among the answers, at a confidence of 0.95; None promises nothing of it.
    """

    far: float = 0.001
    ood: float = 0.05
    conformal_miss: float = 0.05
    wrong: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                check_share(f"target {name}", value)


@dataclass(frozen=True)
class Histogram:
    """Counts of κ between rising edges, on a logarithmic scale.

    Attributes:
        counts: B, how many values lie between two edges.
        edges: B + 1 of κ.
    """

    counts: tuple[int, ...]
    edges: tuple[float, ...]

    @classmethod
    def of(cls, kappa: Float[Tensor, " N"]) -> "Histogram":
        """Count concentrations between the least and the greatest; what is outside `KAPPA_RANGE` is at its end."""
        logs = kappa.detach().cpu().double().clamp(*KAPPA_RANGE).log10()
        counts, edges = np.histogram(logs.numpy(), _HISTOGRAM_BINS)
        return cls(tuple(counts.tolist()), tuple((10**edges).tolist()))


@dataclass(frozen=True, eq=False)
class Calibration:
    """Thresholds, probabilities and sets learnt on held-out data, for new queries.

    Attributes:
        key: fingerprint of the network, posterior and preprocessing.
        gallery_size: how many items the calibration searched; the false-accept rate grows with it.
        targets: the error rates in force.
        flag: the score in force by which queries are flagged.
        detector: the OOD scores of in-distribution queries.
        acceptances: what decides: from all scores; from those of a mean, a κ and hits; and from these without what
            labels say. The first decides whose evidence is all there.
        reliability: of the first one's P(right | known) on data that it was not learnt from, by cross-validation.
        depth: the smallest k whose first k hits hold a match with probability 1 − `conformal_miss`; None where too few
            queries have a match to promise it.
        kappa: of the calibration queries, to be shown.
        dimension: of the embeddings.
        nearest: by score, how many neighbours it looks at, where that is not the usual number.
        reference: features of known items, for distances to them; None where there are none.
        verifier: of pairs of images; None where none were given.
        unseen: tells items of classes that the gallery does not hold, by the gallery itself; None where it cannot. Its
            labels are those of `label_key`, rising.
        facts: further facts of how it was made, as JSON.
    """

    key: str
    gallery_size: int
    targets: Targets
    flag: str
    detector: OodDetector
    acceptances: tuple[Acceptance, ...]
    reliability: ReliabilityBins
    depth: int | None
    kappa: Histogram
    dimension: int
    nearest: Mapping[str, int] = field(default_factory=dict)
    reference: Reference | None = None
    verifier: Verifier | None = None
    unseen: UnseenClasses | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def accept(self) -> str:
        """What decides: `probability`, or the name of a score, whose negative it is."""
        return self.acceptances[0].accept

    @property
    def false_accepts(self) -> ConformalScores:
        """Of what decides, for queries that have no match in the gallery, or strangers; see `facts`."""
        return self.acceptances[0].false_accepts

    @property
    def match_probability(self) -> MatchProbability:
        """P(known) and P(right | known) of a query of which all is known."""
        return self.acceptances[0].match_probability

    @cached_property
    def accept_above(self) -> float:
        """The threshold above which a first hit is a match: P(a query without one exceeds it) ≤ `targets.far`.

        Where `targets.wrong` is asked for, it is also so high that P(wrong | answered) ≤ `targets.wrong`.
        """
        return self._accepts_above[0]

    @cached_property
    def _accepts_above(self) -> tuple[float, ...]:
        """One threshold for each acceptance."""
        far, wrong = self.targets.far, self.targets.wrong
        return tuple(one.threshold(far=far, wrong=wrong) for one in self.acceptances)

    @cached_property
    def flag_above(self) -> float:
        """The OOD score above which a query is flagged: P(an in-distribution query exceeds it) ≤ `targets.ood`."""
        return self.detector.conformal_scores(self.flag).threshold(self.targets.ood)

    @cached_property
    def kappa_below(self) -> float:
        """The κ below which a query is flagged where κ alone decides, at the same target."""
        return -self.detector.conformal_scores("kappa").threshold(self.targets.ood)

    @cached_property
    def for_vectors(self) -> "Calibration":
        """For queries that are but a direction and a κ, with a flag that needs no features."""
        return self._with_flag(without_input(self.flag, self.detector.components(self.flag)))

    @cached_property
    def for_hitless(self) -> "Calibration":
        """For queries without hits, with a flag that looks at none."""
        return self._with_flag(without_hits(self.flag, self.detector.components(self.flag), self.detector.calibrated))

    @cached_property
    def for_unlabelled(self) -> "Calibration":
        """For queries of whose hits not all have a label, with a flag that looks at none of these."""
        if "votes" not in self.detector.calibrated:
            return self
        return self._with_flag(without_labels(self.flag, self.detector.components(self.flag)))

    def recall(self, threshold: float) -> float:
        """Recall@1 at an accept threshold: the share of queries with a match whose first hit is right and above it."""
        return float((self.acceptances[0].right_hits > threshold).double().mean())

    def is_stale(self, gallery_size: int) -> bool:
        """Whether a gallery's size is beyond ±20 % of what the calibration searched: its rates are no longer known."""
        return abs(gallery_size - self.gallery_size) > STALE_BEYOND * self.gallery_size

    def decide(
        self,
        hits: Hits,
        queries: Embeddings,
        *,
        features: Float[Tensor, "Q P"] | None = None,
        labels: Int64[Tensor, "Q K"] | None = None,
        gallery_size: int | None = None,
        accept_above: float | None = None,
        flag_above: float | None = None,
    ) -> SearchDecisions:
        """Answer each query: abstain where it is flagged, else match where its first hit is accepted, else unknown.

        A hit is accepted where what decides, the probability that it is right unless another `accept` was asked for, is
        above the threshold.

        Args:
            hits: of the queries, at least 50 for each (`N_HITS`), which are looked at, or all that the gallery holds.
            queries: their embeddings.
            features: (Q, P) of the queries; without them they count as a mean and a κ that somebody gave, and what was
                found flags in place of what needs features.
            labels: (Q, K) of the hits, negative where a hit has none; None where items have no labels. Where any of
                the hits that are looked at has none, the query is answered by what was found and by features alone: it
                was calibrated on hits that all have one.
            gallery_size: of the index now; None where it has not changed since the calibration.
            accept_above: another threshold than that in force, such as one from a slider.
            flag_above: another OOD score than that in force; of κ it is −κ. Where another flag takes the place of
                `flag`, for want of its evidence, that one's own threshold stays.

        Returns:
            One answer a query, on the device of the hits.

        Raises:
            ValueError: for hits and queries that differ in number, another dimension, labels or features of another
                shape, thresholds that are NaN, or too few hits a query.
        """
        for name, threshold in (("accept_above", accept_above), ("flag_above", flag_above)):
            if threshold is not None and math.isnan(threshold):
                raise ValueError(f"{name} must be a number, got NaN")
        size, k = self.gallery_size if gallery_size is None else gallery_size, hits.scores.shape[1]
        if len(hits) and k < min(N_HITS, size):
            raise ValueError(f"a decision rests on {N_HITS} hits: search a gallery of {size} with that k, got k={k}")
        if labels is not None and (is_unlabelled := (labels[:, :N_HITS] < 0).any(1)).any():
            thresholds = {"accept_above": accept_above, "flag_above": flag_above}
            decide = partial(self.decide, hits, queries, features=features, gallery_size=gallery_size, **thresholds)
            return decide().where(is_unlabelled, decide(labels=labels.masked_fill(is_unlabelled[:, None], 0)))
        scores = self.scores(hits, queries, features=features, labels=labels)
        able = self.for_vectors if features is None else self
        able = able.for_unlabelled if labels is None else able
        in_force = able if k else able.for_hitless
        ood_score, known = self.detector.ood_score(in_force.flag, scores), self.detector.conformal_scores(in_force.flag)
        flag_above = in_force.flag_above if flag_above is None or in_force.flag != self.flag else flag_above
        on = hits.scores.device
        none = torch.zeros(len(hits), dtype=torch.float64)
        p_known, right, statistic, false_accept = none, none, none - torch.inf, none + 1
        able_to = (place for place, one in enumerate(self.acceptances) if scores.keys() >= one.evidence)
        place = next(able_to, None)
        deciding, in_force_above = self.acceptances[place or 0], self._accepts_above[place or 0]
        if place is not None:
            p_known, right = deciding.match_probability.p_known(scores), deciding.match_probability.right(scores)
            statistic = deciding.statistic(scores, p_known * right)
            false_accept = deciding.false_accepts.p_values(statistic)
        flagged = (ood_score > flag_above).to(on)
        accept_above = in_force_above if accept_above is None else accept_above
        return SearchDecisions(
            codes=decision_codes(flagged, statistic.to(on), accept_above=accept_above),
            probability=(p_known * right).to(on),
            p_known=p_known.to(on),
            right_if_known=right.to(on),
            statistic=statistic.to(on),
            false_accept=false_accept.to(on),
            accept=(deciding.accept,) * len(hits),
            accept_above=(none + accept_above).to(on),
            score=hits.scores[:, 0] if k else hits.scores.new_full((len(hits),), -torch.inf),
            ood_score=ood_score,
            p_value=known.p_values(ood_score),
            flagged_by=(in_force.flag,) * len(hits),
            stale=gallery_size is not None and self.is_stale(gallery_size),
        )

    def scores(
        self,
        hits: Hits,
        queries: Embeddings,
        *,
        features: Float[Tensor, "Q P"] | None = None,
        labels: Int64[Tensor, "Q K"] | None = None,
    ) -> dict[str, Float[Tensor, " Q"]]:
        """Every score of the queries and their hits that can be had, by name, on the CPU; arguments as in `decide`.

        Raises:
            ValueError: for hits and queries that differ in number, another dimension, labels that are not those of the
                hits, or features of another number or width.
        """
        if len(hits) != len(queries):
            raise ValueError(f"hits and queries must be as many, got {len(hits)} and {len(queries)}")
        if labels is not None and labels.shape != hits.ids.shape:
            shapes = f"{tuple(labels.shape)} and {tuple(hits.ids.shape)}"
            raise ValueError(f"labels must be one for each hit, got shapes {shapes}")
        if features is not None and len(features) != len(queries):
            raise ValueError(f"features and queries must be as many, got {len(features)} and {len(queries)}")
        if queries.dimension != self.dimension:
            raise ValueError(f"queries must have dimension {self.dimension}, got {queries.dimension}")
        cosines = hits.scores[:, :N_HITS]  # as many as it was calibrated on: shares of the hits depend on their number
        labels = None if labels is None else labels[:, :N_HITS]
        if cosines.shape[1] == 0:
            cosines = labels = None
        return query_scores(
            queries, cosines, features=features, labels=labels, reference=self.reference, nearest=self.nearest
        )

    def flagged(self, embeddings: Embeddings, features: Float[Tensor, "N P"] | None = None) -> Bool[Tensor, " N"]:
        """Which embeddings cannot be judged, without a search: by `for_hitless` where the flag in force looks at hits.

        Raises:
            ValueError: where the flag needs features and there are none.
        """
        scores = query_scores(embeddings, None, features=features, reference=self.reference, nearest=self.nearest)
        return self.detector.ood_score(self.for_hitless.flag, scores) > self.for_hitless.flag_above

    def unseen_p_values(self, first: Float[Tensor, " Q"], labels: Sequence[str]) -> list[tuple[float, float] | None]:
        """p-values of "this item is of a new class" and "this item is of a class in the gallery", see `UnseenClasses`.

        They are of the gallery as it was calibrated on, and rest on its being a random sample of what comes in.

        Args:
            first: (Q,) cosines of the first hits.
            labels: Q labels of these; the empty one where a hit has none, or a query has no hit.

        Returns:
            Both p-values of each query; None where `unseen` is none, or its first hit has no label.
        """
        if self.unseen is None:
            return [None] * len(labels)
        classes = self.unseen.labels  # rising; where a class has one item, that item is the nearest
        keys = torch.tensor([label_key(label) if label else -1 for label in labels], dtype=torch.int64)
        nearest = torch.searchsorted(classes, keys).clamp(max=len(classes) - 1)
        known, scores = classes[nearest] == keys, first.detach().cpu().double().clamp(min=-1)
        pairs = zip(self.unseen.p_new(scores, nearest).tolist(), self.unseen.p_in_gallery(scores).tolist(), strict=True)
        return [pair if is_known else None for is_known, pair in zip(known.tolist(), pairs, strict=True)]

    def _with_flag(self, flag: str) -> "Calibration":
        return self if flag == self.flag else replace(self, flag=flag)

    def verify(self, first: Embeddings, second: Embeddings) -> Decisions:
        """Whether each of R pairs matches: abstain where κ flags either, at `targets.ood` each.

        Of pairs that do not match, at most a share `targets.far` is called a match; the probability is that of a match
        where half of all pairs are. A gallery and its size are of no effect.

        Args:
            first: R embeddings.
            second: R embeddings, each to be held against the first of its row.

        Raises:
            ValueError: where the calibration saw no pairs or too few for the target, or the two differ in number.
        """
        if self.verifier is None:
            raise ValueError("this calibration saw no pairs: run `lam calibrate` again")
        if first.mean.shape != second.mean.shape:
            raise ValueError(
                "the two of a pair must be embedded alike and be as many, "
                f"got shapes {tuple(first.mean.shape)} and {tuple(second.mean.shape)}"
            )
        score = (first.mean.double() * second.mean.double()).sum(1).clamp(-1, 1)
        ood_score = -torch.minimum(first.kappa, second.kappa).double()
        accept = self.verifier.impostors.threshold(self.targets.far)
        return Decisions(
            codes=decision_codes(ood_score > -self.kappa_below, score, accept_above=accept),
            probability=self.verifier.probability(score, first.kappa.double(), second.kappa.double()),
            score=score,
            ood_score=ood_score,
            p_value=self.detector.conformal_scores("kappa").p_values(ood_score),
            flagged_by=("kappa",) * len(score),
            stale=False,
        )

    def conformal_set(self, hits: Hits) -> Bool[Tensor, "Q K"]:
        """Which hits are of the smallest set that holds a match with probability 1 − `conformal_miss`: the first k.

        Raises:
            ValueError: where no k could be promised, or there are fewer hits than that.
        """
        if self.depth is None:
            raise ValueError(
                f"too few calibration queries had a match to promise a miss rate of {self.targets.conformal_miss:g}: "
                "calibrate on more data, or at a greater target"
            )
        if (k := hits.scores.shape[1]) < min(self.depth, self.gallery_size):
            raise ValueError(f"the set is of the first {self.depth} hits: search with that k, got k={k}")
        return (torch.arange(hits.scores.shape[1], device=hits.scores.device) < self.depth).expand(hits.scores.shape)


def query_scores(
    queries: Embeddings,
    cosines: Float[Tensor, "Q K"] | None,
    *,
    features: Float[Tensor, "Q P"] | None = None,
    labels: Int64[Tensor, "Q K"] | None = None,
    reference: Reference | None = None,
    nearest: Mapping[str, int] | None = None,
) -> dict[str, Float[Tensor, " Q"]]:
    """Every score of the registry that can be had of queries and their hits, by name, float64 on the CPU.

    Args:
        queries: their embeddings; without features they are a mean and a κ that somebody gave, and nothing else.
        cosines: (Q, K) of the hits; None where there are none.
        features: (Q, P) of the queries.
        labels: (Q, K) of the hits.
        reference: features of known items.
        nearest: by score, how many neighbours it looks at; see `lam.retrieval.metrics.registry.scores_of`.
    """
    evidence = {
        "embeddings": queries,
        "features": None if features is None else features.to(torch.promote_types(features.dtype, torch.float32)),
        "cosines": None if cosines is None else cosines.clamp(min=-1),
        "labels": labels,
        "reference": reference,
    }
    scores = scores_of(evidence, nearest=nearest)
    if features is None:
        scores = {name: values for name, values in scores.items() if not needs_input(name)}
    return {name: values.detach().cpu().double() for name, values in scores.items()}


def label_key(label: str) -> int:
    """A label as a number: 63 bits of its SHA-256, equal where labels are.

    Example:
        >>> label_key("cat") == label_key("cat"), label_key("cat") == label_key("dog")
        (True, False)
    """
    return int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "big") >> 1


def credible_cosine(kappa: Float[Tensor, " Q"], dimension: int, *, level: float = LEVEL) -> Float[Tensor, " Q"]:
    """Cosine of each query's credible cap.

    The cap around the mean direction that holds a share `level` of the query's von Mises-Fisher distribution: hits
    within it are what the query may be, as far as κ knows.

    Source: Kirchhof, Kasneci and Oh (2023), appendix C.5, where the cap is meant by cosines of at *least* t.

    Args:
        kappa: (Q,) of the queries.
        dimension: of the sphere that κ is of, `Encoder.kappa_dimension`.
        level: of the cap, in (0, 1).

    Raises:
        ValueError: for a level outside (0, 1).
    """
    mean = torch.eye(1, dimension, dtype=torch.float64, device=kappa.device)
    return VonMisesFisher(mean.expand(len(kappa), -1), kappa.double()).credible_cap(level)
