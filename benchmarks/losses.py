"""Losses: time of a step, compared with pytorch-metric-learning, and its growth with the batch.

    python benchmarks/losses.py [--quick]

A step is the loss of unit embeddings and its gradient, including pairs if the loss takes pairs. Seconds are processor
seconds on one thread, so other work on the machine has less effect; the losses of a batch take turns, and the median
counts. results/losses.json holds seconds, ratios and the exponent of growth over the last doubling.
"""

import argparse
import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from pytorch_metric_learning.losses import NTXentLoss, SupConLoss
from timing import write
from torch import Tensor

from lam.losses import AnInfoNCE, InfoNCE, SupCon, VarCon
from lam.pairs.pairs import Pairs

DIMENSION, CLASSES, TEMPERATURE = 128, 100, 0.1
RIVALS = {"infonce": "pml_ntxent", "supcon": "pml_supcon", "varcon": "pml_supcon", "aninfonce": "pml_ntxent"}
MOST_ELEMENTS = 2**28  # of a table of NTXentLoss, which has a column for every negative pair of the batch

Call = Callable[[Tensor, Tensor], Tensor]


def losses() -> dict[str, Call]:
    """Every loss as a function of embeddings and labels, in pytorch-metric-learning and in lam."""
    infonce, supcon = InfoNCE(0.7, TEMPERATURE), SupCon(0.7, TEMPERATURE)
    varcon, aninfonce = VarCon(TEMPERATURE), AnInfoNCE(DIMENSION, 1 / (2 * TEMPERATURE))
    ntxent, pml_supcon = NTXentLoss(TEMPERATURE), SupConLoss(TEMPERATURE)
    return {
        "infonce": lambda x, labels: infonce(x, Pairs.by_label(labels)),
        "pml_ntxent": ntxent,
        "supcon": lambda x, labels: supcon(x, Pairs.by_label(labels)),
        "pml_supcon": pml_supcon,
        "varcon": lambda x, labels: varcon(x, Pairs.by_label(labels)),
        "aninfonce": lambda x, labels: aninfonce(x, Pairs.by_label(labels)),
    }


def labels_of(name: str, N: int) -> Tensor:
    """Two views of each item for the losses compared with NT-Xent, a hundred classes for the others."""
    return torch.arange(N) // 2 if RIVALS.get(name, name) == "pml_ntxent" else torch.arange(N) % CLASSES


def fits(name: str, N: int) -> bool:
    return name != "pml_ntxent" or N * N * N < MOST_ELEMENTS


def cpu_seconds(N: int, repeats: int) -> dict[str, float]:
    """Median processor seconds of a step by each loss, in turns."""
    x = F.normalize(torch.randn(N, DIMENSION, generator=torch.Generator().manual_seed(0))).requires_grad_()
    calls = {name: call for name, call in losses().items() if fits(name, N)}
    measured: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            labels = labels_of(name, N)
            start = time.process_time()
            torch.autograd.grad(call(x, labels), x)
            if repeat:
                measured[name].append(time.process_time() - start)
    return {name: sorted(values)[len(values) // 2] for name, values in measured.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small batches, few repeats, nothing is written")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    sizes = (64, 128) if quick else (256, 512, 1024, 2048, 4096)
    rows = []
    for N in sizes:
        seconds = cpu_seconds(N, 3 if quick else 5)
        ratios = {name: seconds[name] / seconds[rival] for name, rival in RIVALS.items() if rival in seconds}
        rows.append({"batch": N, "seconds": seconds, "ratio_to_pml": ratios})
        print(N, {name: f"{value * 1000:.2f} ms" for name, value in seconds.items()}, ratios, flush=True)
    last, before = (row["seconds"] for row in (rows[-1], rows[-2]))
    growth = {name: math.log2(last[name] / before[name]) for name in last if name in before}
    print("exponent of growth over the last doubling:", growth)
    if not quick:
        write("losses", {"dimension": DIMENSION, "classes": CLASSES, "rows": rows, "growth": growth})


if __name__ == "__main__":
    main()
