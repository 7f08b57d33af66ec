"""A run's configuration: typed, checked before any work, and written back fully resolved.

Each method's section holds its own options; what they mean is said where they are used.
"""

from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from lam.curvature import Relation, Scope
from lam.hessians.contrastive import Fix, Split
from lam.hessians.last_layer import check_settings
from lam.losses import LossName
from lam.training import Optimizer, Precision

Method = Literal["laplace_posthoc"]
Tune = Literal["calibration", "marginal_likelihood", "none"]


@dataclass
class OodConfig:
    """An out-of-distribution set.

    Attributes:
        name: a data set of `lam.datasets.load_ood`.
        root: its folder, where it needs one.
        options: further options of that data set.
    """

    name: str
    root: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class DataConfig:
    """What is embedded.

    Attributes:
        name: a data set of `lam.datasets.load`.
        root: its folder, where it needs one.
        options: further options of that data set.
        ood: out-of-distribution sets, the main one first.
        limit: at most this many items of each part, for a quick try.
        seed: of the split into parts.
    """

    name: str
    root: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    ood: list[OodConfig] = field(default_factory=list)
    limit: int | None = None
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
    checkpoint_every: int | None = None
    precision: Precision = "32-true"


@dataclass
class LaplaceConfig:
    """How the posterior is fitted and tuned; see `lam.fit` and `BayesianEncoder.tune`."""

    split: Split = "arccos"
    fix: Fix = "fixed"
    negative_weight: float = 1.0
    pairs: Scope = "batch"
    batch_size: int = 256
    prior_precision: float = 1.0
    likelihood_scale: float | None = None
    tune: Tune = "calibration"
    tune_samples: int = 32


@dataclass
class EvaluationConfig:
    """How the encoder is evaluated; see `lam.evaluate`.

    Attributes:
        n_samples: samples behind κ, and sampled networks behind the calibration.
        reference: how many training items the k-NN score compares with.
    """

    n_samples: int = 100
    reference: int = 5000


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
        accelerator: of Lightning Fabric: "auto", "cpu", "cuda", ...
        training: how the network is trained.
        laplace: how the posterior is fitted and tuned.
        evaluation: how the encoder is evaluated.
    """

    data: DataConfig
    network: NetworkConfig
    method: Method = "laplace_posthoc"
    margin: float = 0.7
    seed: int = 0
    output: str | None = None
    checkpoint: str | None = None
    accelerator: str = "auto"
    training: TrainingConfig = field(default_factory=TrainingConfig)
    laplace: LaplaceConfig = field(default_factory=LaplaceConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def check(self) -> None:
        """Refuse settings outside their range, before any data are read.

        Raises:
            ValueError: saying which, and what is allowed.
        """
        laplace = self.laplace
        check_settings(
            margin=self.margin, split=laplace.split, fix=laplace.fix, negative_weight=laplace.negative_weight
        )
        Relation(laplace.pairs)
        for name, value in (
            ("evaluation.n_samples", self.evaluation.n_samples),
            ("laplace.tune_samples", laplace.tune_samples),
            ("laplace.batch_size", laplace.batch_size),
        ):
            if value < 2:
                raise ValueError(f"{name} must be at least 2, got {value}")
        if self.checkpoint is not None and not Path(self.checkpoint).is_file():
            raise ValueError(f"checkpoint {self.checkpoint} does not exist")

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path("runs") / self.data.name / self.method if self.output is None else Path(self.output)


def find_config(path: str | Path) -> Path:
    """Find a configuration file: as given, or among those that lam ships (`configs/digits/laplace_posthoc.yaml`).

    Raises:
        ValueError: naming the ones that ship, where there is none.
    """
    path = Path(path)
    if path.is_file():
        return path
    shipped = Path(str(files("lam") / "configs"))
    parts = path.parts[1:] if path.parts[:1] == ("configs",) else path.parts
    inside = shipped.joinpath(*parts)
    if inside.is_file():
        return inside
    known = ", ".join(sorted(f"configs/{found.relative_to(shipped)}" for found in shipped.glob("*/*.yaml")))
    raise ValueError(f"there is no configuration {path}; lam ships {known}")
