"""How a network is trained: the options that a configuration has, and the record that holds all there is to say."""

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
"""Called with the name of a stage, returns the context that it runs in: the caller can time and announce it."""

_LEAST = {"epochs": 1, "batch_size": 2, "weight_decay": 0.0, "checkpoint_every": 1}


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What a configuration says about training.

    Attributes:
        epochs: passes over the data, at least 1.
        batch_size: items a batch, at least 2, for each process; the last batch of an epoch may be smaller.
        per_class: batches are of so many items, at least 2, of each of batch_size / per_class classes drawn at random,
            or of more classes where some have fewer items. No item is in a batch twice, and one that is alone in its
            class in none; see `lam.training.batches.Batches`. None for batches that pass through the data.
        miner: which pairs of a batch the loss takes, "all", "violating", "easy", "semihard" or "hard", or a miner of
            pytorch-metric-learning; see `lam.pairs.Mining`. A batch in which it finds none has a loss of zero.
        max_pairs: at most so many of these triplets, or, of all pairs, so many of each type, drawn at random; None for
            no limit.
        learning_rate: positive.
        learning_rate_decay: in (0, 1], the learning rate's factor an epoch.
        optimizer: "adam", "adamw", "rmsprop" or "sgd".
        weight_decay: of the optimizer, ≥ 0.
        precision: "32-true", "bf16-mixed" or "16-mixed"; weights are float32 in all of them.
        checkpoint_every: write a checkpoint after this many batches too, not after every epoch alone.

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
        _check_divisible(self.per_class, self.batch_size)
        Mining(self.miner, self.max_pairs)  # which refuses others

    @property
    def mining(self) -> Mining:
        """Which pairs the loss takes."""
        return Mining(self.miner, self.max_pairs)


@dataclass(frozen=True, kw_only=True)
class Training(TrainingOptions):
    """All there is to say about a training, beside the network, the data and the method.

    Attributes:
        loss: of `lam.losses`.
        relation: what makes two items a positive or a negative pair; by default their labels.
        seed: of the order of the data and of everything drawn; at least 0.
        pretrained: the network is trained already; a method then does only what comes after that.
        trained_by: of a network that is trained already, name and settings of the curvature of the loss that did it;
            see `lam.methods.Method.trained_by`.
        another: returns a network like the one to train, with the random weights of a seed, for a method that trains
            several; by default the recipe of the network, by which `lam.models.build` made it, is followed.
        validate: called after each epoch with the network in evaluation mode; higher is better, and the first epoch
            with the highest value is kept. Without it the last epoch is.
        folder: where checkpoints are kept, written after every epoch; None for none.
        num_workers: processes that read data.
        accelerator: "cpu", "cuda", or "auto" for CUDA where there is some.
        devices: one device: 1, or its index in a list. Under torchrun each process has its own, whatever this says.
        progress: show a progress bar on standard error, in the first process.
        stage: see `Stage`; by default nothing is timed or announced.

    Raises:
        ValueError: for one outside its limits, whose name the message begins with.
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
        """The folder of the checkpoints of one of several trainings; None where none are kept."""
        return None if self.folder is None else Path(self.folder) / name

    @property
    def by_label(self) -> bool:
        """Whether labels make the pairs of a batch, in place of distances."""
        return self.relation is None or self.relation.positive_within is None

    def resume_key(self) -> dict[str, Any]:
        """Those that decide the weights of an epoch, as JSON."""
        names = [name for name in TrainingOptions.__dataclass_fields__ if name not in ("epochs", "checkpoint_every")]
        return {**{name: getattr(self, name) for name in (*names, "seed")}, **self.mining.settings}


def resolve_accelerator(accelerator: str) -> str:
    """The accelerator that trains, "cpu" or "cuda"; of "auto" the latter where there is one.

    Apple's mps is never chosen: it has no float64, in which curvatures are summed.

    Raises:
        ValueError: for another accelerator, or one that is not there.
    """
    check_choice("accelerator", accelerator, get_args(Accelerator))
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ValueError("accelerator cuda is not available here: take auto or cpu")
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return accelerator


def _check_divisible(per_class: int | None, batch_size: int) -> None:
    check_at_least("per_class", per_class, 2)
    if per_class is not None and (batch_size % per_class or batch_size == per_class):
        raise ValueError(
            f"batch_size must be per_class={per_class} times the number of classes in a batch, at least 2, "
            f"got {batch_size}: take {max(2, round(batch_size / per_class)) * per_class}, or another per_class"
        )
