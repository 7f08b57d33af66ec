"""What a loader yields: inputs alone, or followed by targets."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

Batch = Any
"""A batch of a loader: the inputs, a tensor or a dictionary of named ones; or (inputs, targets, ...).

A dictionary may hold the targets under `labels`, the key that Hugging Face uses.
"""


def split_batch(batch: Batch) -> tuple[Any, Any]:
    """Inputs and targets of a batch; targets are None where it has none."""
    if isinstance(batch, tuple | list):
        if not batch:
            raise ValueError("a batch must hold inputs, got an empty one")
        return batch[0], batch[1] if len(batch) > 1 else None
    if isinstance(batch, Mapping) and "labels" in batch:
        return {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
    return batch, None


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
    if isinstance(inputs, Tensor | Mapping) or hasattr(inputs, "__array__"):  # an array is refused by name later
        return [inputs]
    if isinstance(inputs, tuple | list) and len(inputs) > 1:
        first, second = inputs[:2]
        if isinstance(first, Mapping):
            return [inputs] if isinstance(second, Tensor) else inputs
        are_tensors = isinstance(first, Tensor) and isinstance(second, Tensor)
        if are_tensors and len(first) == len(second) and (labelled or second.ndim < first.ndim):
            return [inputs]
    return inputs
