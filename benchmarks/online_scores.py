"""OOD scores of online Laplace that use κ and another, on validation data and, for what was chosen there, on the test.

    python benchmarks/online_scores.py --work FOLDER --mnist FOLDER [--root FOLDER] [--seeds 5]

FOLDER holds the runs of `methods.py laplace_online`. Two scores are joined by the greater of their ranks among known
images: those are the even half of a split, and figures are of its odd half. Known and unknown are those of `validation`
and the test split beside MNIST. Results: results/online_scores.json.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from timing import write
from torch import Tensor
from torch.utils.data import DataLoader
from validation import means, on_validation

from lam import datasets
from lam.encoders.evaluation import Evaluation, evaluate
from lam.encoders.load import load
from lam.retrieval.decisions.flags import OodDetector
from lam.retrieval.metrics.ood import auroc
from lam.runs.config_files import load_config
from lam.runs.data import reference_features

REFERENCE = 5000


def by_scores(found: Evaluation) -> dict[str, float]:
    """AUROC by κ, by another score, which takes the place of the k-NN distance, and by the greater rank of both."""
    rows = {}
    for other in ("variance", "knn"):
        detector = OodDetector.of(pair(found.scores, other))
        inside = {score: values[1::2] for score, values in found.scores.items()}
        for flag, name in (("kappa", "kappa"), ("knn", other), ("combined", f"kappa, {other}")):
            known = detector.ood_score(flag, pair(inside, other))
            for ood, values in found.ood_scores.items():
                rows[f"{name}@{ood}"] = auroc(known, detector.ood_score(flag, pair(values, other)))
    return rows


def pair(scores: dict[str, Tensor], other: str) -> dict[str, Tensor]:
    """κ and another score in the place of the k-NN distance."""
    return {"kappa": scores["kappa"], "knn": scores[other]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="where the runs are")
    parser.add_argument("--mnist", required=True, help="the folder of MNIST's IDX files")
    parser.add_argument("--root", help="the folder of FashionMNIST's IDX files")
    parser.add_argument("--seeds", type=int, default=5)
    parsed = parser.parse_args()
    mnist = {"mnist": DataLoader(datasets.load("mnist", root=parsed.mnist).test, batch_size=500)}
    rows: list[dict[str, float]] = []
    for seed in range(parsed.seeds):
        run = Path(parsed.work) / f"laplace_online-{seed}"
        encoder: Any = load(run / "encoder")
        splits = datasets.load("fashionmnist", root=parsed.root, seed=load_config(run).data.seed)
        reference = reference_features(encoder, splits.train, REFERENCE, seed=seed)
        validation = on_validation(encoder, splits, reference)
        test = evaluate(encoder, DataLoader(splits.test, batch_size=500), mnist, reference=reference, n_samples=100)
        rows.append(by_scores(validation) | by_scores(test))
        print(seed, rows[-1], file=sys.stderr, flush=True)
    write("online_scores", {"auroc": means(rows), "seeds": rows})


if __name__ == "__main__":
    sys.exit(main())
