"""Real pretrained networks on real data, with some classes as strangers.

    python benchmarks/real.py features --data FOLDER [--only NETWORK__DATA ...] [--cache build/real]
    python benchmarks/real.py score|posteriors|ratios|indexed|intervals [--only NETWORK__DATA ...] [--draws 5]

`features` computes the features of each data set by each network, once, into CACHE/NETWORK__DATA.safetensors:

- `features` (N, P), the input of the last linear layer; `previous` (N, P'), pooled, of the layer before;
- `labels` (N,), and `split`, `maker`, `category` or `alphabet` (N,) if the data have them;
- for faces also `outputs` (N, 128) and `head` (128, 256), for texts `last` (N, 384), the embedding alone;
- in the metadata, as JSON: `classes`, `names` of the further numbers, `licence`, and `recall`, recall@1 by cosine.

Existing files are kept. Missing data are skipped, with a message that says how to get them.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from real_data import Places, load
from real_indexed import measure_indexed
from real_intervals import measure_intervals
from real_networks import NETWORKS, MissingError
from real_scores import Cell, draw, measure, measure_posteriors, measure_ratios, part
from safetensors import safe_open
from safetensors.torch import save_file
from timing import RESULTS, write
from torch import Tensor

IMAGES, TEXTS = ("faces", "stamps", "emoji", "cifar10", "omniglot"), ("clinc150", "banking77", "docstrings", "debian")
CELLS = [
    ("faces", "faces"),
    *(("efficientnet_lite0", data) for data in IMAGES[:2]),
    *(("minilm", data) for data in TEXTS),
    *(("efficientnet_lite0", data) for data in IMAGES[2:]),
]
HELD_OUT = [("minilm", "libraries"), ("efficientnet_lite0", "clothes"), ("efficientnet_lite0", "digits")]
"""Cells that were measured last; they decided no default, except the least gain of a single flag."""


KINDS: dict[str, tuple[str, Callable[[Cell, int], Any]]] = {
    "score": ("real", lambda cell, seed: measure(draw(cell), seed)),
    "posteriors": ("real_posteriors", lambda cell, seed: measure_posteriors(cell)),
    "ratios": ("real_ratios", lambda cell, seed: measure_ratios(cell)),
    "indexed": ("real_indexed", lambda cell, seed: measure_indexed(cell)),
    "intervals": ("real_intervals", lambda cell, seed: measure_intervals(cell)),
}
"""Measurements on the features: the folder of the results, and a function of a cell and the draw's number."""


def name_of(network: str, data: str) -> str:
    """The name of a cell."""
    return f"{network}__{data}"


def recall_at_1(embeddings: Float[Tensor, "N D"], labels: Int64[Tensor, " N"]) -> float:
    """The share of items whose nearest other item by cosine has their class, among items with a class."""
    inside = labels >= 0
    unit, labels = F.normalize(embeddings[inside], dim=1), labels[inside]
    nearest = []
    for start in range(0, len(unit), 1024):
        similarity = unit[start : start + 1024] @ unit.T
        similarity[torch.arange(len(similarity)), torch.arange(start, start + len(similarity))] = -2.0
        nearest.append(similarity.argmax(1))
    return (labels[torch.cat(nearest)] == labels).double().mean().item()


def write_features(network: str, data: str, places: Places, file: Path) -> None:
    """Compute the features of a cell and write its file; `MissingError` if data or network are missing."""
    items = load(data, places)
    embed = NETWORKS[network](places.packages)
    start = time.perf_counter()
    tensors = embed(items.items)
    seconds = time.perf_counter() - start
    best = tensors.get("outputs", tensors.get("last", tensors["features"]))
    facts = {
        "classes": items.classes,
        "names": items.names,
        "licence": items.licence,
        "recall": recall_at_1(best, items.labels),
        "seconds": seconds,
    }
    tensors |= {"labels": items.labels, **items.ids}
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    partial = file.with_suffix(".part")
    save_file(whole, partial, metadata={name: json.dumps(fact) for name, fact in facts.items()})
    partial.replace(file)


def compute(places: Places, cache: Path, only: list[str] | None) -> None:
    """Write the missing features of all cells, or of some."""
    for network, data in CELLS + HELD_OUT:
        name = name_of(network, data)
        file = cache / f"{name}.safetensors"
        if only and name not in only:
            continue
        if not file.exists():
            try:
                write_features(network, data, places, file)
            except MissingError as error:
                print(f"{name}: left out, {error}", flush=True)
                continue
        with safe_open(file, "pt") as opened:
            facts, shape = opened.metadata(), opened.get_slice("features").get_shape()
        print(f"{name}: {shape}, {len(json.loads(facts['classes']))} classes, ", end="")
        print(f"recall@1 {float(facts['recall']):.3f}, {float(facts['seconds']):.0f} s", flush=True)


def score(cache: Path, only: list[str] | None, draws: int, kind: str) -> None:
    """Measure all cells with features; each has a file, which also keeps unfinished results."""
    for network, data in CELLS + HELD_OUT:
        name = name_of(network, data)
        if only and name not in only:
            continue
        if not (file := cache / f"{name}.safetensors").exists():
            print(f"{name}: left out, its features are not in {cache}: run `real.py features` first", flush=True)
            continue
        folder, of_cell = KINDS[kind]
        kept = RESULTS / folder / f"{name}.json"
        measured = json.loads(kept.read_text())["draws"] if kept.exists() else []
        for seed in range(len(measured), draws):
            start = time.perf_counter()
            measured.append(of_cell(part(file, data, seed), seed))
            kept.parent.mkdir(exist_ok=True)
            write(f"{folder}/{name}", {"draws": measured})
            print(f"{name} {seed}: {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [name_of(*cell) for cell in CELLS + HELD_OUT]
    commands = parser.add_subparsers(dest="command", required=True)
    features = commands.add_parser("features", help="compute what each network makes of each data set")
    features.add_argument("--data", type=Path, default=Path(os.environ.get("LAM_DATA", "data")))
    features.add_argument("--cache", type=Path, default=Path("build/real"), help="where features are kept")
    features.add_argument("--packages", type=Path, help="archives of npm packages, fetched where missing [CACHE]")
    features.add_argument("--only", nargs="+", choices=names, metavar="NETWORK__DATA")
    for name, text in (
        ("score", "scores and decisions"),
        ("posteriors", "κ under several posteriors"),
        ("ratios", "κ under several ratios of prior and curvature, on validation data"),
        ("indexed", "calibration on queries in the gallery"),
        ("intervals", "intervals of cosines"),
    ):
        scored = commands.add_parser(name, help=f"measure {text} on these features")
        scored.add_argument("--cache", type=Path, default=Path("build/real"))
        scored.add_argument("--draws", type=int, default=5)
        scored.add_argument("--only", nargs="+", choices=names, metavar="NETWORK__DATA")
    parsed = parser.parse_args()
    if parsed.command != "features":
        return score(parsed.cache, parsed.only, parsed.draws, parsed.command)
    compute(Places(parsed.data, parsed.packages or parsed.cache), parsed.cache, parsed.only)


if __name__ == "__main__":
    main()
