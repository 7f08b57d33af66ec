"""Whether promises of a calibration hold: false flags, false accepts, P(correct), and answers to images of digits.

    python benchmarks/calibration.py RUN [RUN ...] --mnist FOLDER

Each RUN is a finished run on FashionMNIST. Promises of rates are means over calibrations, so 200 random splits of the
test images into a calibration part and the rest are tried. The answers of a run are calibrated on its validation split
only. Half of this split is the gallery. The queries are the test split and MNIST. Writes results/calibration.json.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy.stats import betabinom, kstest
from timing import write
from torch import Tensor

from lam import datasets
from lam.datasets.splits import carve
from lam.encoders.base import N_SAMPLES, Prediction
from lam.retrieval.decisions.calibrate import CalibrationData, Choices, calibrate
from lam.retrieval.decisions.calibration import Calibration, Targets, query_scores
from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.evidence import Evidence, Group, folds_of
from lam.retrieval.decisions.flags import COMBINED, OodDetector
from lam.retrieval.decisions.probability import Correctness, probability_bins
from lam.retrieval.decisions.verification import Verifier, draw_pairs
from lam.retrieval.index.exact import rank
from lam.retrieval.index.hits import Hits
from lam.retrieval.metrics.ood import auroc
from lam.retrieval.metrics.open_set import Searches, open_set_metrics, search_open_set
from lam.retrieval.metrics.scores import N_HITS
from lam.runs.calibration_options import REFERENCE
from lam.runs.config_files import load_config
from lam.runs.data import load_data, loader_of, reference_features
from lam.runs.finished import Run

RESAMPLES = 200
OOD_TARGETS, FAR_TARGETS = (0.01, 0.05), (0.001, 0.01, 0.05)
CALIBRATED = 1000
FLAGGED_BY = ("kappa", "knn", "cosine", COMBINED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--mnist", required=True)
    given = parser.parse_args()
    measured = [measure(run, given.mnist) for run in given.runs]
    write("calibration", {"resamples": RESAMPLES, "mean": mean_of(measured), "runs": measured})


def measure(run: Path, mnist: str) -> dict[str, Any]:
    encoder, config = Run(run).encoder, load_config(run, ["--data.ood=[]"])
    splits, _ = load_data(config.data)
    others = datasets.load_ood("mnist", like=splits.test, root=mnist)
    reference = reference_features(encoder, splits.train, REFERENCE, seed=config.seed)

    def predict(images: datasets.Dataset) -> Prediction:
        return encoder.predict(loader_of(images), n_samples=N_SAMPLES)

    parts = carve(splits.validation, (len(splits.validation) // 2,), seed=0)
    gallery, held, test, outside = (predict(images) for images in (*parts, splits.test, others))
    stored, labels = parts[0].labels, (parts[1].labels, splits.test.labels)
    own = search(held, gallery, labels[0], stored)
    asked = search(test, gallery, labels[1], stored)
    common: Any = {"gallery_labels": stored, "reference": reference}
    data = CalibrationData(own, held.embeddings, held.features, labels[0], **common)
    made = calibrate(data, Choices(Targets(far=0.01)), key="")
    assert made.depth is not None
    generator = torch.Generator().manual_seed(0)
    evidence = CalibrationData(asked, test.embeddings, test.features, labels[1], **common).evidence({}, labelled=True)
    return {
        "false_flags": false_flags(evidence, generator),
        "false_accepts": false_accepts(asked, generator),
        "false_accepts_without_a_gallery": false_accepts_alone(test, labels[1], generator),
        "p_correct": p_correct(made, asked, test, held, labels, stored),
        "verification": verification(test, held, gallery, labels, stored, generator),
        "conformal_depth": {
            "k": made.depth,
            "miss_target": made.targets.conformal_miss,
            "miss_on_test": float((asked.rank > made.depth).double().mean()),
        },
        "open_set": [open_set_metrics(asked, fpir=fpir) for fpir in FAR_TARGETS],
        "no_match": no_match(made, gallery, stored, {"fashionmnist": test, "mnist": outside}),
    }


def search(queries: Prediction, gallery: Prediction | None, labels: Tensor, others: Tensor) -> Searches:
    items = None if gallery is None else gallery.embeddings.mean
    return search_open_set(queries.embeddings.mean, items, partial(_match, others, labels))


def false_flags(evidence: Evidence, generator: torch.Generator) -> list[dict[str, Any]]:
    """Rates on the rest of the test split, with the target, and their spread, with the Beta-binomial law."""
    rates: dict[tuple[str, float], list[float]] = {(flag, target): [] for flag in FLAGGED_BY for target in OOD_TARGETS}
    n, fold = len(evidence.queries), folds_of(torch.arange(CALIBRATED))

    def part(group: Group, rows: Tensor) -> Group:
        return Group({name: values[rows] for name, values in group.scores.items()}, fold)

    for known, new in partings(n, generator):
        groups = (part(group, known) for group in (evidence.no_match, evidence.strangers))
        queries = part(evidence.queries, known)
        detector = OodDetector.fit(Evidence(queries, evidence.has_match[known], evidence.right[known], *groups))
        fresh = {name: values[new] for name, values in evidence.queries.scores.items()}
        for (flag, target), found in rates.items():
            ood_score = detector.ood_score(flag, fresh)
            found.append(float((ood_score > detector.conformal_scores(flag).threshold(target)).double().mean()))
    return [{"flag": flag, **against_law(found, target, n)} for (flag, target), found in rates.items()]


def against_law(rates: list[float], target: float, n: int) -> dict[str, Any]:
    new = n - CALIBRATED
    law: Any = betabinom(new, *ConformalScores(torch.arange(float(CALIBRATED)).double()).law(target))
    found = torch.tensor(rates, dtype=torch.float64)
    counts = (found * new).round().numpy()
    error = float(found.std()) / len(rates) ** 0.5
    return {
        "target": target,
        "mean": float(found.mean()),
        "standard_error": error,
        "kept": float(found.mean()) <= target + 2 * error,
        "standard_deviation": float(found.std()),
        "standard_deviation_by_law": float(law.std()) / new,
        "p_of_law": float(kstest(law.cdf(counts - 1) + 0.5 * law.pmf(counts), "uniform").pvalue),
    }


def false_accepts(asked: Searches, generator: torch.Generator) -> list[dict[str, Any]]:
    """Share of splits in which the interval of a threshold contains the rate on the rest of the test split."""
    scores = asked.non_mated
    found: dict[float, list[tuple[float, bool]]] = {target: [] for target in FAR_TARGETS}
    for known, new in partings(len(scores), generator):
        tail = ConformalScores.of(scores[known])
        for target, results in found.items():
            threshold = tail.threshold(target)
            rate = float((scores[new] > threshold).double().mean())
            low, high = tail.interval(threshold)
            results.append((rate, low <= rate <= high))
    return [
        {
            **summary(target, results, asked.gallery_size),
            "interval_holds_by_law": expected_coverage(target, len(scores) - CALIBRATED),
        }
        for target, results in found.items()
    ]


def false_accepts_alone(test: Prediction, labels: Tensor, generator: torch.Generator) -> list[dict[str, Any]]:
    """The same if the calibration part is its own gallery, each query without itself; no promise is possible then.

    Two items are often each other's nearest non-match, so there are fewer independent scores.
    """
    mean = test.embeddings.mean
    found: dict[float, list[tuple[float, bool]]] = {target: [] for target in FAR_TARGETS}
    for known, new in partings(len(mean), generator):
        new = new[:CALIBRATED]
        match = partial(_match, labels[known])
        tail = ConformalScores.of(search_open_set(mean[known], None, partial(match, labels[known])).non_mated)
        fresh = search_open_set(mean[new], mean[known], partial(match, labels[new])).non_mated
        for target, results in found.items():
            threshold = tail.threshold(target)
            rate = float((fresh > threshold).double().mean())
            low, high = tail.interval(threshold)
            results.append((rate, low <= rate <= high))
    return [
        {**summary(target, results, CALIBRATED), "interval_holds_by_law": expected_coverage(target, CALIBRATED)}
        for target, results in found.items()
    ]


def summary(target: float, results: list[tuple[float, bool]], gallery_size: int) -> dict[str, Any]:
    rates = torch.tensor([rate for rate, _ in results], dtype=torch.float64)
    return {
        "target": target,
        "gallery_size": gallery_size,
        "mean": float(rates.mean()),
        "standard_error": float(rates.std()) / len(results) ** 0.5,
        "interval_level": 0.95,
        "interval_holds": sum(held for _, held in results) / len(results),
    }


def expected_coverage(target: float, new: int) -> float:
    """Expected coverage of the interval for the rate of `new` searches without ties; this rate is noisy, too."""
    tail = ConformalScores(torch.arange(float(CALIBRATED)).double())
    low, high = tail.interval(tail.threshold(target))
    law: Any = betabinom(new, *tail.law(target))
    counts = torch.arange(new + 1).double() / new
    held = (counts >= low) & (counts <= high)
    return float(torch.from_numpy(law.pmf(range(new + 1)))[held].sum())


def partings(n: int, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    orders = [torch.randperm(n, generator=generator) for _ in range(RESAMPLES)]
    return [(order[:CALIBRATED], order[CALIBRATED:]) for order in orders]


def p_correct(
    made: Calibration,
    asked: Searches,
    test: Prediction,
    held: Prediction,
    labels: tuple[Tensor, Tensor],
    stored: Tensor,
) -> dict[str, float]:
    """ECE on the test split: in the gallery of the calibration, and in the test split itself, four times as large.

    The larger gallery makes the calibration stale. A third ECE is for a new calibration in this gallery.
    """
    alone, again = search(test, None, labels[1], labels[1]), search(held, test, *labels)

    def scores(queries: Prediction, found: Searches, of_items: Tensor) -> dict[str, Tensor]:
        labels_of_hits = of_items[found.hits]
        return query_scores(
            queries.embeddings,
            found.cosines,
            features=queries.features,
            labels=labels_of_hits,
            reference=made.reference,
            nearest=made.nearest,
        )

    renewed = Correctness.fit(scores(held, again, labels[1]), again.correct)
    results = {"ece_cross_validated": made.reliability.expected_error}
    for name, model, found, of_items in (
        ("same_gallery", made.match_probability.right, asked, stored),
        ("stale", made.match_probability.right, alone, labels[1]),
        ("calibrated_again", renewed, alone, labels[1]),
    ):
        probability = model(scores(test, found, of_items))
        results[f"ece_{name}"] = probability_bins(probability, found.correct).expected_error
        results[f"accuracy_{name}"] = float(found.correct.double().mean())
        results[f"gallery_size_{name}"] = found.gallery_size
        results[f"auroc_of_right_{name}"] = auroc(-probability[found.correct], -probability[~found.correct])
    return results


def verification(
    test: Prediction,
    held: Prediction,
    gallery: Prediction,
    labels: tuple[Tensor, Tensor],
    stored: Tensor,
    generator: torch.Generator,
) -> dict[str, Any]:
    """Rates for pairs of an image and a gallery item: over splits of the test images, and from the validation split."""

    def pairs(queries: Prediction, of: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, partners, same = draw_pairs(partial(_match, stored, of), len(of), len(stored), generator=generator)
        one, other = queries.embeddings, gallery.embeddings
        cosine = (one.mean[rows].double() * other.mean[partners].double()).sum(1)
        return cosine, one.kappa[rows].double(), other.kappa[partners].double(), same

    verifier = Verifier.of(*pairs(held, labels[0]))
    cosine, one, other, same = pairs(test, labels[1])
    impostors = cosine[~same]
    parted: dict[float, list[float]] = {target: [] for target in FAR_TARGETS}
    for known, new in partings(len(impostors), generator):
        tail = ConformalScores.of(impostors[known])
        for target, rates in parted.items():
            rates.append(float((impostors[new] > tail.threshold(target)).double().mean()))
    rows = []
    for target, rates in parted.items():
        accept = verifier.impostors.threshold(target)
        rows.append(
            {
                "target": target,
                "mean": sum(rates) / len(rates),
                "standard_error": float(torch.tensor(rates).std()) / len(rates) ** 0.5,
                "of_validation": float((impostors > accept).double().mean()),
                "true_accepts_of_validation": float((cosine[same] > accept).double().mean()),
            }
        )
    return {
        "pairs": len(same),
        "rates": rows,
        "ece": probability_bins(verifier.probability(cosine, one, other), same).expected_error,
    }


def no_match(
    made: Calibration, gallery: Prediction, stored: Tensor, asked: dict[str, Prediction]
) -> list[dict[str, Any]]:
    """Shares flagged by each score at one false-flag target, and decisions, for queries of FashionMNIST and MNIST."""
    rows = []
    found = {name: hits_of(seen, gallery) for name, seen in asked.items()}
    for score in FLAGGED_BY:
        threshold = made.detector.conformal_scores(score).threshold(made.targets.ood)
        row: dict[str, Any] = {"score": score, "target": made.targets.ood, "gallery_size": len(gallery.embeddings)}
        for name, seen in asked.items():
            hits = found[name]
            evidence: Any = {"features": seen.features, "labels": stored[hits.ids]}
            ood_score = made.detector.ood_score(score, made.scores(hits, seen.embeddings, **evidence))
            flagged = ood_score > threshold
            decisions = made.decide(hits, seen.embeddings, **evidence)
            accepted = ~flagged & (decisions.statistic > decisions.accept_above)
            row[f"{name}_flagged"] = float(flagged.double().mean())
            row[f"{name}_answered_match_at_far_{made.targets.far:g}"] = float(accepted.double().mean())
        rows.append(row)
    return rows


def hits_of(queries: Prediction, gallery: Prediction) -> Hits:
    ids, scores = rank(queries.embeddings.mean, gallery.embeddings.mean, k=N_HITS)
    return Hits(ids, scores, gallery.embeddings.kappa[ids])


def _match(others: Tensor, labels: Tensor, rows: Tensor) -> Tensor:
    return labels[rows][:, None] == others


def mean_of(measured: list[Any]) -> Any:
    """The mean over runs of every number, in the common structure of the results."""
    first = measured[0]
    if isinstance(first, dict):
        return {name: mean_of([found[name] for found in measured]) for name in first}
    if isinstance(first, list):
        return [mean_of(list(found)) for found in zip(*measured, strict=True)]
    if isinstance(first, bool):
        return all(measured)
    return first if len(set(measured)) == 1 else sum(measured) / len(measured)


if __name__ == "__main__":
    main()
