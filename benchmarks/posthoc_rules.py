"""The posterior's width by the authors' post-hoc rule, by the likelihood scale N² and after tuning, on one network.

    python benchmarks/posthoc_rules.py NAME RUN RUN ... [--subset 12000]

Each RUN is a finished run of `laplace_posthoc`; the runs are seeds. `tuned` is its posterior. `squared` has the squared
number of training images as scale. `authors` is fitted on the same network with the options of fashionmnist
laplace_posthoc --paper, whose curvature is a plain sum over triplets. Results: results/posthoc_rules_NAME.json, also
with the divisor of the squared number of images that gives the mean precision of `authors`, for all training images and
for the first `--subset`.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from timing import write
from torch.utils.data import DataLoader

from lam import losses
from lam.encoders.bayesian import BayesianEncoder
from lam.evaluation import evaluate
from lam.methods import Training
from lam.methods.laplace_posthoc import fit_posterior
from lam.runs.config_files import load_config
from lam.runs.data import load_data
from lam.runs.finished import Run
from lam.runs.folder import METRICS
from lam.runs.sweep import summary
from lam.utils.files import read_json

FIGURES = ("map@1", "auroc", "auprc", "ausc", "ece", "ece_below_one", "share_clipped", "variance_clipped")


def precision_of_data(posterior: Any) -> float:
    """Mean precision of the weights, without the prior's."""
    return float((1 / posterior.variance[:, : posterior.weight.shape[1]].double()).mean()) - posterior.prior_precision


def squared(posterior: Any, n_images: int) -> Any:
    return replace(posterior, likelihood_scale=float(n_images) ** 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--subset", type=int)
    parsed = parser.parse_args()
    authors: Any = load_config("fashionmnist laplace_posthoc --paper").method
    found: dict[str, dict[int, dict[str, Any]]] = {"tuned": {}, "squared": {}, "authors": {}}
    parts: dict[int, dict[int, float]] = {}
    for run in parsed.runs:
        config = load_config(run)
        splits, ood = load_data(config.data)
        encoder: Any = Run(run).encoder
        parts[config.seed] = {}
        fitted = encoder.posterior
        for n_images in sorted({min(parsed.subset or len(splits.train), len(splits.train)), len(splits.train)}):
            images = splits.train.subset(torch.arange(n_images))
            training = Training(
                loss=losses.build(margin=config.margin),
                epochs=1,
                relation=encoder.relation,
                seed=config.seed,
                progress=False,
            )
            fitted = fit_posterior(authors, encoder.network, images, training, {}).posterior
            wide = precision_of_data(squared(encoder.posterior, n_images))
            parts[config.seed][n_images] = wide / precision_of_data(fitted)
            print(config.seed, n_images, parts[config.seed][n_images], file=sys.stderr, flush=True)
        posteriors = {
            "tuned": encoder.posterior,
            "squared": squared(encoder.posterior, len(splits.train)),
            "authors": fitted,
        }
        for name, posterior in posteriors.items():
            variant = BayesianEncoder(encoder.network, encoder.head, posterior, relation=encoder.relation)
            metrics = read_json(run / METRICS)
            if name != "tuned":
                test = DataLoader(splits.test, batch_size=500)
                outside = {title: DataLoader(images, batch_size=500) for title, images in ood.items()}
                metrics = evaluate(variant, test, outside, n_samples=config.evaluation.n_samples).metrics
            figures = {figure: metrics[figure] for figure in FIGURES}
            found[name][config.seed] = figures | {"precision_of_data": precision_of_data(posterior)}
            print(config.seed, name, found[name][config.seed], file=sys.stderr, flush=True)
    results = {name: {"seeds": rows, **summary(rows)} for name, rows in found.items()}
    write(f"posthoc_rules_{parsed.name}", {"authors_scale_is_squared_over": parts, **results})


if __name__ == "__main__":
    sys.exit(main())
