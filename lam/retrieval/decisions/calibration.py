"""`Calibration`: thresholds, probabilities and sets for answers, with their promised error rates.

`lam.retrieval.decisions.calibrate` learns a calibration; `lam.retrieval.decisions.conformal` states the assumptions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from lam.retrieval.decisions.abstention import Decisions, SearchDecisions, decision_codes
from lam.retrieval.decisions.acceptance import Acceptance
from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.flags import Missing, OodDetector, needs_input
from lam.retrieval.decisions.match_probability import MatchProbability
from lam.retrieval.decisions.unseen_classes import UnseenClasses
from lam.retrieval.decisions.verification import CosineIntervals, Verifier
from lam.retrieval.index.hits import Hits, label_key
from lam.retrieval.metrics.reference import Reference
from lam.retrieval.metrics.scores import N_HITS, scores_of
from lam.retrieval.metrics.uncertainty import ReliabilityBins
from lam.utils.checks import check_share, check_tensor
from lam.vmf.embeddings import KAPPA_RANGE, Embeddings

STALE_BEYOND = 0.2
"""Allowed relative change of the gallery's size since calibration."""


@dataclass(frozen=True)
class Targets:
    """Target error rates, each in (0, 1).

    Attributes:
        far: share of accepted first hits among searches without a match (FPIR).
        ood: share of in-distribution queries that are flagged.
        conformal_miss: share of conformal sets without a match, among queries with a match in the gallery.
        wrong: share of wrong hits among the accepted first hits, at a confidence of 0.95; None for no promise.
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
    """Histogram of κ on a logarithmic scale.

    Attributes:
        counts: number of values in each of B bins.
        edges: B + 1 edges of the bins, rising.
    """

    counts: tuple[int, ...]
    edges: tuple[float, ...]

    @classmethod
    def of(cls, kappa: Float[Tensor, " N"]) -> "Histogram":
        """Histogram of κ, clamped to `KAPPA_RANGE`, with edges from the least to the greatest value."""
        logs = kappa.detach().cpu().double().clamp(*KAPPA_RANGE).log10()
        counts, edges = np.histogram(logs.numpy(), bins=40)
        return cls(tuple(counts.tolist()), tuple((10**edges).tolist()))


@dataclass(frozen=True, eq=False)
class UnmatchedQueries:
    """Queries without a match, for the threshold of a filtered search; see `lam.retrieval.decisions.gallery_part`.

    Attributes:
        mean: (R, D) directions.
        labels: (R,) the `label_key` of the matches, which are left out of the hits; −1 if no item can match.
        classes: (R,) classes of strangers, if the promise is about new classes.
    """

    mean: Float[Tensor, "R D"]
    labels: Int64[Tensor, " R"]
    classes: Int64[Tensor, " R"] | None = None


@dataclass(frozen=True, eq=False)
class Calibration:
    """Thresholds, probabilities and sets learned on held-out data, for new queries.

    Attributes:
        key: fingerprint of the network, posterior and preprocessing.
        gallery_size: number of items that the calibration searched; the false-accept rate grows with the gallery.
        targets: the promised error rates.
        flag: the score that flags queries.
        detector: computes OOD scores.
        acceptances: rules that accept first hits: by all scores, by scores of mean, κ and hits, and by scores of mean,
            κ and cosines. Equal rules appear once. The first rule whose scores are all available decides.
        reliability: bins of P(right | known) by the first rule, cross-validated.
        depth: least number of first hits that hold a match with P = 1 − `conformal_miss`; None for too few queries.
        kappa: histogram of the calibration queries' κ.
        dimension: number of embedding dimensions D.
        nearest: number of neighbours of each score; replaces `Score.k`.
        reference: features of known items, if any.
        verifier: decides on pairs of images; None without pairs.
        unseen: p-values of new classes, with sorted `label_key`s as labels; None if not learned.
        unmatched: queries that bound false accepts in a part of the gallery; None for a gallery without labels.
        intervals: intervals for the cosine between a hit and another image of the query's class, if learned.
        facts: further facts, as JSON.
    """

    key: str
    gallery_size: int
    targets: Targets
    flag: str
    detector: OodDetector = field(repr=False)
    acceptances: tuple[Acceptance, ...] = field(repr=False)
    reliability: ReliabilityBins = field(repr=False)
    depth: int | None
    kappa: Histogram = field(repr=False)
    dimension: int
    nearest: Mapping[str, int] = field(default_factory=dict, repr=False)
    reference: Reference | None = field(default=None, repr=False)
    verifier: Verifier | None = field(default=None, repr=False)
    unseen: UnseenClasses | None = field(default=None, repr=False)
    unmatched: UnmatchedQueries | None = field(default=None, repr=False)
    intervals: CosineIntervals | None = field(default=None, repr=False)
    facts: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def accept(self) -> str:
        """`probability`, or the name of a score. For a score, the accept statistic is minus the score."""
        return self.acceptances[0].accept

    @property
    def false_accepts(self) -> ConformalScores:
        """The accept statistics of strangers, or of queries searched without their matches."""
        return self.acceptances[0].false_accepts

    @property
    def match_probability(self) -> MatchProbability:
        """P(known) and P(right | known) from all scores."""
        return self.acceptances[0].match_probability

    @cached_property
    def accept_above(self) -> float:
        """The accept threshold, which keeps `targets.far` and, if set, `targets.wrong`."""
        return self._accepts_above[0]

    @cached_property
    def _accepts_above(self) -> tuple[float, ...]:
        far, wrong = self.targets.far, self.targets.wrong
        return tuple(acceptance.threshold(far=far, wrong=wrong) for acceptance in self.acceptances)

    @cached_property
    def _flags_above(self) -> dict[str, float]:
        return {flag: scores.threshold(self.targets.ood) for flag, scores in self.detector.calibrated.items()}

    @property
    def flag_above(self) -> float:
        """The flag threshold: P(an in-distribution query exceeds it) ≤ `targets.ood`."""
        return self._flags_above[self.flag]

    @property
    def kappa_below(self) -> float:
        """The κ below which the flag `kappa` flags a query, at the rate `targets.ood`."""
        return -self._flags_above["kappa"]

    def recall(self, threshold: float) -> float:
        """Recall@1 at a threshold: share of queries with a match whose first hit is right and above the threshold."""
        return float((self.acceptances[0].right_hits > threshold).double().mean())

    def is_stale(self, gallery_size: int) -> bool:
        """Whether the gallery has grown or shrunk by over 20 % since calibration, so that the rates no longer hold."""
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
        """Answer each query: abstain if it is flagged, match if its first hit is accepted, else unknown.

        A first hit is accepted if its statistic is above the accept threshold. Answers are on the device of the hits.

        Args:
            hits: hits of the queries, 50 (`N_HITS`) or more for each, or all items of the gallery.
            queries: embeddings of the queries.
            features: (Q, P) features; without them, a flag by hits replaces a flag that needs features.
            labels: (Q, K) labels of the hits, negative for an unlabelled hit; None for a gallery without labels. The
                answer to a query with an unlabelled hit among its first 50 uses no labels.
            gallery_size: number of items now; by default as in the calibration.
            accept_above: another accept threshold, such as one from a slider.
            flag_above: another flag threshold, in −κ for the flag `kappa`; no effect if a substitute replaces the flag.

        Raises:
            ValueError: as for `scores`; also for a threshold that is NaN, or too few hits per query.
        """
        for name, threshold in (("accept_above", accept_above), ("flag_above", flag_above)):
            if threshold is not None and math.isnan(threshold):
                raise ValueError(f"{name} must be a number, got NaN")
        size, k = self.gallery_size if gallery_size is None else gallery_size, hits.scores.shape[1]
        if len(hits) and k < min(N_HITS, size):
            raise ValueError(f"a decision needs k={min(N_HITS, size)} hits from a gallery of {size}, got k={k}")
        if labels is not None and (is_unlabelled := (labels[:, :N_HITS] < 0).any(1)).any():
            thresholds = {"accept_above": accept_above, "flag_above": flag_above}
            decide = partial(self.decide, hits, queries, features=features, gallery_size=gallery_size, **thresholds)
            # decide without labels if one is missing, else with labels; `where` drops the rows with filled-in labels
            return decide().where(is_unlabelled, decide(labels=labels.masked_fill(is_unlabelled[:, None], 0)))
        scores = self.scores(hits, queries, features=features, labels=labels)
        missing: list[Missing] = ["input"] if features is None else []
        if labels is None and "votes" in self.detector.calibrated:  # the calibration's gallery had labels
            missing.append("labels")
        flag = self.detector.substitute(self.flag, *missing, *(() if k else ("hits",)))
        ood_score = self.detector.ood_score(flag, scores)
        if flag_above is None or flag != self.flag:
            flag_above = self._flags_above[flag]
        zeros, device = torch.zeros(len(hits), dtype=torch.float64), hits.scores.device
        p_known, right, statistic, false_accept = zeros, zeros, zeros - torch.inf, zeros + 1  # without a hit
        has_evidence = [scores.keys() >= acceptance.evidence for acceptance in self.acceptances]
        place = has_evidence.index(True) if any(has_evidence) else 0
        acceptance = self.acceptances[place]
        if has_evidence[place]:
            probability = acceptance.match_probability
            p_known, right = probability.p_known(scores), probability.right(scores)
            statistic = acceptance.statistic(scores, p_known * right)
            false_accept = acceptance.false_accepts.p_values(statistic)
        accept_above = self._accepts_above[place] if accept_above is None else accept_above
        return SearchDecisions(
            codes=decision_codes((ood_score > flag_above).to(device), statistic.to(device), accept_above=accept_above),
            probability=(p_known * right).to(device),
            p_known=p_known.to(device),
            right_if_known=right.to(device),
            statistic=statistic.to(device),
            false_accept=false_accept.to(device),
            accept=(acceptance.accept,) * len(hits),
            accept_above=(zeros + accept_above).to(device),
            flag_above=(zeros + flag_above).to(device),
            score=hits.scores[:, 0] if k else hits.scores.new_full((len(hits),), -torch.inf),
            ood_score=ood_score.to(device),
            p_value=self.detector.conformal_scores(flag).p_values(ood_score).to(device),
            flagged_by=(flag,) * len(hits),
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
        """Every available score of the queries and their hits, by name, on the CPU; arguments as in `decide`.

        Raises:
            ValueError: if queries and evidence differ in number, or a dimension is not the calibration's.
        """
        for name, values in (("features", features), ("labels", labels)):
            if values is not None:
                check_tensor(name, values)
        for name, rows in (("hits", hits), ("features", features)):
            if rows is not None and len(rows) != len(queries):
                raise ValueError(f"{name} and queries must be equal in number, got {len(rows)} and {len(queries)}")
        if labels is not None and labels.shape != hits.ids.shape:
            raise ValueError(
                f"labels and hits must have one shape, got {tuple(labels.shape)} and {tuple(hits.ids.shape)}"
            )
        if queries.dimension != self.dimension:
            raise ValueError(f"queries must have dimension {self.dimension}, got {queries.dimension}")
        cosines = hits.scores[:, :N_HITS]  # as many as in the calibration: shares depend on the number of hits
        labels = None if labels is None else labels[:, :N_HITS]
        if cosines.shape[1] == 0:
            cosines = labels = None
        known: Any = {"reference": self.reference, "nearest": self.nearest}
        return query_scores(queries, cosines, features=features, labels=labels, **known)

    def flagged(self, embeddings: Embeddings, features: Float[Tensor, "N P"] | None = None) -> Bool[Tensor, " N"]:
        """Whether embeddings are flagged without a search, by a flag that needs no hits.

        Raises:
            ValueError: if the flag needs features, but `features` is None.
        """
        flag = self.detector.substitute(self.flag, "hits")
        scores = query_scores(embeddings, features=features, reference=self.reference, nearest=self.nearest)
        return self.detector.ood_score(flag, scores) > self._flags_above[flag]

    def unseen_p_values(self, first: Float[Tensor, " Q"], labels: Sequence[str]) -> list[tuple[float, float] | None]:
        """For each query, p-values of "it is of a new class" and "its class is in the gallery".

        `lam.retrieval.decisions.unseen_classes` defines them. A query gets None if `unseen` does not hold the label of
        its first hit; all queries get None without `unseen`.

        Args:
            first: (Q,) cosines of the first hits.
            labels: Q labels of the first hits; empty for an unlabelled or missing hit.
        """
        if self.unseen is None:
            return [None] * len(labels)
        classes = self.unseen.labels  # rising; a class of one item has the position of its item
        keys = torch.tensor([label_key(label) if label else -1 for label in labels], dtype=torch.int64)
        nearest = torch.searchsorted(classes, keys).clamp(max=len(classes) - 1)
        known, scores = classes[nearest] == keys, first.detach().cpu().double().clamp(min=-1)
        pairs = zip(self.unseen.p_new(scores, nearest).tolist(), self.unseen.p_in_gallery(scores).tolist(), strict=True)
        return [pair if is_known else None for is_known, pair in zip(known.tolist(), pairs, strict=True)]

    def verify(self, first: Embeddings, second: Embeddings) -> Decisions:
        """Whether each of R pairs matches; the answer is `abstain` if one of the two items is flagged by its κ.

        At most a share `targets.ood` of known items is flagged. At most a share `targets.far` of the pairs that do not
        match gets the answer `match`. The probability assumes that half of all pairs match.

        Args:
            first: R embeddings.
            second: R embeddings, compared with `first` row by row.

        Raises:
            ValueError: for two different shapes, or a calibration that has no pairs, or too few pairs for the target.
        """
        if self.verifier is None:
            raise ValueError("this calibration was learned without pairs of images: run `lam calibrate` again")
        if first.mean.shape != second.mean.shape:
            raise ValueError(
                "first and second must be equal in number and dimension, "
                f"got shapes {tuple(first.mean.shape)} and {tuple(second.mean.shape)}"
            )
        score = (first.mean.detach().double() * second.mean.detach().double()).sum(1).clamp(-1, 1)
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


def query_scores(
    queries: Embeddings,
    cosines: Float[Tensor, "Q K"] | None = None,
    *,
    features: Float[Tensor, "Q P"] | None = None,
    labels: Int64[Tensor, "Q K"] | None = None,
    reference: Reference | None = None,
    nearest: Mapping[str, int] | None = None,
) -> dict[str, Float[Tensor, " Q"]]:
    """Every available score of queries and their hits, by name, float64 on the CPU.

    Args:
        queries: embeddings of the queries; without features, only mean and κ are used.
        cosines: (Q, K) cosines of the hits; None without hits.
        features: (Q, P) features of the queries.
        labels: (Q, K) labels of the hits.
        reference: features of known items.
        nearest: number of neighbours for each score; see `lam.retrieval.metrics.scores.scores_of`.
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
