"""Why κ detects OOD data worse after online training: three curvatures for one network, on validation data.

    python benchmarks/online_curvature.py --work FOLDER [--root FOLDER] [--seeds 5]

FOLDER holds the runs of `lam run fashionmnist laplace_online --method.n_samples=1`, `laplace_online_one_sample-SEED`.
`followed` is the running mean of training; `unbiased` is this mean without its initial value h₀, that is,
(h − βᵀh₀)/(1 − βᵀ); `refitted` is computed again at the final weights. OOD sets are as in `validation`. Results:
results/online_curvature.json.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from timing import write
from torch import Tensor
from validation import figures_of, means, on_validation

from lam import datasets
from lam.encoders.bayesian import BayesianEncoder
from lam.encoders.load import load
from lam.runs.config_files import load_config
from lam.training import checkpoints


def curvatures(run: Path, encoder: BayesianEncoder, n_items: int) -> dict[str, BayesianEncoder]:
    """The encoder with each of the three curvatures."""
    config = load_config(run)
    method: Any = config.method
    online, batches = method, -(-n_items // config.training.batch_size)
    found: Any = checkpoints.load(run / "checkpoints")
    steps = found.state["progress"]["best_epoch"] * batches
    h = found.tensors["best/step/h"]
    start = (online.initial_precision or online.likelihood_scale / 1000) / online.likelihood_scale
    left = online.memory_factor**steps
    posterior = encoder.posterior

    def with_curvature(h: Tensor) -> BayesianEncoder:
        changed = replace(posterior, curvature=replace(posterior.curvature, sums=h[None], counts=None))
        return BayesianEncoder(encoder.network, encoder.head, changed, relation=encoder.relation)

    return {
        "followed": with_curvature(h),
        "unbiased": with_curvature((h - left * start) / (1 - left)),
        "refitted": encoder,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="where the runs are")
    parser.add_argument("--root", help="the folder of FashionMNIST's IDX files")
    parser.add_argument("--seeds", type=int, default=5)
    parsed = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {}
    for seed in range(parsed.seeds):
        run = Path(parsed.work) / f"laplace_online_one_sample-{seed}"
        encoder: Any = load(run / "encoder")
        splits = datasets.load("fashionmnist", root=parsed.root, seed=load_config(run).data.seed)
        for name, variant in curvatures(run, encoder, len(splits.train)).items():
            rows.setdefault(name, []).append(figures_of(on_validation(variant, splits)))
            print(seed, name, rows[name][-1], file=sys.stderr, flush=True)
    by_curvature = {name: means(found) for name, found in rows.items()}
    write("online_curvature", {"mean": by_curvature, "seeds": rows})


if __name__ == "__main__":
    sys.exit(main())
