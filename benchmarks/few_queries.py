"""Decisions after calibration on few queries: answered share, false accepts and ECE of P(right | known).

    python benchmarks/few_queries.py [--cache build/real] [--draws 5] [--subsets 4]

From each draw of `real.py score`, 20, 30, 40, 60 and 100 calibration queries are taken at random. Test queries are
answered at a false-accept rate of 0.1, and at a false-flag rate of 0.05 or the least possible one. Writes
results/few_queries.json and docs/pictures/few_queries.png.
"""

import argparse
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import torch
from real_scores import Part, calibration_data, draw, of_queries, part, searched
from timing import write

from lam.retrieval.decisions.abstention import MATCH
from lam.retrieval.decisions.calibrate import Choices, calibrate
from lam.retrieval.decisions.calibration import Targets
from lam.retrieval.decisions.conformal import least_rate
from lam.retrieval.decisions.probability import probability_bins

SIZES, FAR = (20, 30, 40, 60, 100), 0.1
CELLS = {
    "stamps": ("efficientnet_lite0", "stamps"),
    "characters": ("efficientnet_lite0", "omniglot"),
    "photographs": ("efficientnet_lite0", "cifar10"),
    "BANKING77": ("minilm", "banking77"),
}
CURVES = {
    "answered_right": "known queries answered, and rightly",
    "false_accepts": f"queries without a match accepted (promised: {FAR:g})",
    "ece": "ECE of P(right | known)",
}


def answered(parts: Any, size: int, generator: torch.Generator) -> dict[str, float | str]:
    """Calibrate on `size` queries, and answer the test queries."""
    rows = torch.randperm(len(parts.calibration.labels), generator=generator)[:size]
    asked = Part(parts.calibration.embeddings[rows], parts.calibration.features[rows], parts.calibration.labels[rows])
    gallery, test = parts.gallery, parts.test
    data = calibration_data(asked, gallery)
    targets = Targets(far=FAR, ood=max(0.05, least_rate(size)), conformal_miss=0.5)
    made = calibrate(data, Choices(targets), key="")
    found = searched(test, gallery)
    (_, known), (_, no_match) = of_queries(made, test, found, gallery)
    bins = probability_bins(known.right_if_known, found.correct)
    return {
        "answered_right": float(((known.codes == MATCH) & found.correct).double().mean()),
        "false_accepts": float((no_match.statistic > made.accept_above).double().mean()),
        "ece": bins.expected_error,
        "ece_by_chance": bins.error_by_chance,
        "flag": made.flag,
        "accept": made.accept,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("build/real"))
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--subsets", type=int, default=4)
    parsed = parser.parse_args()
    results: dict[str, Any] = {}
    for title, (network, data) in CELLS.items():
        measured: dict[int, list[Any]] = {size: [] for size in SIZES}
        for seed in range(parsed.draws):
            parts = draw(part(parsed.cache / f"{network}__{data}.safetensors", data, seed))
            generator = torch.Generator().manual_seed(seed)
            for size in SIZES:
                measured[size] += [answered(parts, size, generator) for _ in range(parsed.subsets)]
        results[title] = {
            size: {name: fmean(row[name] for row in rows) for name in (*CURVES, "ece_by_chance")}
            | {by: dict(Counter(row[by] for row in rows)) for by in ("flag", "accept")}
            for size, rows in measured.items()
        }
        print(title, results[title], flush=True)
    write("few_queries", {"far": FAR, "draws": parsed.draws, "subsets": parsed.subsets, "cells": results})
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for axis, (name, words) in zip(axes, CURVES.items(), strict=True):
        for title, rows in results.items():
            axis.plot(SIZES, [rows[size][name] for size in SIZES], marker="o", label=title)
        axis.set(title=words, xlabel="calibration queries", xscale="log", ylim=(0, None))
        axis.set_xticks(SIZES, [str(size) for size in SIZES], minor=False)
        axis.minorticks_off()
    axes[1].axhline(FAR, color="grey", linestyle=":")
    axes[0].legend(fontsize="small")
    figure.savefig(Path(__file__).parent.parent / "docs" / "pictures" / "few_queries.png", dpi=110)


if __name__ == "__main__":
    main()
