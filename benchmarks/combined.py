"""Which scores the flag `combined` is made of, and how it joins them: every set of up to five, on validation parts.

    python benchmarks/combined.py --data FOLDER [--features FILE] [--work FOLDER] [--only NAME ...] [--seeds 2]

Arguments, data and runs are those of `suite.py` and, for questions, of `intents.py`. Of images half of the validation
split gives each score its ranks, the other half is known, and outsiders are made of it: inverted, permuted and blurred.
Of questions half of the intents are in no training, and theirs are the outsiders. Scores that look at labels are left
out, as items need not have any. results/combined.json holds, by size and way of joining (an exponent of the mean of
p-values, or their least), the set of the highest mean AUROC over data sets; of `combined` and of single scores the
AUROC by data set; and that of `combined` with one score more. The test split is not looked at.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from answers import Cell
from intents import PARTS, Part, drawn, embedded
from intents import Cell as QuestionCell
from suite import NOT_ASKED, SOURCES, cell
from timing import write
from torch import Tensor

from lam.encoders.outsiders import made_outsiders
from lam.retrieval.decisions.flags import TOGETHER
from lam.retrieval.decisions.probability import RankOdds, random_order
from lam.retrieval.metrics.ood import auroc
from lam.retrieval.metrics.registry import SCORES
from lam.runs.data import EMBEDDING_BATCH
from lam.runs.finished import Run

LARGEST = 5
MOST = 1000
"""Validation images of which outsiders are made."""
EXPONENTS = 0.0, -0.5, -1.0, -1.5
LEAST = "least"
"""In place of an exponent: the least p-value."""
OURS = -0.5
IMAGES = "photographs", "characters", "faces", "digits", "fashionmnist"
QUESTIONS = "clinc150", "banking77"

Parts = tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]
"""Scores of known items, and those of outsiders by kind."""


def of_images(folder: Path, seed: int) -> Parts:
    finished = Cell(Run(folder), seed)
    images = finished.splits.validation.limit(MOST, seed=seed)
    pixels = torch.stack([images[row][0] for row in range(len(images))])
    known, _ = finished.answers(images, images.labels)
    return known, {
        kind: finished.answers(list(worse.split(EMBEDDING_BATCH)), images.labels)[0]
        for kind, worse in made_outsiders(pixels, seed=seed).items()
    }


def of_questions(parts: dict[str, Any], seed: int) -> Parts:
    known = drawn(parts, 0.5, seed)
    train, validation = parts["train"], parts["validation"]
    asked = QuestionCell(train.of(known), validation.of(known), seed)
    foreign = validation.features[~torch.isin(validation.labels, known)]
    return asked.ask(validation.of(known).features)[0], {"left out": asked.ask(foreign)[0]}


def surprises(parts: Parts, names: tuple[str, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """−log p (E, N) of known items and (E, O) of each kind of outsiders, by ranks of the other half of the known."""
    known, outside = parts
    order = random_order(len(known[names[0]]))
    ranks = {name: RankOdds.of(known[name][order[::2]].double()) for name in names}

    def of(scores: dict[str, Tensor]) -> Tensor:
        return torch.stack([torch.nn.functional.softplus(ranks[name].extended(scores[name])) for name in names])

    inside = of({name: known[name][order[1::2]] for name in names})
    for scores in outside.values():
        yield inside, of(scores)


def joined(surprise: Tensor, rows: list[int], way: float | str) -> Tensor:
    """What orders items as the mean of their p-values of an exponent does, or the least of these."""
    chosen = surprise[rows]
    if way == LEAST:
        return chosen.amax(0)
    return chosen.mean(0) if way == 0 else (-float(way) * chosen).logsumexp(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--fashionmnist", help="the folder of FashionMNIST's IDX files")
    parser.add_argument("--features", type=Path, default=Path("runs/intents.pt"), help="where embeddings are kept")
    parser.add_argument("--only", nargs="+", choices=(*IMAGES, *QUESTIONS), default=[*IMAGES, *QUESTIONS])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("runs/suite"), help="where data and runs are kept")
    parser.set_defaults(**NOT_ASKED)
    parsed = parser.parse_args()
    parsed.data, parsed.work = parsed.data.resolve(), parsed.work.resolve()
    measured: dict[str, list[Parts]] = {}
    stored: dict[str, Any] = {}
    if set(QUESTIONS) & set(parsed.only):
        if not parsed.features.is_file():
            torch.save(embedded(parsed.data), parsed.features)
        stored = torch.load(parsed.features)
    for name in parsed.only:
        for seed in range(parsed.seeds):
            if name in QUESTIONS:
                made = of_questions({part: Part(**stored[f"{name}_{part}"]) for part in PARTS}, seed)
            else:
                made = of_images(cell(parsed, name, SOURCES[name](parsed), "laplace_posthoc", seed).folder, seed)
            measured.setdefault(name, []).append(made)
            print(name, seed, file=sys.stderr, flush=True)
    first = next(iter(measured.values()))[0][0]
    names = tuple(
        name for name in first if name in SCORES and "labels" not in (*SCORES[name].needs, *SCORES[name].uses)
    )
    pairs = {name: [pair for parts in of for pair in surprises(parts, names)] for name, of in measured.items()}

    def figures(chosen: tuple[str, ...], way: float | str) -> dict[str, float]:
        rows = [names.index(name) for name in chosen]
        return {
            data: sum(auroc(joined(inside, rows, way), joined(outside, rows, way)) for inside, outside in of) / len(of)
            for data, of in pairs.items()
        }

    def with_mean(values: dict[str, float]) -> dict[str, float]:
        return {"mean": sum(values.values()) / len(values), **values}

    best: dict[str, Any] = {}
    above = total = 0
    ours = with_mean(figures(TOGETHER, OURS))
    for size in range(1, LARGEST + 1):
        for way in (*EXPONENTS, LEAST) if size > 1 else (OURS,):
            sets = {chosen: with_mean(figures(chosen, way)) for chosen in combinations(names, size)}
            highest = max(sets, key=lambda chosen: sets[chosen]["mean"])
            best[f"{size} scores, {way}"] = {"scores": list(highest), **sets[highest]}
            above += sum(of["mean"] > ours["mean"] for of in sets.values())
            total += len(sets)
            print(size, way, highest, sets[highest], file=sys.stderr, flush=True)
    more = {name: with_mean(figures((*TOGETHER, name), OURS)) for name in names if name not in TOGETHER}
    results = {"seeds": parsed.seeds, "sets": total, "better than combined": above, "combined": ours}
    write("combined", {**results, "best": best, "with one more": more})


if __name__ == "__main__":
    sys.exit(main())
