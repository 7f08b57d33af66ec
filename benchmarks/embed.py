"""The cost of κ: embedding with 32 marginal samples, compared with the deterministic forward pass, ResNet-50, D = 512.

    python benchmarks/embed.py [--quick]

Both are measured in turn in one run; results/embed.json holds seconds and their ratio. On a GPU, the exported program,
compiled to a CUDA graph, is measured, too: it launches few kernels, see `kernels.py`.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from timing import APART, DEVICE, synchronise, write

import lam
from lam import models


def in_turn(calls: list, repeats: int) -> list[list[float]]:
    """Seconds of each call, measured in turn, so that a drift of the machine affects all of them."""
    measured: list[list[float]] = [[] for _ in calls]
    for round_ in range(repeats + 1):
        for call, kept in zip(calls, measured, strict=True):
            start = time.perf_counter()
            call()
            if round_:
                kept.append(time.perf_counter() - start)
    return measured


def exported(encoder: lam.BayesianEncoder, inputs: torch.Tensor):
    """The exported program, compiled and captured."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "encoder.pt2"
        encoder.export(file, inputs.repeat(2, 1, 1, 1)[:2])
        return torch.compile(torch.export.load(file).module(), mode="reduce-overhead")


def compare(name: str, dimension: int, shape: tuple[int, ...], batch: int, repeats: int) -> dict[str, object]:
    """The ratio of embedding with κ to a forward pass alone."""
    generator = torch.Generator().manual_seed(0)
    network = models.build(name, dimension=dimension).eval().to(DEVICE)
    images = torch.rand(8, *shape, generator=generator).to(DEVICE)
    encoder = lam.fit(network, [(images, torch.arange(8) % 4)], margin=0.7, progress=False)
    inputs = torch.rand(batch, *shape, generator=generator).to(DEVICE)

    def synchronised(call):
        def timed() -> None:
            with torch.no_grad():
                call()
            synchronise()

        return timed

    predict = encoder.posterior.predictor(n_samples=32)
    features = encoder.features(inputs)
    calls = [
        synchronised(lambda: network(inputs)),
        synchronised(lambda: encoder.embed(inputs, n_samples=32)),
        synchronised(lambda: predict(features)),
    ]
    if DEVICE == "cuda":
        plain, program = torch.compile(network, mode="reduce-overhead"), exported(encoder, inputs)
        calls += [synchronised(lambda: plain(inputs)), synchronised(lambda: program(inputs))]
    forward, embed, head, *compiled = in_turn(calls, repeats)
    ratios = sorted(one / other for one, other in zip(embed, forward, strict=True))
    middle = repeats // 2
    return {
        "network": name,
        "D": dimension,
        "batch": batch,
        "samples": 32,
        "device": DEVICE,
        "forward_seconds": sorted(forward)[middle],
        "embed_seconds": sorted(embed)[middle],
        "kappa_alone_seconds": sorted(head)[middle],
        "ratio_embed_to_forward": ratios[middle],
        "ratio_range": [ratios[0], ratios[-1]],
        **{
            f"compiled_{name}_seconds": sorted(kept)[middle]
            for name, kept in zip(("forward", "embed"), compiled, strict=False)
        },
        "ratio_one_plus_kappa_alone": 1 + sorted(head)[middle] / sorted(forward)[middle],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    repeats = 3 if parser.parse_args().quick else 11
    cases = [
        compare("resnet50", 512, (3, 224, 224), 16, repeats),
        compare("resnet50", 512, (3, 224, 224), 1, repeats),
        compare("convnet28", 3, (1, 28, 28), 256, repeats),
    ]
    write(f"embed{APART}", {"cases": cases})


if __name__ == "__main__":
    sys.exit(main())
