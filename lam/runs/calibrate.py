"""`lam calibrate`: thresholds and probabilities for the answers of a run.

A known query has a match in the gallery; a stranger has no match.

The calibration data are the run's validation split or a folder of fresh images. A strict bound needs fresh images,
because the run chose its epoch and likelihood scale on the validation split.

By default, the queries search the run's gallery, including items that a service added. If the gallery holds no class of
the validation split, or holds the run's places, half of the split replaces as many gallery items. With the gallery
`held-out`, half of the calibration data are queries, and the other half is their gallery.
"""

import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lam.datasets import Dataset
from lam.retrieval.decisions.calibrate import CalibrationData, Choices, OtherQueries, attainable_targets, calibrate
from lam.retrieval.decisions.calibration import Calibration, Targets, UnmatchedQueries
from lam.retrieval.decisions.conformal import needed
from lam.retrieval.decisions.files import save_calibration
from lam.retrieval.decisions.unseen_classes import UnseenClasses
from lam.retrieval.decisions.verification import CosineIntervals
from lam.retrieval.index.faiss_index import search_flat
from lam.retrieval.index.hits import label_key
from lam.retrieval.metrics.plots import plot_reliability
from lam.runs.calibration_gallery import Searchable
from lam.runs.calibration_options import CalibrationOptions
from lam.runs.calibration_report import bounded_queries, query_mixture
from lam.runs.calibration_searches import Inputs, Known, Strangers, search_known, search_strangers, search_unlabelled
from lam.runs.finished import Run
from lam.utils.files import check_writable

VALIDATION = "validation split"
UNSEEN = 50_000
"""Largest gallery for which the detector of new classes is fitted; the fit searches the gallery for each item."""
KEPT = 2000
"""Number of queries that are stored to bound false accepts of filtered searches; a low target rate stores more."""


def calibrate_run(run: str | Path, options: CalibrationOptions | None = None, *, progress: bool = True) -> Calibration:
    """Calibrate a finished run, save the calibration in its folder, and return it; `progress` shows a bar on stderr.

    Raises:
        ValueError: for a folder without a finished run, changed data, damaged files, a gallery without a match for any
            query, or too few data to bound a target rate.
        CorruptFileError: naming a file of the run that is missing, truncated or altered.
    """
    finished = Run(run)
    check_writable(finished.folder)
    inputs = Inputs(finished, CalibrationOptions() if options is None else options, progress)
    known = search_known(inputs)
    strangers = search_strangers(inputs, known)
    n_strangers = strangers.n_classes or len(strangers)
    far = int(known.searches.non_mated.isfinite().sum()) if inputs.options.strangers is None else n_strangers
    targets = attainable_targets(inputs.options.rates, far=far, ood=len(known.searches))
    mixture = search_unlabelled(inputs, known)
    options, gallery = inputs.options, known.searchable
    is_whole = gallery.is_stored and not gallery.without_label
    of_strangers, share = strangers.can_bound(targets.far), options.share_of_strangers
    choices = Choices(targets, options.flag, options.accept, of_strangers=of_strangers, share=share)
    with inputs.run.lock():
        data = CalibrationData(
            known.searches,
            known.queries.embeddings,
            features=known.queries.features,
            classes=None if inputs.splits is None else _classes(known, inputs.splits.train),
            gallery_labels=known.gallery_labels,
            reference=known.reference,
            strangers=strangers.found,
            mixture=mixture,
        )
        calibration = calibrate(data, choices, key=inputs.run.fingerprint)
        calibration = replace(
            calibration,
            verifier=strangers.verifier(known, targets.far),
            unseen=_unseen(inputs.run, gallery) if is_whole else None,
            intervals=_intervals(known),
            unmatched=_unmatched(known, strangers, targets.far, inputs.config.seed),
            facts=_facts(inputs, known, strangers, mixture, targets) | calibration.facts,
        )
        _warn_of_constant_flag(calibration)
        save_calibration(inputs.run.folder, calibration)
        path = inputs.run.folder / "plots" / "probability.png"
        axis = "P(the first hit is right, if the gallery holds a match)"
        plot_reliability(path, calibration.reliability, confidence=axis)
    return calibration


def _facts(
    inputs: Inputs, known: Known, strangers: Strangers, mixture: OtherQueries | None, targets: Targets
) -> dict[str, Any]:
    """Facts for later commands: the calibration data, the options, and the queries for which the bounds hold."""
    options, run = inputs.options, inputs.run
    right = known.searches.correct[known.searches.has_mate]
    given = {name: getattr(options, name) for name in ("folder", "strangers", "unlabelled")}
    paths = {name: None if path is None else str(path) for name, path in given.items()}
    n_queries = len(known.searches)
    return {
        "data": paths["folder"] or VALIDATION,
        "asked_flag": options.flag,
        "asked_accept": options.accept,
        "asked_rates": sorted(options.rates),
        "gallery": known.gallery,
        "strangers": paths["strangers"],
        "false_accepts": bounded_queries(
            "questions" if run.has_answers else run.gallery_kind,
            folder=paths["folder"],
            strangers=paths["strangers"],
            is_trained=run.config.network.head == "train",
            n_classes=strangers.n_classes,
            far=targets.far,
        ),
        "answers_wrong": None
        if targets.wrong is None
        else query_mixture(
            n_queries, n_queries - len(right), strangers.n_classes or len(strangers), paths["strangers"]
        ),
        "without_label": known.searchable.without_label,
        "unlabelled": paths["unlabelled"],
        "n_unlabelled": 0 if mixture is None else len(mixture.cosines),
        "n_strangers": len(strangers),
        "queries": n_queries,
        "queries_with_match": len(right),
        "first_hit_right": float(right.double().mean()),
    }


def _unseen(run: Run, gallery: Searchable) -> UnseenClasses | None:
    """The detector of new classes, fitted by a search for each item of the gallery; None if it cannot be fitted."""
    items = gallery.items
    if run.has_answers or not 2 <= len(items) <= UNSEEN or any(item.is_fused for item in run.gallery.items):
        return None
    keys, order = _keys(gallery.labels or ()).sort()
    if not (keys.unique(return_counts=True)[1] == 1).any():
        return None
    hits = search_flat(items, items, 2)
    is_itself = hits.ids[:, 0] == torch.arange(len(items))  # False if another item has the same embedding
    return UnseenClasses(keys, torch.where(is_itself, hits.scores[:, 1], hits.scores[:, 0])[order].double())


def _unmatched(known: Known, strangers: Strangers, far: float, seed: int) -> UnmatchedQueries | None:
    """The strangers or labelled queries that bound false accepts of filtered searches; None for images of places."""
    if known.labels is None:
        return None
    if (found := strangers.found) is not None and strangers.can_bound(far):
        mean = found.embeddings.mean.cpu().float()
        labels = torch.full((len(mean),), -1) if strangers.labels is None else _keys(strangers.labels)
        return UnmatchedQueries(mean, labels, found.classes)
    rows = known.searches.non_mated.isfinite().nonzero().flatten()
    kept = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[: max(KEPT, 2 * needed(far))]
    rows = rows[kept.sort().values]
    labels = _keys(known.images.classes[number] for number in known.labels[rows].tolist())
    return UnmatchedQueries(known.queries.embeddings.mean.cpu().float()[rows], labels)


def _keys(labels: Iterable[str]) -> Tensor:
    return torch.tensor([label_key(label) for label in labels], dtype=torch.int64)


def _intervals(known: Known) -> CosineIntervals | None:
    """Intervals for the cosines of hits; None for images of places."""
    if known.labels is None:
        return None
    rows = known.searches.has_mate
    queries, hits = known.queries.embeddings[rows], known.searches.hits[rows]
    return CosineIntervals.fit(queries, known.labels[rows], known.searchable.items.mean, hits)


def _classes(known: Known, train: Dataset) -> Tensor | None:
    """(Q,) classes of the queries, numbered as in training, −1 for other classes; None for images of places."""
    if known.labels is None or train.targets.ndim > 1:
        return None
    numbers = {name: number for number, name in enumerate(train.classes)}
    return torch.tensor([numbers.get(known.images.classes[label], -1) for label in known.labels.tolist()])


def _warn_of_constant_flag(calibration: Calibration) -> None:
    scores = calibration.detector.conformal_scores(calibration.flag).scores
    if len(scores) > 1 and scores[0] == scores[-1]:
        warnings.warn(
            f"{calibration.flag} is {float(scores[0]):.6g} for all {len(scores)} calibration queries, so it separates "
            "none of them: flag by another score (votes are constant if every item has its own label)",
            stacklevel=3,
        )
