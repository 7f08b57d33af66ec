"""`Calibration`: the thresholds, probabilities and sets behind an answer, with the error rates that they promise.

Tensors in, tensors out: the data of a run are chosen in `lam.runs.calibrate`, files written in
`lam.retrieval.decisions.files`, and the assumptions of each promise stated in `lam.retrieval.decisions.conformal`.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from lam.retrieval.decisions.conformal import LEVEL, ConformalScores, conformal_depth
from lam.retrieval.decisions.decisions import Decisions, decision_codes
from lam.retrieval.decisions.flags import Flag, OodDetector
from lam.retrieval.decisions.probability import Correctness, evidence_of, folds, probability_bins
from lam.retrieval.decisions.verification import Verifier
from lam.retrieval.index.hits import Hits
from lam.retrieval.metrics.reference import NEIGHBOUR, Reference, knn_distance
from lam.retrieval.metrics.searches import Searches
from lam.retrieval.metrics.uncertainty import CalibrationBins
from lam.utils.checks import check_length, positive_integer
from lam.vmf.distribution import VonMisesFisher
from lam.vmf.embeddings import Embeddings

TARGET_FAR, TARGET_OOD, TARGET_MISS = 0.001, 0.05, 0.05
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
    """

    far: float = TARGET_FAR
    ood: float = TARGET_OOD
    conformal_miss: float = TARGET_MISS

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < 1:
                raise ValueError(f"target {name} must lie in (0, 1), got {value}")


@dataclass(frozen=True)
class Histogram:
    """Counts of κ between rising edges, on a logarithmic scale.

    Attributes:
        counts: (B,) how many values lie between two edges.
        edges: (B + 1,) of κ.
    """

    counts: Int64[Tensor, " B"]
    edges: Float[Tensor, " E"]

    @classmethod
    def of(cls, kappa: Float[Tensor, " N"], *, bins: int = _HISTOGRAM_BINS) -> "Histogram":
        """Count positive concentrations between the least and the greatest."""
        logs = kappa.detach().cpu().double().log10()
        low, high = float(logs.min()) - 1e-6, float(logs.max()) + 1e-6
        edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
        counts = torch.bincount((torch.bucketize(logs, edges) - 1).clamp(0, bins - 1), minlength=bins)
        return cls(counts, 10**edges)


@dataclass(frozen=True, eq=False)
class Calibration:
    """Thresholds, probabilities and sets learnt on held-out data, for new queries.

    Attributes:
        key: fingerprint of the network, posterior and preprocessing.
        gallery_size: how many items the calibration searched; the false-accept rate grows with it.
        targets: the error rates in force.
        flag: the score in force by which queries are flagged.
        detector: the OOD scores of in-distribution queries.
        false_accepts: the highest cosines of searches without a match; with classes where these were set aside before
            training, so that the rate is promised of a random item of a class never trained on.
        right_hits: (M,) of the queries with a match the cosine of the first hit, −∞ where that is wrong, rising.
        correctness: P(first hit is right).
        reliability: of those probabilities on data that they were not learnt from, by cross-validation.
        depth: the smallest k whose first k hits hold a match with probability 1 − `conformal_miss`; None where too few
            queries have a match to promise it.
        kappa: of the calibration queries, to be shown.
        dimension: of the embeddings.
        reference: features of known items, for distances to them; None where κ alone flags.
        verifier: of pairs of images; None where none were given.
        facts: further facts of how it was made, as JSON.
    """

    key: str
    gallery_size: int
    targets: Targets
    flag: Flag
    detector: OodDetector
    false_accepts: ConformalScores
    right_hits: Float[Tensor, " M"]
    correctness: Correctness
    reliability: CalibrationBins
    depth: int | None
    kappa: Histogram
    dimension: int
    reference: Reference | None = None
    verifier: Verifier | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def accept_above(self) -> float:
        """The cosine above which a first hit is a match: P(a search without a match exceeds it) ≤ `targets.far`."""
        return self.false_accepts.threshold(self.targets.far)

    @cached_property
    def flag_above(self) -> float:
        """The OOD score above which a query is flagged: P(an in-distribution query exceeds it) ≤ `targets.ood`."""
        return self.detector.known(self.flag).threshold(self.targets.ood)

    @cached_property
    def kappa_below(self) -> float:
        """The κ below which a query is flagged where κ alone decides, at the same target."""
        return -self.detector.kappa.threshold(self.targets.ood)

    def false_accept_rate(self, cosine: float) -> tuple[float, tuple[float, float]]:
        """The rate that an accept threshold promises (see `ConformalScores.rate`), and its 95 % interval."""
        return self.false_accepts.rate(cosine), self.false_accepts.interval(cosine)

    def recall(self, cosine: float) -> float:
        """Recall@1 at an accept threshold: the share of queries with a match whose first hit is right and above it."""
        return float((self.right_hits > cosine).double().mean())

    def is_stale(self, gallery_size: int) -> bool:
        """Whether a gallery's size is beyond ±20 % of that at calibration: its rates are no longer known."""
        return abs(gallery_size - self.gallery_size) > STALE_BEYOND * self.gallery_size

    def decide(
        self,
        hits: Hits,
        queries: Embeddings,
        *,
        features: Float[Tensor, "Q P"] | None = None,
        gallery_size: int | None = None,
        accept_above: float | None = None,
        flag_above: float | None = None,
    ) -> Decisions:
        """Answer each query: abstain where it is flagged, else match where its first hit is good enough, else unknown.

        Args:
            hits: of the queries; two or more a query, for the margin to the second, unless the gallery has but one.
            queries: their embeddings.
            features: (Q, P) of the queries, which flags other than `kappa` need.
            gallery_size: of the index now; None where it has not changed since the calibration.
            accept_above: another cosine than that in force, such as one from a slider.
            flag_above: another OOD score than that in force; of κ it is −κ.

        Returns:
            One answer a query, on the device of the hits.

        Raises:
            ValueError: for hits and queries that differ in number, another dimension, features that are missing, or one
                hit a query where the gallery has more.
        """
        self._check(hits, queries)
        size, k = self.gallery_size if gallery_size is None else gallery_size, hits.scores.shape[1]
        if len(hits) and k < min(2, size):
            raise ValueError(f"P(correct) rests on the second hit too: search a gallery of {size} with k=2, got k={k}")
        ood_score, known = self.ood_score(queries, features), self.detector.known(self.flag)
        flagged = ood_score > (self.flag_above if flag_above is None else flag_above)
        score = _column(hits.scores, 0, -torch.inf)
        return Decisions(
            codes=decision_codes(
                flagged.to(score.device),
                score,
                accept_above=self.accept_above if accept_above is None else accept_above,
            ),
            probability=self.probability(hits, queries),
            score=score,
            ood_score=ood_score,
            p_value=known.p_values(ood_score),
            stale=gallery_size is not None and self.is_stale(gallery_size),
        )

    def ood_score(self, queries: Embeddings, features: Float[Tensor, "Q P"] | None = None) -> Float[Tensor, " Q"]:
        """The OOD score in force; queries are flagged where it is above `flag_above`.

        Raises:
            ValueError: for features that are missing, where the flag needs them, or of another width.
        """
        distance = None if self.flag == "kappa" else self.distance(features)
        return self.detector.ood_score(self.flag, queries.kappa, distance)

    def verify(self, first: Embeddings, second: Embeddings) -> Decisions:
        """Whether each of M pairs matches: abstain where κ flags either, at `targets.ood` each.

        Of pairs that do not match, at most a share `targets.far` is called a match; the probability is that of a match
        where half of all pairs are. A gallery and its size are of no effect.

        Args:
            first: M embeddings.
            second: M embeddings, each to be held against the first of its row.

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
            p_value=self.detector.kappa.p_values(ood_score),
            stale=False,
        )

    def probability(self, hits: Hits, queries: Embeddings) -> Float[Tensor, " Q"]:
        """P(first hit is right) of queries that have a match in the gallery; 0 where there is no hit."""
        self._check(hits, queries)
        if hits.scores.shape[1] == 0:
            return torch.zeros(len(hits), dtype=torch.float64, device=hits.scores.device)
        second = _column(hits.scores, 1, -1.0)
        kappa = queries.kappa.to(hits.scores.device)
        return self.correctness(evidence_of(hits.scores[:, 0], kappa, hits.kappa[:, 0], second))

    def conformal_set(self, hits: Hits) -> Bool[Tensor, "Q K"]:
        """Which hits are of the smallest set that holds a match with probability 1 − `conformal_miss`: the first k.

        Raises:
            ValueError: where no k could be promised.
        """
        if self.depth is None:
            raise ValueError(
                f"too few calibration queries had a match to promise a miss rate of {self.targets.conformal_miss:g}: "
                "calibrate on more data, or at a greater target"
            )
        return (torch.arange(hits.scores.shape[1], device=hits.scores.device) < self.depth).expand(hits.scores.shape)

    def distance(self, features: Float[Tensor, "Q P"] | None) -> Float[Tensor, " Q"]:
        """The k-NN distance of features to the reference.

        Raises:
            ValueError: where there are no features, or no reference, or they differ in width.
        """
        if self.reference is None:
            raise ValueError("this calibration holds no reference features: calibrate with k-NN distances first")
        if features is None:
            raise ValueError(f"flag {self.flag!r} needs the features of the queries: give features=...")
        width = self.reference.unit.shape[1]
        if features.shape[1] != width:
            raise ValueError(f"features must have width {width}, got {features.shape[1]}")
        return knn_distance(features, self.reference, k=NEIGHBOUR)

    def _check(self, hits: Hits, queries: Embeddings) -> None:
        if len(hits) != len(queries):
            raise ValueError(f"hits and queries must be as many, got {len(hits)} and {len(queries)}")
        if queries.dimension != self.dimension:
            raise ValueError(f"queries must have dimension {self.dimension}, got {queries.dimension}")


def calibrate(
    searches: Searches,
    kappa: Float[Tensor, " Q"],
    gallery_kappa: Float[Tensor, " N"],
    *,
    key: str,
    dimension: int,
    targets: Targets | None = None,
    flag: Flag = "kappa",
    distance: Float[Tensor, " Q"] | None = None,
    reference: Reference | None = None,
    strangers: ConformalScores | None = None,
    verifier: Verifier | None = None,
    facts: dict[str, Any] | None = None,
) -> Calibration:
    """Learn thresholds and probabilities from searches of in-distribution queries, in an order that tells nothing.

    Args:
        searches: of Q queries that nothing was fitted to.
        kappa: (Q,) their concentrations.
        gallery_kappa: (N,) those of the items searched.
        key: of the run; see `Calibration`.
        dimension: of the embeddings.
        targets: the error rates asked for.
        flag: the score by which queries shall be flagged.
        distance: (Q,) k-NN distances of the queries to the reference.
        reference: features of known items.
        strangers: highest cosines of queries that are known to have no match in the gallery. False accepts are then
            promised of their like, or, where these have classes, of classes like theirs; by default of queries like
            those of the searches, with their matches taken out.
        verifier: of pairs of images, where those shall be verified.
        facts: further facts to keep, as JSON.

    Raises:
        ValueError: where the queries are too few to promise a target, saying how many it needs; where none has a match;
            or where one of `distance` and `reference` is missing that the other or the flag needs.
    """
    check_length("kappa", kappa, "the searches", len(searches))
    positive_integer("dimension", dimension)
    if (distance is None) != (reference is None):
        raise ValueError("distance and reference go together: give both, or neither")
    targets = Targets() if targets is None else targets
    if strangers is None:
        non_mated = searches.non_mated[searches.non_mated.isfinite()]
        if len(non_mated) == 0:
            raise ValueError(
                "no query has an item in the gallery that does not match it: there is no false accept to learn"
            )
        strangers = ConformalScores.of(non_mated)
    detector = OodDetector.of(kappa, distance)
    mated = searches.has_mate
    evidence = evidence_of(searches.score, kappa.cpu(), gallery_kappa.cpu()[searches.nearest], searches.second)[mated]
    correct = searches.correct[mated]
    ranks = searches.rank[mated]
    calibration = Calibration(
        key=key,
        gallery_size=searches.gallery_size,
        targets=targets,
        flag=flag,
        detector=detector,
        false_accepts=strangers,
        right_hits=searches.score.double().masked_fill(~searches.correct, -torch.inf)[mated].sort().values,
        correctness=Correctness.fit(evidence, correct),
        reliability=probability_bins(cross_validated(evidence, correct), correct),
        depth=_depth(ranks, targets.conformal_miss),
        kappa=Histogram.of(kappa),
        dimension=dimension,
        reference=reference,
        verifier=verifier,
        facts={} if facts is None else facts,
    )
    _refuse_unpromised(calibration)
    return calibration


def credible_cosine(queries: Embeddings, *, level: float = LEVEL, dimension: int | None = None) -> Float[Tensor, " Q"]:
    """Cosine of each query's credible cap, which depends on κ and the dimension alone.

    The cap around the mean direction that holds a share `level` of the query's von Mises-Fisher distribution: hits
    within it are what the query may be, as far as κ knows.

    Source: Kirchhof, Kasneci and Oh (2023), appendix C.5, where the cap is meant by cosines of at *least* t.

    Args:
        queries: Q of them.
        level: of the cap, in (0, 1).
        dimension: of the sphere that κ is of, `Encoder.kappa_dimension`, where it is not the embeddings'.

    Raises:
        ValueError: for a level outside (0, 1).
    """
    kappa = queries.kappa.double()
    mean = torch.eye(1, dimension or queries.dimension, dtype=torch.float64, device=kappa.device)
    return VonMisesFisher(mean.expand(len(kappa), -1), kappa).credible_cap(level)


def cross_validated(evidence: Float[Tensor, "N E"], correct: Bool[Tensor, " N"]) -> Float[Tensor, " N"]:
    """P(first hit is right) of each search, learnt from the other four fifths of them."""
    probability = torch.empty(len(evidence), dtype=torch.float64)
    for fold, rest in folds(len(evidence)):
        probability[fold] = Correctness.fit(evidence[rest], correct[rest])(evidence[fold])
    return probability


def _depth(ranks: Tensor, miss: float) -> int | None:
    try:
        return conformal_depth(ranks, target=miss)
    except ValueError:
        return None


def _refuse_unpromised(calibration: Calibration) -> None:
    for name, threshold in (("far", "accept_above"), ("ood", "flag_above")):
        try:
            getattr(calibration, threshold)
        except ValueError as error:
            raise ValueError(f"target {name}: {error}") from None


def _column(values: Tensor, column: int, otherwise: float) -> Tensor:
    return values[:, column] if values.shape[1] > column else values.new_full((len(values),), otherwise)
