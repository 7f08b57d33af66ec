"""The picture of docs/results/decisions.md: kept answers, reliability of the probability, and flagged queries.

    python benchmarks/answers_picture.py NAME=RUN [NAME=RUN ...] [--output docs/pictures/answers.png]

Each row is a finished run, each column a question. Gallery, calibration and queries are as in `answers.py`, whose
tables have the same numbers.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import torch
from answers import IF_KNOWN, Cell
from matplotlib import pyplot as plt
from torch import Tensor

from lam.retrieval.decisions.flags import COMBINED
from lam.retrieval.decisions.probability import probability_bins
from lam.runs.finished import Run

KEPT = {"kappa": "κ", "cosine": "first cosine", "weighted_votes": "votes", IF_KNOWN: "P(right | known)"}
COLOURS = dict(zip(KEPT, ("#59636e", "#0969da", "#bf8700", "#00704f"), strict=True))
RATE = 0.05


def draw_kept(axes: Any, doubt: dict[str, Tensor], correct: Tensor) -> None:
    """Accuracy of the least doubtful share, by each score."""
    share = torch.arange(1, len(correct) + 1) / len(correct)
    least = len(correct) // 50  # fewer say nothing
    for name, title in KEPT.items():
        accuracy = correct[doubt[name].argsort(stable=True)].double().cumsum(0) / torch.arange(1, len(correct) + 1)
        axes.plot(share[least:], accuracy[least:], label=title, color=COLOURS[name], lw=2 if name == IF_KNOWN else 1.2)
    axes.set(xlabel="share of queries answered, least doubtful first", ylabel="accuracy of the first hit")
    axes.legend(frameon=False, fontsize=8)


def draw_reliability(axes: Any, probability: Tensor, correct: Tensor) -> None:
    """Accuracy by bins of the probability; the area of a dot is the share of queries."""
    bins = probability_bins(probability, correct)
    axes.plot([0, 1], [0, 1], color="#d0d7de", lw=1)
    axes.scatter(
        bins.confidence, bins.accuracy, s=300 * bins.count / len(correct) + 4, color=COLOURS[IF_KNOWN], clip_on=False
    )
    axes.set(xlabel="P(right | known)", ylabel="accuracy", xlim=(0, 1.02), ylim=(0, 1.02))
    axes.text(0.04, 0.93, f"ECE {bins.expected_error:.3f}", fontsize=9)


def draw_flagged(axes: Any, known: Tensor, outside: Tensor, threshold: float, title: str) -> None:
    """Scores of known queries and of strangers, and the threshold between them."""
    edges = torch.linspace(0, float(torch.cat([known, outside]).quantile(0.99)), 40)
    for values, name, colour in ((known, "known", COLOURS[IF_KNOWN]), (outside, title, "#6b4fa0")):
        axes.hist(values.clamp(max=edges[-1]), edges, density=True, alpha=0.55, label=name, color=colour)
    flagged = [float((values > threshold).double().mean()) for values in (known, outside)]
    axes.axvline(threshold, color="#1f2328", lw=1)
    axes.set(xlabel=f"combined; flagged on the right: {flagged[0]:.0%} and {flagged[1]:.0%}", yticks=[])
    axes.legend(frameon=False, fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN", help="finished runs and what they are called")
    parser.add_argument("--output", type=Path, default=Path("docs/pictures/answers.png"))
    parsed = parser.parse_args()
    figure, rows = plt.subplots(len(parsed.runs), 3, figsize=(11, 3.2 * len(parsed.runs)), squeeze=False)
    for row, argument in zip(rows, parsed.runs, strict=True):
        name, folder = argument.split("=", 1)
        cell = Cell(Run(folder), 0)
        test = cell.splits.test
        title, outside = next(iter(cell.ood.items()))
        doubt, correct = cell.answers(test, test.labels)
        foreign, _ = cell.answers(outside, torch.full((len(outside),), -1))
        draw_kept(row[0], doubt, correct)
        draw_reliability(row[1], 1 - doubt[IF_KNOWN], correct)
        threshold = cell.calibration.detector.conformal_scores(COMBINED).threshold(RATE)
        draw_flagged(row[2], doubt[COMBINED], foreign[COMBINED], threshold, title.replace("_", " "))
        row[0].set_title(name, loc="left", fontsize=11)
        for axes in row:
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=8)
    figure.tight_layout()
    figure.savefig(parsed.output, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
