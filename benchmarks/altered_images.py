"""AUROC of altered test images, by every score, by `combined` and by P(right), over seeds.

    python benchmarks/altered_images.py NAME=RUN ... [--limit 4000]

Each RUN is a finished run on images; runs of one NAME are seeds. Gallery, calibration and scores are as in
`answers.py`. Half of the test images, at most 2,000, are inverted, have permuted pixels, are blurred to 7 × 7 patches,
or are turned by 90 degrees; the first OOD set is measured, too. results/altered_images.json holds the AUROC of each by
NAME; a call replaces only its own NAMEs. `fashionmnist` there comes from an earlier version, which searched within the
test images and had neither `combined` nor P(right).
"""

import argparse
import sys
from typing import Any

import torch
from answers import IF_KNOWN, Cell
from timing import kept, write
from torch import Tensor

from lam.datasets import Dataset
from lam.retrieval.metrics.ood import auroc
from lam.runs.data import EMBEDDING_BATCH
from lam.runs.finished import Run
from lam.runs.sweep import summary
from lam.tuning.alterations import alterations

MOST = 2000


def made_of(images: Dataset, *, seed: int) -> dict[str, list[Tensor]]:
    """Altered images by kind, as batches."""
    drawn = images.limit(min(MOST, len(images) // 2), seed=seed)
    pixels = torch.stack([drawn[row][0] for row in range(len(drawn))])
    made = {**alterations(pixels, seed=seed), "turned": pixels.rot90(1, (2, 3))}
    return {kind: list(worse.split(EMBEDDING_BATCH)) for kind, worse in made.items()}


def measure(cell: Cell, seed: int, limit: int) -> dict[str, float]:
    """AUROC of each set of altered images by each score, named SCORE@SET."""
    test = cell.splits.test.limit(limit, seed=seed)
    title, outside = next(iter(cell.ood.items()))
    known, _ = cell.answers(test, test.labels)
    found = {}
    for kind, items in {title: outside.limit(MOST, seed=seed), **made_of(test, seed=seed)}.items():
        n_items = sum(map(len, items)) if isinstance(items, list) else len(items)
        foreign, _ = cell.answers(items, torch.full((n_items,), -1))
        found |= {f"{name}@{kind}": auroc(known[name], foreign[name]) for name in known if name != IF_KNOWN}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN")
    parser.add_argument("--limit", type=int, default=4000, help="of the test images")
    parsed = parser.parse_args()
    folders: dict[str, list[str]] = {}
    for name, folder in (given.split("=", 1) for given in parsed.runs):
        folders.setdefault(name, []).append(folder)
    for name, runs in folders.items():
        rows: dict[int, dict[str, Any]] = {}
        for seed, folder in enumerate(runs):
            cell = Cell(Run(folder), seed)
            rows[seed] = measure(cell, seed, parsed.limit)
            print(name, seed, rows[seed], file=sys.stderr, flush=True)
            result = {"outside": next(iter(cell.ood)), **summary(rows), "seeds": rows}
            write("altered_images", {**kept("altered_images"), name: result})


if __name__ == "__main__":
    sys.exit(main())
