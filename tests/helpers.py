"""Helpers of several test files."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lam.cli import main
from lam.gallery.gallery import Gallery
from lam.gallery.item import Item
from lam.hessians import ContrastiveCurvature, Curvature, Diagonal, diagonal_ggn, ggn_of_dataset
from lam.utils.files import read_csv, read_json

ROOT = Path(__file__).parents[1]


def unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function without the type checks of test runs, so that its own errors can be seen."""
    return inspect.unwrap(function)


def stored(gallery: Gallery, *, limit: int = 100) -> list[Item]:
    """The first items of a gallery, by id."""
    items = [gallery.store.get(info.id) for info in gallery.store.page(after="", limit=limit).values()]
    return [item for item in items if item is not None]


def run_python(*arguments: object, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """A process of Python with one thread, in the repository's root, which must end well."""
    command, environment = [sys.executable, *map(str, arguments)], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def written_hits(run: Path, *arguments: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The contents of `lam search` as JSON, and as the lines of a CSV file."""
    for name in ("hits.json", "hits.csv"):
        assert main(["search", str(run), *arguments, "--quiet", "-o", str(run / name)]) == 0
    return read_json(run / "hits.json"), read_csv(run / "hits.csv")


def contrastive_ggn(features: Any, weight: Any, bias: Any, pairs: Any, **settings: Any) -> Diagonal:
    """Diagonal GGN of the contrastive loss over the pairs of a batch."""
    return diagonal_ggn(features, weight, bias, pairs, ContrastiveCurvature(**settings))


def diagonal_ggn_dataset(
    features: Any, weight: Any, bias: Any, curvature: Curvature, *, related: Any, **options: Any
) -> Diagonal:
    """Diagonal GGN over every pair of a data set."""
    empty = Diagonal.zeros(weight, curvature, has_bias=bias is not None)
    return ggn_of_dataset(empty, features, weight, bias, related, **options)


def contrastive_ggn_dataset(features: Any, weight: Any, bias: Any, **settings: Any) -> Diagonal:
    """Diagonal GGN of the contrastive loss over every pair of a data set."""
    names = ("related", "block_size", "progress")
    options = {name: settings.pop(name) for name in names if name in settings}
    return diagonal_ggn_dataset(features, weight, bias, ContrastiveCurvature(**settings), **options)
