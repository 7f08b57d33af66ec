"""Time, memory and disk space of a gallery of a million items: its store, a start of the service, and a calibration.

    python benchmarks/large.py [--sizes 100000 1000000]

Random unit vectors of 128 dimensions with one of a thousand labels and a field of metadata, without pictures. Each step
is a separate process. results/large.json holds seconds, peak memory and size on disk, and an extrapolation to ten
million
items: ten times the time of the last size, except for fitting the calibration, and MiB by the slope of the last two.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import in_process, write

from lam.gallery.enrolment import SourceImage, enrol
from lam.gallery.gallery import Gallery, open_store, replace_items
from lam.gallery.replica import Snapshot
from lam.retrieval.decisions.calibrate import CalibrationData, Choices, calibrate
from lam.retrieval.decisions.calibration import Targets
from lam.retrieval.metrics.open_set import search_open_set
from lam.vmf.embeddings import Embeddings

D, CLASSES, QUERIES, TARGET = 128, 1000, 500, 10_000_000


def clustered(n: int, seed: int) -> Embeddings:
    """Unit vectors around a centre for each class; row i has class i modulo their number."""
    centres = torch.randn(CLASSES, D, generator=torch.Generator().manual_seed(0)) / D**0.5
    noise = torch.randn(n, D, generator=torch.Generator().manual_seed(seed))
    mean = torch.nn.functional.normalize(centres[torch.arange(n) % CLASSES] + 0.1 * noise, dim=1)
    kappa = 10 + 90 * torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Embeddings(mean, kappa, torch.ones_like(kappa), torch.zeros_like(kappa))


def fill(folder: Path, n: int) -> dict[str, Callable[[], object]]:
    def store() -> None:
        sources = [
            SourceImage(f"{row}.jpg", f"class{row % CLASSES}", row, None, {"year": row % 100}) for row in range(n)
        ]
        with open_store(folder) as opened:
            replace_items(opened, enrol(sources, clustered(n, 1)))

    return {"fill": store}


def start(folder: Path, n: int) -> dict[str, Callable[[], object]]:
    return {"start": lambda: Gallery(folder, D)}


def calibration(folder: Path, n: int) -> dict[str, Callable[[], object]]:
    queries, labels = clustered(QUERIES, 2), torch.arange(QUERIES) % CLASSES
    read: dict[str, Any] = {}

    def snapshot() -> None:
        read["items"] = Snapshot.read(folder, D).embeddings

    def search() -> None:
        stored = torch.arange(n) % CLASSES
        read["searches"] = search_open_set(
            queries.mean, read["items"].mean, lambda rows: labels[rows][:, None] == stored
        )

    def fit() -> None:
        data = CalibrationData(read["searches"], queries, gallery_labels=torch.arange(n) % CLASSES)
        calibrate(data, Choices(Targets(far=0.05, ood=0.05)), key="")

    return {"calibration_read": snapshot, "calibration_search": search, "calibration_fit": fit}


STEPS = {"fill": fill, "start": start, "calibration": calibration}


def one(step: str, folder: Path, n: int) -> None:
    """Print seconds and peak memory of one step."""
    result: dict[str, float] = {}
    for name, call in STEPS[step](folder, n).items():
        begin = time.perf_counter()
        call()
        result[f"{name}_seconds"] = time.perf_counter() - begin
    result[f"{step}_peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(result))


def measure(n: int) -> dict[str, float]:
    """All steps with n items."""
    with tempfile.TemporaryDirectory() as folder:
        place, found = Path(folder) / "gallery", dict[str, float]()
        for step in STEPS:
            found |= in_process(__file__, "--one", step, str(place), str(n))
        found["disk_mib"] = sum(file.stat().st_size for file in place.rglob("*") if file.is_file()) / 2**20
    return found


def extrapolated(measured: dict[int, dict[str, float]]) -> dict[str, float]:
    """Estimates for ten million items."""
    less, most = sorted(measured)[-2:]
    far = dict(measured[most])
    for name, value in measured[most].items():
        if name.endswith("_mib"):
            far[name] += (value - measured[less][name]) / (most - less) * (TARGET - most)
        elif name != "calibration_fit_seconds":  # it depends on the queries alone
            far[name] *= TARGET / most
    return far


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[100_000, 1_000_000])
    parser.add_argument("--one", nargs=3, metavar=("STEP", "FOLDER", "N"), help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.one:
        step, folder, n = parsed.one
        return one(step, Path(folder), int(n))
    measured = {n: measure(n) for n in parsed.sizes}
    far = extrapolated(measured)
    return write("large", {"D": D, "queries": QUERIES, "sizes": measured, "extrapolated": {TARGET: far}})


if __name__ == "__main__":
    sys.exit(main())
