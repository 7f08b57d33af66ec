"""`Store`: the vectors, κ and ids of an index, one row for each item, and their exact search.

Every row has a slot: a number that rises from row to row and is never reused. FAISS identifies rows by slots, and may
still hold the slot of a removed row. A place is one number that encodes a row's chunk and the position in the chunk.

Rows lie in chunks of about 32 MiB. New rows fill the last chunk. A sweep copies a chunk without its removed rows. So
the time of an addition or removal does not grow with the index.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from lam.retrieval.index import faiss_calls
from lam.utils.blocks import row_blocks

_COLUMNS = ("vectors", "kappa", "ids", "slots")
_CHUNK = 2**25  # bytes of a chunk's vectors
_LEAST_ROOM = 256
_REMOVED = -1.0  # κ of a removed row; no other κ is negative
TOMBSTONES = 0.2  # a chunk with at least this share of removed rows is swept
_SCORE_ELEMENTS = 2**24  # greatest number of candidates' coordinates in memory at once
_ONE_THREAD = 2**22  # up to this many coordinates, one thread is faster than several
_COPIED = 2**20  # coordinates of kept rows copied for one product: few enough for the cache of a core

Found = tuple[Int64[np.ndarray, "Q K"], Float32[np.ndarray, "Q K"], Float64[np.ndarray, "Q K"]]
"""Ids, cosines and κ of hits, best first; hits of equal cosine are in the order of adding."""


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
        least, most = ids.min(), ids.max()
        within = among[among.searchsorted(least) : among.searchsorted(most, side="right")]
        is_dense = most - least < 6 * len(ids)  # then `isin` uses a table; with larger gaps it takes ten times as long
        if is_dense or len(within) == 0 or not (ids[1:] > ids[:-1]).all():
            return is_allowed & np.isin(ids, within)
        places = within.searchsorted(ids).clip(max=len(within) - 1)
        return is_allowed & (within[places] == ids)

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
        self.dimension = dimension
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
        """Add rows; their slots must be above all present slots. Ctrl-C waits for the end."""
        start = 0
        with _delay_interrupt():
            while start < len(ids):
                if not self.chunks or self.chunks[-1].size == self._room:
                    self.chunks = (*self.chunks, Chunk(self._room, self.dimension))
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
            swept = Chunk(self._room, self.dimension)
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

    def places(self, least_kappa: float, among: Int64[np.ndarray, " G"]) -> Int64[np.ndarray, " N"]:
        """Places of the rows that `Chunk.allowed` selects, in the order of adding."""
        rows = (np.flatnonzero(chunk.allowed(slice(chunk.size), least_kappa, among)) for chunk in self.chunks)
        parts = [number * self._room + of_chunk for number, of_chunk in enumerate(rows)]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def search(
        self,
        vectors: Float32[np.ndarray, "Q D"],
        k: int,
        least_kappa: float,
        among: Int64[np.ndarray, " G"] | None = None,
    ) -> Found:
        """Up to k rows of highest cosine for each query, exactly, among the rows that `Chunk.allowed` selects.

        Chunks are searched in parallel. FAISS reads the rows in place; its own Flat type would hold a second copy.
        """
        import faiss

        chunks = self.chunks
        total = sum(chunk.size for chunk in chunks)
        threads = 1 if total * self.dimension < _ONE_THREAD else faiss.omp_get_max_threads()
        ends = [total * number // threads for number in range(threads + 1)]

        def search_rows(start: int, end: int) -> list[Found]:
            return [_search_chunk(*part, vectors, k, least_kappa, among) for part in _parts(chunks, start, end)]

        with faiss_calls.matrix_product(len(vectors)):
            run = map if threads == 1 else _pool(threads).map
            found = [_no_hits(len(vectors)), *chain.from_iterable(run(search_rows, ends[:-1], ends[1:]))]
            ids, scores, kappa = (np.concatenate(columns, axis=1) for columns in zip(*found, strict=True))
        scores, ids, kappa = top(k, scores, ids, kappa)
        return ids, scores.clip(-1, 1), kappa

    def best(
        self, k: int, vectors: Float32[np.ndarray, "Q D"], places: Int64[np.ndarray, "Q C"]
    ) -> tuple[Float32[np.ndarray, "Q K"], Int64[np.ndarray, "Q K"]]:
        """Cosines and places of the k nearest rows of each query among its candidates; a place of −1 comes last."""
        places, scores = score(partial(self.take, "vectors"), vectors, places)
        scores, places = top(k, scores, places)
        return scores, places

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


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    import faiss

    return ThreadPoolExecutor(threads, "lam flat", faiss.omp_set_num_threads, (1,))


def _parts(chunks: Sequence[Chunk], start: int, end: int) -> Iterator[tuple[Chunk, slice]]:
    """The parts of chunks that hold rows `start` to `end`, counted over all chunks."""
    before = 0
    for chunk in chunks:
        first, last = max(start - before, 0), min(end - before, chunk.size)
        if first < last:
            yield chunk, slice(first, last)
        before += chunk.size


def _search_chunk(
    chunk: Chunk, rows: slice, vectors: np.ndarray, k: int, least_kappa: float, among: np.ndarray | None
) -> Found:
    stored, kappa, allowed = chunk.vectors[rows], chunk.kappa[rows], chunk.allowed(rows, least_kappa, among)
    n_allowed = int(allowed.sum())
    k, n_hidden = min(k, n_allowed), len(kappa) - n_allowed
    if k == 0:
        return _no_hits(len(vectors))
    found = None
    if among is None:
        found = faiss_calls.nearest(stored, vectors, k + min(k, n_hidden))[1]
        found = np.where(allowed[found], found, -1)
    if found is None or ((found >= 0).sum(axis=1) < k).any():  # too many hidden rows among the candidates
        found = _nearest_of(np.flatnonzero(allowed), stored, vectors, k)
    found, cosines = score(stored.__getitem__, vectors, found)
    return chunk.ids[rows][found], cosines, kappa[found]


def _nearest_of(kept: np.ndarray, stored: np.ndarray, vectors: np.ndarray, k: int) -> np.ndarray:
    """The k best of the rows `kept`, from matrix products with copies; FAISS's own selector of rows is slower."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    copies = np.empty((min(len(kept), max(1, _COPIED // stored.shape[1])), stored.shape[1]), np.float32)
    for block in row_blocks(len(kept), 1, elements=len(copies)):
        # `clip` writes straight into the copies; every row exists
        copied = stored.take(kept[block], axis=0, out=copies[: len(kept[block])], mode="clip")
        scores, rows = faiss_calls.nearest(copied, vectors, k)
        found.append((scores, kept[block][rows]))
    scores, rows = (np.concatenate(columns, axis=1) for columns in zip(*found, strict=True))
    return top(k, scores, rows)[1]


def _no_hits(queries: int) -> Found:
    return np.empty((queries, 0), np.int64), np.empty((queries, 0), np.float32), np.empty((queries, 0))


def score(
    vectors_of: Callable[[np.ndarray], np.ndarray], vectors: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(Q, K) candidate rows by rising number, and their cosines with Q vectors; −1 means no candidate and scores −∞.

    Each cosine is a separate dot product, because a matrix product could give equal vectors unequal scores.
    """
    rows = np.sort(rows, axis=1)
    scores = np.empty(rows.shape, dtype=np.float32)
    for part in row_blocks(len(rows), rows.shape[1] * vectors.shape[1], elements=_SCORE_ELEMENTS):
        scores[part] = np.vecdot(vectors_of(rows[part].clip(min=0)), vectors[part, None])
    scores[rows < 0] = -np.inf
    return rows, scores


def top(k: int, scores: np.ndarray, *columns: np.ndarray) -> list[np.ndarray]:
    """The k highest scores of each row, best first, with ties in their old order; and the columns in the same order."""
    row, order = np.arange(len(scores))[:, None], (-scores).argsort(axis=1, kind="stable")[:, :k]
    return [column[row, order] for column in (scores, *columns)]
