"""Batches of a loader, with hashes that recognise items, and `HeldOut`: batches for evaluation, tuning and learning."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.data import Dataset

from lam.models.head import n_items
from lam.pairs import Relation, Relevance, relevance_of
from lam.pairs.pairs import as_native

Batch = Any
"""A batch of a loader: inputs, or (inputs, targets, ...). Inputs are a tensor, or a dictionary of named tensors.

A dictionary may hold targets under `labels` or `label`, as in Hugging Face data sets. Arrays, and tables of pandas,
become tensors.
"""

REMEMBERED = 64  # greatest number of training items that an encoder remembers


def split_batch(batch: Batch) -> tuple[Any, Any]:
    """Inputs and targets of a batch; the targets are None if the batch has none."""
    if isinstance(batch, tuple | list):
        if not batch:
            raise ValueError("a batch must hold inputs, got an empty one")
        return as_tensors(batch[0]), batch[1] if len(batch) > 1 else None
    targets = next((key for key in ("labels", "label") if isinstance(batch, Mapping) and key in batch), None)
    if targets is None:
        return as_tensors(batch), None
    return as_tensors({name: value for name, value in batch.items() if name != targets}), batch[targets]


def as_tensors(inputs: Any) -> Any:
    """Arrays and tables of pandas as tensors, also in a dictionary; other values unchanged."""
    if isinstance(inputs, Mapping):
        return {name: as_tensors(value) for name, value in inputs.items()}
    if hasattr(inputs, "to_numpy"):
        inputs = np.array(inputs)  # a copy, because pandas gives arrays that are read-only
    if not isinstance(inputs, np.ndarray):
        return inputs
    if inputs.dtype == object and inputs.ndim == 1 and len(inputs):  # a column of rows
        inputs = np.stack([*inputs])
    try:
        return torch.from_numpy(as_native(inputs))
    except TypeError:
        raise ValueError(
            f"inputs must be numbers, got an array of type {inputs.dtype}: leave out columns of other values"
        ) from None


def _is_array(value: Any) -> bool:
    """Whether a value is a tensor, an array, or a table or column of pandas; a table iterates over column names."""
    return isinstance(value, Tensor | np.ndarray) or hasattr(value, "to_numpy")


def labelled_batches(loader: Iterable[Batch], purpose: str) -> Iterator[tuple[Any, Any]]:
    """Inputs and targets of every batch with items; a `ValueError` names the purpose if a batch has no targets."""
    for inputs, targets in map(split_batch, as_batches(loader, labelled=True)):
        if targets is None:
            raise ValueError(
                f"{purpose} needs a loader that yields batches of inputs with labels, such as [(inputs, labels)], or "
                'dictionaries with the key "labels" or "label"'
            )
        if n_items(inputs):
            yield inputs, targets


def as_batches(inputs: Batch | Iterable[Batch], *, labelled: bool = False) -> Iterable[Batch]:
    """The batches of a loader, or a list of one batch.

    Args:
        inputs: a loader, or one batch. A tensor, followed by a tensor or list of equal length, is one batch of inputs
            and targets in three cases: `labelled` is set, the second tensor has fewer axes, or the list holds no
            tensors. In other cases, they are two batches.
        labelled: whether every batch has targets.

    Raises:
        ValueError: for a data set (its items are not batches), a string, or an object that is not iterable.
    """
    if isinstance(inputs, Mapping) or _is_array(inputs) or hasattr(inputs, "__array_interface__"):  # or a PIL image
        return [inputs]
    if isinstance(inputs, tuple | list) and len(inputs) > 1:
        first, second = inputs[:2]
        if isinstance(first, Mapping):
            return inputs if isinstance(second, Mapping) else [inputs]
        if _is_array(first) and hasattr(second, "__len__") and len(first) == len(second):
            has_fewer_axes = _is_array(second) and len(second.shape) < len(first.shape)
            if labelled or has_fewer_axes or (isinstance(second, list) and not any(map(_is_array, second))):
                return [inputs]
    loader: Any = inputs
    if isinstance(loader, Dataset) and not hasattr(loader, "__iter__"):
        raise ValueError(
            f"batches are needed, got a data set, {type(loader).__name__}, of single items: give "
            "torch.utils.data.DataLoader(dataset, batch_size=64)"
        )
    if isinstance(loader, str | bytes) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise ValueError(f"inputs must be a batch or a loader of batches, got {loader!r:.80}")
    return inputs


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out items for evaluation, tuning or learning.

    Attributes:
        batches: (inputs, labels) or, for places, (inputs, positions).
        is_query: (N,) True for queries, False for the gallery. By default every item is both.
        relevant_within: for places, the greatest distance of a match in metres; by default as in training.
        soft_labels: (N, C) share of people who chose each of C classes for an item.

    Example:
        >>> items, labels = torch.randn(4, 8), torch.tensor([0, 0, 1, 1])
        >>> held_out = HeldOut([(items, labels)], is_query=torch.tensor([True, False, True, False]))
        >>> held_out.relevance(Relation(), labels).count()
        tensor([1, 1])
    """

    batches: Iterable[Batch]
    is_query: Bool[Tensor, " N"] | None = None
    relevant_within: float | None = None
    soft_labels: Float[Tensor, "N C"] | None = None

    @classmethod
    def of(cls, items: "HeldOut | Iterable[Batch]") -> "HeldOut":
        """Batches as `HeldOut`; a `HeldOut` is returned unchanged."""
        return items if isinstance(items, HeldOut) else cls(items)

    def relevance(self, relation: Relation, targets: Tensor) -> Relevance:
        """The items that match each query; errors as in `lam.pairs.relevance.relevance_of`."""
        return relevance_of(relation, targets, is_query=self.is_query, relevant_within=self.relevant_within)


def item_hashes(inputs: Any, targets: Any = None) -> list[int]:
    """A 63-bit hash of each item's values, for a batch that is a tensor or a dictionary of tensors.

    In a dictionary, zeros are skipped: they pad texts to the longest text of their batch. Tensors without one row for
    each item, such as positions of words or a temperature, are skipped, too.

    Args:
        inputs: the batch.
        targets: a target for each item; without targets, the items of a dictionary are the rows of its longest tensor.

    Example:
        >>> batch = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
        >>> first, second, third = item_hashes(batch)
        >>> first == third, first == second
        (True, False)
    """
    if isinstance(inputs, Mapping):
        tensors = [inputs[name] for name in sorted(inputs) if isinstance(inputs[name], Tensor) and inputs[name].ndim]
        n_items = max(map(len, tensors), default=0) if targets is None else len(targets)
        columns = [tensor for tensor in tensors if len(tensor) == n_items]
        return [_number(row[row != 0] for row in rows) for rows in zip(*columns, strict=True)]
    return [_number([row]) for row in inputs]


class HashedBatches:
    """Batches that are read once, with hashes of the items read so far."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = batches
        self._hashes: list[int] = []

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            self._hashes.extend(item_hashes(*split_batch(batch)))
            yield batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # raises TypeError for a generator, as it should

    def among(self, hashes: Iterable[int], rows: Iterable[int] | None = None) -> int:
        """Number of these hashes among the items read so far; with `rows`, only among the items at these positions."""
        seen = set(self._hashes if rows is None else (self._hashes[row] for row in rows))
        return sum(number in seen for number in hashes)


def spread(count: int) -> list[int]:
    """At most 64 positions, spread evenly over `count` items."""
    return torch.linspace(0, count - 1, min(count, REMEMBERED)).round().long().unique().tolist()


def _number(parts: Iterable[Tensor]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()) >> 1
