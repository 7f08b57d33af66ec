"""FashionMNIST against MNIST by every method, over seeds, beside the paper's rows.

    python benchmarks/methods.py METHOD --mnist FOLDER [--root FOLDER] [--seeds 3] [--networks FOLDER]

Each seed is one `lam run fashionmnist METHOD`; a run that is finished is not done again. The members of
the ensembles are networks of the deterministic configuration, five different seeds an ensemble. Methods that start from
a trained network (deterministic, norm, knn_distance, deep_ensemble, pfe) take it from `--networks`, a folder of
<seed>.safetensors, where it is there already. results/fashionmnist_METHOD.json holds every figure, its mean and its
standard deviation.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from timing import write

from lam.methods import METHODS
from lam.runs.config import RunConfig
from lam.runs.config_files import load_config
from lam.runs.run import run
from lam.runs.sweep import summary

FIGURES = ("map@1", "map@5", "map@10", "auroc", "auprc", "ausc", "ece")
PAPER: dict[str, tuple[float | None, ...]] = {  # Warburg et al. (2023), table 2
    "deterministic": (0.78, 0.73, 0.72, None, None, None, None),
    "deep_ensemble": (0.69, 0.62, 0.59, 0.41, 0.46, 0.61, 0.04),
    "pfe": (0.78, 0.74, 0.72, 0.53, 0.46, 0.65, 0.26),
    "hib": (0.69, 0.63, 0.61, 0.60, 0.60, 0.65, 0.54),
    "mc_dropout": (0.76, 0.71, 0.70, 0.93, 0.93, 0.84, 0.03),
    "laplace_posthoc": (0.78, 0.74, 0.72, 0.96, 0.96, 0.86, 0.03),
    "laplace_online": (0.81, 0.77, 0.76, 0.98, 0.98, 0.89, 0.02),
}
FROM_A_NETWORK = ("deterministic", "norm", "knn_distance", "pfe")


def configured(parsed: argparse.Namespace, method: str, seed: int) -> RunConfig:
    """The shipped configuration of a method with one seed."""
    overrides = [f"--seed={seed}", f"--output={parsed.work}/{parsed.name or method}-{seed}"]
    overrides += [f"--data.root={parsed.root}"] if parsed.root else []
    config = load_config(f"fashionmnist {method}", [*overrides, *parsed.set])
    for ood in config.data.ood:
        ood.root = parsed.mnist
    trained = Path(parsed.networks or "") / f"{seed}.safetensors"
    if parsed.networks and trained.is_file() and method in FROM_A_NETWORK:
        config.checkpoint = str(trained)
    return config


def with_members(parsed: argparse.Namespace, config: RunConfig, seed: int) -> RunConfig:
    """The ensemble of the deterministic networks of seeds M·seed to M·seed + M − 1, trained where they are not."""
    ensemble: Any = config.method
    n_members = ensemble.n_members
    members = []
    for member in range(seed * n_members, (seed + 1) * n_members):
        found = Path(parsed.networks or "") / f"{member}.safetensors"
        if not (parsed.networks and found.is_file()):
            folder = run(configured(parsed, "deterministic", member), progress=False).folder
            (found,) = (folder / "encoder").glob("generation-*/network.safetensors")
        members.append(str(found))
    config.method = replace(ensemble, checkpoints=tuple(members))
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--mnist", required=True, help="the folder of MNIST's IDX files")
    parser.add_argument("--root", help="the folder of FashionMNIST's IDX files")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--networks", help="a folder of <seed>.safetensors, networks that are trained already")
    parser.add_argument("--set", action="append", default=[], help="another setting, such as --set=--method.refit=true")
    parser.add_argument("--name", help="of the results, where settings differ from the configuration's")
    parser.add_argument("--work", default="runs/benchmark", help="where the runs are kept")
    parsed = parser.parse_args()
    rows: dict[int, dict[str, Any]] = {}
    for seed in range(parsed.seeds):
        config = configured(parsed, parsed.method, seed)
        if parsed.method == "deep_ensemble":
            config = with_members(parsed, config, seed)
        rows[seed] = run(config, progress=False).metrics
        print(f"{parsed.method}, seed {seed}: {rows[seed]}", file=sys.stderr, flush=True)
        paper = dict(zip(FIGURES, PAPER.get(parsed.method, ()), strict=False))
        results = {"paper": paper, "settings": parsed.set, "seeds": rows, **summary(rows)}
        write(f"fashionmnist_{parsed.name or parsed.method}", results)


if __name__ == "__main__":
    sys.exit(main())
