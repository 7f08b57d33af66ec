"""The cost of a step of online Laplace, compared with a deterministic step: same batch, network and optimizer, in turn.

    python benchmarks/online.py [--quick]

A step is forward, pairs, loss, backward and Adam; an online step also samples last layers and updates the curvature.
results/online.json holds seconds, their ratio, and images per second.
"""

import argparse
import copy
import sys
import time
from typing import Any, get_args

import torch
from lightning_fabric import Fabric
from timing import APART, DEVICE, synchronise, write

from lam import losses, models
from lam.methods import LaplaceOnline
from lam.methods.laplace_online import OnlineLaplaceStep
from lam.pairs.pairs import Pairs
from lam.training.settings import Precision
from lam.training.steps import Minibatch, Step

CASES: tuple[tuple[Any, ...], ...] = (  # network, options, D, shape, batch, steps, precision
    ("convnet28", {}, 3, (1, 28, 28), 256, 30, "32-true"),
    ("resnet50", {"pooling": "gem"}, 512, (3, 227, 227), 16, 7, "32-true"),
)
CASES_OF_A_GPU = (
    CASES[0],
    *(("resnet50", {"pooling": "gem"}, 512, (3, 227, 227), 128, 15, precision) for precision in get_args(Precision)),
)


def stepper(network: torch.nn.Module, step: Step, batch: Minibatch, precision: Precision):
    """One training step as the loop does it."""
    fabric = Fabric(accelerator=DEVICE, devices=1, precision=precision)
    module, optimizer = fabric.setup(network, torch.optim.Adam(network.parameters(), lr=1e-6))
    loss = losses.build(margin=0.7)

    def call() -> None:
        optimizer.zero_grad()
        step.backward(module, loss, batch, fabric.backward).item()
        optimizer.step()

    return call


def measure(
    name: str,
    options: dict,
    dimension: int,
    shape: tuple[int, ...],
    size: int,
    steps: int,
    precision: Precision,
    samples: int,
) -> dict[str, Any]:
    """Median seconds of both kinds of step, and the median of the ratio of neighbouring ones."""
    generator = torch.Generator().manual_seed(0)
    network = models.build(name, dimension=dimension, **options).to(DEVICE).train()
    labels = (torch.arange(size) % (size // 4)).to(DEVICE)
    inputs = torch.rand(size, *shape, generator=generator).to(DEVICE)
    batch = Minibatch(inputs, Pairs.by_label(labels), 0, generator)
    online = OnlineLaplaceStep("head", LaplaceOnline(n_samples=samples))
    calls = [stepper(copy.deepcopy(network), Step(), batch, precision), stepper(network, online, batch, precision)]
    measured: list[list[float]] = [[], []]
    for round_ in range(steps + 2):
        for call, kept in zip(calls, measured, strict=True):
            start = time.perf_counter()
            call()
            synchronise()
            if round_ >= 2:
                kept.append(time.perf_counter() - start)
    ratios = sorted(slow / fast for fast, slow in zip(*measured, strict=True))
    deterministic, seconds = (sorted(kept)[steps // 2] for kept in measured)
    return {
        "network": name,
        "D": dimension,
        "batch": size,
        "n_samples": samples,
        "device": DEVICE,
        "precision": precision,
        "deterministic_seconds": deterministic,
        "online_seconds": seconds,
        "deterministic_images_a_second": size / deterministic,
        "online_images_a_second": size / seconds,
        "ratio": ratios[steps // 2],
        "ratio_quartiles": [ratios[steps // 4], ratios[(3 * steps) // 4]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the steps")
    quick = parser.parse_args().quick
    cases = [
        measure(name, options, D, shape, size, max(3, steps // 5) if quick else steps, precision, samples)
        for name, options, D, shape, size, steps, precision in (CASES_OF_A_GPU if DEVICE == "cuda" else CASES)
        for samples in (1, 4)
    ]
    write(f"online{APART}", {"cases": cases})


if __name__ == "__main__":
    sys.exit(main())
