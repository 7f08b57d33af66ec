"""`Plan`: from a configuration to the network, data and training of a run."""

import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lam import models
from lam.datasets import Dataset, Splits
from lam.datasets.augmented import AugmentationOptions, Augmented
from lam.encoders import BayesianEncoder, Encoder
from lam.encoders.deterministic import HeadEncoder
from lam.methods.laplace_posthoc import learned_parameters
from lam.models import EmbeddingNetwork
from lam.models.kappa_head import KappaHead
from lam.models.modes import evaluating
from lam.models.weights import check_is_file, load_state, load_weights
from lam.pairs.relation import Relation
from lam.retrieval import rank, recall_at_k
from lam.runs.config import RunConfig
from lam.runs.data import loader_of
from lam.runs.finished import Run
from lam.training import History, Training
from lam.training.batches import with_features
from lam.tuning.ambiguity import TrainedHead, check_enough
from lam.utils.files import read_json, verify

TRAINED_BY = "trained_by.json"

SECONDS = "seconds.json"
"""File in the folder of an unfinished run: the seconds of each stage so far."""

_OF_LOSS = ("loss", "temperature")


@dataclass
class Stages:
    """Measures the seconds of each stage; with `progress`, prints the stage's name on standard error."""

    progress: bool
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, *, progress: bool) -> "Stages":
        """Stages with the seconds of earlier starts of the run."""
        return cls(progress, read_json(folder / SECONDS) if (folder / SECONDS).is_file() else {})

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.progress:
            print(f"{name} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)


@dataclass(frozen=True)
class Start:
    """The parts of a checkpoint that a run uses in addition to the network's weights.

    `trained_by` is the curvature of the checkpoint's training loss, by name and settings; None for a file of weights.
    `kappa_head` is its layer that predicts κ, if any.
    """

    trained_by: Mapping[str, Any] | None = None
    kappa_head: KappaHead | None = None


class Plan:
    """Builds the network, start and training of a run from its checked configuration."""

    def __init__(self, config: RunConfig) -> None:
        config.check()
        self.config, self.loss = config, config.loss()

    def check_checkpoint(self) -> None:
        """Reject a checkpoint that does not exist, before data are read."""
        checkpoint = self.config.checkpoint
        if checkpoint is not None and not Path(checkpoint).is_dir():
            check_is_file(checkpoint)

    def build(self, seed: int) -> EmbeddingNetwork:
        """A network with the pretrained weights of its library, or with random weights from a seed."""
        settings = self.config.network
        options = {**({} if settings.head == "train" else {"head": settings.head}), **settings.options}
        return models.build(settings.name, dimension=settings.dimension, weights=settings.weights, seed=seed, **options)

    def start(self, items: Dataset) -> tuple[EmbeddingNetwork, Start]:
        """The network before training, and the other parts of its checkpoint."""
        network, checkpoint = self.build(self.config.seed), self.config.checkpoint
        start = Start() if checkpoint is None else start_from(network, checkpoint)
        try:
            with evaluating(network):
                network(torch.stack([items[0][0]] * 2))
        except (RuntimeError, AssertionError) as error:  # vision transformers assert the size of images
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"network {self.config.network.name} does not take inputs of shape {items.shape} ({reason}): choose "
                "another network.name or network.options, or another size of the inputs"
            ) from None
        return network, start

    @property
    def learns(self) -> bool:
        """Whether the run learns from matching items."""
        method = self.config.method
        needs_matches = self.config.network.head != "identity" or method.learns_from_matches
        return method.reads_labels and needs_matches

    def items(self, splits: Splits) -> Dataset:
        """The training split, augmented if the configuration asks for it."""
        augmentation = self.config.augmentation
        return splits.train if augmentation == AugmentationOptions() else Augmented(splits.train, augmentation)

    def training(self, splits: Splits, start: Start, stages: Stages) -> Training:
        """The training; it keeps the epoch with the best validation recall@1, or the last if no query has a match."""
        config, validation = self.config, splits.validation
        relation = config.places.relation_of(splits.train)
        has_matches = bool(config.places.relevance_of(validation, relation).count().any())
        return Training(
            **{name: value for name, value in vars(config.training).items() if name not in _OF_LOSS},
            loss=self.loss,
            relation=relation,
            seed=config.seed,
            pretrained=config.checkpoint is not None,
            trained_by=start.trained_by,
            another=self.build,
            validate=partial(self.recall_at_1, items=validation, relation=relation) if has_matches else None,
            folder=config.folder / "checkpoints",
            num_workers=config.data.num_workers,
            accelerator=config.accelerator,
            progress=stages.progress,
            stage=stages,
        )

    def checked(self, start: Start, validation: Dataset) -> Start:
        """The `start`, without its κ head if the run cannot use the head.

        A κ head needs a posterior, and p_known, which is learned from validation items with a match. If these items are
        too few, the head is dropped with a warning; with `ambiguity.learn=true`, an error is raised.
        """
        config, learn = self.config, self.config.ambiguity.learn
        is_posterior = issubclass(config.method.encoder, BayesianEncoder)
        start = start if is_posterior and learn is not False else replace(start, kappa_head=None)
        if not learn and start.kappa_head is None:
            return start
        try:
            check_enough(config.places.relevance_of(validation))
        except ValueError as error:
            if learn:
                raise
            warnings.warn(
                f"the κ head of checkpoint {config.checkpoint} is left out, and κ comes from the posterior only: "
                f"p_known cannot be learned on the validation split: {error}, or set --ambiguity.learn=false",
                stacklevel=2,
            )
            return replace(start, kappa_head=None)
        return start

    def trained_by(self, start: Start, histories: Mapping[str, History]) -> Mapping[str, Any]:
        """Name and settings of the training loss's curvature, for the training of this run or of its checkpoint."""
        if start.trained_by is not None and "network" not in histories:
            return start.trained_by
        learned = learned_parameters(histories)
        return self.config.method.trained_by(self.loss, self.config.network.dimension, learned)

    def recall_at_1(self, network: nn.Module, items: Dataset, relation: Relation) -> float:
        """Recall@1 of a network on held-out items; 0 if no query has a match."""
        relevance, num_workers = self.config.places.relevance_of(items, relation), self.config.data.num_workers
        with evaluating(network):
            device = next(network.parameters()).device
            features = with_features(network, items, num_workers=num_workers)
            batches = loader_of(features, num_workers)
            embeddings = torch.cat([network(batch.to(device)) for batch, _ in batches]).float()
        gallery = None if relevance.gallery is None else embeddings[relevance.gallery.to(device)]
        hits, _ = rank(embeddings[relevance.queries.to(device)], gallery, k=1)
        n_relevant = relevance.count()
        return recall_at_k(relevance.of_hits(hits), n_relevant, k=1) if n_relevant.any() else 0.0


def start_from(network: nn.Module, checkpoint: str) -> Start:
    """Load the weights of a file or a finished run into a network; return the other parts of this checkpoint."""
    if not Path(checkpoint).is_dir():
        load_weights(network, checkpoint)
        return Start()
    run = Run(checkpoint)
    config, trained = run.config, run.encoder.network
    if trained is None or isinstance(trained, nn.ModuleList):
        raise ValueError(f"checkpoint {checkpoint} is a run of {config.method.name}, with several networks: give one")
    try:
        load_state(network, dict(trained.state_dict()), source=f"checkpoint {checkpoint}: ")
    except ValueError as error:
        options = {name: value for name, value in asdict(config.network).items() if value}
        settings = " ".join(f"--network.{name}={shlex.quote(str(value))}" for name, value in options.items())
        raise ValueError(f"{error}; the settings of its network are {settings}") from None
    verify(run.folder, [TRAINED_BY], others=False)
    trained_by = read_json(run.folder / TRAINED_BY)
    return Start(trained_by, _kappa_head(run.encoder))


def _kappa_head(encoder: Encoder) -> KappaHead | None:
    """An encoder's own κ head, or the κ head in its learned ambiguity."""
    if isinstance(encoder, HeadEncoder):
        return encoder.kappa_head
    learned = encoder.ambiguity
    return learned.head.kappa_head() if learned is not None and isinstance(learned.head, TrainedHead) else None
