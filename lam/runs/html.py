"""The report of a run: one self-contained HTML file without scripts.

Metrics have the keys of `metrics.json`; `lam.retrieval.metrics.registry` maps keys to names. The keys `seconds_STAGE`,
`tuned_...` and `corruption_...` have their own tables. The template is `report.html.jinja`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lam.retrieval.metrics.registry import METRICS, OWN, Direction, Key, Metric, describe, shown_in
from lam.retrieval.metrics.scores import SCORES, describe_score
from lam.utils.files import write_text
from lam.utils.pages import figure, rendered

_APART = _SECONDS, _TUNED, _CORRUPTION = "seconds_", "tuned_", "corruption_"
_PREVALENCE = "prevalence"
_NO_MATCH = "no_match_auprc"
_CORRUPTED = {"recall@1": describe("recall@1").name, "kappa": "median κ"}
_TRENDS = {"trend": "trend of κ"} | {
    f"trend_{score}": f"of {SCORES[score].short}"
    for score in ("cosine", "kappa_epistemic", "kappa_aleatoric", "p_known")
}
Values = Mapping[str, float | int | None]


@dataclass(frozen=True)
class Plot:
    """A PNG file for the report, with a heading and a caption."""

    title: str
    caption: str
    path: Path


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

    Args:
        path, title, plots, configuration, notes: the file, and the parts of the page.
        metrics: values by the keys of `metrics.json`; None or NaN if a metric is undefined.
        ood_score, ood_set: names of the encoder's own score and of the main OOD set, which the keys of `metrics` omit.
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
