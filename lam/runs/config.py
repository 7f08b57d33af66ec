"""A run's configuration: typed, checked before any work, and written back fully resolved.

Each method's section holds its own options; what they mean is said where they are used. How a configuration is read
from a file and the command line is `lam.runs.config_files`.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

from lam.datasets.augmented import AugmentationOptions
from lam.losses import LossName, build
from lam.methods import MethodName
from lam.methods.deep_ensemble import EnsembleOptions
from lam.methods.hib import HibOptions
from lam.methods.knn_distance import NeighbourOptions
from lam.methods.laplace_online import OnlineOptions
from lam.methods.laplace_posthoc import LaplaceOptions
from lam.methods.pfe import PfeOptions
from lam.pairs.mining import MinerName
from lam.pairs.relation import Relation
from lam.retrieval.metrics.ood import NEIGHBOUR
from lam.training.settings import Accelerator, Optimizer, Precision, Settings, resolve_accelerator
from lam.utils.checks import refuse_below, refuse_non_positive, refuse_other_than

_SECTIONS = {"laplace_posthoc": "laplace", "laplace_online": "online"}
"""Where the options of a method are; a method that has any but is not here has a section of its own name."""


@dataclass
class OodConfig:
    """An out-of-distribution set.

    Attributes:
        name: a data set of `lam.datasets.load_ood`.
        root: its folder, where it needs one.
        options: further options of that data set.
        title: what it is called in tables, where the name alone would not tell two sets apart.
    """

    name: str
    root: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    title: str | None = None


@dataclass
class DataConfig:
    """What is embedded.

    Attributes:
        name: a data set of `lam.datasets.load`.
        root: its folder, where it needs one.
        options: further options of that data set.
        ood: out-of-distribution sets, the main one first.
        limit: at most this many items of each part, for a quick try.
        num_workers: processes that read images, in training and after.
        seed: of the split into parts.
    """

    name: str
    root: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    ood: list[OodConfig] = field(default_factory=list)
    limit: int | None = None
    num_workers: int = 0
    seed: int = 0


@dataclass
class NetworkConfig:
    """The network.

    Attributes:
        name: a network of `lam.models.build`.
        dimension: embedding dimensions D.
        weights: the library's name of pretrained weights; None for random ones.
        options: further options of that network.
    """

    name: str
    dimension: int = 3
    weights: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrainingConfig:
    """How the network is trained; see `lam.training.train`."""

    loss: LossName = "contrastive"
    epochs: int = 3
    batch_size: int = 256
    learning_rate: float = 1e-3
    learning_rate_decay: float = 1.0
    optimizer: Optimizer = "adam"
    weight_decay: float = 0.0
    miner: MinerName = "all"
    max_pairs: int | None = None
    per_class: int | None = None
    checkpoint_every: int | None = None
    precision: Precision = "32-true"


@dataclass
class PlacesConfig:
    """What makes images of places match; of no effect on data with labels.

    Attributes:
        positive_within: the largest distance of a positive pair in training, in metres.
        negative_beyond: negative pairs are farther apart than this, in metres.
        relevant_within: the largest distance of a right answer, in metres.
        angle_within: the largest difference between the compass angles of a positive pair, in degrees, where they are
            known; None to look at positions alone.
    """

    positive_within: float = 10.0
    negative_beyond: float = 25.0
    relevant_within: float = 25.0
    angle_within: float | None = None


@dataclass
class EvaluationConfig:
    """How the encoder is evaluated; see `lam.evaluate`.

    Attributes:
        n_samples: samples behind κ, and sampled networks behind the calibration: when the posterior is tuned, in the
            evaluation and wherever the encoder embeds afterwards.
        reference: how many training items the k-NN score compares with.
        corrupted: how many test images are corrupted, to see whether κ falls with their quality; 0 for none.
    """

    n_samples: int = 100
    reference: int = 5000
    corrupted: int = 200


@dataclass
class RunConfig:
    """A whole run.

    Attributes:
        data: what is embedded.
        network: by what.
        method: which system.
        margin: of the contrastive loss, in (0, 2].
        seed: of the weights, the order of the data and the posterior's noise.
        output: the run's folder; runs/<data>/<method> by default.
        checkpoint: weights to start from instead of training: a .safetensors or .pth file.
        accelerator: what trains, fits and evaluates: "cpu", "cuda", or "auto" for CUDA where there is some.
        training: how the network is trained.
        augmentation: random crops and flips of the training images.
        places: what makes images of places match.
        laplace: how the posterior is fitted, post hoc, and tuned.
        online: how the posterior is kept during training, by `laplace_online`.
        deep_ensemble: how many networks, and how they are combined.
        pfe: how the uncertainty head of that method is trained.
        hib: how the samples of that method are drawn and compared.
        knn_distance: what an item is compared with, by that method.
        evaluation: how the encoder is evaluated.
    """

    data: DataConfig
    network: NetworkConfig
    method: MethodName = "laplace_posthoc"
    margin: float = 0.7
    seed: int = 0
    output: str | None = None
    checkpoint: str | None = None
    accelerator: Accelerator = "auto"
    training: TrainingConfig = field(default_factory=TrainingConfig)
    augmentation: AugmentationOptions = field(default_factory=AugmentationOptions)
    places: PlacesConfig = field(default_factory=PlacesConfig)
    laplace: LaplaceOptions = field(default_factory=LaplaceOptions)
    online: OnlineOptions = field(default_factory=OnlineOptions)
    deep_ensemble: EnsembleOptions = field(default_factory=EnsembleOptions)
    pfe: PfeOptions = field(default_factory=PfeOptions)
    hib: HibOptions = field(default_factory=HibOptions)
    knn_distance: NeighbourOptions = field(default_factory=NeighbourOptions)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def check(self) -> None:
        """Refuse settings outside their range, before any data are read.

        Raises:
            ValueError: saying which, and what is allowed.
        """
        build(self.training.loss, margin=self.margin)
        refuse_other_than("method", self.method, get_args(MethodName))
        if self.method == "laplace_online" and self.checkpoint is not None:
            raise ValueError(
                "a checkpoint holds no posterior: laplace_online trains, laplace_posthoc can start from one"
            )
        if self.method == "deep_ensemble":
            self._check_members()
        resolve_accelerator(self.accelerator)
        self._check_numbers()
        self._check_training()
        self._check_ood()

    @property
    def options(self) -> Any:
        """The options of the method; None for one that has none."""
        return getattr(self, _SECTIONS.get(self.method, self.method), None)

    def relation_of(self, images: Any) -> Relation:
        """What makes two of these images a pair: their labels, or, for places, their positions."""
        if images.targets.ndim == 1:
            return Relation()
        places = self.places
        return Relation("batch", places.positive_within, places.negative_beyond, places.angle_within)

    def _check_members(self) -> None:
        if self.checkpoint is not None and not self.deep_ensemble.checkpoints:
            raise ValueError(
                f"a checkpoint is one network and a deep ensemble has {self.deep_ensemble.n_members}: name a file for "
                "each of them in --deep_ensemble.checkpoints, or leave the checkpoint out"
            )
        for file in self.deep_ensemble.checkpoints:
            if not Path(file).is_file():
                raise ValueError(f"deep_ensemble.checkpoints: {file} does not exist")

    def _check_numbers(self) -> None:
        places, evaluation = self.places, self.evaluation
        for name, value, least in (
            ("seed", self.seed, 0),
            ("data.seed", self.data.seed, 0),
            ("data.limit", self.data.limit, 1),
            ("data.num_workers", self.data.num_workers, 0),
            ("network.dimension", self.network.dimension, 2),
            ("evaluation.n_samples", evaluation.n_samples, 2),
            ("evaluation.reference", evaluation.reference, NEIGHBOUR),
            ("evaluation.corrupted", evaluation.corrupted, 0),
        ):
            refuse_below(name, value, least)
        refuse_non_positive("places.positive_within", places.positive_within)
        refuse_non_positive("places.relevant_within", places.relevant_within)
        refuse_non_positive("places.angle_within", places.angle_within)
        refuse_below("places.negative_beyond", places.negative_beyond, places.positive_within)
        if (places.angle_within is not None) != bool(self.data.options.get("angles", False)):
            raise ValueError(
                "places.angle_within and the data's angles go together: give --places.angle_within=DEGREES with "
                "--data.options='{angles: true}', or neither"
            )

    def _check_training(self) -> None:
        options = {name: value for name, value in vars(self.training).items() if name != "loss"}
        try:
            Settings(**options, seed=self.seed, num_workers=0)
        except ValueError as error:
            raise ValueError(f"training.{error}") from None

    def _check_ood(self) -> None:
        titles = [found.title or found.name for found in self.data.ood]
        for title, count in Counter(titles).items():
            if count > 1:
                raise ValueError(f"data.ood has {count} sets called {title}: give each its own title")
            if not re.fullmatch(r"[\w.+-]+", title):
                raise ValueError(f"a title in data.ood must be letters, digits, _, ., + or -, got {title!r}")

    def resolved(self) -> dict[str, Any]:
        """Every setting but where the run is, as YAML has it: a run may be moved."""
        return {**_plain(self), "output": None}

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path("runs") / self.data.name / self.method if self.output is None else Path(self.output)


def completed(settings: Mapping[str, Any], kind: Any = RunConfig) -> dict[str, Any]:
    """Give the resolved settings of an older version, and today's defaults for those that it did not have.

    Args:
        settings: as `RunConfig.resolved` gave them.
        kind: the record that they are of.

    Example:
        >>> completed({"name": "folder", "root": "here"}, OodConfig)
        {'name': 'folder', 'root': 'here', 'options': {}, 'title': None}
    """
    known = [setting for setting in fields(kind) if setting.name in settings or _has_default(setting)]
    return {**settings, **{setting.name: _completed(settings, setting) for setting in known}}


def _has_default(setting: Field[Any]) -> bool:
    return (setting.default, setting.default_factory) != (MISSING, MISSING)


def _completed(settings: Mapping[str, Any], setting: Field[Any]) -> Any:
    if setting.name not in settings:
        factory: Any = setting.default_factory
        return _plain(setting.default if factory is MISSING else factory())
    value = settings[setting.name]
    if isinstance(value, Mapping) and is_dataclass(setting.type):
        return completed(value, setting.type)
    if isinstance(value, list) and any(map(is_dataclass, get_args(setting.type))):
        return [completed(item, get_args(setting.type)[0]) for item in value]
    return value


def _plain(value: Any) -> Any:
    """As YAML has it: a tuple is a list there."""
    return yaml.safe_load(yaml.safe_dump(asdict(value) if is_dataclass(value) else value))  # pyright: ignore[reportArgumentType]
