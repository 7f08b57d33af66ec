"""The picture of the README: one query that a run answers, and one that it flags.

    lam demo
    python benchmarks/picture.py runs/digits/laplace_posthoc docs/query.png

The first is the match of median κ among the validation images, the second the abstention of median κ among the digits 8
and 9, which the network never saw; the hits are those of the run's gallery, which is its test split.
"""

import argparse
import sys
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from torch import Tensor

from lam import datasets
from lam.datasets import TensorImages
from lam.runs.finished import Run

HITS = 5
BLUE, RED, GREY = "#1f6feb", "#c93c37", "#59636e"


def answered(run: Run, images: TensorImages, decision: str) -> dict[str, Any]:
    """The image of median κ among those that are decided so, with its answer."""
    calibration, gallery = run.calibration, run.gallery
    assert calibration is not None, f"lam calibrate {run.folder}"
    prediction = run.encoder.predict(images.batch(range(len(images))))
    kappa, hits = prediction.embeddings.kappa, gallery.search(prediction.embeddings, HITS)
    decisions = calibration.decide(hits, prediction.embeddings, features=prediction.features, gallery_size=len(gallery))
    chosen = [place for place, word in enumerate(decisions.decision) if word == decision]
    place = sorted(chosen, key=lambda one: float(kappa[one]))[len(chosen) // 2]
    return {
        "image": images[place][0][0],
        "hits": hits.ids[place].tolist(),
        "kappa": float(kappa[place]),
        "probability": float(decisions.probability[place]),
        "as_uncertain": float(decisions.p_value[place]),
    }


def draw(axes: Any, pixels: Tensor, title: str, colour: str) -> None:
    axes.imshow(pixels, cmap="gray_r")
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, fontsize=11, color=colour)
    for spine in axes.spines.values():
        spine.set(color=colour, linewidth=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="the folder of the demo's run")
    parser.add_argument("picture", help="the file to write")
    parsed = parser.parse_args()
    run, digits = Run(parsed.run), datasets.load("digits")
    strangers = datasets.load_ood("digits_held_out", like=digits.test)
    match, flagged = answered(run, digits.validation, "match"), answered(run, strangers, "abstain")
    uncertain = f"of known digits {flagged['as_uncertain']:.1%}\nare as uncertain"
    figure = plt.figure(figsize=(11, 3.4), layout="constrained")
    grid = figure.add_gridspec(2, HITS + 3)
    for line, (answer, colour, title, text) in enumerate(
        (
            (match, BLUE, "match", f"right with probability {match['probability']:.2f}"),
            (flagged, RED, "abstain", uncertain),
        )
    ):
        draw(figure.add_subplot(grid[line, 0]), answer["image"], "query", colour)
        words = figure.add_subplot(grid[line, 1:3])
        words.set_axis_off()
        words.text(0.5, 0.75, title, ha="center", va="center", fontsize=18, weight="bold", color=colour)
        words.text(0.5, 0.3, f"{text}\nκ = {answer['kappa']:.1e}", ha="center", va="center", fontsize=12, color=colour)
        for column, hit in enumerate(answer["hits"]):
            draw(figure.add_subplot(grid[line, 3 + column]), digits.test[hit][0][0], f"hit {column + 1}", GREY)
    figure.savefig(parsed.picture, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
