"""Indexes of short codes: hits, memory and promises, with and without a second ranking by the vectors.

    python benchmarks/quantised.py real [--cache build/real] [--draws 3]
    python benchmarks/quantised.py rate

`real` takes the features that `real.py features` wrote. Each draw is calibrated by exact searches, with classes set
aside. Then test queries and strangers are answered from exact hits, from lam's index of codes, and from FAISS's scores
of the same codes. `rate` searches a million clustered vectors of 128 dimensions, 32 queries at once, 50 hits, one
thread; seconds are processor seconds.

Writes results/quantised.json.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import faiss
import numpy as np
import real_scores
import torch
from real_scores import LOOSE, Draw, Part, as_strangers, asked_of, calibration_data, draw, part
from timing import kept, write
from torch import Tensor

from lam.retrieval import Index
from lam.retrieval.decisions.calibrate import Choices, OtherQueries, calibrate
from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.decisions.probability import probability_bins
from lam.retrieval.metrics.scores import N_HITS
from lam.vmf.embeddings import Embeddings

CELLS = ("minilm__clinc150", "minilm__banking77", "minilm__debian", "efficientnet_lite0__omniglot")
FACTORIES = ("IVF64,PQ64x4fs", "IVF64,RaBitQ")
RATE = 0.1
N, D, QUERIES, TURNS = 1_000_000, 128, 320, 5
LARGE = ("Flat", "IVF1024,PQ64x4fs", "IVF1024,RaBitQ")


def bytes_of_codes(factory: str, dimension: int) -> int:
    """Bytes of an item in the index, in addition to its vector: its code and its number."""
    cells: Any = faiss.try_extract_index_ivf(faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT))
    return cells.code_size + 8


def plain(embeddings: Embeddings) -> Embeddings:
    return replace(embeddings, mean_samples=None)


def by_index(factory: str, gallery: Part, queries: Part) -> tuple[Tensor, Tensor]:
    """Rows and cosines of the hits of lam's index."""
    index = Index(gallery.embeddings.dimension, factory)
    index.train(plain(gallery.embeddings))
    index.add(plain(gallery.embeddings), range(len(gallery.labels)))
    hits = index.search(plain(queries.embeddings), N_HITS)
    return hits.ids, hits.scores


def by_codes(factory: str, gallery: Part, queries: Part) -> tuple[Tensor, Tensor]:
    """Rows and scores of the hits of FAISS alone, with the same number of visited cells."""
    stored, asked = (one.embeddings.mean.float().numpy() for one in (gallery, queries))
    index = faiss.index_factory(stored.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    index.train(stored)
    index.add(stored)
    cells = faiss.extract_index_ivf(index)
    cells.nprobe = int(np.ceil(2 * cells.nlist**0.5))
    scores, rows = index.search(asked, N_HITS)
    return torch.from_numpy(rows), torch.from_numpy(scores).clamp(-1, 1)


def answered(made: Calibration, parts: Draw, hits: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Decisions on test queries and strangers from these hits."""
    queries = {
        name: OtherQueries(
            one.embeddings, hits[name][1].to(one.embeddings.mean), parts.gallery.labels[hits[name][0]], one.features
        )
        for name, one in (("test", parts.test), ("strange", parts.strange))
    }
    (_, known), (_, outside) = (asked_of(made, queries[name]) for name in ("test", "strange"))
    correct = parts.gallery.labels[hits["test"][0][:, 0]] == parts.test.labels
    threshold = made.false_accepts.threshold(RATE)
    is_accepted = known.statistic > threshold
    bins = probability_bins(known.right_if_known, correct)
    return {
        "recall@1": share(correct),
        "ece": bins.expected_error,
        "ece_by_chance": bins.error_by_chance,
        "false_accepts": share(outside.statistic > threshold),
        "accepted": share(is_accepted),
        "right_of_accepted": share(correct[is_accepted]),
    }


def measure(parts: Draw) -> dict[str, dict[str, float]]:
    """The answers of one draw, by each kind of hits."""
    gallery, asked = parts.gallery, parts.calibration
    data = replace(calibration_data(asked, gallery), strangers=as_strangers(parts.aside, gallery))
    made = calibrate(data, Choices(LOOSE), key="")
    both = {"test": parts.test, "strange": parts.strange}
    exact = {name: by_index("Flat", gallery, one) for name, one in both.items()}
    found = {"exact": {**answered(made, parts, exact), "recall@10": 1.0}}
    for factory in FACTORIES:
        for kind, search in (("refined", by_index), ("codes", by_codes)):
            hits = {name: search(factory, gallery, one) for name, one in both.items()}
            found[f"{factory}, {kind}"] = {
                **answered(made, parts, hits),
                "recall@10": mean(recall(hits[name][0], exact[name][0]) for name in both),
            }
    return found


def recall(found: Tensor, exact: Tensor, k: int = 10) -> float:
    return float((found[:, :k, None] == exact[:, None, :k]).any(1).double().mean())


def share(which: Tensor) -> float:
    return float(which.double().mean())


def real(cache: Path, draws: int) -> dict[str, Any]:
    """Each cell over draws: means and standard deviations, and the size of its gallery."""
    real_scores.MOST = 10**6  # all items: galleries as large as there are
    results: dict[str, Any] = {}
    for cell in CELLS:
        measured = []
        for seed in range(draws):
            parts = draw(part(cache / f"{cell}.safetensors", cell.partition("__")[2], seed))
            measured.append(measure(parts))
        results[cell] = {
            "gallery": len(parts.gallery.labels),  # pyright: ignore[reportPossiblyUnboundVariable]
            "dimension": parts.gallery.embeddings.dimension,  # pyright: ignore[reportPossiblyUnboundVariable]
            **{
                kind: {key: mean(one[kind][key] for one in measured) for key in row}
                | {f"{key}_std": stdev(one[kind][key] for one in measured) for key in row}
                for kind, row in measured[0].items()
            },
        }
        print(cell, results[cell], flush=True)
    return {"draws": draws, "rate": RATE, "cells": results}


def clustered(count: int, seed: int) -> Embeddings:
    """Unit vectors around ten thousand centres."""
    centres = np.random.default_rng(0).standard_normal((10_000, D), dtype=np.float32) / D**0.5
    generator = np.random.default_rng(seed)
    drawn = centres[generator.integers(10_000, size=count)]
    drawn += 0.07 * generator.standard_normal((count, D), dtype=np.float32)
    unit = torch.nn.functional.normalize(torch.from_numpy(drawn))
    ones = torch.ones(count, dtype=torch.float64)
    return Embeddings(unit, ones, ones, torch.zeros_like(ones))


def rate() -> dict[str, Any]:
    """Searches of a million items per processor second, by lam's indexes in turn."""
    items, queries = clustered(N, 1), clustered(QUERIES, 2)
    rows: dict[str, Any] = {}
    searches: dict[str, Callable[[], Tensor]] = {}
    for factory in LARGE:
        index, start = Index(D, factory), time.process_time()
        index.train(items[: N // 5])
        index.add(items, range(N))
        rows[factory] = {
            "seconds_to_build": time.process_time() - start,
            "code_bytes": 0 if factory == "Flat" else bytes_of_codes(factory, D),
            "vector_bytes": 4 * D,
        }
        searches[factory] = lambda index=index: torch.cat(
            [index.search(queries[row : row + 32], N_HITS).ids for row in range(0, QUERIES, 32)]
        )
    found = {factory: search() for factory, search in searches.items()}
    taken: dict[str, list[float]] = {factory: [] for factory in LARGE}
    for _ in range(TURNS):
        for factory, search in searches.items():
            start = time.process_time()
            search()
            taken[factory].append(time.process_time() - start)
    for factory, row in rows.items():
        row["per_second"] = QUERIES / median(taken[factory])
        ratios = [flat / own for flat, own in zip(taken["Flat"], taken[factory], strict=True)]
        row |= {"over_flat": median(ratios), "over_flat_range": [min(ratios), max(ratios)]}
        row |= {f"recall@{k}": recall(found[factory], found["Flat"], k) for k in (10, N_HITS)}
    return {"items": N, "dimension": D, "hits": N_HITS, "at_once": 32, "indexes": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["real", "rate"])
    parser.add_argument("--cache", type=Path, default=Path("build/real"))
    parser.add_argument("--draws", type=int, default=3)
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    measured = real(parsed.cache, parsed.draws) if parsed.part == "real" else rate()
    write("quantised", kept("quantised") | {parsed.part: measured})


if __name__ == "__main__":
    sys.exit(main())
