"""Settings of online Laplace that rank known items and detect unknown ones well: tried on validation data.

    python benchmarks/online_settings.py --work FOLDER [--root FOLDER] [--seeds 0 3]

Each trial is `fashionmnist laplace_online` with a number of samples per step, or with one other change; missing runs in
FOLDER are trained. OOD sets are as in `validation`. Results: results/online_settings.json.
"""

import argparse
import sys
from pathlib import Path

from timing import write
from validation import figures_of, means, on_validation

from lam import datasets
from lam.encoders.load import load
from lam.runs.config_files import load_config
from lam.runs.run import run

ONE = "--method.n_samples=1"
TRIES = {
    "n_samples=1": (ONE,),
    "n_samples=4": ("--method.n_samples=4",),
    "n_samples=16": ("--method.n_samples=16",),
    "likelihood_scale=3e6": (ONE, "--method.likelihood_scale=3e6"),
    "likelihood_scale=3e7": (ONE, "--method.likelihood_scale=3e7"),
    "memory_factor=0.99": (ONE, "--method.memory_factor=0.99"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="where the runs are kept")
    parser.add_argument("--root", help="the folder of FashionMNIST's IDX files")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 3])
    parsed = parser.parse_args()
    rows: dict[str, dict[int, dict[str, float]]] = {}
    for name, change in TRIES.items():
        for seed in parsed.seeds:
            folder = Path(parsed.work) / f"{name}-{seed}"
            overrides = [f"--seed={seed}", f"--output={folder}", "--data.ood=[]", *change]
            overrides += [f"--data.root={parsed.root}"] if parsed.root else []
            config = load_config("fashionmnist laplace_online", overrides)
            run(config, progress=False)
            splits = datasets.load("fashionmnist", root=parsed.root, seed=config.data.seed)
            rows.setdefault(name, {})[seed] = figures_of(on_validation(load(folder / "encoder"), splits))
            print(name, seed, rows[name][seed], file=sys.stderr, flush=True)
        average = {tried: means(list(found.values())) for tried, found in rows.items()}
        write("online_settings", {"mean": average, "seeds": rows})


if __name__ == "__main__":
    sys.exit(main())
