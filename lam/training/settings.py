"""Settings of training: `TrainingOptions` for a configuration, and `Training` for all settings."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from lam.losses import Loss, TrainableLoss
from lam.pairs.mining import Miner, MinerName, Mining
from lam.pairs.relation import Relation
from lam.utils.checks import check_at_least, check_choice, check_positive

Optimizer = Literal["adam", "adamw", "rmsprop", "sgd"]
Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
Accelerator = Literal["auto", "cpu", "cuda"]
Stage = Callable[[str], AbstractContextManager[Any]]
"""Function from the name of a stage to a context manager around that stage, for example to time it."""

_LEAST = {"epochs": 1, "batch_size": 2, "weight_decay": 0.0, "checkpoint_every": 1}


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The options of training in a configuration.

    Attributes:
        epochs: passes over the data, at least 1.
        batch_size: items in a batch, at least 2 for each process; the last batch of an epoch may be smaller.
        per_class: items of each class in a batch, at least 2. Each batch draws batch_size / per_class random classes,
            or more if classes are smaller; see `lam.training.batches.Batches`. None for random batches of all items.
        miner: choice of the pairs in the loss: "all", "violating", "easy", "semihard", "hard", or a miner of
            pytorch-metric-learning; see `lam.pairs.Mining`. A batch without chosen pairs has a loss of zero.
        max_pairs: greatest number of mined triplets, drawn at random; for "all" and miners of pytorch-metric-learning,
            greatest number of positive pairs, and of negative pairs. None for no limit.
        learning_rate: learning rate of the optimizer, positive.
        learning_rate_decay: factor of the learning rate after each epoch, in (0, 1].
        optimizer: optimizer of the weights.
        weight_decay: weight decay of the optimizer, ≥ 0.
        precision: type of the computation; weights keep their type. "16-mixed" needs a CUDA device.
        checkpoint_every: batches between two checkpoints within an epoch; None for checkpoints after epochs only.

    Raises:
        ValueError: for an option outside its limits.
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
        for name, value in list(vars(self).items()):
            if isinstance(value, np.generic):  # else it would give another seed and no JSON
                object.__setattr__(self, name, value.item())
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
                f"batch_size must be per_class={per_class} times at least 2 classes, got {size}: take "
                f"{max(2, round(size / per_class)) * per_class}, or another per_class"
            )
        _ = self.mining  # checks miner and max_pairs

    @property
    def mining(self) -> Mining:
        return Mining(self.miner, self.max_pairs)


@dataclass(frozen=True, kw_only=True)
class Training(TrainingOptions):
    """All settings of a training except the network, the data and the method.

    Attributes:
        loss: a loss of `lam.losses`, or a subclass; only a `TrainableLoss` may hold trainable parameters.
        relation: definition of positive and negative pairs; by default by label.
        seed: seed of the order of the data and of all random numbers; at least 0.
        pretrained: whether the network is already trained; most methods then do not train it.
        trained_by: for a pretrained network, the result of `lam.methods.Method.trained_by` for its training loss.
        another: function from a seed to a new network of the same kind, for a method that trains several; by default
            `lam.models.build` with the network's recipe.
        validate: computes a score of the network in evaluation mode after each epoch; higher is better. The weights of
            the (first) best epoch are the result; without `validate`, the last weights.
        folder: folder of the checkpoints; None for no checkpoints.
        num_workers: number of processes that read data.
        accelerator: "cpu", "cuda", or "auto" for CUDA if available.
        devices: 1 for one device, or a list with its index. Under torchrun, each process has its own device.
        progress: show a progress bar on standard error, in the first process.
        stage: function from the name of a stage to a context, such as a timer; by default without effect.
    """

    loss: Loss
    relation: Relation = field(default_factory=Relation)
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
        if not isinstance(self.loss, Loss):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"loss must be a loss of lam.losses, got {self.loss!r:.80}: give lam.losses.build(margin=0.7), "
                "lam.losses.PytorchMetricLearning(margin) for that library's contrastive loss, or a subclass of "
                "lam.losses.Loss"
            )
        if not isinstance(self.loss, TrainableLoss) and any(map(_can_learn, (self.loss, *vars(self.loss).values()))):
            raise ValueError(
                f"{type(self.loss).__name__} has parameters, which would not be trained: derive it from "
                "lam.losses.TrainableLoss, or freeze them by requires_grad_(False)"
            )
        check_choice("accelerator", self.accelerator, get_args(Accelerator))
        check_at_least("seed", self.seed, 0)
        check_at_least("num_workers", self.num_workers, 0)

    def part(self, name: str) -> Path | None:
        """The sub-folder for checkpoints of one of several trainings; None without `folder`."""
        return None if self.folder is None else Path(self.folder) / name

    @property
    def by_label(self) -> bool:
        """Whether labels, not distances, define the pairs of a batch."""
        return self.relation.positive_within is None

    def resume_key(self) -> dict[str, Any]:
        """The settings that determine the weights after each epoch, as JSON."""
        names = [name for name in TrainingOptions.__dataclass_fields__ if name not in ("epochs", "checkpoint_every")]
        return {**{name: getattr(self, name) for name in (*names, "seed")}, **self.mining.settings}


def _can_learn(part: object) -> bool:
    tensors = part.parameters() if isinstance(part, nn.Module) else [part]
    return any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors)


def resolve_accelerator(accelerator: str, precision: Precision = "32-true") -> str:
    """The accelerator, "cpu" or "cuda"; "auto" is CUDA if available.

    Apple's mps is never chosen: it lacks float64, which curvatures need. For a CPU, "16-mixed" is rejected, because
    Fabric would train in bfloat16 instead.
    """
    check_choice("accelerator", accelerator, get_args(Accelerator))
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ValueError("accelerator cuda is not available here: take auto or cpu")
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator == "cpu" and precision == "16-mixed":
        raise ValueError("precision 16-mixed needs a CUDA device: take bf16-mixed on the CPU")
    return accelerator
