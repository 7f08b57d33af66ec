"""Used by adapters of text libraries: predictions for texts, and P(right), the probability that a hit is right."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from lam.encoders.base import Encoder, Prediction
from lam.gallery.embed import BATCH, preprocessing_of
from lam.gallery.item import Item
from lam.inputs import TextPreprocessing
from lam.retrieval.decisions.abstention import Decision, SearchDecisions
from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.index.hits import Hits, label_numbers
from lam.utils.checks import check_at_least

OnUnknown = Literal["return", "empty", "raise"]
_MISSING = "nan", "NaT", "<NA>"  # what NumPy and pandas write for a missing value


class UnknownQueryError(ValueError):
    """The decision on a query is not `match`, and the caller asked for an error."""


@dataclass(frozen=True)
class Judgement:
    """The answer to one query.

    Attributes:
        decision: match, unknown or abstain.
        kappa: κ of the query.
        probabilities: P(right) of each of the first k hits.
    """

    decision: Decision
    kappa: float
    probabilities: list[float]

    @property
    def facts(self) -> list[dict[str, Any]]:
        """For each of the first k hits, fields for its metadata: decision, P(right) and the query's κ."""
        same = {"decision": self.decision, "kappa": self.kappa}
        return [{**same, "probability": probability} for probability in self.probabilities]

    def is_shown(self, on_unknown: OnUnknown) -> bool:
        """Whether to return the hits; if the decision is not `match`, "raise" raises an `UnknownQueryError`."""
        if self.decision == "match" or on_unknown == "return":
            return True
        if on_unknown == "raise":
            raise UnknownQueryError(f"the query is answered {self.decision!r}: there is no sure answer to it")
        return False


def fields_of(item: Item) -> dict[str, Any]:
    """Metadata and label of an item, without its text."""
    fields = {**json.loads(item.metadata), "label": item.label}
    return {name: value for name, value in fields.items() if name != "text"}


def label_of(fields: Mapping[str, Any], name: str) -> str:
    """The label in this field of the metadata; empty without one. The number 0 is a label, NaN is a missing label."""
    label = fields.get(name)
    is_missing = label is None or (not isinstance(label, str) and str(label) in _MISSING)
    return "" if is_missing else str(label)


def text_encoder(encoder: Encoder) -> Encoder:
    """The encoder; a `ValueError` if it takes images, or has no preprocessing."""
    preprocessing_of(encoder, TextPreprocessing)
    return encoder


def predict_texts(encoder: Encoder, texts: Sequence[str], *, n_samples: int | None = None) -> Prediction:
    """Features and embeddings of one or more texts; a `ValueError` names the first empty text."""
    preprocessing = preprocessing_of(encoder, TextPreprocessing)
    inputs: list[Tensor] = []
    for number, text in enumerate(texts):
        try:
            inputs.append(preprocessing(text))
        except ValueError as error:
            raise ValueError(f"text {number}: {error}" if len(texts) > 1 else str(error)) from None
    return encoder.predict(torch.stack(inputs).split(BATCH), n_samples=n_samples)


def judge_each(
    calibration: Calibration,
    query: Prediction,
    cosines: Float[Tensor, " N"],
    labels: Sequence[str],
    *,
    k: int,
    gallery_size: int | None = None,
) -> Judgement:
    """The decision on a query, and P(right) of each of its first k hits.

    All hits of a label have the same P(right). For the label of the first hit, P(right) is the calibrated probability.
    A later label is right only if all earlier labels are wrong. So P(right) of a later label has two factors: 1 − Σ
    P(right) over the earlier labels, and the calibrated probability of a search without the hits of these labels. A hit
    without a label counts as the only hit of a label.

    Args:
        calibration: calibration of the encoder on the gallery.
        cosines: (N,) cosines of the hits, best first: at least 50 hits, or all items of the gallery.
        labels: N labels of the hits, empty for a hit without a label.
        k: number of hits to judge.
        gallery_size: number of items in the gallery; None for N.

    Raises:
        ValueError: for k below 1, and as `Calibration.decide`.
    """
    check_at_least("k", k, 1)
    size = len(labels) if gallery_size is None else gallery_size
    numbers, everything = label_numbers([labels]), torch.arange(len(labels))

    def decided(rest: Tensor, size: int) -> SearchDecisions:
        scores = cosines[rest][None]
        hits = Hits(rest[None], scores, torch.full_like(scores, torch.nan))  # decisions do not use κ of hits
        return calibration.decide(
            hits, query.embeddings, features=query.features, labels=numbers[:, rest], gallery_size=size
        )

    first = decided(everything, size)
    if first.stale:
        warnings.warn(
            f"the searched gallery's size is {size}, but was {calibration.gallery_size} at calibration: probabilities "
            "hold within 20 % of that, so calibrate with a gallery like this one",
            stacklevel=4,
        )
    classes = [label or place for place, label in enumerate(labels)]
    probabilities: dict[str | int, float] = {}
    for label in classes[:k]:
        if label not in probabilities:
            rest = torch.tensor([place for place, other in enumerate(classes) if other not in probabilities])
            decisions = decided(rest, len(rest)) if probabilities else first
            left = max(0.0, 1 - sum(probabilities.values()))
            probabilities[label] = left * float(decisions.probability[0])
    kappa = float(query.embeddings.kappa[0])
    return Judgement(first.decision[0], kappa, [probabilities[label] for label in classes[:k]])
