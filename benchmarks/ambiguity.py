"""κ of ambiguity and p_known beside their rivals: AUSC, AUROC of outsiders, and whether each falls under corruption.

    python benchmarks/ambiguity.py NAME=RUN ... [--reference 20000] [--corrupted 200]

RUN is the folder of a finished run of `suite.py`, of images or texts; runs of one NAME, such as several seeds, become
mean and standard deviation. The encoder learns on the run's validation split, with training items among which the
nearest is looked for; nothing is chosen on the test split. What is asked of a score: `ausc`, does it know which first
hits are wrong; `auroc` by OOD set; `trend` by kind of corruption, the rank correlation of severity and certainty, where
falling is right. `κ, by distance alone` and `κ, by shape alone` are the two ends between which p_known lies.
results/ambiguity.json; what other calls wrote stays in it.
"""

import argparse
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from timing import kept, write
from torch import Tensor

from lam.encoders.base import Encoder, Prediction
from lam.retrieval.index.exact import rank
from lam.retrieval.metrics.ood import auroc
from lam.retrieval.metrics.reference import Reference, knn_distance
from lam.retrieval.metrics.uncertainty import ausc
from lam.runs.config_files import load_config
from lam.runs.corruption import CorruptionCurve, worse_inputs
from lam.runs.data import load_data, loader_of
from lam.runs.finished import Run
from lam.tuning.ambiguity import Ambiguity
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


def measure(folder: str, parsed: argparse.Namespace) -> dict[str, Any]:
    """All figures of the encoder of a finished run."""
    config, encoder = load_config(folder), Run(folder).encoder
    splits, ood = load_data(config.data)
    test, labels = splits.test, splits.test.labels
    known = loader_of(splits.train.limit(parsed.reference, seed=0), BATCH)
    plain = encoder.predict(known, n_samples=2).features
    start = time.perf_counter()
    encoder.learn_ambiguity(loader_of(splits.validation, BATCH), reference=known)
    seconds = time.perf_counter() - start
    compared = torch.randperm(len(plain), generator=torch.Generator().manual_seed(0))[:5000]
    reference = Reference.of(plain[compared])
    seen = encoder.predict(loader_of(test, BATCH))
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
    for name, items in ood.items():
        other = encoder.predict(loader_of(items, BATCH))
        theirs = certainties(other, rank(other.embeddings.mean, mean, k=DEPTH)[1], None, encoder, reference)
        for score, values in theirs.items():
            figures["scores"][score][f"auroc {name}"] = auroc(-inside[score], -values)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(len(test), generator=generator)[: parsed.corrupted].sort().values
    is_itself = rows[:, None] == torch.arange(len(mean))
    for kind, severities in worse_inputs(test, rows.tolist(), generator):
        curve: dict[str, list[Tensor]] = {name: [] for name in inside}
        recall = []
        for inputs in severities:
            query = encoder.predict(list(inputs.split(BATCH)))
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
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--reference", type=int, default=20000)
    parser.add_argument("--corrupted", type=int, default=200)
    parsed = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {}
    for given in parsed.runs:
        name, folder = given.split("=", 1)
        rows.setdefault(name, []).append(measure(folder, parsed))
        print(given, rows[name][-1], file=sys.stderr, flush=True)
    found = {name: summary(of) for name, of in rows.items()}
    write("ambiguity", {**kept("ambiguity"), "reference": parsed.reference, **found})


if __name__ == "__main__":
    sys.exit(main())
