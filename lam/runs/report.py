"""The plots and the page of a run, made from its evaluation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lam.datasets import Dataset, Texts
from lam.encoders.ambiguity import SEVERAL, UNSEEN
from lam.encoders.base import Encoder
from lam.encoders.bayesian import BayesianEncoder
from lam.encoders.evaluation import Evaluation
from lam.retrieval.index.exact import rank
from lam.retrieval.metrics import plots
from lam.retrieval.metrics.registry import SCORES
from lam.runs.corruption import CorruptionCurve, Kind, TextKind
from lam.runs.html import Plot, write_report


def write_plots_and_report(
    folder: Path,
    configuration: Mapping[str, Any],
    metrics: Mapping[str, Any],
    encoder: Encoder,
    evaluation: Evaluation,
    corrupted: Mapping[Kind | TextKind, CorruptionCurve],
    test: Dataset,
    ood: Mapping[str, Dataset],
) -> list[Path]:
    """Write plots/*.png and report.html.

    Args:
        folder: of the run.
        configuration: resolved.
        metrics: flat names and values.
        encoder: of the run.
        evaluation: of the encoder on the test split.
        corrupted: of the test images, by kind.
        test: the test split, whose images are shown.
        ood: the OOD sets that were evaluated, by name, likewise.

    Returns:
        The paths of the plots.
    """
    plots_folder = folder / "plots"
    plots_folder.mkdir(exist_ok=True)
    pictures = [
        *_sparsification_plot(plots_folder, evaluation),
        *_calibration_plot(plots_folder, evaluation),
        *_extremes_plots(plots_folder, evaluation, test, ood, encoder.has_kappa),
        *_no_match_plot(plots_folder, evaluation),
        *_ood_plots(plots_folder, evaluation),
        *_corruption_plot(plots_folder, corrupted, encoder.has_kappa),
        *_tuning_plot(plots_folder, encoder),
    ]
    data, method = configuration["data"]["name"], configuration["method"]["name"]
    write_report(
        folder / "report.html",
        title=f"{data}: {method}",
        metrics=metrics,
        plots=pictures,
        configuration=configuration,
        notes=[*_notes(evaluation, metrics), *_doubts(encoder, evaluation)],
        ood_score=evaluation.primary,
        ood_set=next(iter(evaluation.ood_scores), ""),
    )
    return [Path(plot.path) for plot in pictures]


def _sparsification_plot(folder: Path, evaluation: Evaluation) -> list[Plot]:
    answerable = evaluation.answerable
    if not answerable.any():
        return []
    path = folder / "sparsification.png"
    correct = evaluation.correct[answerable]
    ranked = {SCORES[name].short: (correct, values[answerable]) for name, values in evaluation.scores.items()}
    plots.plot_sparsification(path, ranked)
    caption = (
        "Accuracy of the queries that stay when the most uncertain are dropped. A curve that rises says that the "
        "uncertainty knows which answers are wrong."
    )
    return [Plot("Sparsification", caption, path)]


def _calibration_plot(folder: Path, evaluation: Evaluation) -> list[Plot]:
    if evaluation.calibration is None:
        return []
    path = folder / "calibration.png"
    plots.plot_calibration(path, evaluation.calibration)
    caption = "Share of right answers against confidence, the share of sampled networks that agree."
    return [Plot("Calibration", caption, path)]


def _extremes_plots(
    folder: Path, evaluation: Evaluation, test: Dataset, ood: Mapping[str, Dataset], has_kappa: bool
) -> list[Plot]:
    if not has_kappa:
        return []
    known, together = folder / "extremes.png", folder / "extremes_ood.png"
    _draw_extremes(known, evaluation, test, {})
    pictures = [Plot("Most and least certain", "Queries by κ, each above its first hit.", known)]
    if ood:
        _draw_extremes(together, evaluation, test, ood)
        caption = "The same together with what is out of distribution, which should be the least certain."
        pictures.append(Plot("Most and least certain, OOD among them", caption, together))
    return pictures


def _draw_extremes(path: Path, evaluation: Evaluation, test: Dataset, ood: Mapping[str, Dataset]) -> None:
    """Show the ends of κ among the queries, 0 to Q − 1, and the items of the OOD sets, which follow them."""
    n_queries = len(evaluation.queries)
    outside = [(name, row) for name, images in ood.items() for row in range(len(images))]
    embeddings = [evaluation.embeddings, *(evaluation.ood_embeddings[name] for name in ood)]
    mean, kappa = (torch.cat([getattr(part, name) for part in embeddings]) for name in ("mean", "kappa"))

    def image(items: Dataset, index: int) -> Tensor | str:
        return items.texts[index] if isinstance(items, Texts) else items.preprocessing.denormalize(items[index][0])

    def verdict(query: int) -> bool | str:
        return bool(evaluation.correct[query]) if query < n_queries else outside[query - n_queries][0]

    def query_image(query: int) -> Tensor | str:
        if query < n_queries:
            return image(test, int(evaluation.queries[query]))
        name, row = outside[query - n_queries]
        return image(ood[name], row)

    def hit_image(query: int) -> Tensor | str:
        if query < n_queries:
            return image(test, int(evaluation.hits[query, 0]))
        nearest, _ = rank(mean[query, None], evaluation.gallery.mean, k=1)
        return image(test, int(evaluation.candidates[nearest[0, 0]]))

    plots.plot_extremes(path, kappa, verdict, query_image=query_image, hit_image=hit_image)


def _no_match_plot(folder: Path, evaluation: Evaluation) -> list[Plot]:
    answerable = evaluation.answerable
    if answerable.all() or not answerable.any():
        return []
    path = folder / "no_match.png"
    parted = {
        SCORES[name].short: (values[answerable], values[~answerable]) for name, values in evaluation.scores.items()
    }
    plots.plot_precision_recall(path, parted, positives="queries without a match")
    caption = "Finding the queries that nothing in the gallery answers. The line is their share."
    return [Plot("Precision-recall of no match", caption, path)]


def _ood_plots(folder: Path, evaluation: Evaluation) -> list[Plot]:
    kappa = {"in distribution": evaluation.embeddings.kappa}
    kappa |= {name: embeddings.kappa for name, embeddings in evaluation.ood_embeddings.items()}
    plots.plot_kappa(folder / "kappa.png", kappa)
    pictures = [Plot("Concentration κ", "How sure each embedding is; small κ means uncertain.", folder / "kappa.png")]
    for name, outside in evaluation.ood_scores.items():
        scores = {SCORES[score].short: (values, outside[score]) for score, values in evaluation.scores.items()}
        roc, curve = folder / f"roc_{name}.png", folder / f"precision_recall_{name}.png"
        plots.plot_roc(roc, scores)
        plots.plot_precision_recall(curve, scores)
        pictures.append(Plot(f"ROC against {name}", "OOD is the positive class; by score.", roc))
        pictures.append(Plot(f"Precision-recall against {name}", "The line is the prevalence of OOD.", curve))
    return pictures


def _corruption_plot(folder: Path, corrupted: Mapping[Kind | TextKind, CorruptionCurve], has_kappa: bool) -> list[Plot]:
    if not corrupted:
        return []
    path = folder / "corruption.png"
    kappa = {kind: curve.kappa.median(1).values for kind, curve in corrupted.items()} if has_kappa else {}
    plots.plot_corruption(path, kappa, {kind: curve.recall for kind, curve in corrupted.items()})
    words = (
        "κ should fall as recall does; where it rises instead, it must not be read as quality. " if has_kappa else ""
    )
    caption = f"{words}The queries are corrupted, the gallery is not."
    return [Plot("Under corruption", caption, path)]


def _tuning_plot(folder: Path, encoder: Encoder) -> list[Plot]:
    tuning = encoder.tuning if isinstance(encoder, BayesianEncoder) else None
    if tuning is None:
        return []
    path = folder / "tuning.png"
    trials = tuning.trials
    plots.plot_tuning(
        path,
        scales=[trial.scale for trial in trials],
        scores=[trial.score for trial in trials],
        errors=[trial.error for trial in trials],
        eces=[trial.ece for trial in trials],
        interval=tuning.interval,
        chosen=tuning.likelihood_scale,
    )
    caption = (
        "The likelihood scales that were tried on the validation split. Chosen was the largest whose score is within "
        "one standard error (of the difference) of the best."
    )
    return [Plot("Tuning of the posterior", caption, path)]


def _doubts(encoder: Encoder, evaluation: Evaluation) -> list[str]:
    """Which part of κ says what in words, and of how many."""
    if encoder.ambiguity is None:
        return []
    sets = {"queries": evaluation.embeddings, **evaluation.ood_embeddings}
    said = {name: encoder.ambiguity.doubts(embeddings) for name, embeddings in sets.items()}
    shares = {
        doubt: ", ".join(f"{doubts.count(doubt) / len(doubts):.1%} of {name}" for name, doubts in said.items())
        for doubt in (UNSEEN, SEVERAL)
    }
    return [
        f"Where p_known is small κ says “{UNSEEN}”: {shares[UNSEEN]}.",
        f"Where κ of ambiguity is small it says “{SEVERAL}”: {shares[SEVERAL]}.",
    ]


def _notes(evaluation: Evaluation, metrics: Mapping[str, Any]) -> list[str]:
    apart = not torch.equal(evaluation.candidates, evaluation.queries)
    gallery = "part of the test split that holds no query" if apart else "test split without the query itself"
    notes = [f"The gallery is the {gallery}; nothing was tuned on it."]
    if evaluation.ood_scores:
        notes.append(f"The main OOD set is {next(iter(evaluation.ood_scores))}.")
    if evaluation.primary == "knn":
        notes.append(
            "The OOD score of this encoder is the k-NN distance: its head is the identity added to a network that was "
            "trained without it, and κ there says little about the distance from the data."
        )
    if "kappa_on_made" in metrics:
        kappa, variance = metrics["kappa_on_made"], metrics["variance_on_made"]
        better = "kappa" if kappa >= variance else "variance"
        notes.append(
            "Outsiders made from the validation images (inverted, with pixels permuted, blurred) are told by κ with an "
            f"AUROC of {kappa:.3f}, by the variance before normalisation with {variance:.3f}: of these "
            f"two, which need neither training features nor hits, the encoder recommends {better}."
        )
    if skipped := metrics.get("batches_without_positives", 0):
        notes.append(f"{skipped} batches of training held no positive pair and were skipped.")
    left_out = evaluation.metrics["n_without_relevant"]
    if left_out:
        notes.append(f"{left_out} queries have no relevant item and are left out of retrieval metrics.")
    capped = int(evaluation.embeddings.capped.sum())
    if capped:
        notes.append(f"{capped} of {len(evaluation.queries)} embeddings have a κ at an end of its range: a bound.")
    return notes
