"""`Experiment`, a frozen record of settings; `Outcome`, its tables and curves; and their files."""

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from lam.training.settings import Accelerator, resolve_accelerator
from lam.utils.checks import check_choice
from lam.utils.files import write_json, write_text
from lam.utils.pages import figure, rendered
from lam.utils.random import derive_seed

SECONDS = "seconds"
"""Column of a row's processor time; a seed does not repeat it."""
Row = Mapping[str, str | float | None]
Curves = Mapping[str, Sequence[tuple[float, float]]]
Progress = Callable[[str, int, int], None]
"""A function of the work's name, the number of finished steps, and the number of all steps."""


@dataclass(frozen=True)
class Plot:
    """Curves, or clouds of points, in one pair of axes.

    Attributes:
        x, y: labels of the axes.
        curves: x and y of each point, by name.
    """

    x: str
    y: str
    curves: Curves


@dataclass(frozen=True)
class Outcome:
    """The result of an experiment.

    Attributes:
        rows: rows of the table, all with the same columns.
        plots: plots by title.
        notes: remarks for the reader.
        tables: rows of further tables, by title.
    """

    rows: Sequence[Row]
    plots: Mapping[str, Plot] = field(default_factory=dict)
    notes: Sequence[str] = ()
    tables: Mapping[str, Sequence[Row]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC):
    """An experiment; its fields are its settings, checked when it is made.

    Attributes:
        seed: seed of all draws; draws differ between kinds of devices.
        accelerator: "cpu", "cuda", or "auto" for CUDA if it is available.
        name: key in `lam.experiments.EXPERIMENTS` and on the command line.
        title: title of the page.
        conditions: columns that say what a row is about; the other columns are results.
    """

    seed: int = 0
    accelerator: Accelerator = "auto"

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    conditions: ClassVar[tuple[str, ...]] = ("loss",)

    def settings(self) -> dict[str, Any]:
        """The settings by name."""
        return asdict(self)

    @abstractmethod
    def run(self, progress: Progress) -> Outcome:
        """Run the experiment without torch's global random state."""

    def generator(self, *place: str) -> torch.Generator:
        """A random generator for one purpose, on the device of the experiment."""
        return torch.Generator(resolve_accelerator(self.accelerator)).manual_seed(derive_seed(self.seed, *place))


@runtime_checkable
class Conductable(Protocol):
    """What `conduct` runs: an `Experiment`, or a `lam.experiments.sweep.Sweep` of several."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    def settings(self) -> dict[str, Any]: ...

    def run(self, progress: Progress) -> Outcome: ...


def conduct(experiment: Conductable, folder: str | Path, *, progress: Progress = lambda *_: None) -> Outcome:
    """Run an experiment and write `outcome.json` and `report.html` into a folder, new or not."""
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


def check_choices(name: str, values: Sequence[str], allowed: Sequence[str]) -> None:
    """Require at least one value, and only allowed ones."""
    if not values:
        raise ValueError(f"{name} must be at least one of {', '.join(allowed)}, got none")
    for value in values:
        check_choice(name, value, allowed)


def cell_text(value: str | float | None) -> str:
    """A cell of a table as text: numbers to four digits, a dash for None."""
    return "–" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def _storable(value: Any) -> Any:
    """A setting as JSON can hold it: an infinite number becomes the text "inf", which is read as the number again."""
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
    picture.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()
