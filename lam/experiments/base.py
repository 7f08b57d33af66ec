"""`Experiment`: a frozen record of settings. `Outcome`: the tables and curves of an experiment."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch

from lam.training.settings import Accelerator, resolve_accelerator
from lam.utils.checks import check_choice
from lam.utils.random import derive_seed

SECONDS = "seconds"  # column with the processor time of a row; the time differs between runs with the same seed
Row = Mapping[str, str | float | None]
Curves = Mapping[str, Sequence[tuple[float, float]]]
Progress = Callable[[str, int, int], None]
"""A function of the name of the work, the number of finished steps, and the number of all steps."""


@dataclass(frozen=True)
class Plot:
    """Curves, or clouds of points, in one pair of axes: x and y of each point, by the name of the curve."""

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
    """An experiment; its fields are its settings, which the constructor checks.

    Attributes:
        seed: seed of all draws; draws on the CPU and on CUDA differ.
        accelerator: "cpu", "cuda", or "auto" for CUDA if it is available.
        name: key in `lam.experiments.EXPERIMENTS` and on the command line.
        title: title of the page.
        conditions: columns that identify a row; the other columns are results.
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
        """Run the experiment, independent of torch's global random state."""

    def generator(self, *place: str) -> torch.Generator:
        """A random generator for one purpose, on the device of the experiment."""
        return torch.Generator(resolve_accelerator(self.accelerator)).manual_seed(derive_seed(self.seed, *place))


def check_choices(name: str, values: Sequence[str], allowed: Sequence[str]) -> None:
    """Require at least one value, and only allowed values."""
    if not values:
        raise ValueError(f"{name} must be at least one of {', '.join(allowed)}, got none")
    for value in values:
        check_choice(name, value, allowed)


def cell_text(value: str | float | None) -> str:
    """A cell of a table as text: numbers with four digits, a dash for None."""
    return "–" if value is None else value if isinstance(value, str) else f"{value:.4g}"
