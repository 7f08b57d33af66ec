"""Training: one function for every method, on Lightning Fabric for devices and precision.

A method with a gradient of its own hands in a `Step`. The loop is in `lam.training.loop`, options in
`lam.training.settings`.
"""

import os
import warnings
from typing import Any

import torch
from torch import nn

from lam.pairs.pairs import check_label_vector, check_labels
from lam.training.batches import classes_of
from lam.training.loop import History, Loop
from lam.training.settings import Accelerator, Precision, Training, TrainingOptions, resolve_accelerator
from lam.training.steps import DivergenceError, Minibatch, Step
from lam.utils import distributed


def train(
    network: nn.Module, dataset: Any, training: Training, *, step: Step | None = None, method: str | None = None
) -> History:
    """Train a network in place; the same seed gives the same weights, interrupted or not.

    Another call with the same folder and settings goes on from the last good checkpoint; `epochs` may have grown. On
    the CPU the result equals an uninterrupted run to the bit. torch's global random state is restored.

    In several processes, started by torchrun, each calls it with the same arguments and gets the same weights. A batch
    is cut into as many parts, with pairs over the whole; every process takes a batch of fewer than two items a process
    whole. The first process validates and writes checkpoints.

    Args:
        network: maps (N, ...) inputs to unit rows (N, D); left in evaluation mode, with the weights of the best epoch.
        dataset: of (input, label), with a length; `__getitems__` and `labels` are used where it has them.
        training: how; `pretrained`, `another` and `stage` are for methods, and have no effect here.
        step: how the gradient of a batch is taken; by default at the network's own weights.
        method: the method's name, which checkpoints keep: those of another are rejected.

    Returns:
        The history of the run, with the epochs before an interruption.

    Raises:
        ValueError: for data without a positive or without a negative pair, an epoch of batches without positive pairs,
            missing devices, or a folder with checkpoints of other settings.
        DivergenceError: where the loss, the weights or the validation is not finite; the last checkpoint stands.
        CorruptFileError: where the folder has checkpoints and none is whole.

    Example:
        >>> import torch
        >>> from lam import losses, models
        >>> images = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> network = models.build("convnet8", dimension=3)
        >>> data = list(zip(images, [0, 0, 0, 0, 1, 1, 1, 1]))
        >>> training = Training(loss=losses.build(margin=0.7), epochs=2, accelerator="cpu", progress=False)
        >>> history = train(network, data, training)
        >>> len(history.losses), history.best_epoch
        (2, 2)
    """
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ValueError(
            "no parameter of the network requires a gradient: take the head train, or a method without training, such "
            "as laplace_posthoc, knn_distance or deterministic"
        )
    check_data(dataset, training)
    fabric = _fabric(training.accelerator, training.devices, training.precision)
    least = 2 * distributed.world_size()
    if training.batch_size < least:
        raise ValueError(
            f"batch_size must be at least {least}, 2 for each of the {distributed.world_size()} processes, "
            f"got {training.batch_size}"
        )
    with torch.random.fork_rng([fabric.device.index] if fabric.device.type == "cuda" else []):
        return Loop(fabric, network, dataset, training, step or Step(), method).run()


def device_of(accelerator: Accelerator) -> torch.device:
    """The device that `train` uses in this process; `ValueError` for an accelerator that is unknown or missing."""
    return _fabric(accelerator, 1, "32-true").device


def _fabric(accelerator: Accelerator, devices: int | list[int], precision: Precision) -> Any:
    from lightning_fabric import Fabric  # a second to import, for those who only fit

    if not (devices == 1 or (isinstance(devices, list) and len(devices) == 1)):
        raise ValueError(f"devices must be one device, 1 or its index in a list such as [1], got {devices}")
    resolved = resolve_accelerator(accelerator)
    distributed.join()
    places: dict[str, Any] = {"devices": devices} if distributed.world_size() == 1 else _of_torchrun(resolved)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of devices that stay unused; which to use is the caller's choice
        fabric = Fabric(accelerator=resolved, precision=precision, **places)
    if fabric.world_size != distributed.world_size():
        raise ValueError(
            f"the environment asks for {fabric.world_size} processes: start them by "
            f"torchrun --nproc_per_node {fabric.world_size}"
        )
    if fabric.world_size > 1:
        fabric.launch()
    return fabric


def _of_torchrun(accelerator: str) -> dict[str, Any]:
    """Fabric's options of a process that torchrun started, each with a device of its own."""
    if not torch.distributed.is_torchelastic_launched():
        raise ValueError(
            f"torch.distributed runs {distributed.world_size()} processes that torchrun did not start: "
            f"start them by torchrun --nproc_per_node {distributed.world_size()}"
        )
    n_local, n_devices = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if accelerator == "cuda" and n_devices < n_local:
        raise ValueError(
            f"torchrun started {n_local} processes here, and there are {n_devices} CUDA devices: "
            "lower --nproc_per_node, or take the accelerator cpu"
        )
    return {"strategy": "ddp", "devices": n_local, "num_nodes": distributed.world_size() // n_local}


def check_data(dataset: Any, training: Training) -> None:
    """Reject data that `train` would reject, as far as that is known without reading them."""
    if training.loss.needs_classes and not training.by_label:
        raise ValueError(
            f"the loss {type(training.loss).__name__} needs classes, and pairs by distance have none: train on labels"
        )
    if len(dataset) < 2:
        raise ValueError(f"dataset must hold at least 2 items, got {len(dataset)}")
    if training.per_class is not None and not hasattr(dataset, "labels"):
        raise ValueError("per_class needs a data set with labels, and this one has none: leave it out")
    if not hasattr(dataset, "labels") or not (training.by_label or training.per_class):
        return
    labels = torch.as_tensor(dataset.labels)
    if len(labels) != len(dataset):
        raise ValueError(f"dataset has {len(dataset)} items, but {len(labels)} labels")
    (check_labels if training.by_label else check_label_vector)(labels)
    if training.per_class is None:
        return
    available, needed = len(classes_of(dataset)), training.batch_size // training.per_class
    if available < needed:
        raise ValueError(
            f"a batch needs batch_size / per_class = {needed} classes, or groups of places, and the data have "
            f"{available} of at least 2 items: lower batch_size, raise per_class, or leave it out"
        )


__all__ = [
    "DivergenceError",
    "History",
    "Minibatch",
    "Step",
    "Training",
    "TrainingOptions",
    "device_of",
    "train",
]
