"""Plots and report of a run, from its evaluation."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lam.datasets import Dataset, Splits, Texts
from lam.encoders import BayesianEncoder, Encoder
from lam.evaluation import Evaluation
from lam.retrieval import SCORES, rank
from lam.retrieval.metrics import plots
from lam.retrieval.metrics.extremes import plot_extremes
from lam.runs.corruption import CorruptionCurve
from lam.runs.html import Plot, write_report
from lam.tuning.ambiguity import SEVERAL, UNSEEN, Doubt


def write_plots_and_report(
    folder: Path,
    configuration: Mapping[str, Any],
    metrics: Mapping[str, Any],
    encoder: Encoder,
    evaluation: Evaluation,
    corrupted: Mapping[str, CorruptionCurve],
    splits: Splits,
    ood: Mapping[str, Dataset],
) -> list[Path]:
    """Write plots/*.png and report.html of an evaluated run; return the paths of the plots."""
    (folder / "plots").mkdir(exist_ok=True)
    pictures = list(_plots(folder / "plots", encoder, evaluation, corrupted, splits.test, ood))
    data, method = configuration["data"]["name"], configuration["method"]["name"]
    write_report(
        folder / "report.html",
        title=f"{data}: {method}",
        metrics=metrics,
        plots=pictures,
        configuration=configuration,
        notes=[*_notes(encoder, evaluation, metrics, splits.test), *splits.notes],
        ood_score=evaluation.primary,
        ood_set=next(iter(evaluation.ood_scores), ""),
    )
    return [plot.path for plot in pictures]


def _plots(
    folder: Path,
    encoder: Encoder,
    evaluation: Evaluation,
    corrupted: Mapping[str, CorruptionCurve],
    test: Dataset,
    ood: Mapping[str, Dataset],
) -> Iterator[Plot]:
    """Draw the plots of an evaluation into a folder, in the order of the report."""
    answerable = evaluation.answerable
    scores = {SCORES[name].short: values for name, values in evaluation.scores.items()}
    if answerable.any():
        correct, path = evaluation.correct[answerable], folder / "sparsification.png"
        plots.plot_sparsification(path, {name: (correct, values[answerable]) for name, values in scores.items()})
        caption = (
            "Accuracy of the remaining queries after the most uncertain are dropped. A rising curve means that the "
            "uncertainty detects wrong answers."
        )
        yield Plot("Sparsification", caption, path)
    if evaluation.reliability is not None:
        path = folder / "calibration.png"
        plots.plot_reliability(path, evaluation.reliability)
        caption = "Share of right answers against confidence, the share of samples that agree."
        yield Plot("Calibration", caption, path)
    if encoder.has_kappa:
        path = folder / "extremes.png"
        _draw_extremes(path, evaluation, test, {})
        yield Plot("Most and least certain", "Queries by κ, each above its first hit.", path)
    if encoder.has_kappa and ood:
        path = folder / "extremes_ood.png"
        _draw_extremes(path, evaluation, test, ood)
        caption = "Queries and OOD items by κ; OOD items should be the least certain."
        yield Plot("Most and least certain, with OOD items", caption, path)
    if answerable.any() and not answerable.all():
        path = folder / "no_match.png"
        parted = {name: (values[answerable], values[~answerable]) for name, values in scores.items()}
        plots.plot_precision_recall(path, parted, positives="queries without a match")
        caption = "Detection of queries without a match in the gallery. The line is their share."
        yield Plot("Precision-recall of no match", caption, path)
    kappa = {"in distribution": evaluation.embeddings.kappa}
    kappa |= {name: embeddings.kappa for name, embeddings in evaluation.ood_embeddings.items()}
    plots.plot_kappa(folder / "kappa.png", kappa)
    yield Plot("Concentration κ", "How certain each embedding is; small κ means uncertain.", folder / "kappa.png")
    for name, outside in evaluation.ood_scores.items():
        against = {SCORES[score].short: (values, outside[score]) for score, values in evaluation.scores.items()}
        roc, curve = folder / f"roc_{name}.png", folder / f"precision_recall_{name}.png"
        plots.plot_roc(roc, against)
        plots.plot_precision_recall(curve, against)
        yield Plot(f"ROC against {name}", "OOD is the positive class; one curve for each score.", roc)
        yield Plot(f"Precision-recall against {name}", "The line is the prevalence of OOD.", curve)
    for number in range(0, len(corrupted), plots.MOST):
        some = list(corrupted.items())[number : number + plots.MOST]
        path = folder / f"corruption{f'_{number}' if number else ''}.png"
        kappa = {kind: curve.kappa.median(1).values for kind, curve in some} if encoder.has_kappa else {}
        plots.plot_corruption(path, kappa, {kind: curve.recall for kind, curve in some})
        words = "κ should fall with recall; where it rises, it does not measure quality. "
        caption = f"{words if encoder.has_kappa else ''}The queries are corrupted, the gallery is not."
        yield Plot("Under corruption", caption, path)
    if isinstance(encoder, BayesianEncoder) and (tuning := encoder.tuning) is not None:
        path, trials = folder / "tuning.png", tuning.trials
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
            "Likelihood scales tried on the validation split. The band holds those with a score within one standard "
            "error (of the difference) of the best."
        )
        if tuning.remark:
            caption += f" {tuning.remark[0].upper()}{tuning.remark[1:]}."
        yield Plot("Tuning of the posterior", caption, path)


def _draw_extremes(path: Path, evaluation: Evaluation, test: Dataset, ood: Mapping[str, Dataset]) -> None:
    """Draw the items with the largest and with the smallest κ among queries and OOD items."""
    n_queries = len(evaluation.queries)
    outside = [(name, images, row) for name, images in ood.items() for row in range(len(images))]
    shown = [*((test, int(row)) for row in evaluation.queries), *((images, row) for _, images, row in outside)]
    verdicts: list[bool | str] = [*evaluation.correct.tolist(), *(name for name, _, _ in outside)]
    embeddings = [evaluation.embeddings, *(evaluation.ood_embeddings[name] for name in ood)]
    mean, kappa = (torch.cat([getattr(part, name) for part in embeddings]) for name in ("mean", "kappa"))

    def image(items: Dataset, index: int) -> Tensor | str:
        if isinstance(items, Texts):
            return str(items.preview(index).text)
        return items.preprocessing.denormalize(items[index][0])

    def query_image(query: int) -> Tensor | str:
        return image(*shown[query])

    def hit_image(query: int) -> Tensor | str:
        if query < n_queries:
            return image(test, int(evaluation.hits[query, 0]))
        nearest, _ = rank(mean[query, None], evaluation.gallery.mean, k=1)
        return image(test, int(evaluation.candidates[nearest[0, 0]]))

    plot_extremes(path, kappa, verdicts.__getitem__, query_image=query_image, hit_image=hit_image)


def _notes(encoder: Encoder, evaluation: Evaluation, metrics: Mapping[str, Any], test: Dataset) -> Iterator[str]:
    """Sentences that help to read the metrics."""
    apart = not torch.equal(evaluation.candidates, evaluation.queries)
    if apart and isinstance(test, Texts):
        yield "The gallery holds every answer of the data, also those to training questions; the questions are new."
    else:
        gallery = "part of the test split that holds no query" if apart else "test split without the query itself"
        yield f"The gallery is the {gallery}; nothing was tuned on it."
    if evaluation.ood_scores:
        yield f"The main OOD set is {next(iter(evaluation.ood_scores))}."
    if evaluation.primary == "knn":
        yield (
            "The OOD score of this encoder is the k-NN distance: its head is an identity after a trained network, so "
            "its κ says little about the distance from the data."
        )
    if "kappa_on_made" in metrics:
        kappa, variance = metrics["kappa_on_made"], metrics["variance_on_made"]
        better = "kappa" if kappa >= variance else "variance"
        yield (
            "κ detects altered validation images (inverted, with permuted pixels, blurred) with an AUROC of "
            f"{kappa:.3f}, the variance before normalisation with {variance:.3f}. Of these two scores, which need "
            f"neither training features nor hits, the encoder recommends {better}."
        )
    if skipped := metrics.get("batches_without_positives", 0):
        yield f"{skipped} batches of training held no positive pair and were skipped."
    if left_out := evaluation.metrics["n_without_relevant"]:
        yield f"{left_out} queries have no relevant item and are left out of retrieval metrics."
    if capped := int(evaluation.embeddings.capped.sum()):
        yield f"{capped} of {len(evaluation.queries)} embeddings have a κ at an end of its range: only a bound."
    if encoder.ambiguity is None:
        return
    sets = {"queries": evaluation.embeddings, **evaluation.ood_embeddings}
    said = {name: encoder.ambiguity.doubts(embeddings) for name, embeddings in sets.items()}
    small: dict[Doubt, str] = {UNSEEN: "p_known", SEVERAL: "κ of ambiguity"}
    for doubt, part in small.items():
        shares = (f"{doubts.count(doubt) / len(doubts):.1%} of {name}" for name, doubts in said.items())
        yield f"A small {part} means “{doubt}”: {', '.join(shares)}."
