"""`Sweep`: one table of an experiment with several values of some settings; `conduct`: run it and write the outcome."""

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lam.experiments.base import SECONDS, Experiment, Outcome, Plot, Progress, Row, cell_text
from lam.utils.files import write_json, write_text
from lam.utils.pages import figure, rendered
from lam.utils.summary import summary

SEED = "seed"
DEVIATIONS = "Standard deviation over seeds"


@dataclass(frozen=True)
class Sweep:
    """An experiment with every combination of the values of some settings, in the order of `itertools.product`.

    The first columns of a row are these values. The seed has no column: tables hold means over seeds, and a further
    table holds standard deviations. A result that is undefined for a seed has no mean and no deviation. A column that
    an experiment lacks is None. For each numeric setting, curves show every result over the values.

    Attributes:
        values: the values of each setting, by name.
        experiments: an experiment for each combination, in the same order.
    """

    values: Mapping[str, Sequence[Any]]
    experiments: Sequence[Experiment]

    @property
    def name(self) -> str:
        return self.experiments[0].name

    @property
    def title(self) -> str:
        return self.experiments[0].title

    @property
    def conditions(self) -> tuple[str, ...]:
        """Columns that identify a row."""
        return (*(name for name in self.values if name != SEED), *self.experiments[0].conditions)

    def settings(self) -> dict[str, Any]:
        """The settings by name; a setting with several values is a list."""
        return {**self.experiments[0].settings(), **self.values}

    def run(self, progress: Progress) -> Outcome:
        """Run all experiments in order."""
        parts: dict[str, list[Row]] = {"": []}
        plots: dict[str, Plot] = {}
        notes: dict[str, None] = {}
        for number, experiment in enumerate(self.experiments, 1):
            place = f"{number} of {len(self.experiments)}"
            outcome = experiment.run(lambda what, done, total, at=place: progress(f"{at}, {what}", done, total))
            values = {name: _cell(getattr(experiment, name)) for name in self.values}
            for title, rows in {"": outcome.rows, **outcome.tables}.items():
                parts.setdefault(title, []).extend({**values, **row} for row in rows)
            at = ", ".join(f"{name} {cell_text(value)}" for name, value in values.items())
            plots |= {f"{title}; {at}": plot for title, plot in outcome.plots.items()}
            notes |= dict.fromkeys(outcome.notes)
        means, tables = {title: _with_all_columns(rows) for title, rows in parts.items()}, {}
        if SEED in self.values:
            tables = {DEVIATIONS: self._over_seeds(means[""], "std")}
            means = {title: self._over_seeds(rows, "mean") for title, rows in means.items()}
        rows = means.pop("")
        return Outcome(rows, self._curves(rows) | plots, list(notes), means | tables)

    def _over_seeds(self, rows: Sequence[Row], what: str) -> list[Row]:
        """Means ("mean") or standard deviations ("std") of rows that differ only in the seed."""
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            groups.setdefault(tuple(row[name] for name in self._conditions_of(row)), []).append(row)
        over_seeds: list[Row] = []
        for group in groups.values():
            found, first = summary(dict(enumerate(group)))[what], group[0]
            fixed = {name: first[name] for name in self._conditions_of(first)}
            over_seeds.append({name: fixed.get(name, found.get(name)) for name in first if name != SEED})
        return over_seeds

    def _conditions_of(self, row: Row) -> list[str]:
        return [name for name, cell in row.items() if name in self.conditions or isinstance(cell, str)]

    def _curves(self, rows: Sequence[Row]) -> dict[str, Plot]:
        plots: dict[str, Plot] = {}
        for setting in (name for name, values in self.values.items() if name != SEED and _are_numbers(values)):
            curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
            for row in rows:
                others = (cell_text(row[name]) for name in self._conditions_of(row) if name != setting)
                label = ", ".join(others)
                for name in set(row) - {*self.conditions, SECONDS}:
                    x, y = row[setting], row[name]
                    if isinstance(x, float) and isinstance(y, float):
                        curves.setdefault(name, {}).setdefault(label, []).append((x, y))
            for name in sorted(curves, key=list(rows[0]).index):
                plots[f"{name} over {setting}"] = Plot(setting, name, curves[name])
        return plots


def _with_all_columns(rows: Sequence[Row]) -> list[Row]:
    """Rows with the columns of all rows; a missing cell is None."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def _cell(value: Any) -> str | float | None:
    return value if value is None or isinstance(value, str) else float(value) if _are_numbers([value]) else str(value)


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def conduct(experiment: Experiment | Sweep, folder: str | Path, *, progress: Progress = lambda *_: None) -> Outcome:
    """Run an experiment and write `outcome.json` and `report.html` into a new or existing folder.

    Raises:
        ValueError: If the folder holds the report of something else, such as a run.
    """
    folder, settings = Path(folder), _storable(experiment.settings())
    if (folder / "report.html").exists() and not (folder / "outcome.json").exists():
        raise ValueError(f"{folder} holds a report.html that no experiment wrote: give another --output")
    folder.mkdir(parents=True, exist_ok=True)  # before the run: it may take hours, and this may fail
    outcome = experiment.run(progress)
    found = _storable(asdict(outcome))
    write_json(folder / "outcome.json", {"experiment": experiment.name, "settings": settings, **found})
    page = rendered(
        Path(__file__).with_name("report.html.jinja"),
        title=experiment.title,
        rows=outcome.rows,
        tables=outcome.tables,
        notes=outcome.notes,
        plots=[figure(title, "", _picture(plot)) for title, plot in outcome.plots.items()],
        options=list(settings.items()),
    )
    write_text(folder / "report.html", page)
    return outcome


def _storable(value: Any) -> Any:
    """A value for JSON: a number that is not finite becomes text, such as "inf", which pydantic reads as a number."""
    if isinstance(value, Mapping):
        return {name: _storable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _picture(plot: Plot) -> bytes:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7, 4.5), layout="constrained")
    axes = picture.add_subplot()
    for name, points in plot.curves.items():
        x, y = zip(*points, strict=True)
        axes.plot(x, y, "-" if list(x) == sorted(x) else ".", markersize=2, label=name)
    axes.set(xlabel=plot.x, ylabel=plot.y)
    axes.legend()
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the plot shows boxes instead
        picture.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()
