"""How often a stranger, of a class that the network never trained on, is accepted at a promised false-accept rate.

    python benchmarks/strangers.py [--seeds 5]

The digits of the demo: trained on 0 to 7, calibrated on their validation split, the gallery is their test split; the
strangers are 8 and 9. The promise is learnt from the classes that are known, their matches taken out of the gallery, as
`lam calibrate` does; or from one half of the strangers, as its --strangers does, and tried on the other, over 200
partings. Writes results/strangers.json.
"""

import argparse
import tempfile
from typing import Any

import torch
from timing import write
from torch import Tensor

from lam.cli import DEMOS
from lam.encoders.base import N_SAMPLES, Prediction
from lam.retrieval.decisions.calibration import query_scores
from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.flags import COMBINED, OodDetector
from lam.retrieval.metrics.searches import search_open_set
from lam.runs.calibrate import REFERENCE
from lam.runs.config_files import load_config
from lam.runs.data import EMBEDDING_BATCH, load_data, loader_of, reference_features
from lam.runs.finished import Run
from lam.runs.run import run

PARTINGS = 200
FAR_TARGETS, OOD_TARGET = (0.01, 0.05, 0.1), 0.05


def measure(seed: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(DEMOS["digits"], [f"--seed={seed}", f"--output={folder}/run"])
        encoder = Run(run(config, progress=False).folder).encoder
    splits, ood = load_data(config.data)
    reference = reference_features(encoder, splits.train, REFERENCE, seed=seed)
    seen: list[Prediction] = [
        encoder.predict(loader_of(part, EMBEDDING_BATCH), n_samples=N_SAMPLES)
        for part in (splits.validation, splits.test, ood["digits_held_out"])
    ]
    known, gallery, strangers = (part.embeddings.mean for part in seen)
    labels, stored = splits.validation.labels, splits.test.labels
    own = search_open_set(known, gallery, lambda rows: labels[rows][:, None] == stored)
    foreign = search_open_set(strangers, gallery, lambda rows: torch.zeros(len(rows), len(stored)).bool())
    of_known, of_strangers = (
        query_scores(part.embeddings, searches.cosines, features=part.features, reference=reference)
        for part, searches in ((seen[0], own), (seen[2], foreign))
    )
    detector = OodDetector.of(of_known)
    judged = detector.ood_score(COMBINED, of_strangers) <= detector.known(COMBINED).threshold(OOD_TARGET)
    return [against(target, own.non_mated, foreign.score, judged) for target in FAR_TARGETS]


def against(target: float, of_known: Tensor, of_strangers: Tensor, judged: Tensor) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    accepted = of_strangers > ConformalScores.of(of_known).threshold(target)
    learnt, answered = [], []
    for _ in range(PARTINGS):
        one, other = torch.randperm(len(of_strangers), generator=generator).chunk(2)
        found = of_strangers[other] > ConformalScores.of(of_strangers[one]).threshold(target)
        learnt.append(share(found))
        answered.append(share(found & judged[other]))
    return {
        "target": target,
        "accepted_learnt_from_known_classes": share(accepted),
        "accepted_learnt_from_strangers": sum(learnt) / PARTINGS,
        "answered_match_learnt_from_known_classes": share(accepted & judged),
        "answered_match_learnt_from_strangers": sum(answered) / PARTINGS,
    }


def share(of: Tensor) -> float:
    return float(of.double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    measured = [measure(seed) for seed in range(parser.parse_args().seeds)]
    rows = []
    for of_target in zip(*measured, strict=True):
        columns = {name: torch.tensor([row[name] for row in of_target], dtype=torch.float64) for name in of_target[0]}
        spread = {name: {"mean": float(of.mean()), "std": float(of.std())} for name, of in columns.items()}
        rows.append({**spread, "target": of_target[0]["target"]})
    write("strangers", {"flag": COMBINED, "ood_target": OOD_TARGET, "rates": rows, "seeds": measured})


if __name__ == "__main__":
    main()
