"""From hits to an answer: the decision, what it rests on, and the hits, as JSON has them. No HTTP, no threads."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lam.embeddings import KAPPA_RANGE, Embeddings
from lam.retrieval.decisions import Decision
from lam.retrieval.hits import Hits
from lam.retrieval.threshold import Calibration, credible_cosine
from lam.service.gallery import Described
from lam.service.items import Images, Item, content_id, packed, thumbnail_path

_POINTS = 200
_CAPS = 2000


@dataclass(frozen=True)
class Query:
    """One thing that is looked for, or added.

    Attributes:
        embedding: of one item.
        features: (1, P) what k-NN compares; None where only an embedding was given.
        picture: a thumbnail, where one was asked for.
    """

    embedding: Embeddings
    features: Tensor | None = None
    picture: bytes | None = None

    @property
    def kappa(self) -> float:
        """Its concentration."""
        return float(self.embedding.kappa[0])

    @property
    def capped(self) -> bool:
        """Whether κ is a bound, not an estimate."""
        return bool(self.embedding.capped[0])

    def item(self, identity: str | None, *, label: str, metadata: str, file: bytes | None = None) -> Item:
        """Make an item of it.

        Args:
            identity: its id; None for its content as its id.
            label: what it shows.
            metadata: JSON.
            file: the image; None where only an embedding was given, which then is the content.
        """
        mean = self.embedding.mean[0].detach().cpu().double()
        vector = (mean / mean.norm()).float().numpy().tobytes()
        content = content_id(vector if file is None else file)
        name = content if identity is None else identity
        images = Images(contents=packed([int(content)]))
        return Item(name, vector, self.kappa, label, metadata, self.picture, images=images)


@dataclass(frozen=True)
class Answer:
    """What is said of one query.

    Attributes:
        decision: None where the run is not calibrated.
        kappa: of the query.
        body: all of it, as JSON.
    """

    decision: Decision | None
    kappa: float
    body: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Judge:
    """Decides by a calibration, or says that there is none.

    Attributes:
        calibration: of the run.
        dimension: of the sphere that κ is of.
    """

    calibration: Calibration | None
    dimension: int

    def state(self, size: int) -> str:
        """Say whether the rates hold for a gallery of this size: `none`, `current` or `stale`."""
        if self.calibration is None:
            return "none"
        return "stale" if self.calibration.is_stale(size) else "current"

    def poor(self, kappa: float) -> bool | None:
        """Tell whether an image is too poor to be enrolled without a second look; None where nobody knows.

        Of an item it is told by its least κ, so that one which holds a poor image is poor.
        """
        return None if self.calibration is None else kappa < self.calibration.kappa_below

    def answer(
        self, query: Query, hits: Hits, described: Mapping[int, Described], *, k: int, size: int, least: float = 0.0
    ) -> Answer:
        """Answer a search.

        Args:
            query: what was looked for.
            hits: of it alone; more than k, where k is 1.
            described: what the hits are; those that are not in it were deleted meanwhile.
            k: how many hits to give.
            size: of the gallery.
            least: the probability that a match must have.
        """
        verdict = self._verdict(query, hits, least)
        accept = -math.inf if self.calibration is None else self.calibration.accept_above
        cap = self.credible_cosine(query.kappa)
        rows = zip(hits.ids[0].tolist(), hits.scores[0].tolist(), hits.kappa[0].tolist(), strict=True)
        shown = [
            {
                "id": described[key].id,
                "score": score,
                "kappa": kappa,
                "label": described[key].label,
                "metadata": json.loads(described[key].metadata),
                "images": described[key].images,
                "resultant": described[key].resultant,
                "poor": self.poor(described[key].least_kappa),
                "thumbnail": thumbnail_path(described[key].id) if described[key].pictured else None,
                "accepted": None if self.calibration is None else score > accept,
                "credible": score >= cap,
            }
            for key, score, kappa in rows
            if key in described
        ][:k]
        body = verdict | {
            "kappa": query.kappa,
            "kappa_capped": query.capped,
            "credible_cosine": cap,
            "threshold": self.thresholds,
            "calibration": self.state(size),
            "gallery_size": size,
            "hits": shown,
        }
        return Answer(verdict["decision"], query.kappa, body)

    def same(self, first: Query, second: Query) -> dict[str, Any]:
        """Say whether two images show the same thing, at the false-accept rate of pairs; see `Calibration.verify`."""
        made = self.calibration
        if made is None or made.verifier is None:
            score = float((first.embedding.mean[0].double() @ second.embedding.mean[0].double()).clamp(-1, 1))
            decision, probability = None, None
        else:
            verified = made.verify(first.embedding, second.embedding)
            decision, probability = verified.decision[0], float(verified.probability[0])
            score = float(verified.score[0])
        return {
            "same": None if decision in (None, "abstain") else decision == "match",
            "decision": decision,
            "probability": probability,
            "score": score,
            "far": None if decision is None or made is None else made.targets.far,
            "kappa": [first.kappa, second.kappa],
        }

    def credible_cosine(self, kappa: float) -> float:
        """Give the cosine of a query's credible cap, which for one dimension depends on κ alone.

        Interpolated between concentrations that are computed once, to 1e-4: by itself it takes longer than a search.
        """
        logs, cosines = self._caps
        return float(np.interp(math.log(max(kappa, KAPPA_RANGE[0])), logs, cosines))

    @cached_property
    def _caps(self) -> tuple[np.ndarray, np.ndarray]:
        logs = np.linspace(math.log(KAPPA_RANGE[0]), math.log(KAPPA_RANGE[1]), _CAPS)
        kappa = torch.from_numpy(np.exp(logs))
        mean = torch.eye(1, self.dimension, dtype=torch.float64).expand(len(kappa), -1)
        return logs, credible_cosine(Embeddings(mean, kappa, torch.ones_like(kappa), torch.zeros_like(kappa))).numpy()

    @cached_property
    def thresholds(self) -> dict[str, Any] | None:
        """What is in force, and the error rates that it promises."""
        made = self.calibration
        if made is None:
            return None
        return {
            "accept_above": made.accept_above,
            "flag": made.flag,
            "flag_above": made.flag_above,
            "kappa_below": made.kappa_below,
            "far": made.targets.far,
            "ood": made.targets.ood,
        }

    @cached_property
    def described(self) -> dict[str, Any] | None:
        """What the page shows: rates over thresholds, the histogram of κ, reliability, and how it was made."""
        made = self.calibration
        if made is None:
            return None
        cosines = _points(made.false_accepts.scores, made.accept_above)
        kappas = [-surprise for surprise in reversed(_points(made.flags.kappa.scores, -made.kappa_below))]
        return {
            "threshold": self.thresholds,
            "gallery_size": made.gallery_size,
            "false_accept": [{"cosine": at, "rate": made.false_accept_rate(at)[0]} for at in cosines],
            "false_flag": [{"kappa": at, "rate": made.false_flag_rate(at)[0]} for at in kappas],
            "kappa": {"counts": made.kappa.counts.tolist(), "edges": made.kappa.edges.tolist()},
            "reliability": {
                name: [None if math.isnan(value) else value for value in values.tolist()]
                for name, values in vars(made.reliability).items()
            },
            "depth": made.depth,
            "facts": made.facts,
        }

    def _verdict(self, query: Query, hits: Hits, least: float) -> dict[str, Any]:
        made = self.calibration
        if made is None:
            return {"decision": None, "probability": None, "surprise": None, "p_value": None, "flagged_by": None}
        if made.flag != "kappa" and query.features is None:
            made = replace(made, flag="kappa")  # an embedding comes without features: κ alone can flag it
        features = None if made.flag == "kappa" else query.features
        found = hits.scores.shape[1]  # two or more, or all there were when it was searched
        decided = made.decide(hits, query.embedding, features=features, gallery_size=found)
        decision, probability = decided.decision[0], float(decided.probability[0])
        if decision == "match" and probability < least:
            decision = "unknown"
        return {
            "decision": decision,
            "probability": probability,
            "surprise": float(decided.surprise[0]),
            "p_value": float(decided.p_value[0]),
            "flagged_by": made.flag,
        }


def _points(scores: torch.Tensor, in_force: float) -> list[float]:
    """At most so many rising scores: half evenly by rank, half crowding at the high end, and the threshold in force."""
    count = len(scores)
    half = min(_POINTS // 2, count)
    evenly = torch.linspace(0, count - 1, half, dtype=torch.float64)
    crowding = count - torch.logspace(0, math.log10(count), half, dtype=torch.float64)
    shown = scores.double()[torch.cat([evenly, crowding]).round().long().clamp(0, count - 1)]
    return torch.cat([shown, shown.new_tensor([in_force])]).unique().tolist()
