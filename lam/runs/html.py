"""One self-contained HTML file that shows what a run measured: no script, no other host, no other file.

Metrics come as flat keys, as in `metrics.json`. OOD keys have the form `auroc[_SCORE][@SET]`: `auroc` is that of the
encoder's own score, −κ for most, on the first OOD set, `auprc_knn@digits_held_out` that of another score on another
set; `prevalence[@SET]` belongs to them. `seconds_STAGE` are times. What the metrics mean is told in
`lam.runs.metric_names`.
"""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from lam.runs.metric_names import describe, name_of_score, word_on_direction
from lam.runs.report_style import STYLE
from lam.utils.files import write_text

_OOD = re.compile(r"(?P<metric>auroc|auprc|prevalence)(?:_(?P<score>[^@]+))?(?:@(?P<set>.+))?")
_HEADLINES = ("recall@1", "map@5", "ece", "ausc", "auroc", "auprc")
_SECONDS = "seconds_"
_TUNED, _CORRUPTION = "tuned_", "corruption_"
_PNG = b"\x89PNG\r\n\x1a\n"
_WIDE = 1.45  # a plot wider than this times its height takes a row of its own
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Plot:
    """A picture of the report.

    Attributes:
        title: its heading.
        caption: what it shows and how to read it.
        path: a PNG file, which is copied into the report.
    """

    title: str
    caption: str
    path: str | Path


def write_report(
    path: str | Path,
    *,
    title: str,
    metrics: Mapping[str, float | int | None],
    plots: Sequence[Plot] = (),
    configuration: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    ood_score: str = "kappa",
    ood_set: str = "main OOD set",
) -> None:
    """Write a report as one HTML file that needs nothing but a browser.

    Args:
        path: the file to write; its folder must exist.
        title: what was run.
        metrics: values by flat key; None or NaN where a metric is undefined.
        plots: pictures, in the order in which they are shown.
        configuration: the resolved configuration, nested as it is.
        notes: sentences on what a reader should know, such as what was left out.
        ood_score: the score whose keys name none.
        ood_set: the OOD set whose keys name none.

    Raises:
        ValueError: for a plot that is missing or no PNG file, naming it.
    """
    values = {key: None if value is None or value != value else value for key, value in metrics.items()}
    ood = {key: value for key, value in values.items() if _OOD.fullmatch(key)}
    seconds = {key.removeprefix(_SECONDS): v for key, v in values.items() if key.startswith(_SECONDS) and v is not None}
    tuned, corruption = (_starting(values, prefix) for prefix in (_TUNED, _CORRUPTION))
    apart = (_SECONDS, _TUNED, _CORRUPTION)
    rest = {key: v for key, v in values.items() if key not in ood and not key.startswith(apart)}
    body = [
        f"<h1>{escape(title)}</h1>",
        _tiles(values),
        _notes(notes),
        _section("Retrieval and calibration", _metric_table(rest) if rest else ""),
        _section("Out-of-distribution detection", _ood_table(ood, ood_score, ood_set) if ood else ""),
        _section("Tuning of the posterior", _metric_table(tuned) if tuned else ""),
        _section("Under corruption", _corruption_table(corruption) if corruption else ""),
        _section("Plots", f'<div class="plots">{"".join(map(_figure, plots))}</div>' if plots else ""),
        _section("Time", _time_table(seconds) if seconds else ""),
        _section("Configuration", _configuration(configuration) if configuration else ""),
    ]
    write_text(path, _page(title, "\n".join(filter(None, body))))


def _page(title: str, body: str) -> str:
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _section(heading: str, content: str) -> str:
    return f"<section>\n<h2>{heading}</h2>\n{content}\n</section>" if content else ""


def _tiles(values: Mapping[str, float | int | None]) -> str:
    tiles = [
        f'<div class="tile"><span>{escape(describe(key).name)}</span><b>{_number(values[key], 3)}</b>'
        f"<small>{word_on_direction(key)}</small></div>"
        for key in _HEADLINES
        if key in values
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _notes(notes: Sequence[str]) -> str:
    return f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>' if notes else ""


def _metric_table(values: Mapping[str, float | int | None]) -> str:
    rows = [
        f'<tr><th scope="row">{escape(describe(key).name)}</th><td class="number">{_number(value)}</td>'
        f'<td class="word">{word_on_direction(key)}</td><td class="meaning">{escape(describe(key).meaning)}</td></tr>'
        for key, value in values.items()
    ]
    head = '<th>metric</th><th class="number">value</th><th class="word">reading</th><th class="meaning">meaning</th>'
    return _table(f"<tr>{head}</tr>", rows)


def _ood_table(values: Mapping[str, float | int | None], ood_score: str, ood_set: str) -> str:
    """A row a score, two columns a set; the best of each column stands out."""
    cells: dict[tuple[str, str, str], float | int | None] = {}
    for key, value in values.items():
        found = _OOD.fullmatch(key)
        if found is not None:
            cells[found["set"] or "", found["score"] or "", found["metric"]] = value
    measured = [key for key in cells if key[2] != "prevalence"]
    sets, scores = (list(dict.fromkeys(key[axis] for key in measured)) for axis in (0, 1))
    columns = [(name, metric) for name in sets for metric in ("auroc", "auprc")]
    best = {c: max((v for s in scores if (v := cells.get((c[0], s, c[1]))) is not None), default=None) for c in columns}
    rows = []
    for score in scores:
        row = f'<tr><th scope="row">{escape(name_of_score(score or ood_score))}</th>'
        for column in columns:
            value = cells.get((column[0], score, column[1]))
            stands_out = " best" if value is not None and value == best[column] and len(scores) > 1 else ""
            row += f'<td class="number{stands_out}">{_number(value)}</td>'
        rows.append(row + "</tr>")
    top = "".join(
        f'<th scope="colgroup" colspan="2" class="number">{escape((name or ood_set).replace("_", " "))}'
        f"{_prevalence(cells.get((name, '', 'prevalence')))}</th>"
        for name in sets
    )
    below = "".join(f'<th class="number">{metric.upper()}</th>' for _, metric in columns)
    words = (
        "Items out of distribution are the positive class, and higher is better for both. AUROC is 0.5 for a useless "
        "score, AUPRC is the prevalence. The best score of each column stands out."
    )
    head = f"<tr><th></th>{top}</tr><tr><th>score</th>{below}</tr>"
    return f'<p class="muted">{words}</p>\n{_table(head, rows)}'


def _corruption_table(values: Mapping[str, float | int | None]) -> str:
    """A row a kind: recall and median κ at every severity, and how κ goes with it."""
    cells = {key.removeprefix(_CORRUPTION): value for key, value in values.items()}
    kinds = list(dict.fromkeys(key.partition("_")[0] for key in cells if not key.startswith("clean")))
    severities = list(dict.fromkeys(key.split("_")[1] for key in cells if key.split("_")[1].isdigit()))
    measures = [m for m in ("recall@1", "kappa") if f"clean_{m}" in cells]
    names = {"recall@1": "recall@1", "kappa": "median κ"}
    top = "".join(
        f'<th scope="colgroup" colspan="{len(severities) + 1}" class="number">{names[measure]}</th>'
        for measure in measures
    )
    below = "".join(f'<th class="number">{word}</th>' for word in ("clean", *severities)) * len(measures)
    trends = [f"{kind}_trend" for kind in kinds if f"{kind}_trend" in cells]
    trend = '<th class="number">trend of κ</th>' if trends else ""
    rows = []
    for kind in kinds:
        row = f'<tr><th scope="row">{escape(kind)}</th>'
        for measure in measures:
            for name in ("clean", *(f"{kind}_{severity}" for severity in severities)):
                value = cells[f"{name}_{measure}"]
                row += f'<td class="number">{_number(value, 3 if value is None or value < 10 else 1)}</td>'
        row += f'<td class="number">{_number(cells[f"{kind}_trend"], 2)}</td>' if trends else ""
        rows.append(row + "</tr>")
    words = "Some queries, corrupted at severities 1 to 3, in the gallery as it is. " + (
        "The trend is the rank correlation of severity and κ: −1 where κ falls with every step, as it should, +1 where "
        "it rises."
        if trends
        else ""
    )
    head = f"<tr><th></th>{top}<th></th></tr><tr><th>kind</th>{below}{trend}</tr>"
    return f'<p class="muted">{words}</p>\n{_table(head, rows)}'


def _starting(values: Mapping[str, float | int | None], prefix: str) -> dict[str, float | int | None]:
    return {key: value for key, value in values.items() if key.startswith(prefix)}


def _time_table(seconds: Mapping[str, float | int]) -> str:
    longest = max(max(seconds.values()), 1e-9)
    rows = [
        f'<tr><th scope="row">{escape(stage.replace("_", " "))}</th><td class="number">{_duration(value)}</td>'
        f'<td class="bar"><i style="width:{100 * value / longest:.1f}%"></i></td></tr>'
        for stage, value in seconds.items()
    ]
    return _table('<tr><th>stage</th><th class="number">time</th><th class="bar"></th></tr>', rows)


def _configuration(configuration: Mapping[str, Any]) -> str:
    rows = [
        f'<tr><th scope="row"><code>{escape(key)}</code></th><td class="value">{escape(value)}</td></tr>'
        for key, value in _flat(configuration)
    ]
    table = f"<table><tbody>{''.join(rows)}</tbody></table>"
    return f'<details class="card"><summary>{len(rows)} options, as resolved</summary>{table}</details>'


def _figure(plot: Plot) -> str:
    try:
        content = Path(plot.path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"the plot {plot.path} cannot be read ({error.strerror}): write it before the report"
        ) from None
    if not content.startswith(_PNG) or len(content) < 24:
        raise ValueError(f"the plot {plot.path} must be a PNG file, and is none")
    width, height = (int.from_bytes(content[start : start + 4], "big") for start in (16, 20))
    wide = ' class="wide"' if width > _WIDE * height else ""
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    size = f'width="{width // 2}" height="{height // 2}"'  # drawn at twice the resolution of a screen
    return (
        f'<figure{wide}><h3>{escape(plot.title)}</h3><img {size} alt="{escape(plot.title)}" src="{source}">'
        f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
    )


def _table(head: str, rows: Iterable[str]) -> str:
    return f'<div class="card"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _flat(nested: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _number(value: float | int | None, digits: int = 4) -> str:
    if value is None:
        return '<span title="undefined for this data">–</span>'
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.2e}".replace("e+0", "e") if abs(value) >= 1e4 else f"{value:.{digits}f}"


def _duration(seconds: float | int) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{seconds / 60:.1f} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _prevalence(value: float | int | None) -> str:
    return "" if value is None else f" (prevalence {value:.3f})"
