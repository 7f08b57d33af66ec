"""The cost of the gallery, compared with a plain index and JSON file, at 100,000 items of 512 dimensions.

    python benchmarks/gallery.py [--quick]

The plain form is one `lam.retrieval.Index` and one JSON file with the data of the items, in a folder with hashes. It
has no hash for each item, a new index replaces added items, and a kill between the two files leaves them inconsistent.
Both forms start from embeddings and images. Each is measured in separate processes, in turn; results/gallery.json holds
CPU seconds, peak memory, and ratios within a turn.
"""

import argparse
import gc
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from timing import in_process, write

from lam.gallery.enrolment import SourceImage, enrol
from lam.gallery.gallery import open_store, replace_items
from lam.gallery.replica import Snapshot
from lam.retrieval import Index
from lam.utils.files import read_generation, read_json, write_generation, write_json
from lam.vmf.embeddings import Embeddings

D = 512
STEPS = ("first", "replaced", "same", "search")


def embeddings(n: int, seed: int) -> Embeddings:
    generator = torch.Generator().manual_seed(seed)
    mean = torch.nn.functional.normalize(torch.randn(n, D, generator=generator), dim=1)
    kappa = 1 + 100 * torch.rand(n, generator=generator, dtype=torch.float64)
    return Embeddings(mean, kappa, torch.ones_like(kappa), torch.zeros_like(kappa))


def images(n: int, seed: int) -> list[SourceImage]:
    path = "/data/photographs/class{}/image_{}_{}.jpg"
    return [SourceImage(path.format(i % 100, seed, i), f"class{i % 100}", seed * n + i) for i in range(n)]


class Lam:
    """The gallery of a run."""

    @staticmethod
    def write(folder: Path, sources: list[SourceImage], of: Embeddings) -> None:
        with open_store(folder) as store:
            replace_items(store, enrol(sources, of))

    @staticmethod
    def search(folder: Path, query: Embeddings) -> list[str]:
        gallery = Snapshot.read(folder, D)
        return [gallery.items[place].label for place in gallery.search(query, 5).ids[0].tolist()]


class Plain:
    """One index and one JSON file."""

    @staticmethod
    def write(folder: Path, sources: list[SourceImage], of: Embeddings) -> None:
        enrolled = enrol(sources, of)
        folder.mkdir(exist_ok=True)
        index = Index(D)
        index.add(enrolled.embeddings, range(len(enrolled)))
        rows = [{"id": item.id, "label": item.label, "path": item.path} for item in enrolled.items]
        write_generation(folder / "items", lambda generation: write_json(generation / "items.json", rows))
        index.save(folder / "index")

    @staticmethod
    def search(folder: Path, query: Embeddings) -> list[str]:
        index = Index.load(folder / "index")
        items = read_json(read_generation(folder / "items", ["items.json"]) / "items.json")
        return [items[place]["label"] for place in index.search(query, 5).ids[0].tolist()]


SYSTEMS: dict[str, type[Lam] | type[Plain]] = {"plain": Plain, "lam": Lam}


def measured(call: Callable[[], object]) -> float:
    gc.collect()
    start = time.process_time()
    call()
    return time.process_time() - start


def one(system: str, part: str, folder: Path, n: int) -> None:
    """Print the time and memory of one part, in this process."""
    of, result = SYSTEMS[system], dict[str, Any]()
    if part == "search":
        query = embeddings(1, 3)
        result["search"] = measured(lambda: of.search(folder, query))
    else:
        for step, seed in (("first", 1), ("replaced", 2), ("same", 2)):
            sources, vectors = images(n, seed), embeddings(n, seed)
            result[step] = measured(lambda s=sources, v=vectors: of.write(folder, s, v))
    result["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(result))


def compare(n: int, turns: int) -> dict[str, Any]:
    """Every part by every system, turn by turn."""
    taken: dict[str, dict[str, list[float]]] = {name: {} for name in SYSTEMS}
    for _ in range(turns):
        with tempfile.TemporaryDirectory() as folder:
            for part in ("write", "search"):
                for name in SYSTEMS:
                    place = str(Path(folder) / name)
                    for step, value in in_process(__file__, "--one", name, part, place, str(n)).items():
                        key = f"{part}_{step}" if step == "peak_mib" else step
                        taken[name].setdefault(key, []).append(value)
    ratios = {
        key: [ours / theirs for ours, theirs in zip(values, taken["plain"][key], strict=True)]
        for key, values in taken["lam"].items()
    }
    return {
        "items": n,
        "D": D,
        "turns": turns,
        **{name: {key: median(values) for key, values in by_key.items()} for name, by_key in taken.items()},
        "ratio": {key: median(values) for key, values in ratios.items()},
        "ratio_range": {key: [min(values), max(values)] for key, values in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--one", nargs=4, metavar=("SYSTEM", "PART", "FOLDER", "N"), help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.one:
        system, part, folder, n = parsed.one
        return one(system, part, Path(folder), int(n))
    return write("gallery", compare(100_000, 2 if parsed.quick else 5))


if __name__ == "__main__":
    sys.exit(main())
