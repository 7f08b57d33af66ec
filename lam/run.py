"""A run: configuration -> data -> method -> evaluation -> report, in a folder that says all there is to say.

    config.yaml      fully resolved
    data.json        fingerprints of the splits, so that a run is not continued on other data
    checkpoints/     of the training, which continues from the last one; training.json is its history
    encoder/         network, posterior, preprocessing
    index/, items/   the test split, to be searched
    metrics.json     flat names and values, and the seconds of each stage
    plots/*.png, report.html
    MANIFEST.json    SHA-256 of what does not change afterwards, written last

Started again with the same configuration a run continues where it was; what is finished is kept.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from lam import datasets, gallery, losses, models
from lam.config import RunConfig
from lam.curvature import check_labels
from lam.datasets import FolderImages, ImageDataset, MissingDataError, Splits
from lam.encoder import BayesianEncoder, load
from lam.evaluation import NEIGHBOUR, Evaluation, evaluate
from lam.files import MANIFEST, read_json, seal, write_json
from lam.head import evaluating
from lam.methods import laplace_online
from lam.methods.laplace_posthoc import fit
from lam.models import EmbeddingNetwork
from lam.retrieval.neighbours import rank
from lam.run_folder import claimed, is_finished, refuse_other_run
from lam.run_report import write_plots_and_report
from lam.training import History, device_of, train
from lam.weights import load_weights

EMBEDDING_BATCH = 500
MANY_FILES = 1000


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
            take them, or a folder that holds a run with other settings; all before any work, and with nothing written.
        CorruptFileError: naming the file of a finished run that is missing, truncated or altered.
    """
    config.check()
    gallery.require_faiss()
    folder, settings = config.folder, config.resolved()
    refuse_other_run(folder, settings)
    if is_finished(folder):
        return RunResult(folder, read_json(folder / "metrics.json"))
    splits, ood = _load_data(config)
    _check_splits(splits)
    parts: dict[str, ImageDataset] = {**vars(splits), **{f"OOD set {name}": images for name, images in ood.items()}}
    _check_files(parts.values(), progress)
    network = _build_network(config, splits.train)
    with claimed(folder, settings, parts):
        return _run(config, folder, network, splits, ood, progress)


def _run(
    config: RunConfig,
    folder: Path,
    network: EmbeddingNetwork,
    splits: Splits,
    ood: dict[str, ImageDataset],
    progress: bool,
) -> RunResult:
    stages = _Stages(progress, _seconds_so_far(folder))
    if (folder / "encoder" / MANIFEST).is_file():
        encoder = load(folder / "encoder").to(device_of(config.accelerator))
    else:
        encoder = _encoder(config, network, splits, folder, stages, progress)
        write_json(folder / "seconds.json", stages.seconds)
        encoder.save(folder / "encoder")
    with stages("evaluate"):
        evaluation = evaluate(
            encoder,
            _loader(splits.test, EMBEDDING_BATCH),
            {name: _loader(images, EMBEDDING_BATCH) for name, images in ood.items()},
            reference=_reference(config, encoder, splits.train),
            n_samples=config.evaluation.n_samples,
            progress=progress,
        )
    with stages("index"):
        gallery.index_dataset(folder, evaluation.embeddings, splits.test)
    metrics = {**evaluation.metrics, **{f"seconds_{name}": seconds for name, seconds in stages.seconds.items()}}
    return _finish(config, folder, metrics, evaluation, splits.test)


def _finish(
    config: RunConfig, folder: Path, metrics: dict[str, Any], evaluation: Evaluation, test: ImageDataset
) -> RunResult:
    write_json(folder / "metrics.json", metrics)
    plots = write_plots_and_report(folder, asdict(config), metrics, evaluation, test)
    names = ["config.yaml", "data.json", "metrics.json", "report.html", *(f"plots/{path.name}" for path in plots)]
    names += ["training.json"] if (folder / "training.json").is_file() else []
    seal(folder, names)
    (folder / "seconds.json").unlink(missing_ok=True)
    return RunResult(folder, metrics)


def _load_data(config: RunConfig) -> tuple[Splits, dict[str, ImageDataset]]:
    data = config.data
    with _told_how("--data.root=DIR"):
        splits = datasets.load(data.name, root=data.root, seed=data.seed, **data.options)
    ood: dict[str, ImageDataset] = {}
    for found in data.ood:
        with _told_how(f"--data.ood='[{{name: {found.name}, root: DIR}}]'"):
            images = datasets.load_ood(found.name, like=splits.test, root=found.root, seed=data.seed, **found.options)
        ood[found.title or found.name] = images
    if data.limit is not None:
        limit, seed = data.limit, data.seed
        parts = (part.limit(limit, seed=seed) for part in (splits.train, splits.validation, splits.test))
        splits = Splits(*parts)
        ood = {name: images.limit(limit, seed=seed) for name, images in ood.items()}
    return splits, ood


@contextmanager
def _told_how(option: str) -> Iterator[None]:
    try:
        yield
    except MissingDataError as error:
        raise MissingDataError(f"{error} (in a run: {option})") from None


def _check_splits(splits: Splits) -> None:
    for name, part, least in (
        ("train", splits.train, NEIGHBOUR),
        ("validation", splits.validation, 2),
        ("test", splits.test, 2),
    ):
        if len(part) < least:
            raise ValueError(f"the {name} split must have at least {least} images, got {len(part)}: give more data")
        if len(part.labels.unique()) == len(part):
            raise ValueError(f"no two images of the {name} split share a label, so none can be found: give more data")
    try:
        check_labels(splits.train.labels)
    except ValueError as error:
        raise ValueError(f"the train split cannot be learned from: {error}; give more data") from None


def _check_files(parts: Iterable[ImageDataset], progress: bool) -> None:
    """Read every image file as it will be read: one that cannot be would otherwise end the run when its turn comes."""
    files = [(path, part.preprocessing) for part in parts if isinstance(part, FolderImages) for path in part.paths]
    hidden = not progress or len(files) <= MANY_FILES
    for path, preprocessing in tqdm(files, desc="checking", unit="image", disable=hidden):
        try:
            preprocessing(path)
        except ValueError as error:
            raise ValueError(f"{error}: replace or remove it") from None


def _build_network(config: RunConfig, images: ImageDataset) -> EmbeddingNetwork:
    wanted = config.network
    network = models.build(
        wanted.name, dimension=wanted.dimension, weights=wanted.weights, seed=config.seed, **wanted.options
    )
    if config.checkpoint is not None:
        load_weights(network, config.checkpoint)
    try:
        with evaluating(network):
            network(torch.zeros(2, *images.shape))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"network {wanted.name} does not take images of shape {images.shape} ({reason}): choose another "
            "network.name or network.options, or another size of the images"
        ) from None
    return network


def _encoder(
    config: RunConfig, network: EmbeddingNetwork, splits: Splits, folder: Path, stages: "_Stages", progress: bool
) -> BayesianEncoder:
    training = _training_options(config, splits, folder, progress)
    if config.method == "laplace_online":
        with stages("train"):
            encoder, history = laplace_online.train(network, splits.train, options=config.online, **training)
        _keep(history, folder, stages)
    else:
        if config.checkpoint is None:
            with stages("train"):
                history = train(network, splits.train, **training)
            _keep(history, folder, stages)
        with stages("fit"):
            encoder = _fit(config, network.to(device_of(config.accelerator)), splits, progress)
    with stages("tune"):
        if config.laplace.tune == "calibration":
            validation = _loader(splits.validation, EMBEDDING_BATCH)
            encoder.tune(validation, by="calibration", n_samples=config.laplace.tune_samples)
        elif config.laplace.tune == "marginal_likelihood":
            encoder.tune([], by="marginal_likelihood")
    return encoder


def _keep(history: History, folder: Path, stages: "_Stages") -> None:
    write_json(folder / "training.json", asdict(history))
    stages.seconds["train"] = round(sum(history.seconds), 3)  # of every start, not of this one alone


def _training_options(config: RunConfig, splits: Splits, folder: Path, progress: bool) -> dict[str, Any]:
    options = {name: value for name, value in vars(config.training).items() if name != "loss"}
    return {
        **options,
        "loss": losses.build(config.training.loss, margin=config.margin),
        "validate": lambda candidate: nearest_is_relevant(candidate, splits.validation),
        "seed": config.seed,
        "folder": folder / "checkpoints",
        "accelerator": config.accelerator,
        "progress": progress,
    }


def _fit(config: RunConfig, network: nn.Module, splits: Splits, progress: bool) -> BayesianEncoder:
    laplace = config.laplace
    return fit(
        network,
        _loader(splits.train, laplace.batch_size, shuffle_seed=config.seed),
        margin=config.margin,
        split=laplace.split,
        fix=laplace.fix,
        negative_weight=laplace.negative_weight,
        pairs=laplace.pairs,
        prior_precision=laplace.prior_precision,
        likelihood_scale=laplace.likelihood_scale,
        seed=config.seed,
        progress=progress,
    )


def nearest_is_relevant(network: nn.Module, images: ImageDataset) -> float:
    """Give the share of images whose nearest other has their label: what validation picks the epoch by."""
    with evaluating(network):
        device = next(network.parameters()).device
        embeddings = torch.cat([network(batch.to(device)) for batch, _ in _loader(images, EMBEDDING_BATCH)])
    hits, _ = rank(embeddings.float(), k=1)
    labels = images.labels.to(hits.device)
    return float((labels[hits[:, 0]] == labels).double().mean())


def _reference(config: RunConfig, encoder: BayesianEncoder, train_split: ImageDataset) -> Tensor:
    images = train_split.limit(config.evaluation.reference, seed=config.seed)
    return encoder.features(_loader(images, EMBEDDING_BATCH))


def _loader(images: ImageDataset, batch_size: int, *, shuffle_seed: int | None = None) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(shuffle_seed or 0)  # otherwise it draws from torch's global one
    return DataLoader(images, batch_size=batch_size, shuffle=shuffle_seed is not None, generator=generator)


def _seconds_so_far(folder: Path) -> dict[str, float]:
    path = folder / "seconds.json"
    return read_json(path) if path.is_file() else {}


@dataclass
class _Stages:
    """Says which stage runs and how long each took."""

    progress: bool
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.progress:
            print(f"{name} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)
