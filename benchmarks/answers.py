"""P(first hit is right) and each of its single scores, on every data set of the suite.

    python benchmarks/answers.py --data FOLDER [--only NAME ...] [--method laplace_posthoc] [--seeds 3] [--work FOLDER]
        [--runs NAME=FOLDER ...] [--cost]

Arguments, data and runs are as in `suite.py`; missing runs are trained. The gallery holds at most 5,000 training items.
P(right) is learned on the validation split, as by `lam calibrate`. The queries are the test split, clean and corrupted.
Training and calibration have no corrupted item. results/answers.json holds these figures by data set, for each seed,
and their mean and standard deviation:

- AUSC and R-AUROC of each score and of P(right)
- for each OOD set, the AUROC of each score, of the flag `combined` and of P(right); for the first set, SCOD-AUGRC
- the best single score's AUSC on the test split minus the AUSC of P(right | known), with the paired bootstrap error
- ECE of P(right) and P(right | known), and the 0.95 quantile of the ECE of a perfect predictor, simulated
- mean probability and accuracy at each severity, the greatest and the mean gap between them, also for P(right | known)
- rank correlations of severity with P(right) and with κ
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import faiss
import torch
from suite import NOT_ASKED, SOURCES, cell
from timing import kept, write
from torch import Tensor, nn

import lam
from lam.datasets import Dataset
from lam.encoders.base import N_SAMPLES, Encoder, Prediction
from lam.methods import METHODS
from lam.models import EmbeddingNetwork
from lam.retrieval.decisions.calibrate import CalibrationData, Choices, calibrate
from lam.retrieval.decisions.calibration import Calibration, Targets
from lam.retrieval.decisions.flags import COMBINED
from lam.retrieval.decisions.probability import probability_bins
from lam.retrieval.index.exact import rank
from lam.retrieval.index.faiss_index import Index
from lam.retrieval.index.hits import Hits
from lam.retrieval.metrics.ood import auroc
from lam.retrieval.metrics.open_set import search_open_set
from lam.retrieval.metrics.reference import Reference
from lam.retrieval.metrics.scores import N_HITS
from lam.retrieval.metrics.uncertainty import ausc, r_auroc, scod_augrc
from lam.runs.corruption import CorruptionCurve, worse_inputs
from lam.runs.data import EMBEDDING_BATCH, load_data, loader_of, reference_features
from lam.runs.finished import Run
from lam.runs.sweep import summary
from lam.vmf.embeddings import Embeddings

GALLERY = REFERENCE = 5000
CORRUPTED = 300  # queries
RESAMPLES = 1000
RIGHT, IF_KNOWN = "p_right", "p_right_if_known"
"""The probability of an answer, and P(right | known), which takes every query as known."""
TARGETS = Targets(
    far=0.2, ood=0.2, conformal_miss=0.2
)  # no threshold is measured here: rates that few queries can have


class Cell:
    """An encoder, calibrated on its validation split in a gallery of training items."""

    def __init__(self, finished: Run, seed: int) -> None:
        self.encoder: Encoder = finished.encoder
        self.splits, self.ood = load_data(finished.config.data)
        gallery = self.splits.train.limit(GALLERY, seed=seed)
        self.stored, self.gallery = gallery.labels, self.predict(gallery).embeddings
        reference = reference_features(self.encoder, self.splits.train, REFERENCE, seed=seed)
        known, labels = self.predict(self.splits.validation), self.splits.validation.labels
        searches = search_open_set(
            known.embeddings.mean.cpu(), self.gallery.mean.cpu(), lambda rows: labels[rows][:, None] == self.stored
        )
        data = CalibrationData(
            searches, known.embeddings, known.features, gallery_labels=self.stored, reference=reference
        )
        self.calibration: Calibration = calibrate(data, Choices(TARGETS), key="")

    def predict(self, items: Dataset | list[Tensor]) -> Prediction:
        batches = items if isinstance(items, list) else loader_of(items)
        return self.encoder.predict(batches, n_samples=N_SAMPLES)

    def answers(self, items: Dataset | list[Tensor], labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Doubt by each score and by P(right), and whether first hits are right."""
        prediction = self.predict(items)
        ids, cosines = rank(prediction.embeddings.mean, self.gallery.mean, k=N_HITS)
        hits = Hits(ids, cosines, self.gallery.kappa[ids])
        of_hits = self.stored[ids.cpu()]
        scores = self.calibration.scores(hits, prediction.embeddings, features=prediction.features, labels=of_hits)
        answer = self.calibration.match_probability
        doubt = {**scores, RIGHT: 1 - answer(scores), IF_KNOWN: 1 - answer.right(scores)}
        return {**doubt, COMBINED: self.calibration.detector.ood_score(COMBINED, scores)}, of_hits[:, 0] == labels


def measure(cell: Cell, seed: int) -> dict[str, Any]:
    test = cell.splits.test
    has_match = torch.isin(test.labels, cell.stored)
    doubt, correct = cell.answers(test, test.labels)
    doubt, correct = {name: values[has_match] for name, values in doubt.items()}, correct[has_match]
    measured: dict[str, Any] = {"queries": len(correct), "recall@1": float(correct.double().mean())}
    for name, values in doubt.items():
        measured[f"ausc_{name}"], measured[f"r_auroc_{name}"] = ausc(correct, values), r_auroc(correct, values)
    for number, (title, outside) in enumerate(cell.ood.items()):
        foreign, _ = cell.answers(outside, torch.full((len(outside),), -1))
        for name, values in doubt.items():
            measured[f"auroc_{name}@{title}"] = auroc(values, foreign[name])
            if number == 0:
                measured[f"scod_augrc_{name}"] = scod_augrc(correct, values, foreign[name])
    generator = torch.Generator().manual_seed(seed)
    return {
        **measured,
        **against_the_best(doubt, correct, generator),
        **calibration_error(1 - doubt[RIGHT], correct, generator),
        **{
            f"{key}_if_known": value
            for key, value in calibration_error(1 - doubt[IF_KNOWN], correct, generator).items()
        },
        **corrupted(cell, has_match, generator),
        "evidence": len(cell.calibration.match_probability.right.evidence),
        "worth": cell.calibration.match_probability.right.worth,
    }


def against_the_best(doubt: dict[str, Tensor], correct: Tensor, generator: torch.Generator) -> dict[str, Any]:
    """AUSC of P(right | known) behind the best single score, chosen on these queries, with its bootstrap error."""
    best = max(
        (name for name in doubt if name not in (RIGHT, IF_KNOWN, COMBINED)), key=lambda name: ausc(correct, doubt[name])
    )

    def behind(rows: Tensor) -> float:
        return ausc(correct[rows], doubt[best][rows]) - ausc(correct[rows], doubt[IF_KNOWN][rows])

    n = len(correct)
    draws = torch.tensor([behind(torch.randint(n, (n,), generator=generator)) for _ in range(RESAMPLES)])
    difference, error = behind(torch.arange(n)), float(draws.std())
    return {
        "best": best,
        "ausc_best": ausc(correct, doubt[best]),
        "behind": difference,
        "behind_error": error,
        "not_behind": difference <= max(0.002, error),
    }


def calibration_error(probability: Tensor, correct: Tensor, generator: torch.Generator) -> dict[str, float]:
    def ece(right: Tensor) -> float:
        return probability_bins(probability, right).expected_error

    draws = [ece(torch.rand(len(correct), generator=generator) < probability) for _ in range(RESAMPLES)]
    return {"ece": ece(correct), "ece_of_the_perfect": float(torch.tensor(draws).quantile(0.95))}


def corrupted(cell: Cell, has_match: Tensor, generator: torch.Generator) -> dict[str, float | None]:
    rows = has_match.nonzero()[:, 0]
    rows = rows[torch.randperm(len(rows), generator=generator)[:CORRUPTED]]
    labels, gaps, gaps_if_known = cell.splits.test.labels[rows], [], []
    measured: dict[str, float | None] = {}
    for kind, severities in worse_inputs(cell.splits.test, rows.tolist(), generator):
        doubts, right = [], []
        for severity, inputs in enumerate(severities):
            doubt, correct = cell.answers(list(inputs.split(EMBEDDING_BATCH)), labels)
            doubts.append(doubt)
            right.append(correct)
            probability, accuracy = float(1 - doubt[RIGHT].mean()), float(correct.double().mean())
            measured[f"{kind}_{severity}_probability"], measured[f"{kind}_{severity}_accuracy"] = probability, accuracy
            gaps.append(abs(probability - accuracy))
            gaps_if_known.append(abs(float(1 - doubt[IF_KNOWN].mean()) - accuracy))
        for name in ("kappa", RIGHT):
            falling = torch.stack([-doubt[name] for doubt in doubts])
            trend = CorruptionCurve(falling, torch.stack(right)).trend
            measured[f"{kind}_trend_{name}"] = None if trend != trend else trend  # nothing changes
    return {
        **measured,
        **{"greatest_gap": max(gaps), "mean_gap": mean(gaps)},
        **{"greatest_gap_if_known": max(gaps_if_known), "mean_gap_if_known": mean(gaps_if_known)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--fashionmnist", help="the folder of FashionMNIST's IDX files")
    parser.add_argument("--only", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--method", choices=METHODS, default="laplace_posthoc")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/suite"), help="where data and runs are kept")
    parser.add_argument(
        "--runs",
        nargs="+",
        default=[],
        metavar="NAME=FOLDER",
        help="finished runs, in place of these; runs of one name are seeds",
    )
    parser.add_argument("--cost", action="store_true", help="measure what a decision costs beside a search, too")
    parser.set_defaults(**NOT_ASKED)
    parsed = parser.parse_args()
    parsed.data, parsed.work = parsed.data.resolve(), parsed.work.resolve()
    elsewhere: dict[str, list[Path]] = {}
    for name, folder in (given.split("=", 1) for given in parsed.runs):
        elsewhere.setdefault(name, []).append(Path(folder))
    for name in elsewhere or parsed.only:
        try:
            folders = elsewhere.get(name) or trained(parsed, name)
        except FileNotFoundError as missing:
            print(f"{name} is left out: there is no {missing}", file=sys.stderr)
            continue
        rows = {}
        for seed, folder in enumerate(folders):
            measured = measure(Cell(Run(folder), seed), seed)
            rows[seed] = {key: None if value != value else value for key, value in measured.items()}  # NaN: undefined
            print(f"{name}, seed {seed}: {rows[seed]}", file=sys.stderr, flush=True)
        numbers = {
            seed: {key: value for key, value in row.items() if isinstance(value, float | None)}
            for seed, row in rows.items()
        }
        keep(name, {"method": parsed.method, "seeds": rows, **summary(numbers)})
    if parsed.cost:
        keep("cost", cost())


def trained(parsed: argparse.Namespace, name: str) -> list[Path]:
    """The runs of a data set; missing ones are trained."""
    source = SOURCES[name](parsed)
    return [cell(parsed, name, source, parsed.method, seed).folder for seed in range(parsed.seeds)]


def keep(name: str, result: dict[str, Any]) -> None:
    write("answers", {**kept("answers"), name: result})


def cost() -> dict[str, Any]:
    """CPU seconds of a search of 50 hits over 100,000 x 512, of κ by samples of a layer of 2,048 features, and of the
    decision from the hits, on one thread."""
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(500, 512, generator=generator)
    labels, asked = (torch.randint(500, (n,), generator=generator) for n in (100_000, 600))

    def around(classes: Tensor, spread: float) -> Embeddings:
        points = centers[classes] + spread * torch.randn(len(classes), 512, generator=generator)
        one = torch.ones(len(classes), dtype=torch.float64)
        kappa = 100 * torch.rand(len(classes), generator=generator, dtype=torch.float64)
        return Embeddings(torch.nn.functional.normalize(points, dim=1), kappa, one, one)

    gallery, queries = around(labels, 1.0), around(asked, 1.2)
    index = Index(512)
    index.add(gallery, torch.arange(len(labels)))
    searches = search_open_set(queries.mean, gallery.mean, lambda rows: asked[rows][:, None] == labels)
    layer = EmbeddingNetwork(nn.Identity(), nn.Linear(2048, 512)).eval()
    inputs = torch.randn(64, 2048, generator=generator)
    encoder = lam.fit(layer, [(inputs, torch.arange(64) % 8)], margin=0.7, progress=False)
    of_features = encoder.posterior.predictor(n_samples=N_SAMPLES)
    rows = {}
    for kind, reference in (("hits", None), ("features", Reference.of(gallery.mean[:REFERENCE], labels[:REFERENCE]))):
        features = None if reference is None else queries.mean
        data = CalibrationData(searches, queries, features, gallery_labels=labels, reference=reference)
        made = calibrate(data, Choices(TARGETS), key="")
        for batch in (1, 64):
            one = queries[:batch]
            hits = index.search(one, N_HITS)
            known = {"labels": labels[hits.ids], "features": None if features is None else features[:batch]}
            times = (
                process_time_of(lambda: index.search(one, N_HITS)),  # noqa: B023
                process_time_of(lambda: of_features(inputs[:batch])),  # noqa: B023
                process_time_of(lambda: made.decide(hits, one, gallery_size=len(labels), **known)),  # noqa: B023
            )
            row = {f"{name}_ms": 1e3 * time for name, time in zip(("search", "kappa", "decide"), times, strict=True)}
            rows[f"{kind}, {batch} at once"] = {**row, "ratio": (times[1] + times[2]) / times[0]}
    return rows


def process_time_of(work: Callable[[], object]) -> float:
    """The least of ten processor times of a call, in seconds."""
    times = []
    for _ in range(10):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


if __name__ == "__main__":
    sys.exit(main())
