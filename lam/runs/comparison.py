"""Comparison of finished runs: one table, and plots with a curve for each run.

    comparison.csv, comparison.json   every metric of every run
    figures.png                       retrieval, OOD detection and calibration as bars
    roc_SET.png, precision_recall_SET.png, calibration.png, sparsification.png

Source: Warburg et al. (2023), figures 5 (OOD detection and retrieval), 6 (ROC), 7 (calibration), 10 (sparsification).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lam.evaluation import Evaluation
from lam.retrieval.metrics import plots
from lam.retrieval.metrics.registry import describe, needs_posterior, shown_in
from lam.retrieval.metrics.uncertainty import ReliabilityBins
from lam.runs.folder import CONFIG, METRICS, read_data, require_finished
from lam.utils import files

CURVES = "curves.safetensors"
FIGURES = shown_in("table")
"""Metrics in the printed table; the files hold every metric."""
_PICTURES = ("figures", "roc_*", "precision_recall_*", "calibration", "sparsification")
_OUTSIDE, _BINS = "outside/", "calibration/"
_CSV, _JSON = "comparison.csv", "comparison.json"
Metrics = dict[str, float | int | None]


@dataclass(frozen=True)
class Curves:
    """Data of the sparsification, calibration and OOD curves of an evaluation.

    Attributes:
        correct: (Q,) whether the first hit is right, for queries with a match.
        uncertainty: (Q,) −κ of these queries.
        inside, outside: (N,) and (O,) the encoder's own OOD score of all queries and of each OOD set's items.
        reliability: accuracy in bins of confidence; None for a method without samples.
    """

    correct: Bool[Tensor, " Q"]
    uncertainty: Float[Tensor, " Q"]
    inside: Float[Tensor, " N"]
    outside: dict[str, Tensor]
    reliability: ReliabilityBins | None

    @classmethod
    def of(cls, evaluation: Evaluation) -> "Curves":
        """The curves of an evaluation."""
        answerable, primary = evaluation.answerable, evaluation.primary
        return cls(
            evaluation.correct[answerable],
            -evaluation.embeddings.kappa[answerable],
            evaluation.scores[primary],
            {name: scores[primary] for name, scores in evaluation.ood_scores.items()},
            evaluation.reliability,
        )

    @classmethod
    def load(cls, folder: str | Path) -> "Curves":
        """Read the curves of a run; call `lam.utils.files.verify` on its folder first."""
        tensors = files.read_tensors(Path(folder) / CURVES)
        outside = {name.removeprefix(_OUTSIDE): scores for name, scores in tensors.items() if name.startswith(_OUTSIDE)}
        bins = {name.removeprefix(_BINS): values for name, values in tensors.items() if name.startswith(_BINS)}
        reliability = ReliabilityBins(**bins) if bins else None
        return cls(tensors["correct"], tensors["uncertainty"], tensors["inside"], outside, reliability)

    def save(self, folder: str | Path) -> None:
        """Write the curves into the folder of a run."""
        bins = {} if self.reliability is None else vars(self.reliability)
        tensors = {"correct": self.correct, "uncertainty": self.uncertainty, "inside": self.inside}
        tensors |= {f"{_OUTSIDE}{name}": scores for name, scores in self.outside.items()}
        tensors |= {f"{_BINS}{name}": values for name, values in bins.items()}
        files.write_tensors(Path(folder) / CURVES, tensors)

    @property
    def tells_apart(self) -> bool:
        """Whether the OOD score varies; it is constant for a method without uncertainty."""
        return len(torch.cat([self.inside, *self.outside.values()]).unique()) > 1


@dataclass(frozen=True)
class ComparedRun:
    """A finished run in a comparison, named by its method, or by its folder if two runs share a method.

    A metric is None if it is undefined, such as metrics of κ if all κ are equal.
    """

    name: str
    folder: Path
    method: str
    metrics: Metrics
    curves: Curves


@dataclass(frozen=True)
class Comparison:
    """The compared runs in the order of the arguments, and the paths of the table and plots in `folder`."""

    folder: Path
    runs: list[ComparedRun]
    written: list[Path]

    def __str__(self) -> str:
        heads = [describe(figure).name for figure in FIGURES]
        width = max(len(run.name) for run in self.runs)
        lines = ["  ".join([" " * width, *heads])]
        for run in self.runs:
            values = (run.metrics.get(figure) for figure in FIGURES)
            cells = ("–" if value is None else f"{value:.3f}" for value in values)
            padded = (cell.rjust(len(head)) for cell, head in zip(cells, heads, strict=True))
            lines.append("  ".join([run.name.ljust(width), *padded]))
        return "\n".join(lines)


def compare(folders: Sequence[str | Path], output: str | Path) -> Comparison:
    """Draw the curves of finished runs in common plots and write the metrics into one table.

    Args:
        folders: folders of at least two runs on the same data.
        output: a new folder, or the folder of an earlier comparison to replace.

    Raises:
        ValueError: for fewer than two runs or more than a plot can show, a repeated run, a run that is not finished or
            has no curves, runs on different data, or an output folder with other files.
        CorruptFileError: naming the file of a run that is missing, truncated or altered.
    """
    runs, output = [Path(folder) for folder in folders], Path(output)
    if not 2 <= len(runs) <= plots.MOST:
        raise ValueError(f"comparing needs 2 to {plots.MOST} runs, got {len(runs)}")
    resolved = [run.resolve() for run in runs]
    if repeated := [run for run, path in zip(runs, resolved, strict=True) if resolved.count(path) > 1]:
        raise ValueError(f"{repeated[0]} is given twice: give each run once")
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file: give another --output")
    if output.is_dir() and any(output.iterdir()) and not (output / _JSON).is_file():
        raise ValueError(f"{output} holds files that are not a comparison: give another --output")
    for run in runs:
        require_finished(run)
        if CURVES not in files.read_json(run / files.MANIFEST)["sha256"]:
            raise ValueError(
                f"the run in {run} has no curves: delete {run / files.MANIFEST}, and `lam run {run}` evaluates it again"
            )
        files.verify(run, [METRICS, CURVES], others=False)
    _refuse_other_data(runs)
    compared = _read(runs)
    output.mkdir(parents=True, exist_ok=True)
    for picture in (path for kind in _PICTURES for path in output.glob(f"{kind}.png")):
        picture.unlink()
    return Comparison(output, compared, [*_write_table(output, compared), *_draw(output, compared)])


def _refuse_other_data(runs: Sequence[Path]) -> None:
    """Reject runs that were evaluated on different items or with different right answers."""
    first, *others = map(_evaluated_on, runs)
    for run, other in zip(runs[1:], others, strict=True):
        different = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
        if different:
            raise ValueError(
                f"{runs[0]} and {run} were not evaluated on the same data ({', '.join(different)}): compare runs of "
                "one data set with one data.seed, data.limit, data.ood and evaluation"
            )


def _evaluated_on(run: Path) -> dict[str, Any]:
    data = read_data(run)
    parts = {name: part for name, part in data["parts"].items() if name not in ("train", "validation")}
    config = files.read_yaml(run / CONFIG)
    titles = [outside["title"] or outside["name"] for outside in config["data"]["ood"]]
    main_set = titles[0] if titles else None  # metrics of the main set have no suffix
    asked = {"main OOD set": main_set, "gallery": data["gallery"], "places": config["places"]}
    asked |= {f"data.{name}": config["data"].get(name) for name in ("name", "soft_labels")}
    names = ("reference", "corrupted", "corruptions", "unseen")
    asked |= {f"evaluation.{name}": config["evaluation"].get(name) for name in names}
    return {**asked, **parts}


def _read(folders: Sequence[Path]) -> list[ComparedRun]:
    methods = [files.read_yaml(folder / CONFIG)["method"]["name"] for folder in folders]
    choices = (methods, [folder.resolve().name for folder in folders], [str(folder) for folder in folders])
    names = next(names for names in choices if len(set(names)) == len(folders))
    runs = []
    for name, folder, method in zip(names, folders, methods, strict=True):
        curves, metrics = Curves.load(folder), files.read_json(folder / METRICS)
        if not curves.tells_apart:
            metrics |= {key: None for key in metrics if needs_posterior(key)}
        runs.append(ComparedRun(name, folder, method, metrics, curves))
    return runs


def _write_table(folder: Path, runs: Sequence[ComparedRun]) -> list[Path]:
    rows = [({"name": run.name, "method": run.method, "folder": str(run.folder)}, run.metrics) for run in runs]
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    files.write_csv(folder / _CSV, [*rows[0][0], *names], (row | metrics for row, metrics in rows))
    files.write_json(folder / _JSON, {"runs": [row | {"metrics": metrics} for row, metrics in rows]})
    return [folder / _CSV, folder / _JSON]


def _draw(folder: Path, runs: Sequence[ComparedRun]) -> list[Path]:
    """Draw each plot with the runs that have data for it; return the paths."""
    pictures = [folder / "figures.png"]
    bars = {figure: {run.name: run.metrics.get(figure) for run in runs} for figure in shown_in("bars")}
    known = {figure: values for figure, values in bars.items() if set(values.values()) != {None}}
    remarks = {figure: ", lower is better" if describe(figure).direction == "lower" else "" for figure in known}
    plots.plot_bars(pictures[0], {describe(figure).name + remarks[figure]: known[figure] for figure in known})

    def draw(plot: Callable[[Path, Any], None], name: str, of_runs: Mapping[str, Any]) -> None:
        if of_runs:
            plot(folder / f"{name}.png", of_runs)
            pictures.append(folder / f"{name}.png")

    telling_apart = {run.name: run.curves for run in runs if run.curves.tells_apart}
    for ood in runs[0].curves.outside:
        scores = {name: (curves.inside, curves.outside[ood]) for name, curves in telling_apart.items()}
        draw(plots.plot_roc, f"roc_{ood}", scores)
        draw(plots.plot_precision_recall, f"precision_recall_{ood}", scores)
    bins = {run.name: run.curves.reliability for run in runs if run.curves.reliability is not None}
    draw(plots.plot_reliability_curves, "calibration", bins)
    ranked = {
        name: (curves.correct, curves.uncertainty) for name, curves in telling_apart.items() if len(curves.correct)
    }
    draw(plots.plot_sparsification, "sparsification", ranked)
    return pictures
