"""Plots of the metrics, as PNG files.

Each function writes the file `path`. A mapping must have 1 to 24 entries; another number, or a curve without data,
raises a `ValueError`. Matplotlib's global figure, backend and style do not change.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lam.retrieval.metrics.ood import auprc, auroc, precision_recall_curve, prevalence, roc_curve
from lam.retrieval.metrics.uncertainty import ReliabilityBins, ausc, sparsification
from lam.utils.checks import check_finite
from lam.utils.files import write_atomically

_PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # safe for the colour-blind
INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
_DPI = 160
_BINS = 50  # of a histogram of κ
_LEGEND = 3.0  # width in inches of a legend beside the axes
_LINES = ("-", "--", "-.", ":")
MOST = len(_LINES) * len(_PALETTE)
"""Greatest number of curves in one plot: each colour in each line style."""
Value = TypeVar("Value")


def plot_sparsification(path: str | Path, ranked: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Draw the sparsification curve of each uncertainty.

    If all entries have the same `correct`, the plot also has the best possible curve, and the line of random dropping.

    Args:
        ranked: for each name, (Q,) `correct` (whether the first hit is relevant) and (Q,) uncertainties; Q ≥ 1.
    """
    _check_count("ranked", ranked)
    if empty := [name for name, (correct, _) in ranked.items() if len(correct) == 0]:
        raise ValueError(f"correct of {empty[0]} must hold at least one query, got none")
    figure, axes = _figure()
    first, *others = (correct for correct, _ in ranked.values())
    alike = all(torch.equal(first, other) for other in others)
    shares, best = sparsification(first, (~first).double())
    if alike:
        axes.plot(shares, best, color=MUTED, linestyle=":", label="best possible")
    for style, name, (correct, values) in _styled(ranked):
        label = f"{name}   AUSC {ausc(correct, values):.3f}"
        axes.plot(shares, sparsification(correct, values)[1], **style, label=label)
    if alike:
        axes.axhline(float(best[0]), color=MUTED, linestyle="--", linewidth=1, label="dropped at random")
    axes.set(xlabel="share of most uncertain queries dropped", ylabel="accuracy of the first hit", xlim=(0, 0.98))
    _finish(figure, axes, path, legend="best")


def plot_reliability(
    path: str | Path, bins: ReliabilityBins, *, confidence: str = "share of samples that agree"
) -> None:
    """Draw a reliability diagram: accuracy against confidence, with the number of queries in each bin below.

    Args:
        bins: result of `lam.retrieval.metrics.votes.Votes.binned`.
        confidence: meaning of the confidence, for the axis label.
    """
    figure = _blank(5.6, 5.4)
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    count = bins.count.cpu().numpy()
    centers, width = (np.arange(len(count)) + 0.5) / len(count), 0.92 / len(count)
    filled = count > 0
    accuracy, means = bins.accuracy.cpu().numpy()[filled], bins.confidence.cpu().numpy()[filled]
    axes.plot([0, 1], [0, 1], color=MUTED, linestyle="--", linewidth=1, label="perfectly calibrated")
    label = f"accuracy   ECE {bins.expected_error:.3f}"
    axes.bar(centers[filled], accuracy, width, color=_PALETTE[0], alpha=0.85, label=label)
    axes.vlines(means, accuracy, means, color=_PALETTE[1], linewidth=1.6)
    axes.plot(means, means, "o", color=_PALETTE[1], markersize=5, label="mean confidence")
    axes.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))
    below.bar(centers, count, width, color=MUTED, alpha=0.6)
    for center, height in zip(centers, count, strict=True):
        below.annotate(f"{height:,}", (center, height), (0, 2), textcoords="offset points", ha="center", fontsize=7)
    below.set(xlabel=f"confidence: {confidence}", ylabel="queries")
    below.margins(y=0.25)
    below.yaxis.get_major_locator().set_params(integer=True)
    _style(below)
    _finish(figure, axes, path, legend="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)  # inside, it could hide bars


def plot_reliability_curves(path: str | Path, bins: Mapping[str, ReliabilityBins]) -> None:
    """Draw accuracy against confidence for several systems, with a point for each non-empty bin."""
    _check_count("bins", bins)
    figure, axes = _figure()
    axes.plot([0, 1], [0, 1], color=MUTED, linestyle=":", linewidth=1, label="perfectly calibrated")
    for style, name, found in _styled(bins):
        filled = (found.count > 0).cpu()
        confidence, accuracy = found.confidence.cpu()[filled], found.accuracy.cpu()[filled]
        axes.plot(
            confidence, accuracy, **style, marker="o", markersize=4, label=f"{name}   ECE {found.expected_error:.3f}"
        )
    axes.set(xlabel="confidence: share of samples that agree", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))
    _finish(figure, axes, path, legend="best")


def plot_bars(path: str | Path, figures: Mapping[str, Mapping[str, float | None]]) -> None:
    """Draw several metrics of several systems as bars, side by side.

    Args:
        figures: for each metric, each system's value in [0, 1], or None if undefined; the same systems for all metrics.
    """
    _check_count("figures", figures)
    names = list(next(iter(figures.values())))
    for figure_name, values in figures.items():
        _check_count(f"values of {figure_name}", values)
        if list(values) != names:
            raise ValueError(f"figures must be of the same systems, got {names} and {list(values)}")
    figure = _blank(1.2 + 2.1 * len(figures), 1.0 + 0.3 * len(names))
    panels = figure.subplots(1, len(figures), sharey=True, squeeze=False)[0]
    for axes, (figure_name, values) in zip(panels, figures.items(), strict=True):
        for place, (style, _, value) in enumerate(_styled(values)):
            axes.barh(place, value or 0, color=style["color"], alpha=1 if style["linestyle"] == "-" else 0.5)
            label = "undefined" if value is None else f"{value:.3f}"
            axes.annotate(label, (value or 0, place), (3, 0), textcoords="offset points", va="center", fontsize=8)
        axes.set(title=figure_name, xlim=(0, 1.25), xticks=(0, 0.5, 1), yticks=range(len(names)))
        axes.set_yticklabels([_literal(name) for name in names])
        axes.title.set(color=INK, fontsize=10)
        _style(axes)
    panels[0].invert_yaxis()
    save_figure(figure, path)


def plot_roc(path: str | Path, scores: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Draw the ROC curve of each OOD score; OOD is the positive class.

    Args:
        scores: for each name, (N,) scores of in-distribution items and (O,) scores of OOD items.
    """
    _check_count("scores", scores)
    figure, axes = _figure()
    for style, name, (inside, outside) in _styled(scores):
        axes.plot(*roc_curve(inside, outside), **style, label=f"{name}   AUROC {auroc(inside, outside):.3f}")
    axes.plot([0, 1], [0, 1], color=MUTED, linestyle="--", linewidth=1, label="useless score")
    axes.set(xlabel="false positive rate: known items flagged", ylabel="true positive rate: OOD items flagged")
    axes.set(xlim=(-0.01, 1), ylim=(0, 1.01))
    _finish(figure, axes, path, legend="best")


def plot_precision_recall(
    path: str | Path, scores: Mapping[str, tuple[Tensor, Tensor]], *, positives: str = "OOD items"
) -> None:
    """Draw precision against recall for each OOD score, and the prevalence, which is the precision of a useless score.

    Args:
        scores: for each name, (N,) scores of in-distribution items and (O,) scores of OOD items.
        positives: name of the OOD items on the axes.
    """
    _check_count("scores", scores)
    figure, axes = _figure()
    for style, name, (inside, outside) in _styled(scores):
        label = f"{name}   AUPRC {auprc(inside, outside):.3f}"
        axes.step(*precision_recall_curve(inside, outside), **style, where="pre", label=label)
    for share in sorted({prevalence(*pair) for pair in scores.values()}):
        axes.axhline(share, color=MUTED, linestyle="--", linewidth=1, label=f"useless score: prevalence {share:.3f}")
    axes.set(xlabel=f"recall: share of {positives} found", ylabel=f"precision: {positives} among the flagged")
    axes.set(xlim=(0, 1.01), ylim=(0, 1.02))
    _finish(figure, axes, path, legend="best")


def plot_kappa(path: str | Path, kappa: Mapping[str, Tensor]) -> None:
    """Draw the distribution of the concentration κ of each set, on a logarithmic axis.

    Args:
        kappa: for each set, (N,) values ≥ 0, the in-distribution set first. Zeros fall in the lowest bin.
    """
    _check_count("kappa", kappa)
    for name, values in kappa.items():
        check_finite(f"kappa of {name}", values)
        if len(values) == 0:
            raise ValueError(f"kappa of {name} must hold at least one value, got none")
    figure, axes = _figure()
    arrays = {name: values.detach().double().cpu().numpy() for name, values in kappa.items()}
    edges = _log_edges(np.concatenate(list(arrays.values())))
    for style, name, values in _styled(arrays):
        inside, share = values.clip(edges[0], edges[-1]), np.full(len(values), 100 / len(values))
        axes.hist(inside, edges, weights=share, color=style["color"], alpha=0.35, histtype="stepfilled")
        axes.hist(inside, edges, weights=share, **style, histtype="step", linewidth=1.4)
        label = f"{name}   median {short_number(float(np.median(values)))}, n = {len(values):,}"
        axes.plot([], [], color=style["color"], linewidth=6, alpha=0.6, label=label)
    _log_ticks(axes, edges[0], edges[-1])
    axes.set_ylim(top=axes.get_ylim()[1] * (1.05 + 0.08 * len(kappa)))
    axes.set(xlabel="concentration κ (small means uncertain)", ylabel="share of the set (%)")
    _finish(figure, axes, path, legend="upper left")


def plot_corruption(path: str | Path, kappa: Mapping[str, Tensor], recall: Mapping[str, Tensor]) -> None:
    """Draw median κ, relative to clean queries, and recall@1 against the severity of each kind of corruption.

    Args:
        kappa: for each kind, (V,) medians of κ at severities 0 (clean) to V − 1; empty for a network without κ.
        recall: for each kind, (V,) recall@1.
    """
    _check_count("recall", recall)
    figure = _blank(8.4 if kappa else 4.6, 3.8)
    panels = figure.subplots(1, 2 if kappa else 1, squeeze=False)[0]
    drawn = ((kappa, "median κ, as a multiple of the clean"), (recall, "recall@1"))[not kappa :]
    for axes, (curves, label) in zip(panels, drawn, strict=True):
        for style, kind, values in _styled(curves):
            heights = values / values[0] if curves is kappa else values
            axes.plot(range(len(values)), heights.cpu(), **style, marker="o", markersize=4, label=kind)
        axes.set(xlabel="severity", ylabel=label, xticks=range(len(next(iter(curves.values())))))
        _style(axes)
        if curves is kappa:
            axes.axhline(1, color=MUTED, linestyle="--", linewidth=1)
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, 0.9), max(high, 1.1))
        else:
            axes.set_ylim(0, 1.02)
    _finish(figure, panels[-1], path, legend="best")


def plot_tuning(
    path: str | Path,
    *,
    scales: Sequence[float],
    scores: Sequence[float],
    errors: Sequence[float],
    eces: Sequence[float],
    interval: tuple[float, float],
    chosen: float,
) -> None:
    """Draw the log score and the ECE of every likelihood scale, and mark the chosen scale.

    Args:
        scales: likelihood scales s, rising.
        scores: log score of each scale.
        errors: standard error of each log score's difference from the best.
        eces: retrieval ECE of each scale.
        interval: least and greatest scale within one standard error of the best.
        chosen: the scale in use.
    """
    figure, axes = _figure()
    low, high = interval
    axes.axvspan(low, high, color=_PALETTE[0], alpha=0.12, linewidth=0, label="within one standard error of the best")
    axes.errorbar(scales, scores, errors, fmt="o-", color=_PALETTE[0], markersize=4, linewidth=1.4, label="log score")
    axes.plot(scales, eces, "s:", color=_PALETTE[1], markersize=3, linewidth=1.2, label="ECE")
    axes.axvline(chosen, color=INK, linewidth=1, linestyle="--", label=f"chosen: s = {short_number(chosen)}")
    _log_ticks(axes, scales[0], scales[-1])
    axes.set(xlabel="likelihood scale s (small means a wide posterior)", ylabel="lower is better")
    axes.set_ylim(0, 1.35 * axes.get_ylim()[1])
    _finish(figure, axes, path, legend="upper right")


def _log_edges(values: Any) -> Any:
    """Edges of bins over the range of the positive values, at least half a decade."""
    positive = values[values > 0] if (values > 0).any() else np.ones(1)
    low, high = np.log10(positive.min()), np.log10(positive.max())
    middle, half = (low + high) / 2, max((high - low) / 2, 0.25)
    return np.logspace(middle - half, middle + half, _BINS + 1)


def _log_ticks(axes: Any, low: float, high: float) -> None:
    """Make the x axis logarithmic, with about eight labels in plain digits."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    decades = np.log10(high / low)
    subs = (1.0,) if decades > 2.5 else (1.0, 2.0, 5.0) if decades > 1 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    axes.xaxis.set_major_locator(LogLocator(subs=subs, numticks=9))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="minor", length=0)


def _blank(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def _figure() -> tuple[Any, Any]:
    figure = _blank(5.6, 4.2)
    return figure, figure.subplots()


def _style(axes: Any) -> None:
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=8.5, length=0)
    axes.xaxis.label.set(color=INK, fontsize=9.5)
    axes.yaxis.label.set(color=INK, fontsize=9.5)
    for side, spine in axes.spines.items():
        spine.set(visible=side in ("left", "bottom"), color=GRID)


def _finish(figure: Any, axes: Any, path: str | Path, *, legend: str, **place: Any) -> None:
    """Style the axes and write the file; a legend with many entries stands beside the axes."""
    _style(axes)
    place["loc"] = legend
    if len(axes.get_legend_handles_labels()[1]) > len(_PALETTE) + 2:
        figure.set_figwidth(figure.get_figwidth() + _LEGEND)
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
    axes.legend(**place, fontsize=8.5, frameon=True, framealpha=0.85, edgecolor="none", labelcolor=INK)
    save_figure(figure, path)


def save_figure(figure: Any, path: str | Path) -> None:
    """Write a figure as PNG."""

    def write(temporary: Path) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the plot shows boxes instead
            figure.savefig(temporary, format="png", dpi=_DPI, metadata={"Software": None})

    write_atomically(path, write)


def short_number(value: float) -> str:
    """A number as text, with about three digits and without long rows of zeros."""
    if 100 <= value < 1e4:
        return f"{value:,.0f}"
    if 1e-3 <= value < 100 or value == 0:
        return f"{value:.3g}"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _styled(named: Mapping[str, Value]) -> Iterator[tuple[dict[str, str], str, Value]]:
    for number, (name, value) in enumerate(named.items()):
        again, color = divmod(number, len(_PALETTE))
        yield {"color": _PALETTE[color], "linestyle": _LINES[again]}, _literal(name), value


def _literal(name: str) -> str:
    """A name as a label; Matplotlib would read text between dollar signs as a formula."""
    return name.replace("$", "\\$")


def _check_count(name: str, named: Mapping[str, Any]) -> None:
    if not 1 <= len(named) <= MOST:
        raise ValueError(f"{name} must hold between 1 and {MOST} entries to be told apart, got {len(named)}")
