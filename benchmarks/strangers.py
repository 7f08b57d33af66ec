"""False accepts of strangers, whose classes the network never trained on, at a promised rate.

    python benchmarks/strangers.py [--seeds 5] [--runs NAME=FOLDER ...] [--splits 20]

The demo's digits: the network is trained on 0 to 7 and calibrated on their validation split; the gallery is their test
split; the strangers are 8 and 9. The promise is learned from known classes, searched without their matches, as `lam
calibrate` does; or from one half of the strangers, as with --strangers, and tested on the other half, over 200 splits.

Finished runs with more classes in their first OOD set, such as runs of `benchmarks/suite.py` on faces and characters:
half of these classes, drawn anew for each split, promise the smallest possible rate from 0.1, for classes; the other
half tests it. Runs of one name are seeds. Writes results/strangers.json.
"""

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing import kept, write
from torch import Tensor

from lam.cli.commands import DEMOS
from lam.encoders.base import N_SAMPLES, Prediction
from lam.retrieval.decisions.calibrate import CalibrationData, OtherQueries
from lam.retrieval.decisions.conformal import ConformalScores, needed
from lam.retrieval.decisions.flags import COMBINED, OodDetector
from lam.retrieval.metrics.open_set import search_open_set
from lam.runs.calibration_options import REFERENCE
from lam.runs.config_files import load_config
from lam.runs.data import load_data, loader_of, reference_features
from lam.runs.finished import Run
from lam.runs.run import run
from lam.runs.sweep import summary

PARTINGS = 200
FAR_TARGETS, OOD_TARGET, RATE = (0.01, 0.05, 0.1), 0.05, 0.1


@dataclass(frozen=True)
class Asked:
    """First cosines of queries without and with a match, and which queries are not flagged.

    Attributes:
        non_mated: (Q,) for known queries, searched without their matches.
        mated: (Q,) for the same queries with their matches.
        known: (Q,) whether these queries are not flagged.
        strangers: (S,) for queries of the OOD set.
        passed: (S,) whether these are not flagged.
        classes: (S,) their classes.
    """

    non_mated: Tensor
    mated: Tensor
    known: Tensor
    strangers: Tensor
    passed: Tensor
    classes: Tensor


def asked(folder: Path) -> Asked:
    """Searches of a run's validation queries and of its first OOD set; the gallery is its test split."""
    finished = Run(folder)
    encoder, config = finished.encoder, finished.config
    splits, ood = load_data(config.data)
    outside = next(iter(ood.values()))
    reference = reference_features(encoder, splits.train, REFERENCE, seed=config.seed)
    seen: list[Prediction] = [
        encoder.predict(loader_of(part), n_samples=N_SAMPLES) for part in (splits.validation, splits.test, outside)
    ]
    known, gallery, strangers = (part.embeddings.mean for part in seen)
    labels, stored = splits.validation.labels, splits.test.labels
    own = search_open_set(known, gallery, lambda rows: labels[rows][:, None] == stored)
    foreign = search_open_set(strangers, gallery, lambda rows: torch.zeros(len(rows), len(stored)).bool())
    data = CalibrationData(
        own, seen[0].embeddings, seen[0].features, labels, gallery_labels=stored, reference=reference
    )
    nearest = data.nearest()
    of_known, of_strangers = (
        data.scores_of(
            OtherQueries(part.embeddings, searches.cosines, stored[searches.hits], part.features),
            nearest=nearest,
            reference=reference,
            labelled=True,
        )
        for part, searches in ((seen[0], own), (seen[2], foreign))
    )
    detector = OodDetector.fit(data.evidence(nearest, labelled=True))
    usual = detector.conformal_scores(COMBINED)
    limit = usual.threshold(max(OOD_TARGET, 1 / (len(usual) + 1) + 1e-9))
    passed = (detector.ood_score(COMBINED, scores) <= limit for scores in (of_known, of_strangers))
    return Asked(own.non_mated, own.score, next(passed), foreign.score, next(passed), outside.labels)


def digits(seed: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        config = load_config([DEMOS["digits"], "laplace_posthoc"], [f"--seed={seed}", f"--output={folder}/run"])
        config.data.ood.sort(key=lambda outside: outside.name != "digits_held_out")
        seen = asked(run(config, progress=False).folder)
    return [against(target, seen) for target in FAR_TARGETS]


def against(target: float, seen: Asked) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    accepted = seen.strangers > ConformalScores.of(seen.non_mated).threshold(target)
    learned, answered = [], []
    for _ in range(PARTINGS):
        one, other = torch.randperm(len(seen.strangers), generator=generator).chunk(2)
        found = seen.strangers[other] > ConformalScores.of(seen.strangers[one]).threshold(target)
        learned.append(share(found))
        answered.append(share(found & seen.passed[other]))
    return {
        "target": target,
        "accepted_learnt_from_known_classes": share(accepted),
        "accepted_learnt_from_strangers": sum(learned) / PARTINGS,
        "answered_match_learnt_from_known_classes": share(accepted & seen.passed),
        "answered_match_learnt_from_strangers": sum(answered) / PARTINGS,
    }


def of_classes(seen: Asked, split: int) -> dict[str, float]:
    """A promise for classes, learned from half of the OOD classes and tested on the other half."""
    classes = seen.classes.unique()
    aside = classes[torch.randperm(len(classes), generator=torch.Generator().manual_seed(split))][: len(classes) // 2]
    learned = torch.isin(seen.classes, aside)
    rate = smallest_rate(len(aside))
    limit = ConformalScores.of(seen.strangers[learned], seen.classes[learned]).threshold(rate)
    of_known_alone = ConformalScores.of(seen.non_mated).threshold(rate)
    accepted, answered = seen.strangers > limit, seen.mated > limit
    return {
        "promised": rate,
        "classes": float(len(aside)),
        "false_accepts_of_known_classes_alone": share(seen.strangers[~learned] > of_known_alone),
        "false_accepts_lam": share(accepted[~learned]),
        "false_matches_lam": share((accepted & seen.passed)[~learned]),
        "answered_lam": share(answered),
        "matched_lam": share(answered & seen.known),
    }


def smallest_rate(n_classes: int) -> float:
    """The smallest rate, from 0.1, that this number of classes can promise."""
    rate = max(RATE, 1 / (n_classes + 1) + 1e-9)
    assert n_classes >= needed(rate)
    return rate


def inside(rows: Mapping[Any, Mapping[str, float]]) -> dict[str, int]:
    """Number of splits that keep the promise, for strangers above the threshold and for answered strangers."""
    return {
        f"inside_{figure}": sum(row[f"{figure}_lam"] <= row["promised"] for row in rows.values())
        for figure in ("false_accepts", "false_matches")
    }


def share(of: Tensor) -> float:
    return float(of.double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", nargs="+", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--splits", type=int, default=20)
    parsed = parser.parse_args()
    results = kept("strangers")
    if parsed.seeds:
        measured = [digits(seed) for seed in range(parsed.seeds)]
        results |= {"flag": COMBINED, "ood_target": OOD_TARGET, "rates": rates_of(measured), "seeds": measured}
    found: dict[str, dict[Any, dict[str, float]]] = {}
    for name, folder in (given.split("=", 1) for given in parsed.runs):
        rows, seen = found.setdefault(name, {}), asked(Path(folder))
        seed = len(rows) // parsed.splits
        rows.update({f"{seed}-{split}": of_classes(seen, split) for split in range(parsed.splits)})
    for name, rows in found.items():
        results[name] = {**inside(rows), "seeds": rows, **summary(rows)}
    write("strangers", results)


def rates_of(measured: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Mean and standard deviation of the digits' figures over seeds, with a row for each target."""
    rates = []
    for of_target in zip(*measured, strict=True):
        columns = {name: torch.tensor([row[name] for row in of_target], dtype=torch.float64) for name in of_target[0]}
        spread = {name: {"mean": float(of.mean()), "std": float(of.std())} for name, of in columns.items()}
        rates.append({**spread, "target": of_target[0]["target"]})
    return rates


if __name__ == "__main__":
    main()
