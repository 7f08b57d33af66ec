"""κ of ambiguity and p_known beside their rivals: AUSC, AUROC of outsiders, and whether each falls under corruption.

    python benchmarks/ambiguity.py NAME=RUN ... [--clinc EMBEDDED] [--reference 20000] [--corrupted 200]

RUN is the folder of a finished run; runs of one NAME, such as several seeds, become mean and standard deviation. The
encoder learns on the run's validation split, with training items among which the nearest is looked for; nothing is
chosen on the test split. EMBEDDED holds sentences embedded by all-MiniLM-L6-v2 and labels: train, val, test, oos_test.
What is asked of a score: `ausc`, does it know which first hits are wrong; `auroc` by OOD set; `trend` by kind of
corruption, the rank correlation of severity and certainty, where falling is right. `κ, by distance alone` and `κ, by
shape alone` are the two ends between which p_known lies. results/ambiguity.json; what other calls
wrote stays in it.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timing import kept, write
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lam
from lam.encoders.ambiguity import Ambiguity
from lam.encoders.base import Encoder, Prediction
from lam.inputs.corruption import STRENGTHS, corrupted
from lam.retrieval.index.exact import rank
from lam.retrieval.metrics.ood import auroc
from lam.retrieval.metrics.reference import Reference, knn_distance
from lam.retrieval.metrics.uncertainty import ausc
from lam.runs.config_files import load_config
from lam.runs.corruption import CorruptionCurve
from lam.runs.data import load_data, loader_of
from lam.runs.finished import Run
from lam.vmf import bessel_ratio

BATCH, DEPTH = 500, 10
FAR_BELOW = 1e9


def certainties(
    seen: Prediction, cosines: Tensor, labels: Tensor | None, encoder: Encoder, reference: Reference
) -> dict[str, Tensor]:
    """Every score of some items, higher for what is more certain."""
    ambiguity: Any = encoder.ambiguity
    learnt: Ambiguity = ambiguity
    embeddings: Any = seen.embeddings
    typicality = learnt.typicality
    scores = typicality.scores(seen.features)
    length = bessel_ratio(embeddings.dimension, embeddings.kappa_aleatoric.double())

    def end(column: int) -> Tensor:
        alone = scores.clone()
        alone[:, 1 - column] = -FAR_BELOW
        beyond = F.softplus((alone - typicality.thresholds) / typicality.widths).square().sum(1)
        return length / (1 + beyond / torch.log(torch.tensor(2.0)).square())

    found = {
        "κ, the one number": embeddings.resultant.double(),
        "κ, by distance alone": end(0),
        "κ, by shape alone": end(1),
        "κ_a": embeddings.kappa_aleatoric,
        "p_known": embeddings.p_known,
        "κ_e of the posterior": embeddings.kappa_epistemic,
        "k-NN": -knn_distance(seen.features, reference),
        "norm of φ": seen.features.norm(dim=1),
        "first cosine": cosines[:, 0],
        "mean of 10 cosines": cosines.mean(1),
    }
    posterior: Any = getattr(encoder, "posterior", None)
    if posterior is not None:
        found["length of f"] = F.linear(seen.features, posterior.weight, posterior.bias).norm(dim=1)
    if labels is not None:
        found["votes of 10"] = (labels == labels[:, :1]).double().mean(1)
    return found


def measure(
    encoder: Encoder,
    learn_from: Any,
    known: Any,
    test: Any,
    labels: Tensor,
    outside: dict[str, Any],
    worse: Callable[[], dict[str, list[Any]]],
    rows: Tensor,
) -> dict[str, Any]:
    """All figures of one encoder."""
    plain = encoder.predict(known, n_samples=2).features
    start = time.perf_counter()
    encoder.learn_ambiguity(learn_from, reference=known)
    seconds = time.perf_counter() - start
    compared = torch.randperm(len(plain), generator=torch.Generator().manual_seed(0))[:5000]
    reference = Reference.of(plain[compared])
    seen = encoder.predict(test)
    mean = seen.embeddings.mean
    hits, cosines = rank(mean, k=DEPTH)
    correct = labels[hits[:, 0]] == labels
    inside = certainties(seen, cosines, labels[hits], encoder, reference)
    embeddings: Any = seen.embeddings
    figures: dict[str, Any] = {
        "seconds": round(seconds, 1),
        "recall@1": float(correct.double().mean()),
        "p_known below ½": float((embeddings.p_known < 0.5).double().mean()),
        "width of shape": float(encoder.ambiguity.typicality.widths[1]) if encoder.ambiguity else None,
        "scores": {name: {"ausc": ausc(correct, -values)} for name, values in inside.items()},
    }
    for name, batches in outside.items():
        other = encoder.predict(batches)
        theirs = certainties(other, rank(other.embeddings.mean, mean, k=DEPTH)[1], None, encoder, reference)
        for score, values in theirs.items():
            figures["scores"][score][f"auroc {name}"] = auroc(-inside[score], -values)
    is_itself = rows[:, None] == torch.arange(len(mean))
    for kind, severities in worse().items():
        curve: dict[str, list[Tensor]] = {name: [values[rows]] for name, values in inside.items()}
        recall = [float(correct[rows].double().mean())]
        for inputs in severities:
            query = encoder.predict(inputs)
            cosine = (query.embeddings.mean @ mean.T).masked_fill(is_itself, -torch.inf)
            top, places = cosine.topk(DEPTH)
            recall.append(float((labels[places[:, 0]] == labels[rows]).double().mean()))
            for name, values in certainties(query, top, labels[places], encoder, reference).items():
                curve[name].append(values)
        figures.setdefault("accuracy", {})[kind] = recall
        for name, values in curve.items():
            kappa = torch.stack([value.double() for value in values])
            figures["scores"][name][f"trend {kind}"] = CorruptionCurve(kappa, kappa > 0).trend
    return figures


def of_run(folder: str, parsed: argparse.Namespace) -> dict[str, Any]:
    """A finished run."""
    config, encoder = load_config(folder), Run(folder).encoder
    splits, ood = load_data(config.data)
    preprocessing: Any = splits.test.preprocessing
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(splits.test), generator=generator)[: parsed.corrupted].sort().values

    def worse() -> dict[str, list[Any]]:
        pixels = preprocessing.denormalize(torch.stack([splits.test[row][0] for row in rows.tolist()]))
        return {
            kind: [
                list(preprocessing.standardize(corrupted(pixels, kind, level, generator=generator)).split(100))
                for level in range(1, len(strengths) + 1)
            ]
            for kind, strengths in STRENGTHS.items()
        }

    return measure(
        encoder,
        loader_of(splits.validation, BATCH),
        loader_of(splits.train.limit(parsed.reference, seed=0), BATCH),
        loader_of(splits.test, BATCH),
        splits.test.labels,
        {name: loader_of(items, BATCH) for name, items in ood.items()},
        worse,
        rows,
    )


def of_sentences(path: str, seed: int) -> dict[str, Any]:
    """A layer trained on sentences embedded by a frozen network."""
    sets = torch.load(path, weights_only=True)
    generator = torch.Generator().manual_seed(seed)
    train = TensorDataset(sets["train"], sets["train_y"])
    loader = DataLoader(train, batch_size=256, shuffle=True, generator=generator)
    options: dict[str, Any] = {"margin": 0.7, "head": "train", "dimension": 64, "seed": seed, "progress": False}
    encoder = lam.fit(nn.Identity(), loader, **options)
    validation = [(sets["val"], sets["val_y"])]
    encoder.tune(validation)
    no_rows = torch.zeros(0, dtype=torch.int64)
    outside = {"out of scope": sets["oos_test"]}
    none: dict[str, list[Any]] = {}
    return measure(encoder, validation, sets["train"], sets["test"], sets["test_y"], outside, lambda: none, no_rows)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean of every figure, and of several runs the standard deviation."""

    def joined(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {name: joined([value[name] for value in values]) for name in values[0]}
        tensor = torch.tensor(values, dtype=torch.float64)
        mean = tensor.mean(0).tolist()
        return mean if len(values) == 1 else {"mean": mean, "std": tensor.std(0).tolist()}

    return {"runs": len(rows), **joined(rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*")
    parser.add_argument("--clinc", help="a file of embedded sentences")
    parser.add_argument("--seeds", type=int, default=3, help="of the layers trained on sentences")
    parser.add_argument("--reference", type=int, default=20000)
    parser.add_argument("--corrupted", type=int, default=200)
    parsed = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {}
    for given in parsed.runs:
        name, folder = given.split("=", 1)
        rows.setdefault(name, []).append(of_run(folder, parsed))
        print(given, rows[name][-1], file=sys.stderr, flush=True)
    for seed in range(parsed.seeds) if parsed.clinc else ():
        rows.setdefault("clinc150", []).append(of_sentences(parsed.clinc, seed))
        print("clinc150", rows["clinc150"][-1], file=sys.stderr, flush=True)
    found = {name: summary(of) for name, of in rows.items()}
    write("ambiguity", {**kept("ambiguity"), "reference": parsed.reference, **found})


if __name__ == "__main__":
    sys.exit(main())
