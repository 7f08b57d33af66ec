"""Photographs, faces, characters: what becomes of a method, in the settings for own images, on data it was not made on.

    python benchmarks/other_data.py DATA KNOWN OUTSIDE [--method laplace_posthoc] [--seeds 3] [--work FOLDER]

Each seed is one `lam run folder METHOD` on the folder KNOWN, with the classes of the folder OUTSIDE as OOD
set; a run that is finished is not done again. DATA says only how large images and network are. The figures in the
documentation are of CIFAR-10 (600 training images a class, seven known, three outside), of the ORL faces (15 people
known, five outside) and of Omniglot (the characters of four alphabets known, one outside). results/other_data.json
holds, by data and method, each metric's mean and standard deviation over the seeds; what other calls wrote stays in it.
"""

import argparse
import json
import sys
from typing import Any

from timing import RESULTS, write

from lam.runs.config import OodConfig
from lam.runs.config_files import load_config
from lam.runs.run import run
from lam.runs.sweep import summary

DATA = {
    "photographs": ("mode: RGB, size: 32", "convnet32", 16, 12, 128, "null"),
    "faces": ("mode: RGB, size: 64", "resnet18", 64, 5, 64, "null"),
    "characters": ("mode: L, size: 28", "convnet28", 32, 20, 128, "8"),
}
"""Preprocessing, network, dimension, epochs, items in a batch, and of a class in it."""


def measure(parsed: argparse.Namespace, seed: int) -> dict[str, Any]:
    preprocessing, network, dimension, epochs, batch_size, per_class = DATA[parsed.data]
    overrides = [
        *(f"--seed={seed}", f"--output={parsed.work}/{parsed.data}-{parsed.method}-{seed}", "--accelerator=cpu"),
        *(f"--data.root={parsed.known}", f"--data.options={{preprocessing: {{{preprocessing}}}}}"),
        *(f"--network.name={network}", f"--network.dimension={dimension}", "--network.weights=null"),
        *(f"--training.epochs={epochs}", f"--training.batch_size={batch_size}", f"--training.per_class={per_class}"),
    ]
    config = load_config(f"folder {parsed.method}", overrides)
    config.data.ood = [OodConfig("folder", parsed.outside, title="outside")]
    return run(config, progress=False).metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=DATA)
    parser.add_argument("known", help="a folder with a sub-folder a class")
    parser.add_argument("outside", help="the same with other classes")
    parser.add_argument("--method", default="laplace_posthoc")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", default="runs/benchmark", help="where the runs are kept")
    parsed = parser.parse_args()
    rows: dict[int, dict[str, Any]] = {}
    for seed in range(parsed.seeds):
        rows[seed] = measure(parsed, seed)
        print(f"{parsed.data}, {parsed.method}, seed {seed}: {rows[seed]}", file=sys.stderr, flush=True)
    file = RESULTS / "other_data.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    found.setdefault(parsed.data, {})[parsed.method] = {"seeds": rows, **summary(rows)}
    found.pop("machine", None)
    write("other_data", found)


if __name__ == "__main__":
    sys.exit(main())
