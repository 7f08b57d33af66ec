"""Both parts of κ beside each other: on clean, on corrupted known images, and on the OOD sets of a run.

    python benchmarks/parts_of_kappa.py RUN [--images 1000]

RUN is the folder of a finished run whose encoder has both parts, such as

    lam run fashionmnist mcinfonce --output=first
    lam run fashionmnist laplace_posthoc --checkpoint=first --method.curvature=own --output=RUN

Of each set of images: the median of κ, of its parts and of p_known, and by each the AUROC of telling these images from
the clean ones. Ambiguity should fall on the blurred, κ_e and p_known on what is from elsewhere.
results/parts_of_kappa.json.
"""

import argparse
import sys

import torch
from timing import write

from lam.encoders.base import Encoder
from lam.inputs.corruption import STRENGTHS, corrupt
from lam.retrieval.metrics.ood import auroc
from lam.runs.data import load_data
from lam.runs.finished import Run
from lam.vmf.embeddings import Embeddings

BATCH = 250
SHOWN = ("blur", "noise", "contrast")
PARTS = ("kappa", "kappa_epistemic", "kappa_aleatoric", "p_known")


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--images", type=int, default=1000, help="of each set (default: 1000)")
    options = parser.parse_args()
    run = Run(options.run)
    if run.encoder.ambiguity is None:
        sys.exit(f"the encoder of {options.run} has no parts of κ")
    splits, ood = load_data(run.config.data)
    known = splits.test.limit(options.images, seed=0)
    preprocessing, generator = known.preprocessing, torch.Generator().manual_seed(0)
    pixels = preprocessing.denormalize(torch.stack([known[row][0] for row in range(len(known))]))
    clean = embedded(run.encoder, preprocessing.standardize(pixels))
    sets: dict[str, Embeddings] = {}
    for kind in SHOWN:
        for severity in range(1, len(STRENGTHS[kind]) + 1):
            worse = preprocessing.standardize(corrupt(pixels, kind, severity, generator=generator))
            sets[f"{kind} {severity}"] = embedded(run.encoder, worse)
    for name, images in ood.items():
        drawn = images.limit(options.images, seed=0)
        sets[name] = embedded(run.encoder, torch.stack([drawn[row][0] for row in range(len(drawn))]))
    rows = {
        name: {part: round(float(getattr(values, part).median()), 4) for part in PARTS}
        | {
            f"auroc_{part}": round(auroc(-getattr(clean, part), -getattr(values, part)), 4)
            for part in PARTS
            if name != "clean"
        }
        for name, values in {"clean": clean, **sets}.items()
    }
    settings = {"images": len(known), "seed": run.config.seed, "start": run.config.checkpoint is not None}
    write("parts_of_kappa", {"data": run.config.data.name, **settings, "sets": rows})


def embedded(encoder: Encoder, inputs: torch.Tensor) -> Embeddings:
    """Embeddings of inputs, in batches."""
    return encoder.embed(list(inputs.split(BATCH)))


if __name__ == "__main__":
    main()
