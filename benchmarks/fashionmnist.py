"""FashionMNIST against MNIST: the paper's setting post hoc, six variants, four training losses, over seeds.

    python benchmarks/fashionmnist.py --mnist FOLDER [--root FOLDER] [--seeds 5] [--loss-seeds 3] [--variant-seeds 3]
        [--online-seeds 3] [--online-limit N]

Each seed is one `lam run fashionmnist laplace_posthoc`; finished runs are not repeated. The six variants share a seed's
network; online, each variant is a separate training with one sample per step. results/fashionmnist.json holds every
figure of the default loss, its mean and its standard deviation; fashionmnist_losses.json, fashionmnist_variants.json
and fashionmnist_online_variants.json hold the same for other losses and for variants.
"""

import argparse
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from timing import write
from torch import Tensor
from torch.utils.data import DataLoader

from lam import datasets
from lam.encoders.bayesian import BayesianEncoder
from lam.encoders.load import load
from lam.evaluation import evaluate
from lam.hessians import Diagonal
from lam.hessians.accumulate import LastLayerAccumulator
from lam.pairs.relation import Relation
from lam.posteriors.last_layer import DiagonalPosterior
from lam.runs.config import RunConfig
from lam.runs.config_files import load_config
from lam.runs.run import run
from lam.runs.sweep import summary

LOSSES = ("contrastive", "log_posterior", "squared", "pml")
VARIANTS = tuple(product(("euclidean", "arccos"), ("positive", "fixed", "full")))


def configured(parsed: argparse.Namespace, loss: str, seed: int) -> RunConfig:
    """The shipped configuration with another loss and seed."""
    overrides = [f"--seed={seed}", f"--training.loss={loss}", f"--output={parsed.work}/{loss}-{seed}"]
    trained = Path(parsed.networks or "") / f"{seed}.safetensors"
    if parsed.networks and loss == LOSSES[0] and trained.is_file():
        overrides += [f"--checkpoint={trained}"]
    return on_these_data(parsed, "laplace_posthoc", overrides)


def on_these_data(parsed: argparse.Namespace, method: str, overrides: list[str]) -> RunConfig:
    """The shipped configuration of a method, with the folders of FashionMNIST and MNIST."""
    overrides += [f"--data.root={parsed.root}"] if parsed.root else []
    config = load_config(f"fashionmnist {method}", overrides)
    ood = [replace(each, root=parsed.mnist) for each in config.data.ood]
    return replace(config, data=replace(config.data, ood=ood))


def variants_of(parsed: argparse.Namespace, seed: int) -> dict[str, dict[str, Any]]:
    """The six variants on the network of one finished run, from its features."""
    config = configured(parsed, "contrastive", seed)
    encoder: Any = load(config.folder / "encoder")
    method: Any = config.method
    splits = datasets.load(config.data.name, root=config.data.root, seed=config.data.seed)
    ood = datasets.load_ood("mnist", like=splits.test, root=parsed.mnist)

    def features(images: datasets.Dataset) -> tuple[Tensor, Tensor]:
        return encoder.features(DataLoader(images, batch_size=500)), images.labels

    inputs, labels = features(splits.train)
    validation, test, outside = features(splits.validation), features(splits.test), features(ood)[0]
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    weight, bias = encoder.posterior.weight, encoder.posterior.bias
    found = {}
    for split, fix in VARIANTS:
        start = time.perf_counter()
        settings = replace(method.loss_curvature, margin=config.margin, split=split, fix=fix)
        empty = Diagonal.zeros(weight, settings, has_bias=bias is not None)
        summing = LastLayerAccumulator(empty=empty, relation=Relation(), weight=weight, bias=bias)
        batches = ((inputs[rows], labels[rows]) for rows in order.split(method.batch_size))
        curvature, n_items = summing.accumulate(batches)
        seconds = time.perf_counter() - start
        posterior = DiagonalPosterior(weight, bias, curvature, n_items, seed=seed)
        variant = BayesianEncoder(None, "", posterior, relation=Relation())
        variant.n_samples = config.evaluation.n_samples
        variant.tune([validation])
        metrics = evaluate(variant, [test], [outside]).metrics
        found[f"{split} {fix}"] = {**metrics, "seconds_curvature": seconds}
        print(f"seed {seed}, {split} {fix}: {metrics}", file=sys.stderr, flush=True)
    return found


def online_variants(parsed: argparse.Namespace) -> None:
    """The six variants, trained online; written after each seed."""
    variants: dict[str, list[dict[str, Any]]] = {}
    for seed in range(parsed.online_seeds):
        for split, fix in VARIANTS:
            options = [f"--method.split={split}", f"--method.fix={fix}", "--method.n_samples=1", f"--seed={seed}"]
            options += [f"--data.limit={parsed.online_limit}"] if parsed.online_limit else []
            options += [f"--output={parsed.work}/online-{split}-{fix}-{parsed.online_limit or 'all'}-{seed}"]
            config = on_these_data(parsed, "laplace_online", options)
            variants.setdefault(f"{split} {fix}", []).append(run(config, progress=False).metrics)
        results = {name: over_seeds(found) for name, found in variants.items()}
        write("fashionmnist_online_variants", {"limit": parsed.online_limit, **results})


def over_seeds(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation of every figure over seeds 0, 1, ..., and the figures."""
    return {**summary(dict(enumerate(rows))), "seeds": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", required=True, help="the folder of MNIST's IDX files")
    parser.add_argument("--root", help="the folder of FashionMNIST's IDX files")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--loss-seeds", type=int, default=3)
    parser.add_argument("--variant-seeds", type=int, default=3)
    parser.add_argument("--online-seeds", type=int, default=3)
    parser.add_argument("--online-limit", type=int, help="train the online variants on so many images")
    parser.add_argument("--networks", help="a folder of <seed>.safetensors, networks that the default loss has trained")
    parser.add_argument("--work", default="runs/benchmark", help="where the runs are kept")
    parsed = parser.parse_args()
    Path(parsed.work).mkdir(parents=True, exist_ok=True)
    variants: dict[str, list[dict[str, Any]]] = {}
    losses: dict[str, Any] = {}
    if parsed.online_seeds:
        online_variants(parsed)
    for loss in LOSSES if parsed.loss_seeds else LOSSES[:1] * bool(parsed.seeds):
        rows: list[dict[str, Any]] = []
        for seed in range(parsed.seeds if loss == LOSSES[0] else parsed.loss_seeds):
            config = configured(parsed, loss, seed)
            rows.append(run(config, progress=False).metrics)
            print(f"{loss}, seed {seed}: {rows[-1]}", file=sys.stderr, flush=True)
            if loss == LOSSES[0] and seed < parsed.variant_seeds:
                for name, metrics in variants_of(parsed, seed).items():
                    variants.setdefault(name, []).append(metrics)
                write("fashionmnist_variants", {name: over_seeds(found) for name, found in variants.items()})
        if loss == LOSSES[0]:
            write("fashionmnist", over_seeds(rows))
        else:
            losses[loss] = over_seeds(rows)
            write("fashionmnist_losses", losses)


if __name__ == "__main__":
    sys.exit(main())
