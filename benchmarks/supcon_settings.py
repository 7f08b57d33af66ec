"""Settings of SupCon's curvature on networks trained by SupCon, judged on the validation split alone.

    python benchmarks/supcon_settings.py RUN ... [--cache FOLDER]

RUN is the folder of a finished run of laplace_posthoc with training.loss=supcon. Each setting is fitted as a diagonal
to the training features of `structures.py`, its scale is tuned on a part of the validation split, and the rest gives
AUSC by κ, ECE, and the AUROC by κ of altered images. results/supcon_settings.json has a row for every run and setting.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from structures import MADE, N_SAMPLES, batches_of, features_of
from timing import kept, write

from lam.encoders.bayesian import BayesianEncoder
from lam.evaluation import evaluate
from lam.hessians import Diagonal, SupConCurvature, ggn_of_dataset
from lam.hessians.accumulate import LastLayerAccumulator
from lam.posteriors import POSTERIORS
from lam.runs.config_files import load_config
from lam.runs.data import load_data, loader_of
from lam.runs.finished import Run

N_TRAIN = 20_000
WHOLE = 8000
"""Number of training items that are compared with each other, if all of them are candidates, not only a batch."""
VALIDATION, TUNED = 4000, 1000
"""Number of validation items, and number of these that tune the scale."""
TEMPERATURES = 0.05, 0.1, 0.2, 0.5, 1.0


def settings(own: Any) -> dict[str, tuple[Any, bool]]:
    """Curvatures by title, and whether the candidates are the whole data set."""
    rows: dict[str, tuple[Any, bool]] = {"contrastive": (own, False), "contrastive, data set": (own, True)}
    rows |= {f"logits, τ = {t:g}": (SupConCurvature(t), False) for t in TEMPERATURES}
    rows |= {f"outputs, τ = {t:g}": (SupConCurvature(t, split="outputs"), False) for t in (0.1, 0.5)}
    rows["outputs projected, τ = 0.1"] = SupConCurvature(0.1, split="outputs", fix="projected"), False
    rows["logits full, τ = 0.1"] = SupConCurvature(0.1, fix="full"), False
    rows["logits, data set, τ = 0.1"] = SupConCurvature(0.1), True
    return rows


def measured(run: str, cache: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """A function that measures a setting on a run."""
    config: Any = load_config(run)
    encoder: Any = Run(run).encoder
    posterior = encoder.posterior
    weight, bias = posterior.weight, posterior.bias
    features, labels = features_of(run, N_TRAIN, cache)["train"]
    images = load_data(config.data)[0].validation
    some = images.limit(VALIDATION, seed=1)
    held_out = encoder.features(loader_of(some, batch_size=500))
    tuned, judged = ((held_out[rows], some.labels[rows]) for rows in (slice(TUNED), slice(TUNED, None)))

    def measure(curvature: Any, whole: bool) -> dict[str, Any]:
        empty = Diagonal.zeros(weight, curvature, has_bias=bias is not None)
        if whole:
            data = features[:WHOLE], weight, bias, labels[:WHOLE]
            total, n_items = ggn_of_dataset(empty, *data, progress=False), WHOLE
        else:
            batches = batches_of(features, labels, config.method.batch_size, config.seed)
            summing = LastLayerAccumulator(empty=empty, relation=encoder.relation, weight=weight, bias=bias)
            total, n_items = summing.accumulate(batches)
        fitted = POSTERIORS["diag"](weight, bias, total, n_items, seed=config.seed)
        head = BayesianEncoder(None, "", fitted, relation=encoder.relation, n_samples=N_SAMPLES)
        head.tune([tuned])
        metrics, encoder.posterior = evaluate(head, [judged]).metrics, head.posterior
        made = encoder.recommend(loader_of(images.limit(MADE, seed=0), batch_size=250)).metrics()
        return {"ausc": metrics["ausc"], "ece": metrics["ece"], "auroc_of_altered": made["kappa_on_altered"]}

    return {title: partial(measure, *setting) for title, setting in settings(posterior.curvature.curvature).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--settings", nargs="+", help="some of them alone, by title")
    parser.add_argument("--cache", type=Path, default=Path(), help="where features are kept")
    parsed = parser.parse_args()
    warnings.simplefilter("ignore")  # of tuning
    results = kept("supcon_settings")
    for run in parsed.runs:
        for title, measure in measured(run, parsed.cache).items():
            if not parsed.settings or title in parsed.settings:
                results.setdefault(Path(run).name, {})[title] = measure()
                write("supcon_settings", results)


if __name__ == "__main__":
    sys.exit(main())
