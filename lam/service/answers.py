"""From hits to an answer: the decision, what it rests on, and the hits, as JSON has them. No HTTP, no threads."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from lam.gallery.item import Images, Item, checked_metadata, content_id, packed
from lam.gallery.store import HitInfo
from lam.retrieval.decisions.abstention import Decision, SearchDecisions
from lam.retrieval.decisions.calibration import Calibration, credible_cosine
from lam.retrieval.decisions.conformal import needed
from lam.retrieval.index.hits import Hits, label_numbers
from lam.retrieval.metrics.hit_scores import N_HITS
from lam.retrieval.metrics.registry import describe_score
from lam.service.models import (
    CalibrationResponse,
    DecisionFields,
    DoubtFields,
    HitFields,
    SearchFields,
    SearchThresholds,
    State,
    UnseenFields,
    VerifyResponse,
)
from lam.tuning.ambiguity import Ambiguity
from lam.vmf.embeddings import KAPPA_RANGE, Embeddings

_PLAIN = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_POINTS = 200
_CAPS = 2000


@dataclass(frozen=True)
class Query:
    """One thing that is looked for, or added.

    Attributes:
        embedding: of one item.
        features: (1, P) what k-NN compares; None where only an embedding was given.
        thumbnail: a small picture, where one was asked for.
        text: of a text, as much of it as becomes an input.
        text_cut: whether only the beginning of the text was read.
    """

    embedding: Embeddings
    features: Tensor | None = None
    thumbnail: bytes | None = None
    text: str | None = None
    text_cut: bool = False

    @property
    def kappa(self) -> float:
        """Its concentration."""
        return float(self.embedding.kappa[0])

    @property
    def capped(self) -> bool:
        """Whether κ is a bound, not an estimate."""
        return bool(self.embedding.capped[0])

    def to_item(self, item_id: str | None, *, label: str, metadata: str, file: bytes | None = None) -> Item:
        """Make an item of it.

        Args:
            item_id: its id; None for its content as its id.
            label: what it shows.
            metadata: JSON; a text is added to them.
            file: the image; None of a text, or where only an embedding was given: these then are the content.

        Raises:
            Refusal: where metadata and text together are too long.
        """
        mean = self.embedding.mean[0].detach().cpu().double()
        vector = (mean / mean.norm()).float().numpy().tobytes()
        if self.text is not None:
            file, metadata = self.text.encode(), checked_metadata({**json.loads(metadata), "text": self.text})
        content = content_id(vector if file is None else file)
        item_id = str(content) if item_id is None else item_id
        images = Images(contents=packed([content]))
        return Item(item_id, vector, self.kappa, label, metadata, self.thumbnail, images=images)


@dataclass(frozen=True)
class Answer:
    """What is said of one query.

    Attributes:
        decision: None where the run is not calibrated.
        kappa: of the query.
        text: all of it, as JSON.
    """

    decision: Decision | None
    kappa: float
    text: str = field(repr=False)


@dataclass(frozen=True)
class Responder:
    """Decides by a calibration, or says that there is none.

    Attributes:
        calibration: of the run.
        dimension: of the sphere that κ is of.
        ambiguity: says in words why a query is uncertain; None where the encoder has not learnt it.
    """

    calibration: Calibration | None
    dimension: int
    ambiguity: Ambiguity | None = None

    def state(self, size: int) -> State:
        """Whether the rates hold for a gallery of this size: `none`, `current` or `stale`."""
        if self.calibration is None:
            return "none"
        return "stale" if self.calibration.is_stale(size) else "current"

    def is_uncertain(self, kappa: float) -> bool | None:
        """Whether an image is too uncertain to be enrolled without a second look; None where nobody knows.

        Of an item it is told by its least κ, so that one which holds an uncertain image is uncertain.
        """
        return None if self.calibration is None else kappa < self.calibration.kappa_below

    def answer(
        self,
        query: Query,
        hits: Hits,
        infos: Mapping[int, HitInfo],
        *,
        k: int,
        size: int,
        min_probability: float = 0.0,
        judged: bool = True,
        is_new: bool = True,
    ) -> Answer:
        """Answer a search.

        Args:
            query: what was looked for.
            hits: of it alone; as many as a decision rests on, or k, if that is more.
            infos: what the hits are.
            k: how many hits to give.
            size: of the gallery.
            min_probability: that a match must have.
            judged: whether to decide, as of queries like those calibrated on; otherwise only hits are given.
            is_new: whether the query is no item of the gallery.
        """
        calibration = self.calibration if judged else None
        if calibration is not None and query.features is None:
            calibration = calibration.for_vectors
        if calibration is not None and hits.ids.shape[1] == 0:
            calibration = calibration.for_hitless
        ranked = [infos[key] for key in hits.ids[0].tolist()]
        labels = label_numbers([[hit.label for hit in ranked]])
        if calibration is not None and (labels[:, :N_HITS] < 0).any():
            calibration = calibration.for_unlabelled
        decided = _decided(calibration, query, hits, labels)
        verdict = _verdict(decided, min_probability)
        is_match, first = verdict["decision"] == "match", ranked[0].label if ranked else ""
        cap = self.credible_cosine(query.kappa)
        sets = _conformal(calibration, hits)
        rows = zip(ranked, hits.scores[0].tolist(), hits.kappa[0].tolist(), sets, strict=True)
        texts = [
            as_json(
                HitFields(
                    id=hit.id,
                    score=score,
                    kappa=kappa,
                    label=hit.label,
                    images=hit.images,
                    resultant=hit.resultant,
                    uncertain=self.is_uncertain(hit.least_kappa),
                    thumbnail=thumbnail_path(hit.id) if hit.has_thumbnail else None,
                    accepted=None
                    if decided is None
                    else is_match and (place == 0 or (first != "" and hit.label == first)),
                    credible=score >= cap,
                    conformal=conformal,
                ),
                metadata=hit.metadata,
            )
            for place, (hit, score, kappa, conformal) in enumerate(islice(rows, k))
        ]
        body: SearchFields = {
            **verdict,
            "kappa": query.kappa,
            "kappa_capped": query.capped,
            **self._doubt(query.embedding),
            "text_cut": query.text_cut,
            "credible_cosine": cap,
            "unseen": _unseen(calibration if is_new else None, hits, first),
            "threshold": self.thresholds if calibration is None else _thresholds(calibration, decided),
            "calibration": self.state(size),
            "gallery_size": size,
        }
        return Answer(verdict["decision"], query.kappa, as_json(body, hits=f"[{','.join(texts)}]"))

    def verify(self, first: Query, second: Query) -> VerifyResponse:
        """Whether two show the same thing, at the false-accept rate of pairs; see `Calibration.verify`.

        κ alone says whether they can be judged, whatever flag is in force for searches.
        """
        calibration, above = self.calibration, self._verify_above
        response: VerifyResponse = {
            "same": None,
            "decision": None,
            "probability": None,
            "far": None,
            "threshold": None,
            "score": float((first.embedding.mean.double() * second.embedding.mean.double()).sum(1).clamp(-1, 1)),
            "kappa": [first.kappa, second.kappa],
            "text_cut": [first.text_cut, second.text_cut],
        }
        if calibration is not None and above is not None:
            verified = calibration.verify(first.embedding, second.embedding)
            decision, far, ood = verified.decision[0], calibration.targets.far, calibration.targets.ood
            response["same"] = None if decision == "abstain" else decision == "match"
            response["decision"] = decision
            response["probability"] = float(verified.probability[0])
            response["far"] = far
            response["threshold"] = {
                "accept_above": above,
                "kappa_below": calibration.kappa_below,
                "far": far,
                "ood": ood,
            }
        return response

    def credible_cosine(self, kappa: float) -> float:
        """The cosine of a query's credible cap, which for one dimension depends on κ alone.

        Interpolated between concentrations that are computed once, to 1e-4: by itself it takes longer than a search.
        """
        logs, cosines = self._caps
        return float(np.interp(math.log(max(kappa, KAPPA_RANGE[0])), logs, cosines))

    @cached_property
    def _caps(self) -> tuple[np.ndarray, np.ndarray]:
        logs = np.linspace(math.log(KAPPA_RANGE[0]), math.log(KAPPA_RANGE[1]), _CAPS)
        return logs, credible_cosine(torch.from_numpy(np.exp(logs)), self.dimension).numpy()

    @cached_property
    def thresholds(self) -> SearchThresholds | None:
        """What is in force for images, and the error rates that it promises."""
        return None if self.calibration is None else _thresholds(self.calibration)

    @cached_property
    def summary(self) -> CalibrationResponse | None:
        """What the page shows: rates over thresholds, the histogram of κ, reliability, and how it was calibrated."""
        calibration = self.calibration
        if calibration is None:
            return None
        known, contrast = calibration.detector.conformal_scores("kappa"), calibration.match_probability.contrast
        kappas = [-ood_score for ood_score in reversed(_points(known.scores, -calibration.kappa_below))]
        return {
            "threshold": self.thresholds,
            "gallery_size": calibration.gallery_size,
            "accept": calibration.accept,
            "accept_name": describe_score(calibration.accept).name,
            "share_without_match": None if contrast is None else contrast.share,
            "false_accept": [
                {"threshold": at, "rate": calibration.false_accepts.rate(at), "recall": calibration.recall(at)}
                for at in _accept_points(calibration)
            ],
            "false_flag": [{"kappa": at, "rate": known.rate(-at)} for at in kappas],
            "kappa": {"counts": list(calibration.kappa.counts), "edges": list(calibration.kappa.edges)},
            "reliability": {
                "confidence": _numbers(calibration.reliability.confidence),
                "accuracy": _numbers(calibration.reliability.accuracy),
                "count": calibration.reliability.count.tolist(),
            },
            "depth": calibration.depth,
            "facts": calibration.facts,
        }

    def _doubt(self, embedding: Embeddings) -> DoubtFields:
        """Why a query is uncertain; None each where nothing is known of that, as of an embedding without its input."""
        if self.ambiguity is None or not embedding.has_parts:
            return {"doubt": None, "p_known": None, "kappa_aleatoric": None, "kappa_epistemic": None}
        parts = {name: float(values[0]) for name, values in embedding.parts().items()}
        return {
            "doubt": self.ambiguity.doubts(embedding)[0],
            "p_known": parts["p_known"],
            "kappa_aleatoric": parts["kappa_aleatoric"],
            "kappa_epistemic": parts["kappa_epistemic"],
        }

    @cached_property
    def _verify_above(self) -> float | None:
        """The cosine above which two images show the same; None where too few pairs were seen to promise a rate."""
        if self.calibration is None or self.calibration.verifier is None:
            return None
        impostors, far = self.calibration.verifier.impostors, self.calibration.targets.far
        return None if len(impostors) < needed(far) else impostors.threshold(far)


def _numbers(values: Tensor) -> list[float | None]:
    """Numbers as JSON has them, which has no NaN."""
    return [None if math.isnan(value) else value for value in values.tolist()]


def thumbnail_path(item_id: str) -> str:
    """Where the thumbnail of an item is."""
    return f"/v1/items/{quote(item_id, safe=':@+=')}/thumbnail"


def as_json(known: Mapping[str, Any], **texts: str) -> str:
    """Write an object as JSON.

    Args:
        known: what it holds.
        texts: what it holds that is JSON already, and goes in as it is: it was checked when it was stored, and to read
            and write it again takes longer than a search.

    Example:
        >>> as_json({"id": "é"}, metadata='{"a": [1]}')
        '{"id":"é","metadata":{"a": [1]}}'
    """
    plain = _PLAIN.encode(known)[1:-1]
    return f"{{{','.join(filter(None, [plain, *(f'{json.dumps(name)}:{text}' for name, text in texts.items())]))}}}"


def _thresholds(calibration: Calibration, decided: SearchDecisions | None = None) -> SearchThresholds:
    """What is in force; of a decision, for its query."""
    accept_above = calibration.accept_above if decided is None else float(decided.accept_above[0])
    return {
        "accept": calibration.accept if decided is None else decided.accept[0],
        "accept_above": accept_above if math.isfinite(accept_above) else None,
        "flag": calibration.flag,
        "flag_above": calibration.flag_above,
        "kappa_below": calibration.kappa_below,
        "far": calibration.targets.far,
        "ood": calibration.targets.ood,
        "conformal_miss": calibration.targets.conformal_miss,
        "wrong": calibration.targets.wrong,
    }


def _decided(calibration: Calibration | None, query: Query, hits: Hits, labels: Tensor) -> SearchDecisions | None:
    if calibration is None:
        return None
    size = len(labels[0])  # all that there are to decide by: an item that is searched for is not among its own hits
    return calibration.decide(hits, query.embedding, features=query.features, labels=labels, gallery_size=size)


def _verdict(decisions: SearchDecisions | None, min_probability: float) -> DecisionFields:
    if decisions is None:
        return {
            "decision": None,
            "probability": None,
            "known": None,
            "right_if_known": None,
            "accept": None,
            "statistic": None,
            "false_accept": None,
            "ood_score": None,
            "p_value": None,
            "flagged_by": None,
        }
    decision, probability = decisions.decision[0], float(decisions.probability[0])
    statistic = float(decisions.statistic[0])
    if decision == "match" and probability < min_probability:
        decision = "unknown"
    return {
        "decision": decision,
        "probability": probability,
        "known": float(decisions.p_known[0]),
        "right_if_known": float(decisions.right_if_known[0]),
        "accept": decisions.accept[0],
        "statistic": statistic if math.isfinite(statistic) else None,
        "false_accept": float(decisions.false_accept[0]),
        "ood_score": float(decisions.ood_score[0]),
        "p_value": float(decisions.p_value[0]),
        "flagged_by": decisions.flagged_by[0],
    }


def _unseen(calibration: Calibration | None, hits: Hits, label: str) -> UnseenFields | None:
    """Whether the query is of a class that the gallery does not hold, by its first hit, of this label."""
    if calibration is None or hits.ids.shape[1] == 0:
        return None
    (p_values,) = calibration.unseen_p_values(hits.scores[:, 0], [label])
    return None if p_values is None else {"p_new": p_values[0], "p_in_gallery": p_values[1]}


def _conformal(calibration: Calibration | None, hits: Hits) -> list[bool | None]:
    """Which hits are of the set that holds a match at the promised rate; None each where no rate is promised."""
    k, depth = hits.scores.shape[1], None if calibration is None else calibration.depth
    return [None if depth is None else place < depth for place in range(k)]


def _accept_points(calibration: Calibration) -> list[float]:
    """At most so many rising thresholds, steps of what is at stake: of half of them the rate of false accepts falls by
    one factor from 1/2 to the least, of the others recall evenly to none; and the threshold in force.
    """
    right_hits = calibration.acceptances[0].right_hits
    scores, right = calibration.false_accepts.scores.double(), right_hits
    half, right = _POINTS // 4, right[right.isfinite()]
    by_rate = len(scores) - torch.logspace(0, math.log10(max(1, len(scores) / 2)), half, dtype=torch.float64)
    shown = [scores[by_rate.round().long()], right_hits.new_tensor([calibration.accept_above])]
    if len(right):
        shown.append(right[torch.linspace(0, len(right) - 1, half).round().long()])
    return torch.cat(shown).unique().tolist()


def _points(scores: torch.Tensor, in_force: float) -> list[float]:
    """At most so many rising scores: half evenly by rank, half crowding at the high end, and the threshold in force."""
    count = len(scores)
    half = min(_POINTS // 2, count)
    evenly = torch.linspace(0, count - 1, half, dtype=torch.float64)
    crowding = count - torch.logspace(0, math.log10(count), half, dtype=torch.float64)
    shown = scores.double()[torch.cat([evenly, crowding]).round().long().clamp(0, count - 1)]
    return torch.cat([shown, shown.new_tensor([in_force])]).unique().tolist()
