"""A run: configuration -> data -> method -> evaluation -> report, in a folder that holds all of it.

    config.yaml      fully resolved
    data.json        fingerprints of the splits, so that a run is not continued on other data; what a gallery of them is
    copies.csv       the same image or text twice; damaged.csv, files that were left out: where there are any
    checkpoints/     of the training, which continues from the last one; training.json is its history
    trained_by.json  the curvature of the loss that trained the network, for runs that start from it
    encoder/         network, posterior, preprocessing
    gallery/         the test split, to be searched
    samples/         a few inputs to try it with
    metrics.json     flat names and values, and the seconds of each stage
    curves.safetensors   the arrays behind the curves of its plots, for `lam compare`
    plots/*.png, report.html
    MANIFEST.json    SHA-256 of what does not change afterwards, written last

Started again with the same configuration a run continues where it was; what is finished is kept, and refused where the
data are others by now.

Several processes, started by torchrun, train and fit together; the first one alone writes, evaluates and reports, while
the others wait.
"""

import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lam import models
from lam.datasets import Dataset, MissingDataError, Splits
from lam.datasets.augmented import AugmentationOptions, Augmented
from lam.encoders.base import Encoder
from lam.encoders.held_out import HeldOut
from lam.encoders.load import load
from lam.evaluation import Evaluation, evaluate
from lam.gallery.damaged import DamagedFiles, path_key, write_damaged
from lam.gallery.local_index import require_faiss
from lam.methods.base import Method, Refit, Trained
from lam.models import EmbeddingNetwork
from lam.models.head import evaluating
from lam.pairs.relation import Relation
from lam.pairs.relevance import relevance_of
from lam.retrieval.index.exact import rank
from lam.retrieval.metrics import registry
from lam.runs.config import UNSEEN, RunConfig
from lam.runs.copies import (
    COPIES,
    Copy,
    check_copies,
    find_copies,
    read_copies,
    remark_on,
    without_copies,
    write_copies,
)
from lam.runs.corruption import AnyKind, CorruptionCurve, corruption_metrics, corruptions_of, measure_corruption
from lam.runs.curves import CURVES, Curves
from lam.runs.data import (
    EMBEDDING_BATCH,
    check_files,
    check_splits,
    check_texts,
    leave_out,
    load_data,
    loader_of,
    parts_of,
    reference_features,
    warn_of_cut_texts,
)
from lam.runs.folder import (
    CONFIG,
    DAMAGED,
    DATA,
    ENCODER,
    METRICS,
    is_finished,
    left_out,
    open_for_writing,
    refuse_changed_data,
    refuse_other_run,
)
from lam.runs.index import index_dataset
from lam.runs.report import write_plots_and_report
from lam.runs.samples import draw_samples, write_samples
from lam.runs.start import TRAINED_BY, Start, start_from, write_trained_by
from lam.training import Training, device_of
from lam.training.features import with_features
from lam.utils import distributed
from lam.utils.files import MANIFEST, read_json, read_yaml, seal, write_json

SECONDS = "seconds.json"
"""Of the stages so far, while a run has not finished."""


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        folder: where it is.
        metrics: flat names and values; None where a metric is undefined.
    """

    folder: Path
    metrics: dict[str, Any]

    @property
    def report(self) -> Path:
        """The page to open."""
        return self.folder / "report.html"


def run(config: RunConfig, *, progress: bool = True) -> RunResult:
    """Train, fit, tune, evaluate and report; or continue where an earlier call was stopped.

    Nothing is tuned on what is reported: the network and its posterior are fitted on the training split, the epoch and
    the likelihood scale are chosen on the validation split, metrics are of the test split.

    Args:
        config: what to do.
        progress: show what happens on standard error.

    Returns:
        The folder and the metrics.

    Raises:
        ValueError: for settings outside their range, data that cannot be read or are too few, a network that does not
            take them, or a folder that holds a run with other settings or of other data; all before any work, and with
            nothing written.
        CorruptFileError: naming the file of a finished run that is missing, truncated or altered.
    """
    config.check()
    require_faiss()
    folder, settings = config.folder, config.resolved()
    distributed.join()
    progress = progress and distributed.is_rank_zero()
    if finished := distributed.broadcast_from_rank_zero(lambda: _finished(config, settings)):
        return finished
    damaged = left_out(folder, config.data.root)
    splits, ood = distributed.rank_zero_first(lambda: load_data(config.data, damaged))
    method = config.method
    learns = method.reads_labels and (config.network.head != "identity" or method.learns_from_matches)
    check_splits(splits, learns=learns)
    check_texts(splits.test)
    corruptions_of(splits.test, config.evaluation.corruptions)
    is_new = not (folder / DATA).is_file()  # or an earlier start has checked them
    copies, unreadable = distributed.broadcast_from_rank_zero(
        lambda: _check_items(config, splits, ood, progress) if is_new else (read_copies(folder), {})
    )
    if unreadable:
        splits, ood = leave_out(splits, ood, frozenset(map(path_key, unreadable)))
        check_splits(splits, learns=learns)
    remark = remark_on(copies, config.data.duplicates)
    if remark is not None:
        splits = replace(splits, notes=(*splits.notes, remark))
        if is_new and distributed.is_rank_zero():
            warnings.warn(remark, stacklevel=2)
    parts = parts_of(splits, ood)
    network, start = distributed.rank_zero_first(lambda: _build_network(config, splits.train))
    if is_new and distributed.is_rank_zero():
        warn_of_cut_texts(network, parts.values())
    stages = Stages(progress, read_json(folder / SECONDS) if (folder / SECONDS).is_file() else {})
    images, training = _training(config, start, splits, stages)
    config.method.check(network, images, training)
    start = start.taken_over(config, splits)
    with open_for_writing(folder, settings, parts, splits):
        if is_new and distributed.is_rank_zero():
            if unreadable:
                write_damaged(unreadable, folder / DAMAGED)
            if copies:
                write_copies(copies, folder)
        is_trained = distributed.broadcast_from_rank_zero((folder / ENCODER / MANIFEST).is_file)
        trained = None if is_trained else config.method.train(network, images, training)
        again = replace(training, pretrained=True)

        def refit(method: Method) -> Encoder:
            with distributed.alone():  # the others wait for the tuning
                return method.train(network, images, again).encoder

        return distributed.broadcast_from_rank_zero(
            lambda: _evaluate(config, folder, trained, start, splits, ood, stages, refit)
        )


def _check_items(
    config: RunConfig, splits: Splits, ood: Mapping[str, Dataset], progress: bool
) -> tuple[list[Copy], dict[Path, str]]:
    """Read all image files; the copies among the items, and the reasons of damaged files, where these are left out."""
    parts = parts_of(splits, ood).values()
    hashes, reasons = check_files(parts, progress=progress)
    skips = config.data.skip_damaged
    listed = None if skips else config.folder.with_name(f"{config.folder.name}-{DAMAGED}")  # or later, in the folder
    DamagedFiles(listed, skips, reasons).settle(sum(len(part.files) for part in parts))
    copies = find_copies(splits, hashes)
    if config.data.duplicates == "drop":  # exact ones are gone from the splits
        whole, _ = load_data(replace(config.data, duplicates="keep"))
        copies = [*without_copies(whole)[1], *copies]
    check_copies(copies, config.data.duplicates)
    return copies, reasons


def _finished(config: RunConfig, settings: dict[str, Any]) -> RunResult | None:
    """The run that is there already, unless its data are others now; where they are gone nobody can say."""
    folder = config.folder
    refuse_other_run(folder, settings)
    if not is_finished(folder):
        return None
    try:
        parts = parts_of(*load_data(config.data, left_out(folder, config.data.root)))
    except MissingDataError:
        if read_yaml(folder / CONFIG)["data"].get("root") != config.data.root:
            raise
        parts = {}
    refuse_changed_data(folder, parts)
    return RunResult(folder, read_json(folder / METRICS))


def _evaluate(
    config: RunConfig,
    folder: Path,
    trained: Trained | None,
    start: Start,
    splits: Splits,
    ood: dict[str, Dataset],
    stages: "Stages",
    refit: Refit | None,
) -> RunResult:
    encoder = _encoder(config, trained, start, splits, folder, stages, refit)
    evaluation, corrupted, measured = evaluate_splits(config, encoder, splits, ood, stages)
    with stages("index"):
        index_dataset(folder, evaluation.gallery, splits.test.subset(evaluation.candidates.cpu()))
    seconds = {f"seconds_{name}": seconds for name, seconds in stages.seconds.items()}
    metrics = {**measured, **_skipped(folder), **seconds}
    write_json(folder / METRICS, metrics)
    samples = write_samples(folder, draw_samples(splits, ood, evaluation.candidates, seed=config.seed))
    Curves.of(evaluation).save(folder)
    plots = write_plots_and_report(folder, config.resolved(), metrics, encoder, evaluation, corrupted, splits, ood)
    return _finish(folder, metrics, plots, samples)


def evaluate_splits(
    config: RunConfig,
    encoder: Encoder,
    splits: Splits,
    ood: dict[str, Dataset],
    stages: "Stages | None" = None,
) -> tuple[Evaluation, dict[AnyKind, CorruptionCurve], dict[str, float | None]]:
    """What a run measures of its encoder: the evaluation, what corrupting test images did, and the metrics of both."""
    stages, workers = stages or Stages(progress=False), config.data.num_workers
    with stages("evaluate"):
        evaluation = evaluate(
            encoder,
            held_out_items(config, splits.test),
            {name: loader_of(images, EMBEDDING_BATCH, workers) for name, images in ood.items()},
            reference=reference_features(
                encoder, splits.train, config.evaluation.reference, seed=config.seed, num_workers=workers
            ),
            costly=config.evaluation.costly,
            progress=stages.progress,
        )
        unseen = _unseen(config, encoder, splits)
    with stages("corrupt"):
        size, options = config.evaluation.corrupted, {"seed": config.seed, "kinds": config.evaluation.corruptions}
        corrupted = measure_corruption(encoder, splits.test, evaluation, size=size, **options) if size else {}
    metrics = {**evaluation.metrics, **unseen, **corruption_metrics(corrupted, has_kappa=encoder.has_kappa)}
    return evaluation, corrupted, metrics


def held_out_items(config: RunConfig, part: Dataset) -> HeldOut:
    """A part of the data in batches, with what is known of it."""
    loader = loader_of(part, EMBEDDING_BATCH, config.data.num_workers)
    return HeldOut(loader, part.is_query, config.places.relevant_within, part.soft_labels)


def _unseen(config: RunConfig, encoder: Encoder, splits: Splits) -> dict[str, float | int | None]:
    """What the encoder finds, and how well each score knows it, among items of classes never trained on."""
    count = config.evaluation.unseen
    if splits.strangers is None or not count:
        return {}
    strangers = splits.strangers.limit(count, seed=config.seed)
    if len(strangers.labels.unique()) == len(strangers):
        return {}
    measured = evaluate(encoder, loader_of(strangers, EMBEDDING_BATCH, config.data.num_workers)).metrics
    keys = {name: registry.Key.parse(name) for name in measured}
    answers = {str(key._replace(ood_set=UNSEEN)): measured[name] for name, key in keys.items() if key.metric in _ASKED}
    return {"unseen_recall@1": measured["recall@1"], **answers}


_ASKED = ("ausc", "r_auroc")


def _skipped(folder: Path) -> dict[str, int]:
    """Number of batches without a positive pair, in all trainings of the run; nothing where none was trained."""
    if not (folder / "training.json").is_file():
        return {}
    histories = read_json(folder / "training.json").values()
    return {"batches_without_positives": sum(history["batches_without_positives"] for history in histories)}


def _finish(folder: Path, metrics: dict[str, Any], plots: list[Path], samples: list[str]) -> RunResult:
    names = [CONFIG, DATA, TRAINED_BY, METRICS, CURVES, "report.html", *samples]
    names += [f"plots/{path.name}" for path in plots]
    names += [name for name in ("training.json", DAMAGED, COPIES) if (folder / name).is_file()]
    seal(folder, names)
    (folder / SECONDS).unlink(missing_ok=True)
    return RunResult(folder, metrics)


def _build_network(config: RunConfig, images: Dataset) -> tuple[EmbeddingNetwork, Start]:
    network = _network(config, config.seed)
    start = Start() if config.checkpoint is None else start_from(network, config.checkpoint)
    try:
        with evaluating(network):
            network(torch.stack([images[0][0]] * 2))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"network {config.network.name} does not take inputs of shape {images.shape} ({reason}): choose another "
            "network.name or network.options, or another size of the inputs"
        ) from None
    return network, start


def _network(config: RunConfig, seed: int) -> EmbeddingNetwork:
    network = config.network
    head: dict[str, Any] = {} if network.head == "train" else {"head": network.head}
    options = {**head, **network.options}
    return models.build(network.name, dimension=network.dimension, weights=network.weights, seed=seed, **options)


def _training(config: RunConfig, start: Start, splits: Splits, stages: "Stages") -> tuple[Dataset, Training]:
    """The images that are trained on, and how; the last epoch is kept where no query of the validation has a match."""
    relation, held_out, within = config.relation_of(splits.train), splits.validation, config.places.relevant_within
    relevance = relevance_of(relation, held_out.targets, is_query=held_out.is_query, relevant_within=within)
    options = {name: value for name, value in vars(config.training).items() if name not in ("loss", "temperature")}
    training = Training(
        **options,
        loss=config.loss(),
        relation=relation,
        seed=config.seed,
        pretrained=config.checkpoint is not None,
        trained_by=start.trained_by,
        another=lambda seed: _network(config, seed),
        validate=None
        if not relevance.count().any()
        else lambda candidate: nearest_is_relevant(
            candidate, held_out, relation, relevant_within=within, num_workers=config.data.num_workers
        ),
        folder=config.folder / "checkpoints",
        num_workers=config.data.num_workers,
        accelerator=config.accelerator,
        progress=stages.progress,
        stage=stages,
    )
    is_augmented = config.augmentation != AugmentationOptions()
    images = Augmented(splits.train, config.augmentation) if is_augmented else splits.train
    return images, training


def _encoder(
    config: RunConfig,
    trained: Trained | None,
    start: Start,
    splits: Splits,
    folder: Path,
    stages: "Stages",
    refit: Refit | None,
) -> Encoder:
    """The encoder, tuned and saved; or read, where an earlier start saved it."""
    if trained is None:
        return load(folder / ENCODER).to(device_of(config.accelerator))
    encoder, histories = trained
    write_trained_by(folder, config, start, histories)
    if histories:
        write_json(folder / "training.json", {name: asdict(history) for name, history in histories.items()})
        total = sum(sum(history.seconds) for history in histories.values())
        stages.seconds["train"] = round(total, 3)  # of every start, not of this one alone
    encoder.n_samples = config.evaluation.n_samples
    workers = config.data.num_workers
    held_out = held_out_items(config, splits.validation)
    if config.method.tunes:
        with stages("tune"):
            config.method.tune_on(encoder, held_out, refit=refit)
    if config.ambiguity.learn or start.kappa_head is not None:
        with stages("ambiguity"):
            count = config.ambiguity.reference
            known = loader_of(splits.train.limit(count, seed=config.seed), EMBEDDING_BATCH, workers) if count else None
            own: Any = {"reference": known, "kappa_head": start.kappa_head, "seed": config.seed}
            encoder.learn_ambiguity(held_out, **own)
    write_json(folder / SECONDS, stages.seconds)
    encoder.save(folder / ENCODER)
    return encoder


def nearest_is_relevant(
    network: nn.Module,
    images: Dataset,
    relation: Relation,
    *,
    relevant_within: float | None = None,
    num_workers: int = 0,
) -> float:
    """Recall@1 of a network on a validation split, by which the epoch is chosen; 0 where no query can be answered."""
    relevance = relevance_of(relation, images.targets, is_query=images.is_query, relevant_within=relevant_within)
    with evaluating(network):
        device = next(network.parameters()).device
        items = with_features(network, images, num_workers=num_workers)
        batches = loader_of(items, EMBEDDING_BATCH, num_workers)
        embeddings = torch.cat([network(batch.to(device)) for batch, _ in batches]).float()
    gallery = None if relevance.gallery is None else embeddings[relevance.gallery.to(device)]
    hits, _ = rank(embeddings[relevance.queries.to(device)], gallery, k=1)
    answerable = relevance.count() > 0
    return float(relevance.of_hits(hits)[answerable, 0].double().mean()) if answerable.any() else 0.0


@dataclass
class Stages:
    """Prints the name of each stage, and keeps the seconds it took."""

    progress: bool
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.progress:
            print(f"{name} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)
