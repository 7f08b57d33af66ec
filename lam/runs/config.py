"""`RunConfig`, the typed configuration of a run. Each section checks its own settings.

`lam.methods` has the options of methods; `lam.runs.config_files` reads files and the command line.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from lam import losses, methods, models
from lam.datasets.augmented import AugmentationOptions
from lam.datasets.base import Dataset
from lam.datasets.splits import GalleryKind
from lam.inputs.corruption import KINDS, PUBLISHED_KINDS
from lam.methods import Method
from lam.models.frozen import Head
from lam.pairs import Relation, Relevance, relevance_of
from lam.pairs.mining import MinerName
from lam.retrieval.metrics.reference import NEIGHBOUR
from lam.training.settings import Accelerator, TrainingOptions, resolve_accelerator
from lam.utils.checks import check_at_least, check_positive
from lam.utils.settings import validated

Duplicates = Literal["keep", "drop", "refuse"]

METHOD = "method"
COMMAND = "lam run"
UNSEEN = "unseen"
"""Name of the held-out classes in keys of metrics, in place of the name of an OOD set."""


@dataclass(frozen=True)
class OodConfig:
    """An out-of-distribution set.

    Attributes:
        name: a data set of `lam.datasets.load_ood`.
        root: folder of the data set, if it needs one.
        options: other options of the data set.
        title: name in tables and keys of metrics; by default `name`.
    """

    name: str
    root: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    title: str | None = None

    def __post_init__(self) -> None:
        _check_options(self.options, name="name", root="root", seed="data.seed", like="data.name")
        if not re.fullmatch(r"[\w.+-]+", self.key):
            raise ValueError(f"title must be letters, digits, _, ., + or -, got {self.key!r}")
        if self.key == UNSEEN:
            raise ValueError(f"title must not be {UNSEEN}: metrics use it for held-out classes")

    @property
    def key(self) -> str:
        """The name in tables and keys of metrics."""
        return self.title or self.name


@dataclass(frozen=True)
class DataConfig:
    """The data sets of a run.

    Attributes:
        name: a data set of `lam.datasets.load`.
        root: folder of the data set, if it needs one.
        options: other options of the data set.
        ood: out-of-distribution sets, the main one first.
        strangers: share of classes in [0, 1) held out of training, so that `lam calibrate` can bound false accepts for
            unseen classes. By default 0.1 with 20 or more classes, with exceptions: see `lam.datasets.splits`.
        gallery: `classes` if every query has a match, `identities` if a query may lack one. By default `identities` for
            places, faces and data without labels, else `classes`.
        limit: greatest number of items in each split and OOD set, for a quick try.
        soft_labels: a .npy file with class probabilities, a row for each item of `lam.datasets.load(...).test` (before
            `limit` and `strangers` remove items); or CIFAR-10H's folder.
        num_workers: number of processes that read images.
        seed: seed of random splits.
        duplicates: treatment of repeated images or texts: `keep` all, with a warning; `drop` all except one, or all if
            their labels differ; or `refuse` the data.
        skip_damaged: whether to skip damaged image files, and rows of a table with an empty text, answer or label; by
            default an error.
    """

    name: str
    root: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    ood: list[OodConfig] = field(default_factory=list)
    strangers: float | None = None
    gallery: GalleryKind | None = None
    limit: int | None = None
    soft_labels: str | None = None
    num_workers: int = 0
    seed: int = 0
    duplicates: Duplicates = "keep"
    skip_damaged: bool = False

    def __post_init__(self) -> None:
        _check_options(self.options, name="data.name", root="data.root", seed="data.seed")
        check_at_least("seed", self.seed, 0)
        check_at_least("limit", self.limit, 1)
        check_at_least("num_workers", self.num_workers, 0)
        if self.strangers is not None and not 0 <= self.strangers < 1:
            raise ValueError(f"strangers must be a share of the classes in [0, 1), got {self.strangers}")
        for key, count in Counter(each.key for each in self.ood).items():
            if count > 1:
                raise ValueError(f"ood has {count} sets called {key}: give each its own title")

    def completed(self, network: str) -> "DataConfig":
        """The settings with absolute paths, and with a pretrained network's preprocessing as the default."""
        ood = [replace(each, root=_absolute(each.root)) for each in self.ood]
        root, soft_labels = _absolute(self.root), _absolute(self.soft_labels)
        options = {**self.options, **_preprocessing(network, self.options.get("preprocessing") or {})}
        return replace(self, root=root, soft_labels=soft_labels, ood=ood, options=options)


@dataclass(frozen=True)
class NetworkConfig:
    """The network.

    Attributes:
        name: a network of `lam.models.build`.
        dimension: embedding dimensions D.
        weights: name of the pretrained weights in the network's library; None for random weights.
        head: `train` trains a linear layer from features to embeddings; `identity` takes the features as embeddings,
            for `efficientnet_lite0` and networks for sentences.
        options: other options of the network.
    """

    name: str
    dimension: int = 3
    weights: str | None = None
    head: Head = "train"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_at_least("dimension", self.dimension, 2)
        own = {name: f"network.{name}" for name in ("name", "dimension", "weights")}
        _check_options(self.options, **own, seed="seed")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(TrainingOptions):
    """Training of the network; see `lam.training.TrainingOptions`.

    Attributes:
        loss: a loss of `lam.losses.LOSSES`.
        temperature: temperature of `supcon`, `infonce` and `varcon`, and the initial temperature of `aninfonce`.
    """

    loss: str = field(default="contrastive", metadata={"known": losses.LOSSES})
    temperature: float = losses.TEMPERATURE
    epochs: int = 3
    miner: MinerName = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        losses.find(self.loss)
        check_positive("temperature", self.temperature)


@dataclass(frozen=True)
class PlacesConfig:
    """Rules for matching images of places; no effect on data with labels.

    Attributes:
        positive_within: greatest distance of a positive pair in training, in metres.
        negative_beyond: least distance of a negative pair, in metres.
        relevant_within: greatest distance of a right answer, in metres.
        angle_within: greatest angle between the views of a positive pair, in degrees; None to ignore angles.
    """

    positive_within: float = 10.0
    negative_beyond: float = 25.0
    relevant_within: float = 25.0
    angle_within: float | None = None

    def __post_init__(self) -> None:
        for name in ("positive_within", "relevant_within", "angle_within"):
            check_positive(name, getattr(self, name))
        check_at_least("negative_beyond", self.negative_beyond, float(self.positive_within))

    def relation_of(self, items: Dataset) -> Relation:
        """The rule for positive and negative pairs: by label, or by position for images of places."""
        if items.targets.ndim == 1:
            return Relation()
        return Relation("batch", self.positive_within, self.negative_beyond, self.angle_within)

    def relevance_of(self, items: Dataset, relation: Relation | None = None) -> Relevance:
        """The items that match each query by `relation`, by default `relation_of(items)`."""
        relation = self.relation_of(items) if relation is None else relation
        return relevance_of(relation, items.targets, is_query=items.is_query, relevant_within=self.relevant_within)


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation of the encoder; see `lam.evaluate`.

    Attributes:
        n_samples: number of samples of each item, for κ and calibration metrics; also kept by the saved encoder.
        reference: number of training items among which the k-NN score finds neighbours.
        corrupted: number of test items to corrupt, to test whether κ falls with quality; 0 skips the test.
        corruptions: kinds of `lam.inputs.corruption`, such as `[fog, motion-blur]`, or `all`; by default `noise`,
            `blur`, `contrast` and `crop` for images, and all kinds for texts.
        unseen: number of items of held-out classes. Each is searched for among the others; 0 skips these searches.
        costly: whether to compute slow metrics too; see `lam.evaluate`.
    """

    n_samples: int = 100
    reference: int = 5000
    corrupted: int = 200
    corruptions: list[str] | str | None = field(default=None, metadata={"known": ("all", *KINDS, *PUBLISHED_KINDS)})
    unseen: int = 2000
    costly: bool = False

    def __post_init__(self) -> None:
        for name, least in {"n_samples": 2, "reference": NEIGHBOUR, "corrupted": 0, "unseen": 0}.items():
            check_at_least(name, getattr(self, name), least)


@dataclass(frozen=True)
class AmbiguityConfig:
    """Learning of κ_a (concentration of an item's matches) and p_known (probability that an item is known).

    Both are learned on the validation split; see `lam.tuning.ambiguity`.

    Attributes:
        learn: whether to learn both, so that κ is computed from κ_e, κ_a and p_known. By default, both are learned if
            the run's `checkpoint` has a κ head (a layer that predicts κ) and enough items have a match.
        reference: number of training items that join the validation split as possible neighbours.
    """

    learn: bool | None = None
    reference: int = 20000

    def __post_init__(self) -> None:
        check_at_least("reference", self.reference, 0)


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run.

    Attributes:
        method: the method with its options.
        margin: margin of the loss and of the miner, in (0, 2]; see `lam.losses.build`.
        seed: seed of the weights, the order of the data and the posterior's noise.
        output: folder of the run; runs/<data>/<method> by default.
        checkpoint: weights that replace training: a .safetensors or .pth file, or the folder of a finished run. A
            Laplace posterior also uses that run's κ head: the head computes κ_a, and p_known is learned on the
            validation split.
        accelerator: device of the run: "cpu", "cuda", or "auto" for CUDA if available.
        augmentation: random crops and flips of the training images.
    """

    data: DataConfig
    network: NetworkConfig
    method: Method
    margin: float = 0.7
    seed: int = 0
    output: str | None = None
    checkpoint: str | None = None
    accelerator: Accelerator = "auto"
    training: TrainingConfig = field(default_factory=TrainingConfig)
    augmentation: AugmentationOptions = field(default_factory=AugmentationOptions)
    places: PlacesConfig = field(default_factory=PlacesConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    ambiguity: AmbiguityConfig = field(default_factory=AmbiguityConfig)

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}

    @staticmethod
    def parsed(settings: Mapping[str, Any]) -> "RunConfig":
        """The configuration from the settings of a YAML file; errors as in `lam.utils.settings.validated`."""
        name, options = named_method(settings.get(METHOD))
        if name is None:
            raise ValueError(f"{METHOD}.name is missing; known are {', '.join(methods.METHODS)}")
        method = validated(methods.find(name), options, COMMAND, prefix=f"{METHOD}.")
        config = validated(RunConfig, {**settings, METHOD: method}, COMMAND)
        return replace(config, data=config.data.completed(config.network.name), checkpoint=_absolute(config.checkpoint))

    def __post_init__(self) -> None:
        check_at_least("seed", self.seed, 0)
        if (self.places.angle_within is not None) != bool(self.data.options.get("angles", False)):
            raise ValueError(
                "places.angle_within and the data's angles go together: give --places.angle_within=DEGREES with "
                "--data.options='{angles: true}', or neither"
            )

    def check(self) -> None:
        """Check the loss, the device, and whether the method can start with these settings; read no data.

        Raises:
            ValueError: naming the setting and its allowed values.
        """
        self.loss()
        self.method.check_start(pretrained=self.checkpoint is not None)
        resolve_accelerator(self.accelerator, self.training.precision)

    def loss(self) -> losses.Loss:
        """The training loss."""
        temperature, dimension = self.training.temperature, self.network.dimension
        return losses.build(self.training.loss, margin=self.margin, temperature=temperature, dimension=dimension)

    def resolved(self) -> dict[str, Any]:
        """All settings in YAML's types; `output` is None, because a run may be moved."""
        settings = {**asdict(self), METHOD: self.method.settings(), "output": None}
        return yaml.safe_load(yaml.safe_dump(settings, sort_keys=False))  # turns tuples into lists

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path("runs") / self.data.name / self.method.name if self.output is None else Path(self.output)


def _absolute(path: str | None) -> str | None:
    """The absolute path; an empty path stays empty."""
    return str(Path(path).absolute()) if path else path


def _preprocessing(network: str, settings: Any) -> dict[str, Any]:
    """The option `preprocessing` for a pretrained network, overridden by the settings; empty for other networks."""
    if (wanted := models.preprocessing_of(network)) is None:
        return {}
    own = wanted.to_json()
    if not isinstance(settings, Mapping) or settings.get("mode", own["mode"]) != own["mode"]:
        return {}  # the data set rejects such settings
    kept = ("mean", "std", "resampling") if settings else tuple(own)
    return {"preprocessing": {**{name: own[name] for name in kept}, **settings}}


def _check_options(options: Mapping[str, Any], **settings: str) -> None:
    """Reject options with the name of a setting, because one of the two would have no effect."""
    for name in options.keys() & settings.keys():
        raise ValueError(f"options must not have {name}: use the setting {settings[name]}")


def named_method(section: Any) -> tuple[str | None, dict[str, Any]]:
    """The name and the options of a method, from its name or a mapping with both; a `ValueError` for other values."""
    options = {"name": section} if isinstance(section, str | None) else section
    if not isinstance(options, Mapping) or not isinstance(options.get("name"), str | None):
        raise ValueError(f"{METHOD} must be a name, or a mapping with a name and options, got {section!r}")
    return options.get("name"), {option: value for option, value in options.items() if option != "name"}
