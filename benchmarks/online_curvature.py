"""Why κ tells OOD worse after online training, and what helps: three curvatures for one network, on validation data.

    python benchmarks/online_curvature.py --work FOLDER [--root FOLDER] [--seeds 5]

FOLDER holds the runs of `methods.py laplace_online --set=--online.refit=true --name laplace_online_refit`. `followed`
is the running mean that training kept; `unbiased` the same without what is left in it of its start h₀, that is
(h − βᵀh₀)/(1 − βᵀ); `refitted` is formed again at the kept weights. The test split and MNIST are not read: OOD are the
validation images themselves, inverted and with their pixels permuted, and scikit-learn's digits. For `refitted` the
other OOD scores are measured too, and those that take the greater rank of κ and another. Results:
results/online_curvature.json.
"""

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from timing import write
from torch import Tensor
from torch.utils.data import DataLoader

from lam import datasets
from lam.encoder import BayesianEncoder
from lam.evaluation import Evaluation, evaluate
from lam.hessians import Diagonal
from lam.loading import load
from lam.retrieval.flags import Flags
from lam.retrieval.ood import auroc
from lam.run_data import reference_features
from lam.settings import load_config
from lam.training import checkpoints

REFERENCE = 5000
FIGURES = ("map@1", "ausc", "ece", "auroc@inverted", "auroc@permuted", "auroc@digits")


def ood_of(images: Tensor) -> dict[str, Tensor]:
    """What is surely no clothing, and as bright as the images, or as dark, or drawn by hand."""
    order = torch.randperm(images[0].numel(), generator=torch.Generator().manual_seed(0))
    digits = torch.as_tensor(load_digits().images).float()[:, None] / 16
    return {
        "inverted": 1 - images,
        "permuted": images.flatten(1)[:, order].view_as(images),
        "digits": F.pad(F.interpolate(digits, (20, 20), mode="bilinear"), (4, 4, 4, 4)),
    }


def curvatures(run: Path, encoder: BayesianEncoder, n_items: int) -> dict[str, BayesianEncoder]:
    """The encoder with each of the three curvatures."""
    config = load_config(run)
    online, batches = config.online, -(-n_items // config.training.batch_size)
    found: Any = checkpoints.load(run / "checkpoints")
    steps = found.state["progress"]["best_epoch"] * batches
    h = found.tensors["best/step/h"]
    start = (online.initial_precision or online.likelihood_scale / 1000) / online.likelihood_scale
    left = online.memory_factor**steps
    posterior = encoder.posterior

    def with_curvature(h: Tensor) -> BayesianEncoder:
        kept = posterior.curvature
        diagonal = Diagonal(
            h, torch.zeros_like(h), 1, 0, kept.has_bias, kept.margin, kept.split, kept.fix, kept.negative_weight
        )
        changed = replace(posterior, curvature=diagonal)
        return BayesianEncoder(encoder.network, encoder.head, changed, relation=encoder.relation)

    return {
        "followed": with_curvature(h),
        "unbiased": with_curvature((h - left * start) / (1 - left)),
        "refitted": encoder,
    }


def by_scores(found: Evaluation) -> dict[str, float]:
    """AUROC by κ, by another score, and by the greater rank of both, which is learnt from half of the known images."""
    rows = {}
    for other in ("variance", "knn"):
        flags = Flags.of(-found.scores["kappa"], found.scores[other])
        inside = {score: values[1::2] for score, values in found.scores.items()}
        for flag, name in (("kappa", "kappa"), ("knn", other), ("combined", f"kappa, {other}")):
            known = flags.surprise(flag, -inside["kappa"], inside[other])
            for ood, values in found.ood_scores.items():
                rows[f"{name}@{ood}"] = auroc(known, flags.surprise(flag, -values["kappa"], values[other]))
    return rows


def means(rows: list[dict[str, float]]) -> dict[str, float]:
    return {figure: statistics.fmean(row[figure] for row in rows) for figure in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="where the runs are")
    parser.add_argument("--root", help="the folder of FashionMNIST's IDX files")
    parser.add_argument("--seeds", type=int, default=5)
    parsed = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {}
    scores: list[dict[str, float]] = []
    for seed in range(parsed.seeds):
        run = Path(parsed.work) / f"laplace_online_refit-{seed}"
        encoder: Any = load(run / "encoder")
        splits = datasets.load("fashionmnist", root=parsed.root, seed=load_config(run).data.seed)
        validation = list(DataLoader(splits.validation, batch_size=500))
        ood = {name: list(images.split(500)) for name, images in ood_of(torch.cat([b for b, _ in validation])).items()}
        reference = reference_features(encoder, splits.train, REFERENCE, seed=seed)
        for name, variant in curvatures(run, encoder, len(splits.train)).items():
            found = evaluate(variant, validation, ood, reference=reference, n_samples=100)
            metrics = found.metrics
            metrics["auroc@inverted"] = metrics["auroc"]
            rows.setdefault(name, []).append({figure: metrics[figure] for figure in FIGURES})
            print(seed, name, rows[name][-1], file=sys.stderr, flush=True)
        scores.append(by_scores(found))
    by_curvature = {name: means(found) for name, found in rows.items()}
    write(
        "online_curvature", {"mean": by_curvature, "seeds": rows, "auroc_of_refitted": means(scores), "scores": scores}
    )


if __name__ == "__main__":
    sys.exit(main())
