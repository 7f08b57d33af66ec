"""A run: configuration -> data -> method -> evaluation -> report, in one folder.

    config.yaml          every setting
    data.json            fingerprints of the splits (a run continues only on the same data), and the gallery's kind
    copies.csv           copies among the items, if any
    damaged.csv          image files that are left out, if any
    checkpoints/         checkpoints of the training; its history is in training.json
    trained_by.json      curvature of the training loss, for runs that start from this one
    encoder/             network, posterior, preprocessing
    gallery/             gallery items of the test split
    samples/             a few inputs to try the run with
    metrics.json         metrics by key, and the seconds of each stage
    curves.safetensors   data of the plots' curves, for `lam compare`
    plots/*.png, report.html
    MANIFEST.json        SHA-256 of the files outside checkpoints/, encoder/ and gallery/, written last

A second start with the same configuration continues the run; a finished run is kept. Several processes of torchrun
train and fit together; only rank zero writes, evaluates and reports.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lam.datasets import Dataset, MissingDataError, Splits
from lam.encoders.base import Encoder
from lam.encoders.batches import HeldOut
from lam.encoders.load import load
from lam.evaluation import Evaluation, evaluate
from lam.gallery.local_index import require_faiss
from lam.methods.base import Trained
from lam.retrieval.metrics.registry import Key
from lam.runs import data as run_data
from lam.runs import folder as run_folder
from lam.runs.comparison import CURVES, Curves
from lam.runs.config import UNSEEN, RunConfig
from lam.runs.copies import COPIES
from lam.runs.corruption import CorruptionCurve, corruption_metrics, measure_corruption
from lam.runs.index import index_dataset
from lam.runs.plan import SECONDS, TRAINED_BY, Plan, Stages, Start
from lam.runs.report import write_plots_and_report
from lam.runs.samples import draw_samples, write_samples
from lam.training import device_of
from lam.utils import distributed
from lam.utils.files import MANIFEST, read_json, read_yaml, seal, write_json

TRAINING = "training.json"
_OF_ANSWERS = ("ausc", "r_auroc")


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder, and its metrics by the keys of `metrics.json` (None if undefined)."""

    folder: Path
    metrics: dict[str, Any]

    @property
    def report(self) -> Path:
        """The report page."""
        return self.folder / "report.html"


def run(config: RunConfig, *, progress: bool = True) -> RunResult:
    """Train, fit, tune, evaluate and report, or continue a run that was stopped; `progress` shows stages on stderr.

    Network and posterior are fitted on the training split. The validation split chooses the epoch and the likelihood
    scale. The test split gives the metrics.

    Raises:
        ValueError: for settings out of range, data that are unreadable, too few or unsuited to the network, or a folder
            with a run of other settings or data. Nothing is written then, except a list of damaged files.
        CorruptFileError: naming the file of a finished run that is missing, truncated or altered.
    """
    plan, folder, method = Plan(config), config.folder, config.method
    require_faiss()
    distributed.join()
    progress = progress and distributed.is_rank_zero()
    if finished := distributed.broadcast_from_rank_zero(lambda: _finished(config)):
        return finished
    plan.check_checkpoint()
    data = run_data.prepare_data(config, learns=plan.learns, progress=progress)
    network, start = distributed.rank_zero_first(lambda: plan.start(data.splits.train))
    if distributed.is_rank_zero() and data.is_new:
        run_data.warn_of_cut_texts(network, data.parts.values())
    stages = Stages.of(folder, progress=progress)
    items, training = plan.items(data.splits), plan.training(data.splits, start, stages)
    method.check(network, items, training)
    start = plan.checked(start, data.splits.validation)
    with ExitStack() as stack:  # only rank zero locks and writes the folder
        settings = config.resolved()
        opened = run_folder.open_for_writing(folder, settings, data.parts, data.splits, data.write_lists)
        distributed.broadcast_from_rank_zero(lambda: stack.enter_context(opened))
        is_trained = distributed.broadcast_from_rank_zero((folder / run_folder.ENCODER / MANIFEST).is_file)
        trained = None if is_trained else method.train(network, items, training)

        def finish() -> RunResult:
            device = device_of(config.accelerator)
            if trained is None:
                encoder = load(folder / run_folder.ENCODER).to(device)
            else:
                encoder = _tune(plan, trained, start, data.splits, stages)
            return _report(config, encoder, data, stages)

        return distributed.broadcast_from_rank_zero(finish)


def _finished(config: RunConfig) -> RunResult | None:
    """The result of a finished run, else None. Changed data raise a `ValueError`; missing data are not compared."""
    folder = config.folder
    run_folder.refuse_other_run(folder, config.resolved())
    if not run_folder.is_finished(folder):
        run_folder.check_place(folder, config.data)
        return None
    try:
        parts = run_data.parts_of(*run_data.load_data(config.data, run_folder.left_out(folder, config.data.root)))
    except MissingDataError:
        if read_yaml(folder / run_folder.CONFIG)["data"].get("root") != config.data.root:
            raise
        parts = {}
    run_folder.refuse_changed_data(folder, parts)
    return RunResult(folder, read_json(folder / run_folder.METRICS))


def _tune(plan: Plan, trained: Trained, start: Start, splits: Splits, stages: Stages) -> Encoder:
    """The encoder, tuned on the validation split and saved."""
    config, (encoder, histories) = plan.config, trained
    write_json(config.folder / TRAINED_BY, plan.trained_by(start, histories))
    if histories:
        write_json(config.folder / TRAINING, {name: asdict(history) for name, history in histories.items()})
        total = sum(sum(history.seconds) for history in histories.values())
        stages.seconds["train"] = round(total, 3)  # also of earlier starts
    encoder.n_samples = config.evaluation.n_samples
    held_out = _held_out(config, splits.validation)
    if config.method.tunes:
        with stages("tune"):
            config.method.tune_on(encoder, held_out, progress=stages.progress)
    if config.ambiguity.learn or start.kappa_head is not None:
        with stages("ambiguity"):
            reference, count = None, config.ambiguity.reference
            if count:
                drawn = splits.train.limit(count, seed=config.seed)
                reference = run_data.loader_of(drawn, config.data.num_workers)
            encoder.learn_ambiguity(
                held_out,
                reference=reference,
                kappa_head=start.kappa_head,
                seed=config.seed,
                progress=stages.progress,
            )
    write_json(config.folder / SECONDS, stages.seconds)
    encoder.save(config.folder / run_folder.ENCODER)
    return encoder


def _report(config: RunConfig, encoder: Encoder, data: run_data.RunData, stages: Stages) -> RunResult:
    """Evaluate the encoder, fill the gallery, write metrics, report and, last, the manifest."""
    folder, splits, ood = config.folder, data.splits, data.ood
    evaluation, corrupted, measured = evaluate_run(config, encoder, splits, ood, stages)
    with stages("index"):
        index_dataset(folder, evaluation.gallery, splits.test.subset(evaluation.candidates.cpu()))
    seconds = {f"seconds_{name}": seconds for name, seconds in stages.seconds.items()}
    metrics = {**measured, **_skipped(folder), **seconds}
    write_json(folder / run_folder.METRICS, metrics)
    samples = write_samples(folder, draw_samples(splits, ood, evaluation.candidates, seed=config.seed))
    Curves.of(evaluation).save(folder)
    plots = write_plots_and_report(folder, config.resolved(), metrics, encoder, evaluation, corrupted, splits, ood)
    names = [run_folder.CONFIG, run_folder.DATA, TRAINED_BY, run_folder.METRICS, CURVES, "report.html", *samples]
    names += [f"plots/{path.name}" for path in plots]
    names += [name for name in (TRAINING, run_folder.DAMAGED, COPIES) if (folder / name).is_file()]
    seal(folder, names)
    (folder / SECONDS).unlink(missing_ok=True)
    return RunResult(folder, metrics)


def _skipped(folder: Path) -> dict[str, int]:
    """The number of batches without a positive pair in all trainings of the run; empty without a training."""
    if not (folder / TRAINING).is_file():
        return {}
    histories = read_json(folder / TRAINING).values()
    return {"batches_without_positives": sum(history["batches_without_positives"] for history in histories)}


def evaluate_run(
    config: RunConfig, encoder: Encoder, splits: Splits, ood: Mapping[str, Dataset], stages: Stages
) -> tuple[Evaluation, dict[str, CorruptionCurve], dict[str, float | None]]:
    """The evaluation of an encoder on the test split, curves under corruption, and all metrics."""
    options, seed, num_workers = config.evaluation, config.seed, config.data.num_workers
    with stages("evaluate"):
        evaluation = evaluate(
            encoder,
            _held_out(config, splits.test),
            {name: run_data.loader_of(items, num_workers) for name, items in ood.items()},
            reference=run_data.reference_features(
                encoder, splits.train, options.reference, seed=seed, num_workers=num_workers
            ),
            costly=options.costly,
            progress=stages.progress,
        )
        unseen = {} if splits.strangers is None else _unseen(config, encoder, splits.strangers)
    with stages("corrupt"):
        corrupted: dict[str, CorruptionCurve] = {}
        if size := options.corrupted:
            kinds = options.corruptions
            corrupted = measure_corruption(encoder, splits.test, evaluation, size=size, seed=seed, kinds=kinds)
    metrics = {**evaluation.metrics, **unseen, **corruption_metrics(corrupted, has_kappa=encoder.has_kappa)}
    return evaluation, corrupted, metrics


def _held_out(config: RunConfig, part: Dataset) -> HeldOut:
    """A split as batches, with its queries, soft labels and the rule for right answers."""
    batches = run_data.loader_of(part, config.data.num_workers)
    return HeldOut(batches, part.is_query, config.places.relevant_within, part.soft_labels)


def _unseen(config: RunConfig, encoder: Encoder, strangers: Dataset) -> dict[str, float | int | None]:
    """Recall@1 of searches among items of held-out classes, and how well scores detect wrong answers."""
    if not config.evaluation.unseen:
        return {}
    strangers = strangers.limit(config.evaluation.unseen, seed=config.seed)
    if len(strangers.labels.unique()) == len(strangers):
        return {}
    measured = evaluate(encoder, run_data.loader_of(strangers, config.data.num_workers)).metrics
    keys = {name: key for name in measured if (key := Key.parse(name)).metric in _OF_ANSWERS}
    answers = {str(key._replace(ood_set=UNSEEN)): measured[name] for name, key in keys.items()}
    return {"unseen_recall@1": measured["recall@1"], **answers}
