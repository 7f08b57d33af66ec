"""Searches among some items, compared with FAISS's selectors; searches of all items before and after lam had filters.

    python benchmarks/filtered.py [--before CHECKOUT] [--quick]

N random unit vectors of 128 dimensions; 32 queries at once, 10 hits, one thread. A ratio is the time of the faster one
of FAISS's selectors (a hash set or a bitmap of rows) over lam's time, measured in turn; results/filtered.json holds
medians.
CHECKOUT is a checkout of the commit before filters: processes of both versions search the same gallery in turn.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import faiss
import numpy as np
import torch
from timing import in_process, kept, write

from lam.gallery.enrolment import SourceImage, enrol
from lam.gallery.gallery import Gallery, open_store, replace_items
from lam.retrieval import Index
from lam.vmf.embeddings import Embeddings

D, QUERIES, HITS = 128, 32, 10
SHARES = (0.1, 0.5, 0.9)


def directions(n: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((n, D), dtype=np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def embeddings(mean: np.ndarray) -> Embeddings:
    ones = torch.ones(len(mean), dtype=torch.float64)
    return Embeddings(torch.from_numpy(mean), ones, ones, torch.zeros_like(ones))


def in_turn(turns: int, **calls: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of each call in each turn."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:  # the first warms up
                taken[name].append(time.perf_counter() - start)
    return taken


def beside_selectors(n: int, turns: int) -> list[dict[str, Any]]:
    """Searches among shares of n items."""
    stored, queries = directions(n, 0), directions(QUERIES, 1)
    index, plain = Index(D), faiss.IndexFlatIP(D)
    index.add(embeddings(stored), np.arange(n))
    plain.add(stored)
    parameters: Any = faiss.SearchParameters
    selector: Any = faiss.IDSelectorBitmap
    rows = []
    for share in SHARES:
        rising = np.sort(np.random.default_rng(2).permutation(n)[: round(share * n)])
        is_kept = np.isin(np.arange(n), rising)
        batch = parameters(sel=faiss.IDSelectorBatch(rising))
        bitmap = parameters(sel=selector(np.packbits(is_kept, bitorder="little")))
        taken = in_turn(
            turns,
            lam=lambda among=rising: index.search(embeddings(queries), HITS, among=among),
            set=lambda params=batch: plain.search(queries, HITS, params=params),
            bitmap=lambda params=bitmap: plain.search(queries, HITS, params=params),
        )
        ratios = [min(pair) / own for *pair, own in zip(taken["set"], taken["bitmap"], taken["lam"], strict=True)]
        scores, places = plain.search(queries, HITS, params=bitmap)
        hits = index.search(embeddings(queries), HITS, among=rising)
        rows.append(
            {
                "items": n,
                "share": share,
                **{name: median(values) for name, values in taken.items()},
                "ratio": median(ratios),
                "ratio_range": [min(ratios), max(ratios)],
                "same_ids": bool((hits.ids.numpy() == places).all()),
                "largest_difference_of_scores": float(abs(hits.scores.numpy() - scores).max()),
            }
        )
    return rows


def gallery_of(folder: Path, n: int) -> None:
    """Write a gallery of n items."""
    sources = [SourceImage(f"{row}.jpg", "", row) for row in range(n)]
    with open_store(folder) as store:
        replace_items(store, enrol(sources, embeddings(directions(n, 0))))


def search(folder: Path) -> None:
    """Print the seconds of a search of all items by this process's lam, for 1 and 32 queries."""
    gallery, queries = Gallery(folder, D), embeddings(directions(QUERIES, 1))
    taken = in_turn(20, one=lambda: gallery.search(queries[:1], HITS), many=lambda: gallery.search(queries, HITS))
    gallery.close()
    print(json.dumps({name: median(values) for name, values in taken.items()}))


def beside_before(checkout: Path, n: int, turns: int) -> dict[str, Any]:
    """Time of a search of all items over its time before filters."""
    now = Path(__file__).parent.parent
    ratios: dict[str, list[float]] = {"one": [], "many": []}
    with tempfile.TemporaryDirectory() as folder:
        gallery_of(Path(folder) / "gallery", n)
        for _ in range(turns):
            of = [
                in_process(__file__, "--search", f"{folder}/gallery", PYTHONPATH=str(path)) for path in (now, checkout)
            ]
            for name, values in ratios.items():
                values.append(of[0][name] / of[1][name])
    return {
        "items": n,
        **{name: median(values) for name, values in ratios.items()},
        "range": {name: [min(values), max(values)] for name, values in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the commit before filters")
    parser.add_argument("--quick", action="store_true", help="fewer turns, and 100,000 items only")
    parser.add_argument("--search", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    if parsed.search:
        return search(parsed.search)
    turns, sizes = (3, [100_000]) if parsed.quick else (7, [100_000, 1_000_000])
    results = kept("filtered") | {"among": [row for n in sizes for row in beside_selectors(n, turns)]}
    if parsed.before:
        results["all_over_before"] = beside_before(parsed.before, 100_000, turns)
    return write("filtered", results)


if __name__ == "__main__":
    sys.exit(main())
