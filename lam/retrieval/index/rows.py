"""`Store`: the vectors, κ and ids of an index, one row for each item.

Every row has a slot: a number that rises from row to row and is never reused. FAISS identifies rows by slots, and may
still hold the slot of a removed row. A place is one number that encodes a row's chunk and the position in the chunk.

Rows lie in chunks of about 32 MiB. New rows fill the last chunk. A sweep copies a chunk without its removed rows. So
the time of an addition or removal does not grow with the index.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

_COLUMNS = ("vectors", "kappa", "ids", "slots")
_CHUNK = 2**25  # bytes of a chunk's vectors
_LEAST_ROOM = 256
_REMOVED = -1.0  # κ of a removed row; no other κ is negative
TOMBSTONES = 0.2  # a chunk with at least this share of removed rows is swept


class Chunk:
    """Up to `room` rows; `size` counts all rows, and `n_removed` the removed ones among them."""

    def __init__(self, room: int, dimension: int) -> None:
        self.vectors = np.empty((room, dimension), np.float32)
        self.kappa = np.empty(room, np.float64)  # negative for a removed row
        self.ids = np.empty(room, np.int64)
        self.slots = np.empty(room, np.int64)  # rising
        self.size = self.n_removed = 0

    def __len__(self) -> int:
        return self.size - self.n_removed

    def append(self, columns: Sequence[np.ndarray]) -> None:
        """Add rows, given as columns; there must be room."""
        end = self.size + len(columns[0])
        for name, rows in zip(_COLUMNS, columns, strict=True):
            getattr(self, name)[self.size : end] = rows
        self.size = end

    def allowed(self, rows: slice, least_kappa: float, among: Int64[np.ndarray, " G"] | None) -> Bool[np.ndarray, " N"]:
        """Mask of the rows with κ ≥ `least_kappa` and an id in the sorted `among`; None for any id."""
        is_allowed, ids = self.kappa[rows] >= least_kappa, self.ids[rows]
        if among is None or len(ids) == 0:
            return is_allowed
        within = slice(among.searchsorted(ids.min()), among.searchsorted(ids.max(), side="right"))
        return is_allowed & np.isin(ids, among[within])

    @property
    def needs_sweep(self) -> bool:
        """Whether the share of removed rows is at least `TOMBSTONES`."""
        return self.n_removed >= TOMBSTONES * self.size

    def here(self) -> Int64[np.ndarray, " N"]:
        """Indices of the rows that are not removed."""
        return np.flatnonzero(self.kappa[: self.size] >= 0)


class Store:
    """N unit vectors of dimension D with κ, id and slot, in NumPy: for one query, torch takes twice the time."""

    def __init__(self, dimension: int) -> None:
        self._dimension = dimension
        self._empty = Chunk(0, dimension)
        self._room = max(_LEAST_ROOM, _CHUNK // (4 * dimension))
        self._next_slot = 0
        self._slot_of: dict[int, int] = {}
        self.chunks: tuple[Chunk, ...] = ()

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, item: int) -> bool:
        return item in self._slot_of

    def column(self, name: str) -> np.ndarray:
        """A copy of a column in the order of adding: `vectors` float32, `kappa` float64, `ids` or `slots` int64."""
        return np.concatenate([getattr(chunk, name)[chunk.here()] for chunk in (self._empty, *self.chunks)])

    def take_slots(self, count: int) -> Int64[np.ndarray, " N"]:
        """Slots for `count` new rows."""
        first, self._next_slot = self._next_slot, self._next_slot + count
        return np.arange(first, self._next_slot)

    def append(
        self,
        vectors: Float32[np.ndarray, "N D"],
        kappa: Float64[np.ndarray, " N"],
        ids: Int64[np.ndarray, " N"],
        slots: Int64[np.ndarray, " N"],
    ) -> None:
        """Add rows; their slots must be above all present slots."""
        start = 0
        while start < len(ids):
            if not self.chunks or self.chunks[-1].size == self._room:
                self.chunks = (*self.chunks, Chunk(self._room, self._dimension))
            last = self.chunks[-1]
            end = start + self._room - last.size
            last.append([column[start:end] for column in (vectors, kappa, ids, slots)])
            start = end
        self._slot_of.update(zip(ids.tolist(), slots.tolist(), strict=True))

    def slots_of(self, ids: Int64[Tensor, " N"]) -> Int64[np.ndarray, " N"]:
        """Slots of stored ids."""
        return np.array([self._slot_of[item] for item in ids.tolist()], dtype=np.int64)

    def remove(self, slots: Int64[np.ndarray, " N"]) -> None:
        """Remove the rows of these slots; other rows keep their order and slots.

        Removed rows are marked; a sweep drops them once they are a fifth of their chunk. Ctrl-C waits for the end.
        """
        places = self.places_of(slots)
        with _delay_interrupt():
            for number, _, rows in self._by_chunk(places[places >= 0]):
                chunk = self.chunks[number]
                chunk.kappa[rows] = _REMOVED
                chunk.vectors[rows] = 0  # a zero vector ranks behind all positive cosines
                chunk.n_removed += len(rows)
                for item in chunk.ids[rows].tolist():
                    del self._slot_of[item]
            if any(chunk.needs_sweep for chunk in self.chunks):
                self.chunks = tuple(self._chunks_without_tombstones())

    def _chunks_without_tombstones(self) -> list[Chunk]:
        """The chunks after a sweep. A swept chunk with few rows is merged with the chunk before it."""
        kept = list[Chunk]()
        for chunk in self.chunks:
            if not chunk.needs_sweep:
                kept.append(chunk)
                continue
            is_small = len(kept) > 0 and len(kept[-1]) + len(chunk) <= self._room // 2
            swept = Chunk(self._room, self._dimension)
            for part in (kept.pop(), chunk) if is_small else (chunk,):
                here = part.here()
                swept.append([getattr(part, name)[here] for name in _COLUMNS])
            if swept.size:
                kept.append(swept)
        return kept

    def places_of(self, slots: Int64[np.ndarray, "..."]) -> Int64[np.ndarray, "..."]:
        """Places of the rows with these slots, for `take`; −1 for a missing slot."""
        places = np.full(slots.shape, -1)
        if self.chunks:
            number = np.searchsorted([chunk.slots[0] for chunk in self.chunks], slots, side="right") - 1
            for each in np.unique(number[number >= 0]).tolist():
                chunk, of_chunk = self.chunks[each], number == each
                stored = chunk.slots[: chunk.size]
                row = np.minimum(stored.searchsorted(slots[of_chunk]), len(stored) - 1)
                is_here = (stored[row] == slots[of_chunk]) & (chunk.kappa[row] >= 0)
                places[of_chunk] = np.where(is_here, each * self._room + row, -1)
        return places

    def take(self, name: str, places: Int64[np.ndarray, "..."]) -> np.ndarray:
        """Values of a column at these places; each place must hold a row."""
        empty = getattr(self._empty, name)
        taken = np.empty((*places.shape, *empty.shape[1:]), empty.dtype)
        for number, of_chunk, rows in self._by_chunk(places):
            taken[of_chunk] = getattr(self.chunks[number], name)[rows]
        return taken

    def count(self, least_kappa: float) -> int:
        """Number of rows with κ ≥ `least_kappa`."""
        if not least_kappa:
            return len(self)
        return sum(int((chunk.kappa[: chunk.size] >= least_kappa).sum()) for chunk in self.chunks)

    def places(self, least_kappa: float, among: Int64[np.ndarray, " G"] | None = None) -> Int64[np.ndarray, " N"]:
        """Places of the rows that `Chunk.allowed` selects, in the order of adding."""
        rows = (np.flatnonzero(chunk.allowed(slice(chunk.size), least_kappa, among)) for chunk in self.chunks)
        parts = [number * self._room + of_chunk for number, of_chunk in enumerate(rows)]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def of_ids(self, name: str, ids: Int64[Tensor, " N"]) -> np.ndarray:
        """Values of a column for stored ids."""
        return self.take(name, self.places_of(self.slots_of(ids)))

    def tensors(self) -> dict[str, Tensor]:
        """The columns by name, and the next slot."""
        columns = {name: torch.from_numpy(self.column(name)) for name in _COLUMNS}
        return {**columns, "next_slot": torch.tensor(self._next_slot)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "Store":
        """Rebuild the store from the result of `tensors`."""
        store = cls(tensors["vectors"].shape[1])
        store.append(*(tensors[name].numpy() for name in _COLUMNS))
        store._next_slot = int(tensors["next_slot"])  # FAISS may still hold the slots of removed rows
        return store

    def _by_chunk(self, places: Int64[np.ndarray, "..."]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """For each chunk that holds places: its number, the mask of these places, and their rows in the chunk."""
        number, row = np.divmod(places, self._room)
        for each in np.unique(number).tolist():
            of_chunk = number == each
            yield each, of_chunk, row[of_chunk]


@contextmanager
def _delay_interrupt() -> Iterator[None]:
    """Delay Ctrl-C, which interrupts only the main thread, until the block has ended."""
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
