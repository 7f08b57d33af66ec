"""What a loader yields: inputs alone, or followed by targets."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lam.pairs.pairs import as_native

Batch = Any
"""A batch of a loader: the inputs, a tensor or a dictionary of named ones; or (inputs, targets, ...).

A dictionary may hold the targets under `labels` or `label`, as Hugging Face's do. Arrays are read as tensors.
"""


def split_batch(batch: Batch) -> tuple[Any, Any]:
    """Inputs and targets of a batch; targets are None where it has none."""
    if isinstance(batch, tuple | list):
        if not batch:
            raise ValueError("a batch must hold inputs, got an empty one")
        return _as_tensors(batch[0]), batch[1] if len(batch) > 1 else None
    targets = next((key for key in ("labels", "label") if isinstance(batch, Mapping) and key in batch), None)
    if targets is None:
        return _as_tensors(batch), None
    return _as_tensors({name: value for name, value in batch.items() if name != targets}), batch[targets]


def _as_tensors(inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return {name: _as_tensors(value) for name, value in inputs.items()}
    return torch.from_numpy(as_native(inputs)) if isinstance(inputs, np.ndarray) else inputs


def labelled(loader: Iterable[Batch], purpose: str) -> Iterator[tuple[Any, Any]]:
    """Inputs and targets of every batch of a loader, for a purpose that takes both.

    Raises:
        ValueError: naming the purpose, for a batch without targets.
    """
    for inputs, targets in map(split_batch, as_batches(loader, labelled=True)):
        if targets is None:
            raise ValueError(f"{purpose} needs batches of inputs with labels")
        yield inputs, targets


def as_batches(inputs: Batch | Iterable[Batch], *, labelled: bool = False) -> Iterable[Batch]:
    """The batches of a loader; a single batch, inputs alone or with labels or positions, is the only one.

    Args:
        inputs: a loader, or what it would yield. Two tensors as long as each other are inputs and targets where the
            second has fewer axes, or else two batches.
        labelled: whether every batch has targets, so that two tensors are no batches.
    """
    if isinstance(inputs, Tensor | Mapping) or hasattr(inputs, "__array_interface__"):  # or an array or PIL image
        return [inputs]
    if isinstance(inputs, tuple | list) and len(inputs) > 1:
        first, second = inputs[:2]
        if isinstance(first, Mapping):
            return [inputs] if isinstance(second, Tensor | np.ndarray) else inputs
        are_tensors = isinstance(first, Tensor | np.ndarray) and isinstance(second, Tensor | np.ndarray)
        if are_tensors and len(first) == len(second) and (labelled or second.ndim < first.ndim):
            return [inputs]
    return inputs
