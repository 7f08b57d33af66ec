"""The options of training and their limits, each stated once; a configuration checks its own against them.

What the options do is told by `lam.training.train`.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from lam.pairs.mining import Miner, MinerName, Mining
from lam.utils.checks import refuse_below, refuse_non_positive, refuse_other_than

Optimizer = Literal["adam", "adamw", "rmsprop", "sgd"]
Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
Accelerator = Literal["auto", "cpu", "cuda"]

_LEAST = {"epochs": 1, "batch_size": 2, "seed": 0, "weight_decay": 0, "num_workers": 0, "checkpoint_every": 1}


@dataclass(frozen=True)
class Settings:
    """The options of `lam.training.train` by which the loop goes.

    Raises:
        ValueError: for one outside its limits, whose name the message begins with.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    learning_rate_decay: float
    optimizer: str
    weight_decay: float
    seed: int
    precision: str
    checkpoint_every: int | None
    num_workers: int
    miner: MinerName | Miner = "all"
    max_pairs: int | None = None
    per_class: int | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            refuse_below(name, getattr(self, name), least)
        refuse_non_positive("learning_rate", self.learning_rate)
        if not 0 < self.learning_rate_decay <= 1:
            raise ValueError(f"learning_rate_decay must lie in (0, 1], got {self.learning_rate_decay}")
        refuse_other_than("optimizer", self.optimizer, get_args(Optimizer))
        refuse_other_than("precision", self.precision, get_args(Precision))
        _refuse_uneven(self.per_class, self.batch_size)
        Mining(self.miner, self.max_pairs)  # which refuses others

    @property
    def mining(self) -> Mining:
        """Which pairs the loss takes."""
        return Mining(self.miner, self.max_pairs)

    def decisive(self) -> dict[str, Any]:
        """Those that decide the weights of an epoch, as JSON."""
        others = {k: v for k, v in vars(self).items() if k not in ("epochs", "checkpoint_every", "num_workers")}
        return {**others, **self.mining.settings}


def resolve_accelerator(accelerator: str) -> str:
    """Give what trains, "cpu" or "cuda": of "auto" the latter where there is one.

    Apple's mps is never chosen: it has no float64, in which curvatures are summed.

    Raises:
        ValueError: for another accelerator, or one that is not there.
    """
    refuse_other_than("accelerator", accelerator, get_args(Accelerator))
    if accelerator == "cuda" and not torch.cuda.is_available():
        raise ValueError("accelerator cuda is not available here: take auto or cpu")
    if accelerator == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return accelerator


def _refuse_uneven(per_class: int | None, batch_size: int) -> None:
    refuse_below("per_class", per_class, 2)
    if per_class is not None and (batch_size % per_class or batch_size == per_class):
        raise ValueError(
            f"batch_size must be per_class={per_class} times the number of classes in a batch, at least 2, "
            f"got {batch_size}: take {max(2, round(batch_size / per_class)) * per_class}, or another per_class"
        )
