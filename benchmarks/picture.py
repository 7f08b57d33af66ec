"""The picture of the README: one query that a run answers, and one that it flags, in the words of the page.

    lam demo
    python benchmarks/picture.py runs/digits/laplace_posthoc docs/pictures/query.png

The first is the match of median κ among the validation images. The second is the abstention of median κ among the
digits 8 and 9, which the network never saw. The hits come from the run's gallery, its test split.
"""

import argparse
import sys
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from torch import Tensor

from lam import datasets
from lam.retrieval.index.hits import label_numbers
from lam.retrieval.metrics.scores import N_HITS
from lam.runs.finished import Run

HITS = 5
GREEN, PURPLE, GREY = "#00704f", "#6b4fa0", "#59636e"  # as on the page


def answered(run: Run, images: Any, decision: str) -> dict[str, Any]:
    """The image of median κ among the images with this decision, and its answer."""
    calibration, gallery = run.calibration, run.gallery
    assert calibration is not None, f"lam calibrate {run.folder}"
    prediction = run.encoder.predict(images.batch(range(len(images))))
    kappa, hits = prediction.embeddings.kappa, gallery.search(prediction.embeddings, N_HITS)
    names = [[gallery.items[item].label for item in row] for row in hits.ids.tolist()]
    decisions = calibration.decide(
        hits,
        prediction.embeddings,
        features=prediction.features,
        labels=label_numbers(names),
        gallery_size=len(gallery),
    )
    chosen = [place for place, word in enumerate(decisions.decision) if word == decision]
    place = sorted(chosen, key=lambda one: float(kappa[one]))[len(chosen) // 2]
    return {
        "image": images[place][0][0],
        "hits": hits.ids[place].tolist(),
        "label": names[place][0],
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
    figure = plt.figure(figsize=(11, 3.4), layout="constrained")
    grid = figure.add_gridspec(2, HITS + 3)
    for line, (answer, colour, title, text) in enumerate(
        (
            (match, GREEN, f"It is “{match['label']}”", "accepted"),
            (flagged, PURPLE, "Not sure", f"of known digits {flagged['as_uncertain']:.1%}\nare as unusual"),
        )
    ):
        draw(figure.add_subplot(grid[line, 0]), answer["image"], "query", colour)
        words = figure.add_subplot(grid[line, 1:3])
        words.set_axis_off()
        words.text(0.5, 0.75, title, ha="center", va="center", fontsize=18, weight="bold", color=colour)
        right = f"{answer['probability']:.1%} that “{answer['label']}” is right"
        words.text(0.5, 0.3, f"{right}\n{text}", ha="center", va="center", fontsize=12, color=colour)
        for column, hit in enumerate(answer["hits"][:HITS]):
            draw(figure.add_subplot(grid[line, 3 + column]), digits.test[hit][0][0], f"hit {column + 1}", GREY)
    figure.savefig(parsed.picture, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
