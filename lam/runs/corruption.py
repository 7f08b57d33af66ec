"""Corruption of texts, and curves of κ, the first cosine and recall over the severity.

`lam.inputs.corruption` corrupts images.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from lam.datasets import Dataset, Texts
from lam.encoders.base import Encoder
from lam.evaluation import Evaluation
from lam.inputs.corruption import KINDS, corrupt, published_kinds, strength_of
from lam.retrieval.metrics.registry import measure

TextKind = Literal["words", "typing"]
TEXT_KINDS: tuple[TextKind, ...] = get_args(TextKind)
TEXT_STRENGTHS: dict[TextKind, tuple[float, ...]] = {
    "words": (0.1, 0.2, 0.3, 0.4, 0.5),
    "typing": (0.02, 0.05, 0.1, 0.15, 0.2),
}
"""Probability that a word or a letter changes, at severities 1 to 5. `words` omits words, but keeps at least one.
`typing` omits, doubles or replaces a letter, or swaps it with the next character, with equal probabilities."""

BATCH = 100
SEVERITIES = 5
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def corruptions_of(items: Dataset, asked: Sequence[str] | str | None = None) -> tuple[str, ...]:
    """The kinds of corruption to measure: the `asked` kinds, "all", or for None the default of `EvaluationConfig`.

    Example:
        >>> from lam import datasets
        >>> corruptions_of(datasets.load("digits").test, ["fog", "snow"])
        ('fog', 'snow')
    """
    of_texts = isinstance(items, Texts)
    every: tuple[Any, ...] = TEXT_KINDS if of_texts else (*KINDS, *published_kinds(items.shape[0]))
    if asked is None:
        return TEXT_KINDS if of_texts else KINDS
    if asked == "all":
        return every
    kinds: tuple[Any, ...] = (asked,) if isinstance(asked, str) else tuple(asked)
    if not kinds or len(set(kinds)) < len(kinds) or not set(kinds) <= set(every):
        what = "texts" if of_texts else f"images of shape {items.shape}"
        raise ValueError(
            f"evaluation.corruptions of {what} must be all, or some of {', '.join(every)}, each once, "
            f"got {', '.join(kinds) or 'none'}"
        )
    return kinds


def corrupted_text(text: str, kind: TextKind, severity: int, *, generator: torch.Generator) -> str:
    """A corrupted text; arguments and errors as for `lam.inputs.corruption.corrupt`."""
    strength = strength_of(TEXT_STRENGTHS, kind, severity)
    if strength is None:
        return text
    parts = text.split() if kind == "words" else list(text)
    hit = (torch.rand(len(parts), generator=generator) < strength).tolist()
    if kind == "words":
        return " ".join(word for word, is_hit in zip(parts, hit, strict=True) if not is_hit) or parts[0]
    mistakes = torch.randint(4 * len(_LETTERS), (len(parts),), generator=generator).tolist()
    for place, (is_hit, mistake) in enumerate(zip(hit, mistakes, strict=True)):
        if not is_hit or not parts[place].isalpha():
            continue
        how, which = divmod(mistake, len(_LETTERS))
        if how == 3 and place + 1 < len(parts):
            parts[place : place + 2] = parts[place : place + 2][::-1]
        else:
            parts[place] = ("", 2 * parts[place], _LETTERS[which], parts[place])[how]
    return "".join(parts) if "".join(parts).strip() else text


@dataclass(frozen=True)
class CorruptionCurve:
    """κ, first hits and further scores (V, N) of N queries under one kind of corruption, at severities 0 to V − 1.

    The gallery is clean and leaves out the query itself. The scores are the cosine of the first hit and, if the encoder
    has learned its ambiguity, κ_e, κ_a and p_known.
    """

    kappa: Float[Tensor, "V N"]
    correct: Bool[Tensor, "V N"]
    scores: dict[str, Float[Tensor, "V N"]] = field(default_factory=dict)

    @property
    def recall(self) -> Float[Tensor, " V"]:
        """(V,) recall@1 at each severity."""
        return self.correct.double().mean(1)

    @property
    def median_kappa(self) -> Float[Tensor, " V"]:
        """(V,) median κ at each severity; of an even number of queries, the mean of the two middle values."""
        return self.kappa.double().quantile(0.5, dim=1)

    @property
    def trend(self) -> float:
        """Spearman's correlation of severity and κ, mean over queries; −1 if κ always falls, NaN if κ never changes."""
        return _trend(self.kappa)

    @property
    def trends(self) -> dict[str, float]:
        """The trends of `scores` by name."""
        return {name: _trend(values) for name, values in self.scores.items()}


def measure_corruption(
    encoder: Encoder,
    items: Dataset,
    evaluation: Evaluation,
    *,
    size: int,
    seed: int = 0,
    kinds: Sequence[str] | str | None = None,
) -> dict[str, CorruptionCurve]:
    """A curve for each kind of corruption, on the same queries of an evaluation; the gallery stays clean.

    At most `size` queries are drawn at random from queries with a match; without any, there is no curve. The seed
    determines the draw and the noise; `kinds` is as `asked` of `corruptions_of`.
    """
    generator = torch.Generator().manual_seed(seed)
    answerable = evaluation.answerable.nonzero()[:, 0].cpu()
    rows = answerable[torch.randperm(len(answerable), generator=generator)[:size]]
    if len(rows) == 0:
        return {}
    positions = evaluation.queries.cpu()[rows]
    relevant = evaluation.relevance.of_rows(rows)
    is_itself = positions[:, None] == evaluation.candidates.cpu()
    gallery = evaluation.gallery.mean.cpu()
    curves: dict[str, CorruptionCurve] = {}
    for kind, inputs_by_severity in worse_inputs(items, positions.tolist(), generator, kinds):
        embedded = [encoder.embed(list(inputs.split(BATCH))).to("cpu") for inputs in inputs_by_severity]
        cosines = (embeddings.mean @ gallery.T for embeddings in embedded)
        best = [values.masked_fill(is_itself, -torch.inf).max(1) for values in cosines]
        scores = [{"cosine": hit.values, **part.parts()} for hit, part in zip(best, embedded, strict=True)]
        curves[kind] = CorruptionCurve(
            torch.stack([embeddings.kappa for embeddings in embedded]),
            torch.stack([relevant.gather(1, hit.indices[:, None])[:, 0] for hit in best]),
            {name: torch.stack([values[name] for values in scores]) for name in scores[0]},
        )
    return curves


def worse_inputs(
    items: Dataset, positions: list[int], generator: torch.Generator, kinds: Sequence[str] | str | None = None
) -> Iterator[tuple[str, Iterator[Tensor]]]:
    """For each kind of corruption, the inputs at `positions` for severities 0 to 5."""
    preprocessing = items.preprocessing
    if isinstance(items, Texts):
        texts = [items.texts[row] for row in positions]

        def inputs(kind: Any, severity: int) -> Tensor:
            worse = (corrupted_text(text, kind, severity, generator=generator) for text in texts)
            return torch.stack([preprocessing(text) for text in worse])
    else:
        pixels = preprocessing.denormalize(torch.stack([items[row][0] for row in positions]))

        def inputs(kind: Any, severity: int) -> Tensor:
            return preprocessing.standardize(corrupt(pixels, kind, severity, generator=generator))

    for kind in corruptions_of(items, kinds):
        yield kind, (inputs(kind, severity) for severity in range(SEVERITIES + 1))


def corruption_metrics(curves: Mapping[str, CorruptionCurve], *, has_kappa: bool = True) -> dict[str, float | None]:
    """Metrics `corruption_...`: median κ and recall@1 by kind and severity, and trends of κ and other scores by kind.

    Crops add `crop_less_sure`: the share of queries whose κ is smaller for the smallest crop than for the whole image.
    """
    values: dict[str, float] = {}
    for kind, curve in curves.items():
        for severity, recall in enumerate(curve.recall.tolist()):
            name = f"{kind}_{severity}" if severity else "clean"
            values[f"{name}_recall@1"] = recall
            if has_kappa:
                values[f"{name}_kappa"] = float(curve.median_kappa[severity])
        if has_kappa:
            values[f"{kind}_trend"] = curve.trend
        values |= {f"{kind}_trend_{score}": trend for score, trend in curve.trends.items()}
    metrics = {f"corruption_{name}": None if math.isnan(value) else value for name, value in values.items()}
    if has_kappa and "crop" in curves:
        whole, *_, smallest = curves["crop"].kappa
        metrics |= measure({"kappa": whole, "kappa_of_crop": smallest})
    return metrics


def _trend(values: Float[Tensor, "V N"]) -> float:
    from scipy.stats import rankdata  # slow to import

    ranks = torch.from_numpy(rankdata(values.numpy(), axis=0)).T
    ranks = ranks - ranks.mean(1, keepdim=True)
    severity = torch.arange(len(values), dtype=torch.float64)
    ranks = ranks[ranks.any(1)]  # leaves out queries with constant κ
    return float(F.cosine_similarity(severity - severity.mean(), ranks, dim=1).mean())
