"""Answers to searches and comparisons: the decision, its evidence, and the hits; without HTTP and threads."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import quote

import numpy as np
import torch

from lam.gallery.decide import PValues, decide
from lam.gallery.gallery import Place
from lam.gallery.item import Item, ItemInfo
from lam.retrieval.decisions.abstention import Decision, SearchDecisions
from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.decisions.conformal import needed
from lam.retrieval.index.hits import Hits
from lam.retrieval.metrics.scores import describe_score
from lam.service import models
from lam.service.queries import Part, Query, Search
from lam.tuning.ambiguity import Ambiguity
from lam.vmf.distribution import credible_cosine
from lam.vmf.embeddings import KAPPA_RANGE, Embeddings

_POINTS = 200  # points of a curve on the page
_CAPS = 2000  # concentrations in the grid on which credible cosines are interpolated


Verdict = tuple[SearchDecisions, PValues]
"""The decision on one query, and the p-values of "its class is new" and of "its class is in the gallery"."""


@dataclass(frozen=True)
class Responder:
    """Answers searches and comparisons by a calibration; without a calibration, answers have no decision.

    Attributes:
        dimension: the encoder's `kappa_dimension`, for `credible_cosine`.
        ambiguity: explains why a query is uncertain; None if the encoder has not learned its ambiguity.
    """

    calibration: Calibration | None
    dimension: int
    ambiguity: Ambiguity | None = None

    def state(self, size: int) -> models.State:
        """`current` if the promised rates hold for a gallery of this size, else `stale`; `none` without calibration."""
        if self.calibration is None:
            return "none"
        return "stale" if self.calibration.is_stale(size) else "current"

    def is_uncertain(self, kappa: float) -> bool | None:
        """Whether the κ of a query or item is below the calibration's threshold on κ; None without a calibration."""
        return None if self.calibration is None else kappa < self.calibration.kappa_below

    def verdicts(
        self, part: Part | None, queries: Sequence[Query], hits: Hits, infos: Mapping[int, ItemInfo]
    ) -> list[Verdict]:
        """The verdict on each query from its hits in `part` (None: the whole gallery); empty without a calibration.

        Either all queries have features, or no query has. One call for all queries is ten times as fast.
        """
        if (calibration := self._calibration_of(part)) is None:
            return []
        features = [query.features for query in queries if query.features is not None]
        # the number of hits stands for the gallery's size: hits leave the query out if it is an item
        decisions, unseen = decide(
            calibration,
            Embeddings.concatenate([query.embedding for query in queries]),
            torch.cat(features) if features else None,
            hits,
            [[infos[key].label for key in row] for row in hits.ids.tolist()],
            gallery_size=hits.ids.shape[1],
        )
        return [(decisions[row : row + 1], p_values) for row, p_values in enumerate(unseen)]

    def answer(
        self,
        search: Search,
        query: Query,
        places: Sequence[Place],
        infos: Mapping[int, ItemInfo],
        *,
        size: int,
        verdict: Verdict | None,
        vectors: Mapping[int, bytes],
    ) -> models.SearchResponse:
        """Answer a search of a gallery of `size` items.

        Args:
            search, query: the search, and its query (`Search.read`).
            places: at least k hits of the query.
            infos: information on the hits, by key.
            verdict: the verdict on the query from its hits; None for an answer without a decision.
            vectors: vectors of items by key, for a search with vectors.
        """
        part, is_new = search.part, search.without is None
        calibration = self._calibration_of(part)
        threshold = self.thresholds if part is None else None
        unseen, decided = None, dict[str, Any]()
        if calibration is not None and verdict is not None:
            decisions, unseen = verdict
            threshold = _thresholds(calibration, decisions)
            decided = _fields(decisions, search.min_probability)
            if part is not None:  # probabilities were learned on searches of the whole gallery
                decided |= {"probability": None, "known": None, "right_if_known": None}
        first = infos[places[0].key] if places else None
        answer = models.SearchResponse(
            **decided,
            kappa=query.kappa,
            kappa_capped=query.capped,
            **self._doubt(query.embedding),
            text_cut=query.text_cut,
            credible_cosine=self.credible_cosine(query.kappa),
            unseen=models.UnseenFields(p_new=unseen[0], p_in_gallery=unseen[1]) if unseen and is_new else None,
            threshold=threshold,
            calibration=self.state(size) if part is None else "none" if part.calibration is None else "current",
            gallery_size=size,
            filter=None if part is None else part.fields,
            hits=[],
        )
        shown = self._hits(search, places[: search.k], infos, vectors, answer, first)
        return answer.model_copy(update={"hits": shown})

    def grouped(
        self,
        search: Search,
        answer: models.SearchResponse,
        groups: Sequence[Sequence[Place]],
        infos: Mapping[int, ItemInfo],
        vectors: Mapping[int, bytes],
    ) -> models.SearchResponse:
        """`answer` with groups instead of hits; for the decision `match`, items of the first hit's label are accepted.

        `answer` must hold the first hit. Items that were deleted since the search are left out.
        """
        first = next(iter(answer.hits), None)
        found = [self._hits(search, group, infos, vectors, answer, first) for group in groups]
        shown = [models.Group(label=hits[0].label, hits=hits) for hits in found if hits]
        return answer.model_copy(update={"hits": [], "groups": shown})

    def _hits(
        self,
        search: Search,
        places: Sequence[Place],
        infos: Mapping[int, ItemInfo],
        vectors: Mapping[int, bytes],
        answer: models.SearchResponse,
        first: ItemInfo | models.Hit | None,
    ) -> list[models.Hit]:
        """Places as hits, except deleted items and scores below the threshold; `first` is the search's first hit."""
        calibration = None if answer.decision is None else self._calibration_of(search.part)
        depth = None if calibration is None else calibration.depth  # of a set that holds a match
        intervals = None if calibration is None or search.part is not None else calibration.intervals
        ends: list[list[float] | None] = [None] * len(places)
        if intervals is not None:
            scores = torch.tensor([[place.score for place in places]], dtype=torch.float64)
            ends = intervals(scores, torch.tensor([answer.kappa], dtype=torch.float64))[0].tolist()
        return [
            models.Hit(
                **self.about(infos[place.key]),
                score=place.score,
                kappa=place.kappa,
                accepted=_is_accepted(answer.decision, infos[place.key], first),
                credible=place.score >= answer.credible_cosine,
                conformal=None if depth is None else place.rank is not None and place.rank < depth,
                interval=interval,
                vector=numbers_of(vectors.get(place.key)) if search.with_vector else None,
            )
            for place, interval in zip(places, ends, strict=True)
            if place.key in infos and place.score >= search.score_threshold
        ]

    def _calibration_of(self, part: Part | None) -> Calibration | None:
        return self.calibration if part is None else part.calibration

    def about(self, info: Item | ItemInfo) -> dict[str, Any]:
        """The fields of an item that all answers share."""
        return {
            "id": info.id,
            "label": info.label,
            "images": info.images,
            "resultant": info.resultant,
            "uncertain": self.is_uncertain(info.least_kappa),
            "thumbnail": f"/v1/items/{quote(info.id, safe='/:@+=')}/thumbnail" if info.has_thumbnail else None,
            "metadata": info.metadata,
        }

    def verify(self, first: Query, second: Query) -> models.VerifyResponse:
        """Decide whether two queries match. Only κ can flag a pair; see `Calibration.verify`."""
        calibration, above, verdict = self.calibration, self._verify_above, dict[str, Any]()
        if calibration is not None and above is not None:
            decisions, targets = calibration.verify(first.embedding, second.embedding), calibration.targets
            decision, below = decisions.decision[0], calibration.kappa_below
            verdict = {
                "same": None if decision == "abstain" else decision == "match",
                "decision": decision,
                "probability": float(decisions.probability[0]),
                "far": targets.far,
                "threshold": models.PairThresholds(
                    accept_above=above, kappa_below=below, far=targets.far, ood=targets.ood
                ),
            }
        cosine = (first.embedding.mean.double() * second.embedding.mean.double()).sum(1).clamp(-1, 1)
        kappa, text_cut = [first.kappa, second.kappa], [first.text_cut, second.text_cut]
        return models.VerifyResponse(**verdict, score=float(cosine), kappa=kappa, text_cut=text_cut)

    def credible_cosine(self, kappa: float) -> float:
        """Cosine at the edge of a query's credible cap; see `lam.vmf.distribution.credible_cosine`.

        Interpolation on a grid gives the cosine to 1e-4; an exact computation takes longer than a search.
        """
        logs, cosines = self._caps
        return float(np.interp(math.log(max(kappa, KAPPA_RANGE[0])), logs, cosines))

    @cached_property
    def _caps(self) -> tuple[np.ndarray, np.ndarray]:
        logs = np.linspace(math.log(KAPPA_RANGE[0]), math.log(KAPPA_RANGE[1]), _CAPS)
        return logs, credible_cosine(torch.from_numpy(np.exp(logs)), self.dimension).numpy()

    @cached_property
    def thresholds(self) -> models.SearchThresholds | None:
        """The thresholds of the calibration, and their promised error rates; None without a calibration."""
        return None if self.calibration is None else _thresholds(self.calibration)

    @cached_property
    def summary(self) -> models.CalibrationResponse | None:
        """Data for the web page: rates over thresholds, histogram of κ, reliability, and facts on the calibration."""
        calibration = self.calibration
        if calibration is None:
            return None
        known, contrast = calibration.detector.conformal_scores("kappa"), calibration.match_probability.contrast
        kappas = [-ood_score for ood_score in reversed(_points(known.scores, -calibration.kappa_below))]
        reliability, accept_points = calibration.reliability, _accept_points(calibration)
        false_accepts, recall = calibration.false_accepts, calibration.recall
        return models.CalibrationResponse(
            threshold=_thresholds(calibration),
            gallery_size=calibration.gallery_size,
            accept=calibration.accept,
            accept_name=describe_score(calibration.accept).name,
            share_without_match=None if contrast is None else contrast.share,
            false_accept=[
                models.FalseAcceptPoint(threshold=at, rate=false_accepts.rate(at), recall=recall(at))
                for at in accept_points
            ],
            false_flag=[models.FalseFlagPoint(kappa=at, rate=known.rate(-at)) for at in kappas],
            kappa=models.HistogramFields(counts=calibration.kappa.counts, edges=calibration.kappa.edges),
            reliability=models.ReliabilityFields(
                confidence=reliability.confidence.tolist(),
                accuracy=reliability.accuracy.tolist(),
                count=reliability.count.tolist(),
            ),
            depth=calibration.depth,
            facts=calibration.facts,
        )

    def _doubt(self, embedding: Embeddings) -> dict[str, Any]:
        """Why a query is uncertain; empty for an embedding that a client sent."""
        if self.ambiguity is None or not embedding.has_parts:
            return {}
        parts = {name: float(values[0]) for name, values in embedding.parts().items()}
        return {"doubt": self.ambiguity.doubts(embedding)[0], **parts}

    @cached_property
    def _verify_above(self) -> float | None:
        """The cosine above which two images match; None if the pairs are too few to promise a rate."""
        if self.calibration is None or self.calibration.verifier is None:
            return None
        impostors, far = self.calibration.verifier.impostors, self.calibration.targets.far
        return None if impostors.n_units < needed(far) else impostors.threshold(far)


def _is_accepted(decision: Decision | None, hit: ItemInfo, first: ItemInfo | models.Hit | None) -> bool | None:
    """Whether the query is a `match` and `hit` is `first` or has its label; None without decision or first hit."""
    if decision is None or first is None:
        return None
    return decision == "match" and (hit.id == first.id or (first.label != "" and hit.label == first.label))


def numbers_of(vector: bytes | None) -> list[float] | None:
    """A stored vector as a list of floats."""
    return None if vector is None else np.frombuffer(vector, np.float32).tolist()


def _thresholds(calibration: Calibration, decisions: SearchDecisions | None = None) -> models.SearchThresholds:
    """The thresholds that decided the first query of `decisions`; by default the thresholds of the calibration."""
    accept, above = calibration.accept, calibration.accept_above
    flag, flag_above = calibration.flag, calibration.flag_above
    if decisions is not None:
        accept, above = decisions.accept[0], float(decisions.accept_above[0])
        flag, flag_above = decisions.flagged_by[0], float(decisions.flag_above[0])
    return models.SearchThresholds(
        accept=accept,
        accept_above=above,
        flag=flag,
        flag_above=flag_above,
        kappa_below=calibration.kappa_below,
        **vars(calibration.targets),
    )


def _fields(decisions: SearchDecisions, min_probability: float) -> dict[str, Any]:
    decision, probability = decisions.decision[0], float(decisions.probability[0])
    return {
        "decision": "unknown" if decision == "match" and probability < min_probability else decision,
        "probability": probability,
        "known": float(decisions.p_known[0]),
        "right_if_known": float(decisions.right_if_known[0]),
        "accept": decisions.accept[0],
        "statistic": float(decisions.statistic[0]),
        "false_accept": float(decisions.false_accept[0]),
        "ood_score": float(decisions.ood_score[0]),
        "p_value": float(decisions.p_value[0]),
        "flagged_by": decisions.flagged_by[0],
    }


def _accept_points(calibration: Calibration) -> list[float]:
    """At most `_POINTS` rising thresholds: the one in use, half by false-accept rate (log scale), half by recall."""
    scores, right = calibration.false_accepts.scores.double(), calibration.acceptances[0].right_hits
    right, half = right[right.isfinite()], _POINTS // 4
    by_rate = len(scores) - torch.logspace(0, math.log10(max(1, len(scores) / 2)), half, dtype=torch.float64)
    shown = [scores[by_rate.round().long()], right.new_tensor([calibration.accept_above])]
    if len(right):
        shown.append(right[torch.linspace(0, len(right) - 1, half).round().long()])
    return torch.cat(shown).unique().tolist()


def _points(scores: torch.Tensor, in_force: float) -> list[float]:
    """At most `_POINTS` rising scores and the threshold `in_force`; half are even by rank, half are near the top."""
    count = len(scores)
    half = min(_POINTS // 2, count)
    evenly = torch.linspace(0, count - 1, half, dtype=torch.float64)
    crowding = count - torch.logspace(0, math.log10(count), half, dtype=torch.float64)
    shown = scores.double()[torch.cat([evenly, crowding]).round().long().clamp(0, count - 1)]
    return torch.cat([shown, shown.new_tensor([in_force])]).unique().tolist()
