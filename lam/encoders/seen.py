"""Hashes of some training items, so that an encoder recognises these items."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lam.encoders.batches import Batch, split_batch

REMEMBERED = 64
"""Greatest number of training items that an encoder remembers."""


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
        """Number of these hashes that belong to items read so far, or only to the items in `rows`."""
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
