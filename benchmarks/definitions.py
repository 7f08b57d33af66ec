"""Metrics of the same networks by the definitions of Warburg et al.'s code, and by lam's.

    python benchmarks/definitions.py NAME RUN RUN ...

Each RUN is a finished run of a method with samples; the runs are seeds. The first OOD set is used. Direction,
uncertainty and areas come from the same S samples, as in the authors' code; docs/reference/definitions.md lists the
differences.
Results: results/definitions_NAME.json.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import write
from torch import Tensor
from torch.utils.data import DataLoader

from lam.retrieval.index.exact import rank
from lam.retrieval.metrics.ood import auroc, precision_recall_curve
from lam.runs.config_files import load_config
from lam.runs.data import load_data
from lam.runs.finished import Run
from lam.runs.folder import METRICS
from lam.runs.sweep import summary
from lam.utils.files import read_json

OURS = ("map@1", "auroc", "auprc", "ausc", "ece", "ece_below_one")


def theirs(inside: Tensor, outside: Tensor, labels: Tensor) -> dict[str, float]:
    """Metrics from the mean of the samples (S, N, D) and their standard deviation in each dimension, without κ."""
    direction, deviation = F.normalize(inside.mean(0), dim=1), inside.std(0)
    hits, _ = rank(direction, None, k=1)
    correct = (labels[hits[:, 0]] == labels).double()
    known, unknown = deviation.sum(1), outside.std(0).sum(1)
    recall, precision = precision_recall_curve(known, unknown)
    together = (deviation + deviation[hits[:, 0]]).mean(1)
    ranked = correct[together.argsort(descending=True)]
    accuracies = torch.stack([ranked[len(ranked) * dropped // 100 :].mean() for dropped in range(99)])
    return {
        "map@1": float(correct.mean()),
        "auroc": auroc(known, unknown),
        "auprc": float(torch.trapezoid(precision, recall)),
        "ausc": float(torch.trapezoid(accuracies, dx=1 / 99)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("runs", nargs="+", type=Path)
    parsed = parser.parse_args()
    found: dict[str, dict[int, dict[str, Any]]] = {"ours": {}, "theirs": {}}
    for run in parsed.runs:
        config, metrics = load_config(run), read_json(run / METRICS)
        splits, ood = load_data(config.data)
        encoder: Any = Run(run).encoder
        sets = [DataLoader(images, batch_size=500) for images in (splits.test, next(iter(ood.values())))]
        n_samples = config.evaluation.n_samples
        inside, outside = (
            encoder.predict((x for x, _ in batches), joint=True, n_samples=n_samples).samples for batches in sets
        )
        found["ours"][config.seed] = {figure: metrics[figure] for figure in OURS}
        found["theirs"][config.seed] = theirs(inside, outside, splits.test.targets)
        for name, rows in found.items():
            print(config.seed, name, rows[config.seed], file=sys.stderr, flush=True)
    write(f"definitions_{parsed.name}", {name: {"seeds": rows, **summary(rows)} for name, rows in found.items()})


if __name__ == "__main__":
    sys.exit(main())
