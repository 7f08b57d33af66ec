"""κ of ambiguity and its rivals on real networks: wrong answers, strangers, blends of two items, and corruption.

    python benchmarks/ambiguity.py --data FOLDER [--cache build/real] [--only NETWORK__DATA ...] [--draws 3]

The features come from `real.py features`, split as in `real_scores.py`. Ambiguity is learned on calibration queries,
with the gallery as further known items; nothing is chosen on test queries. 100 test queries are blended with a query of
another class, in shares from 0 to ½: images pixel by pixel; in texts, the other's last words replace their own. They
    are also cropped, and images get blur, noise and less contrast. For each score, the results are `ausc`; `auroc` of
    strangers; `blend`, the rank correlation of doubt with the share; and, by kind of corruption, the rank correlation
    of certainty with the severity, where −1 is best. `each item` has the means of the correlations within an item.
    Results go to results/ambiguity.json; results of other calls stay in the file.
"""

import argparse
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter
from real import CELLS, name_of
from real_data import Places, load
from real_networks import NETWORKS
from real_scores import Cell, ambiguity_of, mean_of, part, tuned
from timing import kept, write
from torch import Tensor

from lam.posteriors import Posterior
from lam.retrieval.index.exact import rank
from lam.retrieval.metrics.ood import auroc
from lam.retrieval.metrics.reference import Reference, relative_mahalanobis
from lam.retrieval.metrics.uncertainty import ausc, rank_correlation
from lam.tuning.ambiguity import Ambiguity

SHARES, CROPS, BLURS = (0.1, 0.2, 0.3, 0.4, 0.5), (0.8, 0.6, 0.4), (1, 2, 4)  # blurs in 60ths of the width
NOISES, CONTRASTS = (15, 40, 80), (0.6, 0.3, 0.1)
ITEMS, HITS = 100, 10
Measure = Callable[[Places, Path, str, str, int], dict[str, Any]]
"""The figures of one draw, from the folders, the file of features, the network, the data and the draw's number."""


def changed_images(image: Image.Image, other: Image.Image) -> dict[str, list[Image.Image]]:
    """The variants of an image by kind, from the least to the most changed; the first is the image itself."""
    image, (width, height) = image.convert("RGB"), image.size
    pixels, noise = np.asarray(image), np.random.default_rng(0).normal(size=(height, width, 3))
    noisy = [Image.fromarray((pixels + std * noise).clip(0, 255).astype(np.uint8)) for std in NOISES]
    edges = [((1 - crop) / 2, (1 + crop) / 2) for crop in CROPS]
    boxes = [tuple(round(size * edge) for edge in pair for size in image.size) for pair in edges]
    return {
        "blend": [image, *(Image.blend(image, other.convert("RGB").resize(image.size), share) for share in SHARES)],
        "crop": [image, *(image.crop(box).resize((width, height)) for box in boxes)],  # type: ignore
        "blur": [image, *(image.filter(ImageFilter.GaussianBlur(blur * width / 60)) for blur in BLURS)],
        "noise": [image, *noisy],
        "contrast": [image, *(ImageEnhance.Contrast(image).enhance(contrast) for contrast in CONTRASTS)],
    }


def changed_texts(text: str, other: str) -> dict[str, list[str]]:
    """The variants of a text by kind, as for images."""
    words, others = text.split(), other.split()
    blended = [
        [*words[: round(len(words) * (1 - share))], *others[len(others) - round(len(others) * share) :]]
        for share in SHARES
    ]
    cropped = [words[: max(1, round(len(words) * crop))] for crop in CROPS]
    return {kind: [text, *map(" ".join, lists)] for kind, lists in (("blend", blended), ("crop", cropped))}


def certainties(
    cell: Cell, posterior: Posterior, ambiguity: Ambiguity, reference: Reference, features: Tensor
) -> dict[str, Tensor]:
    """Every score of some items, higher for more certain ones."""
    (x, y), embeddings = cell.of("gallery"), posterior.predict(features)
    seen: Any = ambiguity(features, embeddings)
    places, cosines = rank(embeddings.mean, mean_of(cell, x), k=HITS)
    return {
        "kappa": seen.resultant.double(),
        "kappa_aleatoric": seen.kappa_aleatoric,
        "p_known": seen.p_known,
        "kappa_epistemic": seen.kappa_epistemic,
        "cosine": cosines[:, 0],
        "votes": (y[places] == y[places[:, :1]]).double().mean(1),
        "relative_mahalanobis": -relative_mahalanobis(features, reference),
    }


def measure(places: Places, file: Path, network: str, data: str, seed: int) -> dict[str, Any]:
    """All figures of one draw."""
    cell = part(file, data, seed)
    (x, y), (test, labels) = (cell.of(name) for name in ("gallery", "test"))
    known = cell, tuned(cell, cell.posterior()).posterior, ambiguity_of(cell), Reference.of(x, y)
    inside, outside = certainties(*known, test), certainties(*known, cell.of("strange")[0])
    correct = y[rank(mean_of(cell, test), mean_of(cell, x), k=1)[0][:, 0]] == labels
    figures: dict[str, Any] = {
        name: {"ausc": ausc(correct, -values), "auroc": auroc(-values, -outside[name])}
        for name, values in inside.items()
    }
    rows = cell.rows["test"][torch.randperm(len(test), generator=torch.Generator().manual_seed(seed))]
    mates = [(int(one), int(other)) for one, other in pairwise(rows) if cell.labels[one] != cell.labels[other]]
    items: list[Any] = load(data, places).items
    change: Any = changed_texts if isinstance(items[0], str) else changed_images
    variants = [change(items[one], items[other]) for one, other in mates[:ITEMS]]
    embed, of_items = NETWORKS[network](places.packages), cell.labels[[one for one, _ in mates[:ITEMS]]]
    recalls: dict[str, dict[str, float]] = {}
    for kind in variants[0]:
        by_severity = zip(*(variant[kind] for variant in variants), strict=True)
        severities = [embed(list(one))["features"] for one in by_severity]
        firsts = [y[rank(mean_of(cell, changed), mean_of(cell, x), k=1)[0][:, 0]] for changed in severities]
        recalls[kind] = {str(n): float((first == of_items).double().mean()) for n, first in enumerate(firsts)}
        curves = [certainties(*known, changed) for changed in severities]
        severity = torch.arange(len(curves)).double()
        for name, of_score in figures.items():
            values = torch.stack([curve[name].double() for curve in curves])
            sign = -1 if kind == "blend" else 1
            trend = rank_correlation(severity.repeat_interleave(len(variants)), values.flatten()) or 0.0
            trends = [rank_correlation(severity, of_item) or 0.0 for of_item in values.T]
            of_score[kind] = sign * trend
            of_score.setdefault("each item", {})[kind] = sign * mean(trends)
    return {"recall@1": float(correct.double().mean()), "recall@1 by severity": recalls, "scores": figures}


def summary(values: list[Any]) -> Any:
    """Mean and standard deviation of every figure."""
    if isinstance(values[0], dict):
        return {name: summary([value[name] for value in values]) for name in values[0]}
    return {"mean": (of := torch.tensor(values).double()).mean().item(), "std": of.std().item()}


def measure_cells(description: str | None, results: str, cells: list[tuple[str, str]], measure: Measure) -> None:
    """The command line of a benchmark that measures cells in several draws."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("build/real"))
    parser.add_argument("--only", nargs="+", choices=[name_of(*cell) for cell in cells], metavar="NETWORK__DATA")
    parser.add_argument("--draws", type=int, default=3)
    parsed = parser.parse_args()
    for network, data in cells:
        name = name_of(network, data)
        if parsed.only and name not in parsed.only:
            continue
        file, places = parsed.cache / f"{name}.safetensors", Places(parsed.data, parsed.cache)
        drawn = [measure(places, file, network, data, seed) for seed in range(parsed.draws)]
        write(results, {**kept(results), name: {"draws": parsed.draws, **summary(drawn)}})
        print(name, flush=True)


if __name__ == "__main__":
    measure_cells(__doc__, "ambiguity", CELLS, measure)
