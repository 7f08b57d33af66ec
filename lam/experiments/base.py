"""What experiments share: settings as a frozen record, an outcome as tables and curves, and how both are written."""

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from lam.training.settings import Accelerator, resolve_accelerator
from lam.utils.checks import check_choice
from lam.utils.files import write_json, write_text
from lam.utils.pages import figure, rendered
from lam.utils.random import derive_seed

SECONDS = "seconds"
"""The column of the processor's time that a row took, which no seed repeats."""
Row = Mapping[str, str | float | None]
Curves = Mapping[str, Sequence[tuple[float, float]]]
Progress = Callable[[str, int, int], None]
"""Called with what is done, how many steps of it are done and how many there are."""


@dataclass(frozen=True)
class Plot:
    """Curves, or clouds of points, in one pair of axes.

    Attributes:
        x: what is to the right.
        y: what is upwards.
        curves: by name: x and y of each point.
    """

    x: str
    y: str
    curves: Curves


@dataclass(frozen=True)
class Outcome:
    """What an experiment found.

    Attributes:
        rows: of the table, all with the same columns.
        plots: by title.
        notes: what a reader should know.
        tables: further ones by title, rows as of the first.
    """

    rows: Sequence[Row]
    plots: Mapping[str, Plot] = field(default_factory=dict)
    notes: Sequence[str] = ()
    tables: Mapping[str, Sequence[Row]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Experiment(ABC):
    """An experiment; its fields are its settings, which check themselves.

    Attributes:
        seed: of everything drawn; what is drawn differs between kinds of devices.
        accelerator: "cpu", "cuda", or "auto" for CUDA where there is some.
        name: its key in `lam.experiments.EXPERIMENTS` and on the command line.
        title: of its page.
    """

    seed: int = 0
    accelerator: Accelerator = "auto"

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""

    @abstractmethod
    def run(self, progress: Progress) -> Outcome:
        """Carry it out; torch's global random state is not used."""

    def generator(self, *place: str) -> torch.Generator:
        """A source of randomness for one purpose, on the device of the experiment."""
        return torch.Generator(resolve_accelerator(self.accelerator)).manual_seed(derive_seed(self.seed, *place))


def conduct(experiment: Experiment, folder: str | Path, *, progress: Progress = lambda *_: None) -> Outcome:
    """Run an experiment and write `outcome.json` and `report.html` into a folder, which is made where it is missing."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)  # before what may take hours
    outcome = experiment.run(progress)
    write_json(
        folder / "outcome.json", {"experiment": experiment.name, "settings": asdict(experiment), **asdict(outcome)}
    )
    page = rendered(
        Path(__file__).with_name("report.html.jinja"),
        title=experiment.title,
        rows=outcome.rows,
        tables=outcome.tables,
        notes=outcome.notes,
        plots=[figure(title, "", _picture(plot)) for title, plot in outcome.plots.items()],
        options=list(asdict(experiment).items()),
    )
    write_text(folder / "report.html", page)
    return outcome


def check_losses(losses: Sequence[str], allowed: Sequence[str]) -> None:
    """Refuse to compare no losses at all, or one that is not allowed."""
    if not losses:
        raise ValueError(f"losses must be at least one of {', '.join(allowed)}, got none")
    for loss in losses:
        check_choice("losses", loss, allowed)


def shown(value: str | float | None) -> str:
    """A cell of a table as text: numbers to four digits, a dash for what is undefined."""
    return "–" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def _picture(plot: Plot) -> bytes:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(7, 4.5), layout="constrained")
    axes = picture.add_subplot()
    for name, points in plot.curves.items():
        x, y = zip(*points, strict=True)
        is_curve = list(x) == sorted(x)
        axes.plot(x, y, "-" if is_curve else ".", markersize=2, label=name)
    axes.set(xlabel=plot.x, ylabel=plot.y)
    axes.legend()
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()
