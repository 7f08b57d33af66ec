"""`conduct`: run an experiment and write its outcome as JSON and as a page."""

import io
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lam.experiments.base import Experiment, Outcome, Plot, Progress
from lam.experiments.sweep import Sweep
from lam.utils.files import write_json, write_text
from lam.utils.pages import figure, rendered


def conduct(experiment: Experiment | Sweep, folder: str | Path, *, progress: Progress = lambda *_: None) -> Outcome:
    """Run an experiment and write `outcome.json` and `report.html` into a new or existing folder."""
    folder, settings = Path(folder), _storable(experiment.settings())
    folder.mkdir(parents=True, exist_ok=True)  # before the run: it may take hours, and this may fail
    outcome = experiment.run(progress)
    write_json(folder / "outcome.json", {"experiment": experiment.name, "settings": settings, **asdict(outcome)})
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
    """A setting for JSON: an infinite number becomes the text "inf", which pydantic reads as the number."""
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
