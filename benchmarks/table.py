"""Tables from the results: all methods on FashionMNIST against MNIST, as the README has it, and other data.

python benchmarks/table.py
"""

import json
import sys
from typing import Any

from methods import FIGURES, PAPER
from timing import RESULTS

from lam.retrieval.metrics.registry import describe

ROWS = (  # what a row is called, and its results
    ("laplace_online", "fashionmnist_laplace_online"),
    ("laplace_online, one sample", "fashionmnist_laplace_online_one_sample"),
    ("laplace_online, one sample, ten epochs", "fashionmnist_laplace_online_one_sample_ten_epochs"),
    ("laplace_online, one sample, not refitted", "fashionmnist_laplace_online_followed"),
    ("laplace_posthoc", "fashionmnist"),
    ("mc_dropout", "fashionmnist_mc_dropout"),
    ("deep_ensemble", "fashionmnist_deep_ensemble"),
    ("deep_ensemble, plain mean", "fashionmnist_deep_ensemble_mean"),
    ("pfe", "fashionmnist_pfe"),
    ("hib", "fashionmnist_hib"),
    ("norm", "fashionmnist_norm"),
    ("knn_distance", "fashionmnist_knn_distance"),
    ("deterministic", "fashionmnist_deterministic"),
)
PAPER_BELOW = (  # the rows that the paper's is like
    "laplace_online",
    "laplace_posthoc",
    "mc_dropout",
    "deep_ensemble, plain mean",
    "pfe",
    "hib",
    "deterministic",
)
SHOWN = (*FIGURES[:-1], "ece_below_one", "ece")
HEADS = [describe(figure).name for figure in SHOWN]
UNCERTAIN = ("auroc", "auprc", "ausc", "ece_below_one", "ece")


def row(name: str, file: str) -> list[str]:
    """Ours and, where there is one, the paper's row below it."""
    found: dict[str, Any] = json.loads((RESULTS / f"{file}.json").read_text())
    method = name.partition(",")[0]
    cells = []
    for figure in SHOWN:
        meaningless = method == "deterministic" and figure in UNCERTAIN
        known = figure in found["mean"] and not meaningless
        cells.append(f"{found['mean'][figure]:.3f} ± {found['std'][figure]:.3f}" if known else "—")
    lines = [f"| {name} ({len(found['seeds'])}) | {' | '.join(cells)} |"]
    if name in PAPER_BELOW:
        figures = [("—" if value is None else f"{value:.2f}") for value in (*PAPER[method], None)]
        lines.append(f"| *paper* | {' | '.join(figures)} |")
    return lines


def table() -> str:
    """The whole table in Markdown."""
    lines = [f"| method (seeds) | {' | '.join(HEADS)} |", "| --- " * (len(HEADS) + 1) + "|"]
    for entry in ROWS:
        lines += row(*entry)
    return "\n".join(lines)


def other_data() -> str:
    """The table of photographs, faces and characters in Markdown, as docs/results.md has it."""
    heads = ("recall@1", "ECE", "AUSC", "AUROC by κ", "by k-NN", "noise", "blur", "contrast")
    trends = (f"corruption_{kind}_trend" for kind in ("noise", "blur", "contrast"))
    figures = ("recall@1", "ece", "ausc", "auroc", "auroc_knn", *trends)
    lines = [f"| data, method (seeds) | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    found: dict[str, Any] = json.loads((RESULTS / "other_data.json").read_text())
    del found["machine"]
    for data, methods in found.items():
        for method, rows in methods.items():
            cells = [f"{rows['mean'][figure]:.2f} ± {rows['std'][figure]:.2f}" for figure in figures]
            lines.append(f"| {data}, {method} ({len(rows['seeds'])}) | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(), other_data(), sep="\n\n")
    sys.exit()
