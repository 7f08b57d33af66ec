"""The rows behind an index: vectors, κ and ids, which grow, shrink and look up without FAISS.

Every row has a slot: a number given once, never given again and rising with the row. The search structure knows slots
alone, so what it still holds of a removed row is recognised by a slot that is no longer here.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor

_COLUMNS = ("vectors", "kappa", "ids", "slots")
_BLOCK = 512
_REMOVED = -1.0  # in place of a removed row's κ, which is never negative
TOMBSTONES = 0.2  # the share of removed rows at which they are swept
_SPARE = 4  # the room is made smaller where the rows would fit into it this many times


class Store:
    """N unit vectors of dimension D with κ, id and slot; room grows by doubling, so that adding one by one stays cheap.

    In NumPy, whose calls cost a single query half of what torch's do.

    Args:
        dimension: the number of embedding dimensions D.
    """

    def __init__(self, dimension: int) -> None:
        self._size = 0  # with the removed rows that are still here
        self._n_removed = 0
        self._next_slot = 0
        self._slot_of: dict[int, int] = {}
        self._buffers = {
            "vectors": np.empty((0, dimension), np.float32),
            "kappa": np.empty(0, np.float64),
            "ids": np.empty(0, np.int64),
            "slots": np.empty(0, np.int64),
        }

    def __len__(self) -> int:
        return self._size - self._n_removed

    def __contains__(self, item: int) -> bool:
        return item in self._slot_of

    def column(self, name: str) -> np.ndarray:
        """A column, as a view of its N rows: `vectors` float32, `kappa` float64, `ids` or `slots` int64."""
        self._sweep()
        return self._buffers[name][: self._size]

    def unswept(self, name: str) -> np.ndarray:
        """A column as `rows_of` numbers its rows, which removed ones are still among; their κ is negative."""
        return self._buffers[name][: self._size]

    def take_slots(self, count: int) -> Int64[np.ndarray, " N"]:
        """New slots; those of an addition that then fails are never used again."""
        first, self._next_slot = self._next_slot, self._next_slot + count
        return np.arange(first, self._next_slot)

    def append(
        self,
        vectors: Float32[np.ndarray, "N D"],
        kappa: Float64[np.ndarray, " N"],
        ids: Int64[np.ndarray, " N"],
        slots: Int64[np.ndarray, " N"],
    ) -> None:
        """Add rows whose slots lie above all that are here."""
        end = self._size + len(ids)
        for name, rows in zip(_COLUMNS, (vectors, kappa, ids, slots), strict=True):
            if end > len(self._buffers[name]):
                self._make_room(name, max(end, 2 * len(self._buffers[name])))
            self._buffers[name][self._size : end] = rows
        self._size = end
        self._slot_of.update(zip(ids.tolist(), slots.tolist(), strict=True))

    def slots_of(self, ids: Int64[Tensor, " N"]) -> Int64[np.ndarray, " N"]:
        """Slots of ids that are all here."""
        return np.array([self._slot_of[item] for item in ids.tolist()], dtype=np.int64)

    def remove(self, slots: Int64[np.ndarray, " N"]) -> None:
        """Drop the rows of these slots; the others keep their order and slots.

        A removed row is marked, and stays until a fifth of the rows are removed or a whole column is asked for: to move
        the rows behind it takes as long as all of them. Ctrl-C waits until every row is whole again.
        """
        rows = self.rows_of(slots)
        rows = rows[rows >= 0]
        with _uninterrupted():
            self._buffers["kappa"][rows] = _REMOVED
            self._n_removed += len(rows)
            for item in self._buffers["ids"][rows].tolist():
                del self._slot_of[item]
        if self._n_removed >= TOMBSTONES * self._size:
            self._sweep()

    def _sweep(self) -> None:
        """Move rows up to where rows were removed.

        They move in place, block by block, and most of the room stays: to copy a large store takes several times as
        long.
        """
        if self._n_removed == 0:
            return
        is_removed = self.unswept("kappa") < 0
        first = int(is_removed.argmax())
        moved = np.flatnonzero(~is_removed[first:]) + first
        with _uninterrupted():
            for name in _COLUMNS:
                column = self.unswept(name)
                for start in range(0, len(moved), _BLOCK):
                    rows = moved[start : start + _BLOCK]
                    column[first + start :][: len(rows)] = column[rows]
            self._size, self._n_removed = first + len(moved), 0
            for name, buffer in self._buffers.items():
                if len(buffer) >= _SPARE * self._size:
                    self._make_room(name, self._size)

    def _make_room(self, name: str, count: int) -> None:
        buffer = np.empty((count, *self._buffers[name].shape[1:]), self._buffers[name].dtype)
        buffer[: self._size] = self.unswept(name)
        self._buffers[name] = buffer

    def rows_of(self, slots: Int64[np.ndarray, "..."]) -> Int64[np.ndarray, "..."]:
        """Row of each slot; −1 where it is no longer here, or never was."""
        stored = self.unswept("slots")
        if len(stored) == 0:
            return np.full_like(slots, -1)
        row = np.minimum(stored.searchsorted(slots), len(stored) - 1)
        is_here = (stored[row] == slots) & (self.unswept("kappa")[row] >= 0)
        return np.where(is_here, row, -1)

    def kappa_of(self, ids: Int64[Tensor, " N"]) -> Float64[Tensor, " N"]:
        """κ of ids that are all here."""
        return torch.from_numpy(self.unswept("kappa")[self.rows_of(self.slots_of(ids))])

    def tensors(self) -> dict[str, Tensor]:
        """The columns by name, which `from_tensors` takes."""
        return {name: torch.from_numpy(self.column(name)) for name in _COLUMNS}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "Store":
        """The store of columns by name."""
        store = cls(tensors["vectors"].shape[1])
        store.append(*(tensors[name].numpy() for name in _COLUMNS))
        store._next_slot = int(tensors["slots"][-1]) + 1 if len(store) else 0
        return store


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C, which only ever reaches the main thread, wait until the block has ended."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: pending.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pending:
            signal.raise_signal(signal.SIGINT)
