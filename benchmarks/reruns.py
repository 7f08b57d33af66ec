"""How far a rerun moves: cells of the suite trained with the same seed on one thread and on two.

    python benchmarks/reruns.py --data FOLDER [--fashionmnist FOLDER] [--only NAME ...] [--seeds 3] [--work FOLDER]

Two threads sum in another order, and training magnifies the difference. Each run is a separate process. Writes
results/reruns.json: for each data set, a list of pairs of figures, with one thread first.
"""

import argparse
import json
import sys
from pathlib import Path

import suite
from timing import in_process, kept, write

METHOD = "laplace_posthoc"
FIGURES = ("recall@1", "auroc", "ausc", "ece")
THREADS = (1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--fashionmnist", help="the folder of FashionMNIST's IDX files")
    parser.add_argument("--only", nargs="+", choices=suite.SOURCES, default=["digits", "faces", "fashionmnist"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/reruns"), help="where data and runs are kept")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    parser.set_defaults(**suite.NOT_ASKED, again=False)
    parsed = parser.parse_args()
    parsed.data, parsed.work = parsed.data.resolve(), parsed.work.resolve()
    if parsed.cell:
        name, seed, threads = parsed.cell
        parsed.work /= f"threads-{threads}"
        metrics = suite.measured(parsed, name, suite.SOURCES[name](parsed), METHOD, int(seed))
        print(json.dumps({figure: metrics[figure] for figure in FIGURES}))
        return
    for name in parsed.only:
        for seed in range(parsed.seeds):
            pair = []
            for threads in map(str, THREADS):
                cell = ("--cell", name, str(seed), threads)
                pair.append(in_process(__file__, *sys.argv[1:], *cell, OMP_NUM_THREADS=threads))
            results = kept("reruns")
            results.setdefault(name, {})[str(seed)] = pair
            write("reruns", results)


if __name__ == "__main__":
    sys.exit(main())
