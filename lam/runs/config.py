"""A run's configuration: typed, checked before any work, and written back fully resolved.

The options of a method are described in `lam.methods`; files and the command line are read by `lam.runs.config_files`.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from lam import losses, methods, models
from lam.datasets.augmented import AugmentationOptions
from lam.datasets.base import Dataset, GalleryKind
from lam.inputs.corruption import KINDS, PUBLISHED_KINDS
from lam.methods import Method
from lam.models.frozen import Head
from lam.pairs.mining import MinerName
from lam.pairs.relation import Relation
from lam.pairs.relevance import Relevance, relevance_of
from lam.retrieval.metrics.reference import NEIGHBOUR
from lam.training.settings import Accelerator, TrainingOptions, resolve_accelerator
from lam.utils.checks import check_at_least, check_positive
from lam.utils.settings import validated

Duplicates = Literal["keep", "drop", "refuse"]

METHOD = "method"
COMMAND = "lam run"
UNSEEN = "unseen"
"""In keys of metrics: of classes that were set aside before training."""


@dataclass
class OodConfig:
    """An out-of-distribution set.

    Attributes:
        name: a data set of `lam.datasets.load_ood`.
        root: its folder, where it needs one.
        options: further options of that data set.
        title: its name in tables, where two sets have one name.
    """

    name: str
    root: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    title: str | None = None


@dataclass
class DataConfig:
    """The data.

    Attributes:
        name: a data set of `lam.datasets.load`.
        root: its folder, where it needs one.
        options: further options of that data set.
        ood: out-of-distribution sets, the main one first.
        strangers: the share of classes that is set aside before training, in [0, 1), for `lam calibrate` to promise
            false accepts of classes never trained on; by default 0.1 where there are at least 20 classes, else 0.
        gallery: what a gallery of these data is: `classes`, of which one is sought, or `identities`, which may be
            there or not; by default what the data set says, of your own folders and texts `classes`.
        limit: at most this many items of each part, for a quick try.
        soft_labels: a .npy file of how often people gave each class to each item of the test split, such as that of
            CIFAR-10H, or the folder with it; or nothing.
        num_workers: processes that read images, in training and after.
        seed: of the split into parts.
        duplicates: what to do with copies, the same image or text twice: `keep` them with a warning; `drop` all but
            one, and every item of one content under several labels; or `refuse` the data.
        skip_damaged: leave image files out that cannot be read, in place of refusing the data.
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


@dataclass
class NetworkConfig:
    """The network.

    Attributes:
        name: a network of `lam.models.build`.
        dimension: embedding dimensions D.
        weights: the library's name of pretrained weights; None for random ones.
        head: `train`, a linear layer from features to embeddings; or, of `efficientnet_lite0` and networks for
            sentences, `identity`: their own features, of which nothing is trained, for labels that occur once.
        options: further options of that network.
    """

    name: str
    dimension: int = 3
    weights: str | None = None
    head: Head = "train"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(TrainingOptions):
    """How the network is trained; see `lam.training.TrainingOptions`.

    Attributes:
        loss: of `lam.losses.LOSSES`.
        temperature: of the losses `supcon`, `infonce`, `varcon` and, to begin with, `aninfonce`.
    """

    loss: str = field(default="contrastive", metadata={"known": losses.LOSSES})
    temperature: float = losses.TEMPERATURE
    epochs: int = 3
    miner: MinerName = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        losses.find(self.loss)


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

    def relation_of(self, items: Dataset) -> Relation:
        """What makes two items a pair: their labels, or, for places, their positions."""
        if items.targets.ndim == 1:
            return Relation()
        return Relation("batch", self.positive_within, self.negative_beyond, self.angle_within)

    def relevance_of(self, items: Dataset, relation: Relation | None = None) -> Relevance:
        """Which items match each query; by default as `relation_of` the same items."""
        relation = self.relation_of(items) if relation is None else relation
        return relevance_of(relation, items.targets, is_query=items.is_query, relevant_within=self.relevant_within)


@dataclass
class EvaluationConfig:
    """How the encoder is evaluated; see `lam.evaluate`.

    Attributes:
        n_samples: samples behind κ, and sampled networks behind the calibration: when the posterior is tuned, in the
            evaluation and wherever the encoder embeds afterwards.
        reference: how many training items the k-NN score compares with.
        corrupted: how many test images are corrupted, to see whether κ falls with their quality; 0 for none.
        corruptions: how: some kinds of `lam.inputs.corruption`, such as `[fog, motion-blur]`, or `all`; by default
            `noise`, `blur`, `contrast` and `crop`, of texts all there are.
        unseen: how many items of classes set aside are searched for among each other; 0 for none.
        costly: whether what takes longer is measured too; see `lam.evaluate`.
    """

    n_samples: int = 100
    reference: int = 5000
    corrupted: int = 200
    corruptions: list[str] | str | None = field(default=None, metadata={"known": ("all", *KINDS, *PUBLISHED_KINDS)})
    unseen: int = 2000
    costly: bool = False


@dataclass
class AmbiguityConfig:
    """Whether the encoder learns its ambiguity on the validation split; see `Encoder.learn_ambiguity`.

    Attributes:
        learn: whether it does; by default with the κ head of a `checkpoint`, where enough items have a match. κ is then
            A_D⁻¹(p_known A_D(κ_a)), and no longer the posterior's alone.
        reference: how many training items the nearest is looked for among, beside the validation split's.
    """

    learn: bool | None = None
    reference: int = 20000


@dataclass
class RunConfig:
    """A whole run.

    Attributes:
        data: the data that are embedded.
        network: the network.
        method: which system, with its options.
        margin: of the contrastive loss, in (0, 2].
        seed: of the weights, the order of the data and the posterior's noise.
        output: the run's folder; runs/<data>/<method> by default.
        checkpoint: weights to start from instead of training: a .safetensors or .pth file, or the folder of a finished
            run. Of a run the κ head comes with them, where it has one: a Laplace posterior then learns p_known on the
            validation split, and κ_a is what the head says.
        accelerator: the device of training, fit and evaluation: "cpu", "cuda", or "auto" for CUDA where there is some.
        training: how the network is trained.
        augmentation: random crops and flips of the training images.
        places: what makes images of places match.
        evaluation: how the encoder is evaluated.
        ambiguity: whether it learns how closely matches lie, and how known an item is.
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
        """The configuration of settings, as a YAML file holds them.

        Raises:
            ValueError: naming every setting that is unknown, missing, of another type or outside its range.
        """
        name, options = named_method(settings.get(METHOD))
        if name is None:
            raise ValueError(f"{METHOD}.name is missing; known are {', '.join(methods.METHODS)}")
        method = validated(methods.find(name), options, COMMAND, prefix=f"{METHOD}.")
        config = validated(RunConfig, {**settings, METHOD: method}, COMMAND)
        _make_absolute(config)
        _read_as_pretrained(config)
        return config

    def check(self) -> None:
        """Refuse settings outside their range, before any data are read.

        Raises:
            ValueError: saying which, and what is allowed.
        """
        self.loss()
        self.method.check_start(pretrained=self.checkpoint is not None)
        resolve_accelerator(self.accelerator)
        self._check_numbers()
        self._check_ood()
        self._check_options()

    def loss(self) -> losses.Loss:
        """The training loss."""
        temperature, dimension = self.training.temperature, self.network.dimension
        return losses.build(self.training.loss, margin=self.margin, temperature=temperature, dimension=dimension)

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
            ("evaluation.unseen", evaluation.unseen, 0),
            ("ambiguity.reference", self.ambiguity.reference, 0),
        ):
            check_at_least(name, value, least)
        check_positive("training.temperature", self.training.temperature)
        if self.data.strangers is not None and not 0 <= self.data.strangers < 1:
            raise ValueError(f"data.strangers must be a share of the classes in [0, 1), got {self.data.strangers}")
        check_positive("places.positive_within", places.positive_within)
        check_positive("places.relevant_within", places.relevant_within)
        check_positive("places.angle_within", places.angle_within)
        check_at_least("places.negative_beyond", places.negative_beyond, float(places.positive_within))
        if (places.angle_within is not None) != bool(self.data.options.get("angles", False)):
            raise ValueError(
                "places.angle_within and the data's angles go together: give --places.angle_within=DEGREES with "
                "--data.options='{angles: true}', or neither"
            )

    def _check_ood(self) -> None:
        titles = [outside.title or outside.name for outside in self.data.ood]
        for title, count in Counter(titles).items():
            if count > 1:
                raise ValueError(f"data.ood has {count} sets called {title}: give each its own title")
            if not re.fullmatch(r"[\w.+-]+", title):
                raise ValueError(f"a title in data.ood must be letters, digits, _, ., + or -, got {title!r}")
            if title == UNSEEN:
                raise ValueError(f"a title in data.ood must not be {UNSEEN}: metrics have it for classes set aside")

    def _check_options(self) -> None:
        """Refuse options that are settings of their own: one of the two would have no effect."""
        own = {"name": "name", "root": "root", "seed": "data.seed", "like": "data.name"}
        sections = [("data.options", self.data.options, {name: f"data.{name}" for name in ("name", "root", "seed")})]
        sections += [(f"the options of {each.name} in data.ood", each.options, own) for each in self.data.ood]
        network = {name: f"network.{name}" for name in ("name", "dimension", "weights")}
        sections.append(("network.options", self.network.options, {**network, "seed": "seed"}))
        for section, options, settings in sections:
            for name in options.keys() & settings.keys():
                raise ValueError(f"{section} must not have {name}, for which there is the setting {settings[name]}")

    def resolved(self) -> dict[str, Any]:
        """Every setting but the output, as YAML has it: a run may be moved."""
        settings = {**asdict(self), METHOD: self.method.settings(), "output": None}
        return yaml.safe_load(yaml.safe_dump(settings, sort_keys=False))  # a tuple is a list there

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path("runs") / self.data.name / self.method.name if self.output is None else Path(self.output)


def _make_absolute(config: RunConfig) -> None:
    """Let paths lead to the same place from every folder."""
    for section, name in (*((each, "root") for each in (config.data, *config.data.ood)), (config.data, "soft_labels")):
        if path := getattr(section, name):
            setattr(section, name, str(Path(path).absolute()))
    if config.checkpoint is not None:
        config.checkpoint = str(Path(config.checkpoint).absolute())


def _read_as_pretrained(config: RunConfig) -> None:
    """Let images be read as a pretrained network takes them; what the settings say of that stands above it."""
    if (wanted := models.preprocessing_of(config.network.name)) is None:
        return
    own, given = wanted.to_json(), config.data.options.get("preprocessing") or {}
    if not isinstance(given, Mapping) or given.get("mode", own["mode"]) != own["mode"]:
        return  # which is refused where it is read
    kept = ("mean", "std", "resampling") if given else tuple(own)
    config.data.options["preprocessing"] = {**{name: own[name] for name in kept}, **given}


def named_method(section: Any) -> tuple[str | None, dict[str, Any]]:
    """The name of a method and its options, of the section of a configuration: a mapping, or the name alone.

    Raises:
        ValueError: for what is neither.
    """
    options = {"name": section} if isinstance(section, str | None) else section
    if not isinstance(options, Mapping) or not isinstance(options.get("name"), str | None):
        raise ValueError(f"{METHOD} must be a name, or a mapping with a name and options, got {section!r}")
    return options.get("name"), {option: value for option, value in options.items() if option != "name"}
