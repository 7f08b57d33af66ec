"""The picture of docs/explanation/why.md: AUROC of strangers by κ of two posteriors and by cheap scores.

    python benchmarks/posteriors_picture.py [--output docs/pictures/why.png]

From results/real_posteriors/ and results/real/; a row of dots for each data set, means over draws.
"""

import argparse
from pathlib import Path
from statistics import mean

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from table import posterior_strangers

COLOURS = ("#0969da", "#bf8700", "#c9ced6", "#00704f", "#cf222e", "#6b4fa0")
MARKERS = ("s", "D", "o", "o", "P", "^")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/pictures/why.png"))
    (_, *names), *rows = posterior_strangers()
    values = [[float(cell.split(" ± ")[0]) for cell in row[1:]] for row in rows]
    order = sorted(range(len(rows)), key=lambda number: mean(values[number]))
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    for column, (name, colour, marker) in enumerate(zip(names, COLOURS, MARKERS, strict=True)):
        label = name.strip("*").replace("`", "")
        axes.scatter([values[row][column] for row in order], range(len(order)), 70, colour, marker=marker, label=label)
    for height, row in enumerate(order):
        axes.plot((min(values[row]), max(values[row])), (height, height), color="#eaecef", zorder=0)
    axes.set_yticks(range(len(order)), [rows[row][0].rpartition(" (")[0] for row in order])
    axes.set(xlabel="AUROC of strangers", xlim=(0.45, 1.01))
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(parser.parse_args().output, dpi=110)


if __name__ == "__main__":
    main()
