"""Training: one function for every method, on Lightning Fabric for devices and precision.

A method that trains otherwise hands in a `Step` of its own: how the gradient of one batch is taken, and what has to be
remembered between batches. Here the data are checked, in `lam.training.settings` the options; the loop is in
`lam.training.loop`. Which loss, which network and which data are chosen elsewhere.

Under torchrun several processes train one network on one device each, as `lam.training.loop` tells.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lam.losses import Loss
from lam.pairs.mining import Miner, MinerName
from lam.pairs.pairs import Pairs, check_label_vector, check_labels
from lam.training.batches import classes_of, labels_of
from lam.training.loop import History, Loop, Task
from lam.training.settings import Accelerator, Optimizer, Precision, Settings, resolve_accelerator
from lam.training.steps import DivergenceError, Minibatch, Step
from lam.utils import distributed
from lam.utils.random import own_randomness

BATCH_SIZE = 256


def train(
    network: nn.Module,
    dataset: Any,
    *,
    loss: Loss,
    epochs: int,
    step: Step | None = None,
    pairs: Callable[[Tensor], Pairs] = Pairs.by_label,
    validate: Callable[[nn.Module], float] | None = None,
    miner: MinerName | Miner = "all",
    max_pairs: int | None = None,
    batch_size: int = BATCH_SIZE,
    per_class: int | None = None,
    learning_rate: float = 1e-3,
    learning_rate_decay: float = 1.0,
    optimizer: Optimizer = "adam",
    weight_decay: float = 0.0,
    seed: int = 0,
    folder: str | Path | None = None,
    method: str | None = None,
    checkpoint_every: int | None = None,
    num_workers: int = 0,
    accelerator: Accelerator = "auto",
    devices: int | list[int] = 1,
    precision: Precision = "32-true",
    progress: bool = True,
) -> History:
    """Train a network in place; the same seed gives the same weights, interrupted or not.

    Called again with the same folder and settings it continues from the last good checkpoint, and the network's weights
    are then the checkpoint's; more epochs than before may be asked for. On the CPU the result equals that of an
    uninterrupted run bit for bit. torch's global random state is used inside, seeded for every batch, and restored.

    In several processes, started by torchrun, each calls it with the same arguments and is left with the same weights.
    A batch is cut into as many parts, and its pairs are formed over the whole of it; one of fewer than two items a
    process is taken whole by all. Validation and checkpoints are the first process's, and the others wait for it.

    Args:
        network: maps (N, ...) inputs to unit rows (N, D); left in evaluation mode, with the weights of the best epoch.
        dataset: of (input, label), with a length; read in batches where it has `__getitems__`, and checked ahead where
            it has `labels`.
        loss: of `lam.losses`.
        epochs: passes over the data, at least 1.
        step: how the gradient of a batch is taken; by default at the network's own weights.
        pairs: makes the pairs of a batch from its collated labels.
        validate: called after each epoch with the network in evaluation mode; higher is better, and the first epoch
            with the highest value is kept. Without it the last epoch is.
        miner: which pairs of a batch the loss takes, "all", "violating", "easy", "semihard" or "hard", or a miner of
            pytorch-metric-learning; see `lam.pairs.Mining`. A batch in which it finds none has a loss of zero.
        max_pairs: at most so many of these triplets, or, of all pairs, so many of each type, drawn at random; None for
            no limit.
        batch_size: items a batch, at least 2, for each process; the last batch of an epoch may be smaller.
        per_class: batches are of so many items, at least 2, of each of batch_size / per_class classes drawn at random,
            or of more classes where some have fewer items. No item is in a batch twice, and one that is alone in its
            class in none; see `lam.training.batches.Batches`. None for batches that pass through the data.
        learning_rate: positive.
        learning_rate_decay: in (0, 1], the learning rate's factor an epoch.
        optimizer: "adam", "adamw", "rmsprop" or "sgd".
        weight_decay: of the optimizer, ≥ 0.
        seed: of the order of the data and of everything drawn; at least 0.
        folder: where checkpoints are kept, written after every epoch; None for none.
        method: whose training this is, kept in the checkpoints: those of another are refused.
        checkpoint_every: also write one after this many batches.
        num_workers: processes that read data.
        accelerator: "cpu", "cuda", or "auto" for CUDA where there is some.
        devices: one device: 1, or its index in a list. Under torchrun each process has its own, whatever this says.
        precision: "32-true", "bf16-mixed" or "16-mixed"; weights are float32 in all of them.
        progress: show a progress bar on stderr, in the first process.

    Returns:
        The history of the run, epochs before an interruption included.

    Raises:
        ValueError: for an option outside what is allowed, data without a positive or without a negative pair, an epoch
            of batches without positive pairs, or a folder whose checkpoints were made with other settings.
        DivergenceError: where the loss, the weights or the validation is not finite; the last checkpoint stands.
        CorruptFileError: where there are checkpoints in the folder and none is whole.

    Example:
        >>> import torch
        >>> from lam import losses, models
        >>> images = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> network = models.build("convnet8", dimension=3)
        >>> data = list(zip(images, [0, 0, 0, 0, 1, 1, 1, 1]))
        >>> history = train(network, data, loss=losses.build(margin=0.7), epochs=2, accelerator="cpu", progress=False)
        >>> len(history.losses), history.best_epoch
        (2, 2)
    """
    settings = Settings(
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        learning_rate_decay=learning_rate_decay,
        optimizer=optimizer,
        weight_decay=weight_decay,
        seed=seed,
        precision=precision,
        checkpoint_every=checkpoint_every,
        num_workers=num_workers,
        miner=miner,
        max_pairs=max_pairs,
        per_class=per_class,
    )
    classes = None if per_class is None else batch_size // per_class
    _check_data(dataset, by_label=pairs == Pairs.by_label, classes=classes)
    kept_in = None if folder is None else Path(folder)
    task = Task(network, dataset, loss, step or Step(), pairs, validate, kept_in, method)
    fabric = _fabric(accelerator, devices, precision)
    n_processes = distributed.world_size()
    least = 2 * n_processes
    if n_processes > 1 and batch_size < least:
        raise ValueError(
            f"batch_size must be at least {least}, 2 for each of the {n_processes} processes, got {batch_size}"
        )
    with own_randomness(fabric.device):
        return Loop(fabric, task, settings).run(progress and distributed.is_rank_zero())


def device_of(accelerator: Accelerator) -> torch.device:
    """Give the device that `train` uses in this process: for what comes after it.

    Raises:
        ValueError: for an accelerator that is unknown or not there.
    """
    return _fabric(accelerator, 1, "32-true").device


def _fabric(accelerator: Accelerator, devices: int | list[int], precision: Precision) -> Any:
    from lightning_fabric import Fabric  # a second to import, for those who only fit

    if not (devices == 1 or (isinstance(devices, list) and len(devices) == 1)):
        raise ValueError(f"devices must be one device, 1 or its index in a list such as [1], got {devices}")
    resolved = resolve_accelerator(accelerator)
    distributed.join()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of devices that stay unused; which to use is the caller's choice
        if distributed.world_size() > 1:
            return _fabric_of_processes(resolved, precision)
        fabric = Fabric(accelerator=resolved, devices=devices, precision=precision)
    if fabric.world_size != 1:
        raise ValueError(
            f"the environment asks for {fabric.world_size} processes: start them by "
            f"torchrun --nproc_per_node {fabric.world_size}"
        )
    return fabric


def _fabric_of_processes(accelerator: str, precision: Precision) -> Any:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.ddp import DDPStrategy

    if not torch.distributed.is_torchelastic_launched():
        raise ValueError(
            f"torch.distributed runs {distributed.world_size()} processes that torchrun did not start: "
            f"start them by torchrun --nproc_per_node {distributed.world_size()}"
        )
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    if accelerator == "cuda" and torch.cuda.device_count() < here:
        raise ValueError(
            f"torchrun started {here} processes here, and there are {torch.cuda.device_count()} CUDA devices: "
            "lower --nproc_per_node, or take the accelerator cpu"
        )
    options: dict[str, Any] = {"devices": here, "num_nodes": distributed.world_size() // here, "precision": precision}
    fabric = Fabric(accelerator=accelerator, strategy=DDPStrategy(), **options)
    fabric.launch()
    return fabric


def _check_data(dataset: Any, *, by_label: bool, classes: int | None) -> None:
    if len(dataset) < 2:
        raise ValueError(f"dataset must hold at least 2 items, got {len(dataset)}")
    if classes is not None and not hasattr(dataset, "labels"):
        raise ValueError("per_class needs a data set with labels, and this one has none: leave it out")
    if not hasattr(dataset, "labels") or not (by_label or classes):
        return
    labels = labels_of(dataset)
    if len(labels) != len(dataset):
        raise ValueError(f"dataset has {len(dataset)} items, but {len(labels)} labels")
    (check_labels if by_label else check_label_vector)(labels)
    if classes is not None:
        _check_classes(len(classes_of(dataset)), classes)


def _check_classes(there: int, wanted: int) -> None:
    if there == 0:
        raise ValueError(
            "per_class draws from classes, or groups of places, of 2 items or more, and the data have none: leave it "
            "out, or give data in which items match"
        )
    if there < wanted:
        raise ValueError(
            f"batch_size / per_class = {wanted} classes are wanted in a batch, and the data have {there} of 2 items or "
            "more: lower batch_size or raise per_class"
        )


__all__ = ["DivergenceError", "History", "Minibatch", "Step", "device_of", "train"]
