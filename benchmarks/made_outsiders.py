"""Outsiders that are made of the test images themselves, by every score that an encoder allows, over seeds.

    python benchmarks/made_outsiders.py RUN RUN ... [--root FOLDER] [--outside FOLDER] [--limit 4000]

Each RUN is a finished run on images, one a seed; --root is the folder of its data and --outside that of its first OOD
set, where they lie elsewhere now. Half of the test images, at most 2,000, are inverted, have their pixels permuted,
are blurred to 7 × 7 patches and turned by 90 degrees; the first OOD set stands beside them. Results:
results/made_outsiders.json.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from timing import write

from lam.datasets import Dataset
from lam.encoders.evaluation import evaluate
from lam.encoders.outsiders import made_outsiders
from lam.runs.config_files import load_config
from lam.runs.data import EMBEDDING_BATCH, load_data, loader_of, reference_features
from lam.runs.finished import Run
from lam.runs.sweep import summary

MOST = 2000


def made_of(images: Dataset, *, seed: int) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Sets of made outsiders, as batches with labels."""
    drawn = images.limit(min(MOST, len(images) // 2), seed=seed)
    pixels = torch.stack([drawn[row][0] for row in range(len(drawn))])
    made = {**made_outsiders(pixels, seed=seed), "turned": pixels.rot90(1, (2, 3))}
    return {
        kind: list(zip(worse.split(EMBEDDING_BATCH), drawn.labels.split(EMBEDDING_BATCH), strict=True))
        for kind, worse in made.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--root", help="the folder of the data")
    parser.add_argument("--outside", help="the folder of the first OOD set")
    parser.add_argument("--limit", type=int, default=4000, help="of the test images")
    parsed = parser.parse_args()
    rows: dict[int, dict[str, Any]] = {}
    for folder in parsed.runs:
        config = load_config(folder)
        config.data.root = parsed.root or config.data.root
        config.data.ood = config.data.ood[:1]
        config.data.ood[0].root = parsed.outside or config.data.ood[0].root
        splits, ood = load_data(config.data)
        test, encoder = splits.test.limit(parsed.limit, seed=config.seed), Run(folder).encoder
        outside: dict[str, Any] = {
            name: loader_of(images.limit(MOST, seed=config.seed), EMBEDDING_BATCH) for name, images in ood.items()
        }
        reference = reference_features(encoder, splits.train, config.evaluation.reference, seed=config.seed)
        evaluation = evaluate(
            encoder,
            loader_of(test, EMBEDDING_BATCH),
            {**outside, **made_of(test, seed=config.seed)},
            reference=reference,
            n_samples=config.evaluation.n_samples,
        )
        rows[config.seed] = {name: value for name, value in evaluation.metrics.items() if name.startswith("auroc")}
        print(config.seed, rows[config.seed], file=sys.stderr, flush=True)
        write("made_outsiders", {"outside": next(iter(ood)), **summary(rows), "seeds": rows})


if __name__ == "__main__":
    sys.exit(main())
