"""Kill a run again and again, start it again each time, and compare its end with an uninterrupted run's.

Called as `python kill_run.py FOLDER KILLS SEED`. Every run is a process of its own, forked from this one, which has
everything imported but no thread started.
"""

import json
import multiprocessing
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import faiss  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch

from lam.runs.config_files import load_config
from lam.runs.run import run

SETTINGS = ("--data.limit=60", "--training.epochs=3", "--training.checkpoint_every=1", "--evaluation.n_samples=8")


def start(folder: Path) -> None:
    run(load_config("digits laplace_posthoc", [*SETTINGS, f"--output={folder}"]), progress=False)


def outcome(folder: Path) -> tuple[bytes, dict[str, Any], set[str]]:
    metrics = json.loads((folder / "metrics.json").read_text())
    (posterior,) = folder.glob("encoder/*/posterior.safetensors")
    same = {name: value for name, value in metrics.items() if not name.startswith("seconds_")}
    return posterior.read_bytes(), same, set(metrics)


def main(folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    context, rng, done = multiprocessing.get_context("fork"), random.Random(seed), 0
    begin = time.monotonic()
    whole = context.Process(target=start, args=(folder / "whole",))
    whole.start()
    whole.join()
    duration = time.monotonic() - begin
    expected = outcome(folder / "whole")
    killed = folder / "killed"
    while True:
        process = context.Process(target=start, args=(killed,))
        process.start()
        process.join(rng.uniform(0, duration) if done < kills else None)
        if process.is_alive():
            process.kill()
            process.join()
            done += 1
            continue
        if process.exitcode != 0:
            raise SystemExit(f"after {done} kills the run did not start again")
        if outcome(killed) != expected:
            raise SystemExit(f"after {done} kills the run ended otherwise")
        if list(killed.rglob("*.tmp")):
            raise SystemExit(f"after {done} kills half-written files are left: {list(killed.rglob('*.tmp'))}")
        if done == kills:
            break
        shutil.rmtree(killed)
    print(f"{done} kills, same end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
