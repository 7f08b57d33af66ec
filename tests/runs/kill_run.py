"""Kill a run again and again: `python -m tests.runs.kill_run FOLDER KILLS SEED`, see `tests.killing`."""

import json
import sys
from pathlib import Path
from typing import Any

import faiss  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import sklearn.datasets  # noqa: F401

from lam.runs.config_files import load_config
from lam.runs.run import run
from tests.killing import kill_again_and_again

SETTINGS = ("--data.limit=60", "--training.epochs=3", "--training.checkpoint_every=1", "--evaluation.n_samples=8")


def start(folder: Path) -> None:
    run(load_config("digits laplace_posthoc", [*SETTINGS, f"--output={folder}"]), progress=False)


def outcome(folder: Path) -> tuple[bytes, dict[str, Any], set[str], list[Path]]:
    metrics = json.loads((folder / "metrics.json").read_text())
    (posterior,) = folder.glob("encoder/*/posterior.safetensors")
    same = {name: value for name, value in metrics.items() if not name.startswith("seconds_")}
    return posterior.read_bytes(), same, set(metrics), list(folder.rglob("*.tmp"))


if __name__ == "__main__":
    kill_again_and_again(start, outcome, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
