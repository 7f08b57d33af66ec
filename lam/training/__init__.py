"""Training: one function for every method, with devices and precision by Lightning Fabric.

A method with its own gradient passes a `Step`. `lam.training.loop` has the loop, `lam.training.settings` the options.
"""

import os
import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from lam.models.weights import check_tensors, unwrapped
from lam.pairs.pairs import as_targets, check_label_vector, check_labels
from lam.training.batches import classes_of, labels_of_items
from lam.training.checkpoints import lock_folder
from lam.training.loop import History, Loop
from lam.training.settings import Accelerator, Precision, Training, TrainingOptions, resolve_accelerator
from lam.training.steps import DivergenceError, Minibatch, Step
from lam.utils import distributed


def train(
    network: nn.Module, dataset: Any, training: Training, *, step: Step | None = None, method: str | None = None
) -> History:
    """Train a network in place; the same seed gives the same weights, interrupted or not.

    Another call with the same folder, settings and data resumes from the last good checkpoint; `epochs` may be larger.
    On the CPU, the result then equals an uninterrupted run to the bit. torch's global random state does not change.

    Under torchrun, every process calls `train` with the same arguments and gets the same weights. The processes share
    the items of a batch, and form pairs over the whole batch. A batch with fewer than two items for each process is not
    divided. The first process validates and writes checkpoints.

    Args:
        network: maps inputs (N, ...) to unit embeddings (N, D). After training, it is in evaluation mode, with the
            weights of the best epoch. Wrappers, such as torch.compile's, share these weights.
        dataset: data set of (input, label, ...) with a length. It may have `__getitems__`, and all labels as `labels`
            or `targets`.
        training: the settings; `pretrained`, `another` and `stage` are for methods and have no effect here.
        step: gradient of a batch; by default the gradient of the loss at the network's current weights.
        method: name of the method; checkpoints of another method are rejected.

    Returns:
        The history of the training, including the epochs before an interruption.

    Raises:
        ValueError: for data without a positive or without a negative pair, an epoch whose batches have no positive
            pair, missing devices, a folder with checkpoints of other settings or data, or of another process that still
            trains, or a network whose state_dict holds more than tensors.
        DivergenceError: if the loss, a weight or the validation is not finite; the last checkpoint stays.
        CorruptFileError: if every checkpoint of the folder is damaged.

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
            "no parameter of the network requires a gradient: use the head train, or a method without training, such "
            "as laplace_posthoc, knn_distance or deterministic"
        )
    check_tensors(network)
    check_data(dataset, training)
    fabric = _fabric(training.accelerator, training.devices, training.precision)
    least = 2 * distributed.world_size()
    if training.batch_size < least:
        raise ValueError(
            f"batch_size must be at least {least}, 2 for each of the {distributed.world_size()} processes, "
            f"got {training.batch_size}"
        )
    with ExitStack() as stack, torch.random.fork_rng([fabric.device.index] if fabric.device.type == "cuda" else []):
        if (folder := training.folder) is not None:
            distributed.broadcast_from_rank_zero(lambda: stack.enter_context(lock_folder(folder)))
        history = Loop(fabric, unwrapped(network), dataset, training, step or Step(), method).run()
    network.eval()  # a wrapper has a mode of its own
    return history


def device_of(accelerator: Accelerator, devices: int | list[int] = 1) -> torch.device:
    """The device that `train` uses in this process; a `ValueError` for an unknown or missing accelerator or device."""
    return _fabric(accelerator, devices, "32-true").device


def _fabric(accelerator: Accelerator, devices: int | list[int], precision: Precision) -> Any:
    from lightning_fabric import Fabric  # imported here, because it takes a second that `lam.fit` saves

    if not (devices == 1 or (isinstance(devices, list) and len(devices) == 1)):
        raise ValueError(f"devices must be 1 or a list of one index, such as [1], got {devices}")
    resolved = resolve_accelerator(accelerator, precision)
    distributed.join()
    places: dict[str, Any] = {"devices": devices} if distributed.world_size() == 1 else _of_torchrun(resolved)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Fabric warns of unused devices, which the caller left unused on purpose
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
    """Fabric's options for a process of torchrun; each process has its own device."""
    if not torch.distributed.is_torchelastic_launched():
        raise ValueError(
            f"torch.distributed runs {distributed.world_size()} processes that torchrun did not start: "
            f"start them by torchrun --nproc_per_node {distributed.world_size()}"
        )
    n_local, n_devices = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if accelerator == "cuda" and n_devices < n_local:
        raise ValueError(
            f"torchrun started {n_local} processes for {n_devices} CUDA devices: lower --nproc_per_node, or use "
            "accelerator cpu"
        )
    return {"strategy": "ddp", "devices": n_local, "num_nodes": distributed.world_size() // n_local}


def check_items(dataset: Any) -> None:
    """Reject a data set without a length or without items."""
    has_items = hasattr(type(dataset), "__getitem__") or hasattr(type(dataset), "__getitems__")
    if not (has_items and hasattr(type(dataset), "__len__")):
        raise ValueError(
            f"dataset must have a length and items (input, label), got {type(dataset).__name__}: give a data set, such "
            "as digits.train or loader.dataset"
        )
    if len(dataset) == 0:
        raise ValueError("dataset must hold at least 2 items, got 0")


def check_data(dataset: Any, training: Training) -> None:
    """Reject data with a length or labels that `train` cannot use."""
    check_items(dataset)
    if training.loss.needs_classes and not training.by_label:
        raise ValueError(
            f"the loss {type(training.loss).__name__} needs classes, not pairs by distance: train on labels"
        )
    if len(dataset) < 2:
        raise ValueError(f"dataset must hold at least 2 items, got {len(dataset)}")
    labels = getattr(dataset, "labels", None) if training.per_class is None else labels_of_items(dataset)
    if training.per_class is not None and labels is None:
        raise ValueError(
            f"per_class needs a data set with labels, got {type(dataset).__name__} without: set its attribute labels "
            "to the labels of all items, or leave per_class out"
        )
    if labels is None or not (training.by_label or training.per_class):
        return
    labels = as_targets(labels)
    if len(labels) != len(dataset):
        raise ValueError(f"dataset has {len(dataset)} items, but {len(labels)} labels")
    (check_labels if training.by_label else check_label_vector)(labels)
    if training.per_class is None:
        return
    available, needed = len(classes_of(dataset)), training.batch_size // training.per_class
    if available < needed:
        raise ValueError(
            f"a batch needs batch_size / per_class = {needed} classes, or groups of places, of at least 2 items, got "
            f"{available}: lower batch_size, raise per_class, or leave it out"
        )


__all__ = ["DivergenceError", "History", "Minibatch", "Step", "Training", "TrainingOptions", "device_of", "train"]
