"""How wide is the posterior by the authors' post-hoc rule? It, the likelihood scale N² and a tuned one, on one network.

    python benchmarks/posthoc_rules.py RUN RUN ... --mnist FOLDER [--root FOLDER]

Each RUN is a finished `lam run configs/fashionmnist/laplace_posthoc.yaml`, one a seed. `tuned` is its posterior;
`squared` the same with the number of training images squared as scale; `authors` is fitted upon its network with the
options of laplace_posthoc_paper.yaml. Results: results/posthoc_rules.json, with what the number of images squared must
be divided by for the mean precision of `authors`.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from timing import write
from torch.utils.data import DataLoader

from lam import datasets
from lam.encoder import BayesianEncoder
from lam.evaluation import evaluate
from lam.gallery import open_run
from lam.methods.laplace_posthoc import fit_with
from lam.posterior import LastLayerPosterior
from lam.settings import load_config
from lam.sweep import summary

FIGURES = ("map@1", "auroc", "auprc", "ausc", "ece", "ece_below_one")


def precision_of_data(posterior: LastLayerPosterior) -> float:
    """Mean precision of the weights, without the prior's."""
    return float((1 / posterior.variance[0].double()).mean()) - posterior.prior_precision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--mnist", required=True, help="the folder of MNIST's IDX files")
    parser.add_argument("--root", help="the folder of FashionMNIST's IDX files")
    parsed = parser.parse_args()
    authors = load_config("configs/fashionmnist/laplace_posthoc_paper.yaml").laplace
    found: dict[str, dict[int, dict[str, Any]]] = {"tuned": {}, "squared": {}, "authors": {}}
    parts = {}
    for run in parsed.runs:
        config = load_config(run)
        splits = datasets.load("fashionmnist", root=parsed.root, seed=config.data.seed)
        outside = datasets.load_ood("mnist", like=splits.test, root=parsed.mnist)
        encoder: Any = open_run(run)
        squared = replace(encoder.posterior, likelihood_scale=float(len(splits.train)) ** 2)
        fitted = fit_with(
            authors,
            encoder.network,
            splits.train,
            margin=config.margin,
            relation=encoder.relation,
            seed=config.seed,
            num_workers=0,
            progress=False,
        )
        posteriors = {"tuned": encoder.posterior, "squared": squared, "authors": fitted.posterior}
        parts[config.seed] = precision_of_data(squared) / precision_of_data(fitted.posterior)
        for name, posterior in posteriors.items():
            variant = BayesianEncoder(encoder.network, encoder.head, posterior, relation=encoder.relation)
            test, ood = DataLoader(splits.test, batch_size=500), DataLoader(outside, batch_size=500)
            metrics = evaluate(variant, test, ood, n_samples=config.evaluation.n_samples).metrics
            figures = {figure: metrics[figure] for figure in FIGURES}
            found[name][config.seed] = figures | {"precision_of_data": precision_of_data(posterior)}
            print(config.seed, name, found[name][config.seed], file=sys.stderr, flush=True)
    results = {name: {"seeds": rows, **summary(rows)} for name, rows in found.items()}
    write("posthoc_rules", {"authors_scale_is_squared_over": parts, **results})


if __name__ == "__main__":
    sys.exit(main())
