"""The report of a run: plots, and one self-contained HTML file without scripts.

Metrics have the keys of `metrics.json`; `lam.retrieval.metrics.registry` maps keys to names. The keys `seconds_STAGE`,
`tuned_...` and `corruption_...` have their own tables. The template is `report.html.jinja`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lam.datasets import Dataset, Splits, Texts
from lam.encoders import BayesianEncoder, Encoder
from lam.evaluation import Evaluation
from lam.retrieval import SCORES, rank
from lam.retrieval.metrics import plots
from lam.retrieval.metrics.extremes import plot_extremes
from lam.retrieval.metrics.registry import METRICS, OWN, Direction, Key, Metric, describe, shown_in
from lam.retrieval.metrics.scores import describe_score
from lam.runs.corruption import CorruptionCurve
from lam.tuning.ambiguity import SEVERAL, UNSEEN, Doubt
from lam.utils.files import write_text
from lam.utils.pages import figure, rendered

_APART = _SECONDS, _TUNED, _CORRUPTION = "seconds_", "tuned_", "corruption_"
_PREVALENCE = "prevalence"
_NO_MATCH = "no_match_auprc"
_CORRUPTED = {"recall@1": describe("recall@1").name, "kappa": "median κ"}
_TRENDS = {"trend": "trend of κ", "trend_cosine": "of the cosine"} | {
    f"trend_{score}": f"of {SCORES[score].short}" for score in ("kappa_epistemic", "kappa_aleatoric", "p_known")
}
Values = Mapping[str, float | int | None]


@dataclass(frozen=True)
class Plot:
    """A PNG file for the report, with a heading and a caption."""

    title: str
    caption: str
    path: Path


def write_plots_and_report(
    folder: Path,
    configuration: Mapping[str, Any],
    metrics: Mapping[str, Any],
    encoder: Encoder,
    evaluation: Evaluation,
    corrupted: Mapping[str, CorruptionCurve],
    splits: Splits,
    ood: Mapping[str, Dataset],
) -> list[Path]:
    """Write plots/*.png and report.html of an evaluated run; return the paths of the plots."""
    (folder / "plots").mkdir(exist_ok=True)
    pictures = list(_plots(folder / "plots", encoder, evaluation, corrupted, splits.test, ood))
    data, method = configuration["data"]["name"], configuration["method"]["name"]
    write_report(
        folder / "report.html",
        title=f"{data}: {method}",
        metrics=metrics,
        plots=pictures,
        configuration=configuration,
        notes=[*_notes(encoder, evaluation, metrics, splits.test), *splits.notes],
        ood_score=evaluation.primary,
        ood_set=next(iter(evaluation.ood_scores), ""),
    )
    return [plot.path for plot in pictures]


def _plots(
    folder: Path,
    encoder: Encoder,
    evaluation: Evaluation,
    corrupted: Mapping[str, CorruptionCurve],
    test: Dataset,
    ood: Mapping[str, Dataset],
) -> Iterator[Plot]:
    """Draw the plots of an evaluation into a folder, in the order of the report."""

    def draw_plot(title: str, caption: str, name: str, draw: Callable[..., None], *values: Any, **options: Any) -> Plot:
        draw(folder / f"{name}.png", *values, **options)
        return Plot(title, caption, folder / f"{name}.png")

    answerable = evaluation.answerable
    scores = {SCORES[name].short: values for name, values in evaluation.scores.items()}
    if answerable.any():
        caption = (
            "Accuracy of the remaining queries after the most uncertain are dropped. A rising curve means that the "
            "uncertainty detects wrong answers."
        )
        correct = evaluation.correct[answerable]
        ranked = {name: (correct, values[answerable]) for name, values in scores.items()}
        yield draw_plot("Sparsification", caption, "sparsification", plots.plot_sparsification, ranked)
    if evaluation.reliability is not None:
        caption = "Share of right answers against confidence, the share of samples that agree."
        yield draw_plot("Calibration", caption, "calibration", plots.plot_reliability, evaluation.reliability)
    if encoder.has_kappa:
        title, caption = "Most and least certain", "Queries by κ, each above its first hit."
        yield draw_plot(title, caption, "extremes", _draw_extremes, evaluation, test, {})
    if encoder.has_kappa and ood:
        title = "Most and least certain, with OOD items"
        caption = "Queries and OOD items by κ; OOD items should be the least certain."
        yield draw_plot(title, caption, "extremes_ood", _draw_extremes, evaluation, test, ood)
    if answerable.any() and not answerable.all():
        title, positives = "Precision-recall of no match", "queries without a match"
        caption = "Detection of queries without a match in the gallery. The line is their share."
        parted = {name: (values[answerable], values[~answerable]) for name, values in scores.items()}
        yield draw_plot(title, caption, "no_match", plots.plot_precision_recall, parted, positives=positives)
    kappa = {"in distribution": evaluation.embeddings.kappa}
    kappa |= {name: embeddings.kappa for name, embeddings in evaluation.ood_embeddings.items()}
    caption = "How certain each embedding is; small κ means uncertain."
    yield draw_plot("Concentration κ", caption, "kappa", plots.plot_kappa, kappa)
    for name, outside in evaluation.ood_scores.items():
        against = {SCORES[score].short: (values, outside[score]) for score, values in evaluation.scores.items()}
        caption = "OOD is the positive class; one curve for each score."
        yield draw_plot(f"ROC against {name}", caption, f"roc_{name}", plots.plot_roc, against)
        title, caption = f"Precision-recall against {name}", "The line is the prevalence of OOD."
        yield draw_plot(title, caption, f"precision_recall_{name}", plots.plot_precision_recall, against)
    for number in range(0, len(corrupted), plots.MOST):
        some = list(corrupted.items())[number : number + plots.MOST]
        kappa = {kind: curve.median_kappa for kind, curve in some} if encoder.has_kappa else {}
        recall, name = {kind: curve.recall for kind, curve in some}, f"corruption{f'_{number}' if number else ''}"
        words = "κ should fall with recall; where it rises, it does not measure quality. "
        caption = f"{words if encoder.has_kappa else ''}The queries are corrupted, the gallery is not."
        yield draw_plot("Under corruption", caption, name, plots.plot_corruption, kappa, recall)
    if isinstance(encoder, BayesianEncoder) and (tuning := encoder.tuning) is not None:
        caption = (
            "Likelihood scales tried on the validation split. The band holds those with a score within one standard "
            "error (of the difference) of the best."
        )
        if tuning.remark:
            caption += f" {tuning.remark[0].upper()}{tuning.remark[1:]}."
        title = "Tuning of the posterior"
        yield draw_plot(
            title,
            caption,
            "tuning",
            plots.plot_tuning,
            scales=[trial.scale for trial in tuning.trials],
            scores=[trial.score for trial in tuning.trials],
            errors=[trial.error for trial in tuning.trials],
            eces=[trial.ece for trial in tuning.trials],
            interval=tuning.interval,
            chosen=tuning.likelihood_scale,
        )


def _draw_extremes(path: Path, evaluation: Evaluation, test: Dataset, ood: Mapping[str, Dataset]) -> None:
    """Draw the items with the largest and with the smallest κ among queries and OOD items."""
    n_queries = len(evaluation.queries)
    outside = [(name, images, row) for name, images in ood.items() for row in range(len(images))]
    shown = [*((test, int(row)) for row in evaluation.queries), *((images, row) for _, images, row in outside)]
    verdicts: list[bool | str] = [*evaluation.correct.tolist(), *(name for name, _, _ in outside)]
    embeddings = [evaluation.embeddings, *(evaluation.ood_embeddings[name] for name in ood)]
    mean, kappa = (torch.cat([getattr(part, name) for part in embeddings]) for name in ("mean", "kappa"))

    def image(items: Dataset, index: int) -> Tensor | str:
        if isinstance(items, Texts):
            return str(items.preview(index).text)
        return items.preprocessing.denormalize(items[index][0])

    def query_image(query: int) -> Tensor | str:
        return image(*shown[query])

    def hit_image(query: int) -> Tensor | str:
        if query < n_queries:
            return image(test, int(evaluation.hits[query, 0]))
        nearest, _ = rank(mean[query, None], evaluation.gallery.mean, k=1)
        return image(test, int(evaluation.candidates[nearest[0, 0]]))

    plot_extremes(path, kappa, verdicts.__getitem__, query_image=query_image, hit_image=hit_image)


def _notes(encoder: Encoder, evaluation: Evaluation, metrics: Mapping[str, Any], test: Dataset) -> Iterator[str]:
    """Sentences that help to read the metrics."""
    apart = not torch.equal(evaluation.candidates, evaluation.queries)
    if apart and isinstance(test, Texts):
        yield "The gallery holds every answer of the data, also those to training questions; the questions are new."
    else:
        gallery = "part of the test split that holds no query" if apart else "test split without the query itself"
        yield f"The gallery is the {gallery}; nothing was tuned on it."
    if evaluation.ood_scores:
        yield f"The main OOD set is {next(iter(evaluation.ood_scores))}."
    if evaluation.primary == "knn":
        yield (
            "The OOD score of this encoder is the k-NN distance: its head is an identity after a trained network, so "
            "its κ says little about the distance from the data."
        )
    if "kappa_on_altered" in metrics:
        kappa, variance = metrics["kappa_on_altered"], metrics["variance_on_altered"]
        better = "κ" if kappa >= variance else "the variance"
        yield (
            "κ detects altered validation images (inverted, with permuted pixels, blurred) with an AUROC of "
            f"{kappa:.3f}, the variance before normalisation with {variance:.3f}. Of these two scores, which need "
            f"neither training features nor hits, the encoder recommends {better}."
        )
    if skipped := metrics.get("batches_without_positives", 0):
        yield f"{skipped} batches of training held no positive pair and were skipped."
    if left_out := evaluation.metrics["n_without_relevant"]:
        yield f"Queries without a relevant item, left out of retrieval metrics: {left_out}."
    if capped := int(evaluation.embeddings.capped.sum()):
        yield f"{capped} of {len(evaluation.queries)} embeddings have a κ at an end of its range: only a bound."
    if encoder.ambiguity is None:
        return
    sets = {"queries": evaluation.embeddings, **evaluation.ood_embeddings}
    said = {name: encoder.ambiguity.doubts(embeddings) for name, embeddings in sets.items()}
    small: dict[Doubt, str] = {UNSEEN: "p_known", SEVERAL: "κ of ambiguity"}
    for doubt, part in small.items():
        shares = (f"{doubts.count(doubt) / len(doubts):.1%} of {name}" for name, doubts in said.items())
        yield f"A small {part} means “{doubt}”: {', '.join(shares)}."


def write_report(
    path: str | Path,
    *,
    title: str,
    metrics: Values,
    plots: Sequence[Plot] = (),
    configuration: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    ood_score: str = "kappa",
    ood_set: str = "main OOD set",
) -> None:
    """Write a report as one HTML file.

    `metrics` has the keys of `metrics.json`, and None or NaN for an undefined value. `ood_score` and `ood_set` are the
    encoder's own score and the main OOD set, which these keys omit.
    """
    values = {key: None if value is None or value != value else value for key, value in metrics.items()}
    seconds, tuned, corruption = (
        {key: value for key, value in values.items() if key.startswith(prefix)} for prefix in _APART
    )
    seconds = {key.removeprefix(_SECONDS): value for key, value in seconds.items() if value is not None}
    place = {name: number for number, name in enumerate(METRICS)}
    keys = (Key.parse(key) for key in values if not key.startswith(_APART))
    parsed = {key: values[str(key)] for key in sorted(keys, key=lambda key: place.get(key.metric, len(place)))}
    by_score = {key: METRICS[key.metric].by_score for key in parsed if key.metric in METRICS}
    ood = {key: value for key, value in parsed.items() if by_score.get(key) == OWN}
    answers = {key: value for key, value in parsed.items() if by_score.get(key) not in (None, OWN)}
    unseen = {key: value for key, value in answers.items() if key.ood_set}
    answers = {key: value for key, value in answers.items() if not key.ood_set}
    prevalence = {key.ood_set: value for key, value in parsed.items() if key.metric == _PREVALENCE}
    rest = {
        str(key): value
        for key, value in parsed.items()
        if key not in ood.keys() | unseen.keys() and key.metric != _PREVALENCE and not key.score
    }
    headings = {key.ood_set: _heading(key.ood_set or ood_set, prevalence.get(key.ood_set)) for key in ood}
    page = rendered(
        Path(__file__).with_name("report.html.jinja"),
        title=title,
        tiles=_described({key: values[key] for key in shown_in("tile") if key in values}),
        notes=notes,
        metrics=_described(rest),
        answers=_score_table(answers) if any(key.score for key in answers) else None,
        has_no_match=any(key.metric == _NO_MATCH for key in answers),
        unseen=_score_table(unseen) if unseen else None,
        ood=_score_table(ood, ood_score, headings) if ood else None,
        tuned=_described(tuned),
        corruption=_corruption_table(corruption),
        plots=[figure(plot.title, plot.caption, plot.path.read_bytes()) for plot in plots],
        seconds=seconds,
        longest=max([*seconds.values(), 1e-9]),
        options=list(_flat(configuration or {})),
    )
    write_text(path, page)


def _described(values: Values) -> list[tuple[Metric, float | int | None]]:
    return [(describe(key), value) for key, value in values.items()]


def _heading(ood_set: str, prevalence: float | int | None) -> str:
    return ood_set.replace("_", " ") + ("" if prevalence is None else f" (prevalence {prevalence:.3f})")


def _score_table(
    values: Mapping[Key, float | int | None], own: str = "", headings: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A table with a row for each score and a column for each metric and OOD set; the best values are marked."""
    cells: dict[tuple[str, str], dict[str, float | int | None]] = {}
    for (metric, score, ood_set), value in values.items():
        by = METRICS[metric].by_score
        cells.setdefault((ood_set, metric), {})[score or (own if by == OWN else by) or ""] = value
    sets, metrics = (list(dict.fromkeys(column[axis] for column in cells)) for axis in (0, 1))
    columns = [(cells.get((ood_set, metric), {}), metric) for ood_set in sets for metric in metrics]
    scores = list(dict.fromkeys(score for column, _ in columns for score in column))
    marked = [_marked([column.get(score) for score in scores], METRICS[metric].direction) for column, metric in columns]
    return {
        "groups": [(heading, len(metrics)) for heading in (headings or {}).values()],
        "columns": [f"{METRICS[metric].name} {METRICS[metric].reading[:1]}" for metric in metrics] * len(sets),
        "rows": [(describe_score(score).name, row) for score, *row in zip(scores, *marked, strict=True)],
    }


def _marked(values: Sequence[float | int | None], direction: Direction) -> list[tuple[float | int | None, bool]]:
    """The values of a column, and whether each is the best; a single value is not marked."""
    known = [value for value in values if value is not None]
    choose = None if direction == "neither" else min if direction == "lower" else max
    best = choose(known) if choose is not None and known and len(values) > 1 else None
    return [(value, value is not None and value == best) for value in values]


def _corruption_table(values: Values) -> dict[str, Any] | None:
    """A table with a row for each kind: recall and median κ at every severity, and the trend of κ."""
    cells = {key.removeprefix(_CORRUPTION): value for key, value in values.items()}
    kinds = list(dict.fromkeys(key.partition("_")[0] for key in cells if not key.startswith("clean")))
    severities = list(dict.fromkeys(key.split("_")[1] for key in cells if key.split("_")[1].isdigit()))
    measures = {name: words for name, words in _CORRUPTED.items() if f"clean_{name}" in cells}
    trends = [trend for trend in _TRENDS if any(key.endswith(f"_{trend}") for key in cells)]
    rows = [
        {
            "kind": kind,
            "cells": [
                cells[f"{step}_{measure}"]
                for measure in measures
                for step in ("clean", *(f"{kind}_{severity}" for severity in severities))
            ],
            "trends": [cells.get(f"{kind}_{trend}") for trend in trends],
        }
        for kind in kinds
    ]
    steps, headings = ["clean", *severities], [_TRENDS[trend] for trend in trends]
    return {"measures": list(measures.values()), "steps": steps, "rows": rows, "trends": headings} if cells else None


def _flat(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
