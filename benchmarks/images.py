"""A user's folder of photographs or pictures: recall with the default network, and the time of the run.

    python benchmarks/images.py FOLDER [FOLDER ...] --seeds 5 --work /tmp/images

Each cell is one `lam run folder` in a separate process, so its seconds are the time for a user. The default is a frozen
EfficientNet-Lite0 with a trained head. For comparison, with one seed each: its features without a head, and a ResNet-18
trained from random weights, the default without the extra `images`.

benchmarks/results/images.json has all cells, with the load of the machine at their start; existing cells are not run
again.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lam.retrieval.index.exact import rank
from lam.runs.data import load_data, loader_of
from lam.runs.finished import Run
from lam.utils.files import read_json, write_json

RESULTS = Path(__file__).parent / "results" / "images.json"
NETWORKS = {
    "default": ("laplace_posthoc",),
    "identity": ("laplace_posthoc", "--network.head=identity"),
    "resnet18": ("laplace_posthoc", "--network.name=resnet18"),
}
KEPT = ("recall@1", "map@5", "ausc", "ece", "ece_by_chance")


def cell(folder: Path, network: str, seed: int, output: Path) -> dict[str, Any]:
    """One run: its metrics on the test part, recall@1 of the test part in the whole folder, and its seconds."""
    command = [sys.executable, "-m", "lam", "run", "folder", *NETWORKS[network], f"--data.root={folder}"]
    command += [f"--data.seed={seed}", f"--seed={seed}", f"--output={output}", "--quiet"]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    metrics = read_json(output / "metrics.json")
    return {
        **{name: metrics[name] for name in KEPT},
        "recall@1_in_folder": recall_in_folder(Run(output)),
        "seconds": round(wall, 1),
        "processor_seconds": round(processor, 1),
        "stages": {name: metrics[name] for name in metrics if name.startswith("seconds_")},
    }


def recall_in_folder(finished: Run) -> float:
    """Recall@1 of the test split if the gallery is the whole folder, including training images."""
    splits, _ = load_data(finished.config.data)
    parts = [splits.test, splits.train, splits.validation]
    embedded = [finished.encoder.embed(loader_of(part, batch_size=64), n_samples=2).mean.cpu() for part in parts]
    labels = torch.cat([part.labels for part in parts])
    hits, _ = rank(embedded[0], torch.cat(embedded), k=2)
    is_itself = hits[:, 0] == torch.arange(len(hits))
    first = torch.where(is_itself, hits[:, 1], hits[:, 0])
    return float((labels[first] == splits.test.labels).double().mean())


def main() -> None:
    """Run missing cells, and print means and standard deviations."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="with a sub-folder a class")
    parser.add_argument("--seeds", type=int, default=5, help="of the default network (default: 5)")
    parser.add_argument("--work", type=Path, default=Path("runs/images"), help="where the runs are kept")
    given = parser.parse_args()
    cells: dict[str, Any] = read_json(RESULTS) if RESULTS.is_file() else {}
    for folder in given.folders:
        for network in NETWORKS:
            seeds = range(given.seeds if network == "default" else 1)
            for seed in seeds:
                name = f"{folder.name}/{network}/{seed}"
                if name not in cells:
                    cells[name] = {
                        "cores": os.cpu_count(),
                        "load": round(os.getloadavg()[0], 1),
                        **cell(folder, network, seed, given.work / name),
                    }
                    write_json(RESULTS, cells)
                    print(name, cells[name], flush=True)
            of_network = [cells[f"{folder.name}/{network}/{seed}"] for seed in seeds]
            for metric in ("recall@1", "recall@1_in_folder", "ausc", "seconds"):
                values = torch.tensor([each[metric] for each in of_network], dtype=torch.float64)
                spread = f" ± {values.std():.4f}" if len(values) > 1 else ""
                print(f"{folder.name:<12} {network:<10} {metric:<20} {values.mean():.4f}{spread}")


if __name__ == "__main__":
    main()
