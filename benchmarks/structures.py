"""Every structure of the curvature on the features of trained runs: metrics and costs.

    python benchmarks/structures.py RUN ... [--structures diag kron ...] [--train 20000] [--cache FOLDER]
    python benchmarks/structures.py RUN ... --layers all [--structures diag kron] [--predictive linearised sampled]

RUN is the folder of a finished run of laplace_posthoc with OOD data. Network, batches and splits are the run's. Each
structure is fitted in the run's batches, its scale is tuned on the validation split, and it is evaluated on a part of
the test split, for speed. With --layers, the posterior is over these layers, and images go through the whole network.
results/structures.json has a row for every run and structure; another call replaces only its own rows. Results on a GPU
go to structures_gpu.json.
"""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast, get_args

import torch
from safetensors.torch import load_file, save_file
from timing import APART, DEVICE, kept, synchronise, write
from torch import Tensor
from torch.utils.data import DataLoader

from lam.encoders.bayesian import BayesianEncoder
from lam.evaluation import evaluate
from lam.hessians import Ekfac, SupConCurvature
from lam.hessians.accumulate import LastLayerAccumulator
from lam.hessians.last_layer import outputs
from lam.hessians.losses.contrastive import SPLITS
from lam.methods.fit import fit
from lam.methods.laplace import Laplace
from lam.pairs.pairs import Pairs
from lam.posteriors import LAYERS_POSTERIORS, POSTERIORS
from lam.posteriors.layers import Predictive
from lam.retrieval.metrics.ood import auroc
from lam.runs.config_files import load_config
from lam.runs.data import load_data, loader_of
from lam.runs.finished import Run
from lam.tuning.alterations import is_images
from lam.vmf.embeddings import Embeddings

FIGURES = ("auroc", "auroc_variance", "ausc", "ausc_variance", "ece", "map@5", "share_clipped", "variance_clipped")
MAX_MEMORY = 8 << 30
PREDICTIVES = get_args(Predictive)
SOFTMAX = "logits", "outputs"
"""Splits of SupCon's curvature, which replaces the run's curvature."""
TEMPERATURE = 0.1
"""Default temperature of SupCon's curvature, as in training."""
TIMED = 1000
"""Number of items whose embedding is timed."""
PARTS = {"validation": 1000, "test": 2000, "outside": 2000}
"""Greatest number of items from each split."""
TUNED_OVER_LAYERS = 500
"""Number of validation images, if they pass through the network again for every scale."""
N_SAMPLES = 32
NEIGHBOURS = 10
MADE = 500
"""Greatest number of validation images to alter."""


def timed(compute: Callable[[], Any]) -> tuple[Any, float]:
    synchronise()
    start, result = time.perf_counter(), compute()
    synchronise()
    return result, time.perf_counter() - start


def features_of(run: str, n_train: int, cache: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Features and labels of a part of each split, and of the OOD items."""
    file = cache / f"{Path(run).name}.safetensors"
    if not file.is_file():
        config, encoder = cast(Any, load_config(run)), cast(Any, Run(run).encoder.to(DEVICE))
        splits, outside = load_data(config.data)
        parts = {**splits.parts(), "outside": next(iter(outside.values()))}
        kept = {}
        for name, images in parts.items():
            part = images.limit(PARTS.get(name, n_train), seed=0)
            features = encoder.features(loader_of(part, batch_size=500)).cpu()
            kept |= {name: features, f"{name}_labels": part.labels}
        save_file(kept, file)
    kept = load_file(file, device=DEVICE)
    return {name: (kept[name], kept[f"{name}_labels"]) for name in ("train", *PARTS)}


def batches_of(features: Tensor, labels: Tensor, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed)).to(features.device)
    return ((features[rows], labels[rows]) for rows in order.split(size))


def curvature_of(run: str, split: str, fix: str, temperature: float) -> tuple[str, Any]:
    """The curvature of a run, or of SupCon, with one of its splits: a title, and the curvature."""
    softmax = split in SOFTMAX
    title = " ".join([*(["SupCon"] if softmax else []), split, *([fix] if fix != "fixed" else [])])
    title += f", τ = {temperature:g}" if softmax and temperature != TEMPERATURE else ""
    curvature = SupConCurvature(temperature) if softmax else cast(Any, Run(run).encoder).posterior.curvature.curvature
    return title, replace(curvature, split=split, fix=fix)


def labelled(title: str, prior: float) -> str:
    """The title, with the prior precision after a comma if it is not 1."""
    title += f", α = {prior:g}" if prior != 1 else ""
    return title + "," * ("," in title)


def fitted(
    run: str,
    data: dict[str, tuple[Tensor, Tensor]],
    curvatures: list[tuple[str, Any]],
    structures: list[str],
    rank: int,
    prior: float,
) -> Iterator[tuple[str, Any, float]]:
    """Each structure by name, and the seconds of its fit, including a first pass."""
    config, encoder = cast(Any, load_config(run)), cast(Any, Run(run).encoder.to(DEVICE))
    weight, bias = encoder.posterior.weight, encoder.posterior.bias

    def passed(empty: Any) -> Any:
        batches = batches_of(*data["train"], config.method.batch_size, config.seed)
        summing = LastLayerAccumulator(empty=empty, relation=encoder.relation, weight=weight, bias=bias)
        total, n_items = summing.accumulate(batches)
        if empty.name != "kron" and hasattr(total, "eigenbasis"):
            _ = total.eigenbasis
        return total, n_items

    kron, before, of_features = None, 0.0, 0.0
    for title, settings in curvatures:
        label = labelled(title, prior)
        for name in structures:
            if name == "ekfac" and kron is not None:
                empty = Ekfac.in_basis_of(kron)
                (total, n_items), seconds = timed(lambda empty=empty: passed(empty))
                seconds += before
            else:
                limits: Any = {"max_memory": MAX_MEMORY, "rank": rank if name == "low_rank" else None}
                try:
                    options = Laplace(curvature=settings, structure=name, **limits)
                    empty = options.empty(weight, has_bias=bias is not None)
                except ValueError as error:
                    yield f"{label} {name}", str(error), 0.0
                    continue
                (total, n_items), seconds = timed(lambda empty=empty: passed(empty))
            if name == "kron":
                if kron is not None:  # of another curvature, and of the same features, whose eigenvectors are these
                    total.__dict__["_inputs"] = kron._inputs
                else:
                    _, of_features = timed(lambda total=total: total.eigenbasis)
                seconds += of_features
                kron, before = total, seconds
            called = f"{name}_{rank}" if name == "low_rank" else name
            posterior = POSTERIORS[name](weight, bias, total, n_items, prior, seed=config.seed)
            options = {"relation": encoder.relation, "n_samples": N_SAMPLES}
            yield f"{label} {called}", BayesianEncoder(None, "", posterior, **options), seconds


def of_items(run: str, features: Tensor, labels: Tensor) -> dict[str, dict[str, float]]:
    """Whether the curvature of an item, in one batch and on the unit sphere, grows with neighbours of other classes.

    For the contrastive curvature and SupCon's, with the trace of H_a r_a²: its rank correlation with the share of other
    classes among the ten nearest items; and its mean over items whose nearest item is of another class, divided by its
    mean over the other items.
    """
    posterior = cast(Any, Run(run).encoder.to(DEVICE)).posterior
    _, n, r = outputs(features, posterior.weight, posterior.bias, torch.float32)
    nearest = (n @ n.T).fill_diagonal_(-2).topk(NEIGHBOURS).indices
    other, pairs = (labels[nearest] != labels[:, None]).float(), Pairs.by_label(labels)
    wrong, result = other[:, 0] > 0, {}
    for curvature in (posterior.curvature.curvature, SupConCurvature(temperature=TEMPERATURE)):
        terms = curvature.of_batch(n, r, pairs).diagonal().sum(2).unbind(1)
        weights = [w / count for w, count in zip(curvature.terms.values(), curvature.counts(pairs), strict=True)]
        trace = r[:, 0].square() * sum(w * term for w, term in zip(weights, terms, strict=True))
        ranks = torch.stack([trace.argsort().argsort(), average_ranks(other.mean(1))]).double()
        ratio = trace[wrong].mean() / trace[~wrong].mean()
        figures = {"rank_correlation": ranks.corrcoef()[0, 1], "wrong_over_right": ratio}
        title = "SupCon" if isinstance(curvature, SupConCurvature) else "contrastive"
        result[title] = {name: float(value) for name, value in figures.items()}
    return result


def average_ranks(values: Tensor) -> Tensor:
    """Ranks; equal values get their mean rank."""
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - counts / 2)[place]


def fitted_over_layers(
    run: str,
    n_train: int,
    layers: str | list[str],
    curvatures: list[tuple[str, Any]],
    structures: list[str],
    predictives: list[Any],
    prior: float,
) -> Iterator[tuple[str, Any, float]]:
    """Encoders with a posterior over these layers, by name, and the seconds of their fits."""
    config, encoder = cast(Any, load_config(run)), cast(Any, Run(run).encoder.to(DEVICE))
    train = load_data(config.data)[0].train.limit(n_train, seed=0)
    generator = torch.Generator().manual_seed(config.seed)
    batches = list(DataLoader(train, config.method.batch_size, shuffle=True, generator=generator))
    where = "all-layers" if layers == "all" else "-".join(layers)
    for (title, curvature), structure in product(curvatures, structures):
        options: Any = {"layers": layers, "structure": structure, "max_memory": MAX_MEMORY, "prior_precision": prior}
        options = Laplace(**options, curvature=curvature, pairs=encoder.relation)
        own, seconds = timed(
            lambda options=options: fit(encoder.network, batches, options, seed=config.seed, progress=False)
        )
        own.n_samples = N_SAMPLES
        for predictive in predictives:
            own.posterior = replace(own.posterior, predictive=predictive, likelihood_scale=None)
            label = labelled(f"{title}, {len(train):,} images", prior)
            yield f"{label} {where}-{structure}-{predictive}", own, seconds


def images_of(run: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Images and labels of a part of each split except training, and of the OOD items."""
    splits, outside = load_data(load_config(run).data)
    parts = {**splits.parts(), "outside": next(iter(outside.values()))}
    counts = {**PARTS, "validation": TUNED_OVER_LAYERS}
    limited = {name: parts[name].limit(count, seed=0) for name, count in counts.items()}
    return {name: (next(iter(loader_of(part, batch_size=len(part))))[0], part.labels) for name, part in limited.items()}


def per_length(embeddings: Embeddings) -> Tensor:
    """Variance over length: the geometric mean of the variance and of the spread on the sphere, 1/κ, up to a factor."""
    return (embeddings.variance.double() / embeddings.kappa.double()).sqrt()


def judged(variant: Any, run: str, data: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """The metrics of an encoder, with the scale tuned on the validation split."""
    _, seconds = timed(lambda: variant.tune([data["validation"]]))
    evaluation = evaluate(variant, [data["test"]], [data["outside"][0]])
    metrics, outside = evaluation.metrics, next(iter(evaluation.ood_embeddings.values()))
    encoder: Any = Run(run).encoder.to(DEVICE) if variant.network is None else variant
    encoder.posterior, made = variant.posterior, {}
    validation = load_data(load_config(run).data)[0].validation.limit(MADE, seed=0)
    if is_images(next(iter(loader_of(validation, batch_size=2)))[0]):
        made = encoder.recommend(loader_of(validation, batch_size=250)).metrics()
    some = data["test"][0][:TIMED]
    predict, prepared = timed(lambda: variant.posterior.predictor(n_samples=N_SAMPLES))
    predict(some)
    _, embedded = timed(lambda: predict(some))
    return {
        **{figure: metrics.get(figure) for figure in FIGURES},
        "auroc_per_length": auroc(per_length(evaluation.embeddings[evaluation.queries]), per_length(outside)),
        **made,
        **({"share_left": metrics["share_left"]} if "share_left" in metrics else {}),
        "tuned_scale": metrics["tuned_scale"],
        "seconds_tune": seconds,
        "seconds_prepare": prepared,
        "microseconds_item": 1e6 * embedded / len(some),
        "bytes": sum(tensor.nbytes for tensor in variant.posterior.curvature.tensors().values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--structures", nargs="+", default=list(POSTERIORS))
    parser.add_argument("--splits", nargs="+", default=list(SPLITS))
    parser.add_argument("--fix", default="fixed")
    parser.add_argument("--rank", type=int, default=256, help="of low_rank")
    parser.add_argument("--prior", type=float, default=1.0, help="precision α")
    parser.add_argument("--temperature", type=float, default=TEMPERATURE, help="of SupCon's curvature")
    parser.add_argument("--layers", nargs="+", default=["last"], help="last, all, or their paths")
    parser.add_argument("--predictive", nargs="+", default=list(PREDICTIVES), help="of several layers")
    parser.add_argument("--train", type=int, default=20_000, help="at most so many training items")
    parser.add_argument("--cache", type=Path, default=Path(), help="where features are kept")
    parsed = parser.parse_args()
    results = kept(f"structures{APART}")
    warnings.simplefilter("ignore")  # of tuning: clipped variance is in the results
    for run in parsed.runs:
        rows = results.setdefault(Path(run).name, {})
        curvatures = [curvature_of(run, split, parsed.fix, parsed.temperature) for split in parsed.splits]
        if parsed.layers == ["last"]:
            data = features_of(run, parsed.train, parsed.cache)
            rows["items"] = of_items(run, *data["validation"])
            rows["layer"] = {"n_items": len(data["train"][0]), "P": data["train"][0].shape[1]}
            variants = fitted(run, data, curvatures, parsed.structures, parsed.rank, parsed.prior)
        else:
            data, layers = images_of(run), "all" if parsed.layers == ["all"] else parsed.layers
            structures = [name for name in parsed.structures if name in LAYERS_POSTERIORS]
            options = layers, curvatures, structures, parsed.predictive, parsed.prior
            variants = fitted_over_layers(run, parsed.train, *options)
        for name, variant, seconds in variants:
            refused = isinstance(variant, str)
            rows[name] = {"refused": variant} if refused else {**judged(variant, run, data), "seconds_fit": seconds}
            print(Path(run).name, name, rows[name], file=sys.stderr, flush=True)
            write(f"structures{APART}", results)


if __name__ == "__main__":
    sys.exit(main())
