"""How a network is trained: the options of a configuration, and the record of a whole training."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from lam.losses import Loss
from lam.pairs.mining import Miner, MinerName, Mining
from lam.pairs.relation import Relation
from lam.utils.checks import check_at_least, check_choice, check_positive

Optimizer = Literal["adam", "adamw", "rmsprop", "sgd"]
Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
Accelerator = Literal["auto", "cpu", "cuda"]
Stage = Callable[[str], AbstractContextManager[Any]]
"""Maps the name of a stage to the context that it runs in, where a caller times and announces it."""

_LEAST = {"epochs": 1, "batch_size": 2, "weight_decay": 0.0, "checkpoint_every": 1}


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What a configuration says about training.

    Attributes:
        epochs: passes over the data, at least 1.
        batch_size: items a batch, at least 2 for each process; the last batch of an epoch may be smaller.
        per_class: batches of so many items, at least 2, of each of batch_size / per_class random classes, or more
            classes where some are smaller; see `lam.training.batches.Batches`. None for batches that pass through the
            data.
        miner: which pairs of a batch the loss takes, "all", "violating", "easy", "semihard" or "hard", or a miner of
            pytorch-metric-learning; see `lam.pairs.Mining`. A batch in which it finds none has a loss of zero.
        max_pairs: at most so many of these triplets, or pairs of each type for "all", drawn at random; None for no
            limit.
        learning_rate: positive.
        learning_rate_decay: in (0, 1], the learning rate's factor an epoch.
        optimizer: "adam", "adamw", "rmsprop" or "sgd".
        weight_decay: of the optimizer, ≥ 0.
        precision: "32-true", "bf16-mixed" or "16-mixed"; weights are float32 in all of them.
        checkpoint_every: write a checkpoint after so many batches too, beside the one after every epoch.

    Raises:
        ValueError: for one outside its limits, whose name the message begins with.
    """

    epochs: int
    batch_size: int = 256
    learning_rate: float = 1e-3
    learning_rate_decay: float = 1.0
    optimizer: Optimizer = "adam"
    weight_decay: float = 0.0
    miner: MinerName | Miner = "all"
    max_pairs: int | None = None
    per_class: int | None = None
    checkpoint_every: int | None = None
    precision: Precision = "32-true"

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            check_at_least(name, getattr(self, name), least)
        check_positive("learning_rate", self.learning_rate)
        if not 0 < self.learning_rate_decay <= 1:
            raise ValueError(f"learning_rate_decay must lie in (0, 1], got {self.learning_rate_decay}")
        check_choice("optimizer", self.optimizer, get_args(Optimizer))
        check_choice("precision", self.precision, get_args(Precision))
        check_at_least("per_class", self.per_class, 2)
        per_class, size = self.per_class, self.batch_size
        if per_class is not None and (size % per_class or size == per_class):
            raise ValueError(
                f"batch_size must be per_class={per_class} times the number of classes in a batch, at least 2, "
                f"got {size}: take {max(2, round(size / per_class)) * per_class}, or another per_class"
            )
        _ = self.mining  # checks miner and max_pairs

    @property
    def mining(self) -> Mining:
        return Mining(self.miner, self.max_pairs)


@dataclass(frozen=True, kw_only=True)
class Training(TrainingOptions):
    """All settings of a training, beside the network, the data and the method.

    Attributes:
        loss: of `lam.losses`.
        relation: what makes two items a positive or a negative pair; by default their labels.
        seed: of the order of the data and all draws; at least 0.
        pretrained: the network is trained already; a method then does only its later steps.
        trained_by: name and settings of the curvature of the loss that trained such a network; see
            `lam.methods.Method.trained_by`.
        another: maps a seed to a network like the one to train, for a method that trains several; by default
            `lam.models.build` follows the network's recipe.
        validate: called after each epoch with the network in evaluation mode; higher is better. The first best epoch is
            kept; without it, the last one.
        folder: of the checkpoints, written after every epoch; None for none.
        num_workers: processes that read data.
        accelerator: "cpu", "cuda", or "auto" for CUDA if there is one.
        devices: one device: 1, or its index in a list. Under torchrun each process has its own.
        progress: show a progress bar on standard error, in the first process.
        stage: see `Stage`; by default nothing is timed or announced.
    """

    loss: Loss
    relation: Relation | None = None
    seed: int = 0
    pretrained: bool = False
    trained_by: Mapping[str, Any] | None = None
    another: Callable[[int], nn.Module] | None = None
    validate: Callable[[nn.Module], float] | None = None
    folder: str | Path | None = None
    num_workers: int = 0
    accelerator: Accelerator = "auto"
    devices: int | list[int] = 1
    progress: bool = True
    stage: Stage = nullcontext

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("accelerator", self.accelerator, get_args(Accelerator))
        check_at_least("seed", self.seed, 0)
        check_at_least("num_workers", self.num_workers, 0)

    def part(self, name: str) -> Path | None:
        """The folder of checkpoints of one of several trainings; None if none are kept."""
        return None if self.folder is None else Path(self.folder) / name

    @property
    def by_label(self) -> bool:
        """Whether labels make the pairs of a batch, instead of distances."""
        return self.relation is None or self.relation.positive_within is None

    def resume_key(self) -> dict[str, Any]:
        """The settings that decide the weights of an epoch, as JSON."""
        names = [name for name in TrainingOptions.__dataclass_fields__ if name not in ("epochs", "checkpoint_every")]
        return {**{name: getattr(self, name) for name in (*names, "seed")}, **self.mining.settings}


def resolve_accelerator(accelerator: str) -> str:
    """The accelerator that trains, "cpu" or "cuda"; "auto" is CUDA if there is one.

    Apple's mps is never chosen: it has no float64, in which curvatures are summed.
    """
    check_choice("accelerator", accelerator, get_args(Accelerator))
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ValueError("accelerator cuda is not available here: take auto or cpu")
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return accelerator
