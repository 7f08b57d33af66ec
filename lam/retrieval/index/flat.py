"""Exact search of an index's rows, chunk by chunk, in parallel.

FAISS reads the rows in place; FAISS's own Flat type would hold a second copy.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain

import numpy as np
from jaxtyping import Float32, Float64, Int64

from lam.retrieval.index import faiss_calls
from lam.retrieval.index.rows import Chunk
from lam.utils.blocks import row_blocks

_SCORE_ELEMENTS = 2**24  # greatest number of candidates' coordinates in memory at once
_ONE_THREAD = 2**22  # up to this many coordinates, one thread is faster than several
_COPIED = 2**20  # coordinates of kept rows copied for one product: few enough for the cache of a core

Found = tuple[Int64[np.ndarray, "Q K"], Float32[np.ndarray, "Q K"], Float64[np.ndarray, "Q K"]]
"""Ids, cosines and κ of hits, best first; hits of equal cosine are in the order of adding."""


def search(
    chunks: Sequence[Chunk],
    vectors: Float32[np.ndarray, "Q D"],
    k: int,
    least_kappa: float,
    among: Int64[np.ndarray, " G"] | None = None,
) -> Found:
    """Up to k rows of highest cosine for each query, among the rows with κ ≥ `least_kappa`.

    `among` holds the sorted ids of the rows to search; None for all.
    """
    import faiss

    total = sum(chunk.size for chunk in chunks)
    threads = 1 if total * vectors.shape[1] < _ONE_THREAD else faiss.omp_get_max_threads()
    ends = [total * number // threads for number in range(threads + 1)]

    def search_rows(start: int, end: int) -> list[Found]:
        return [_search_chunk(*part, vectors, k, least_kappa, among) for part in _parts(chunks, start, end)]

    with faiss_calls.matrix_product(len(vectors)):
        run = map if threads == 1 else _pool(threads).map
        found = [no_hits(len(vectors)), *chain.from_iterable(run(search_rows, ends[:-1], ends[1:]))]
        ids, scores, kappa = (np.concatenate(columns, axis=1) for columns in zip(*found, strict=True))
    scores, ids, kappa = top(k, scores, ids, kappa)
    return ids, scores.clip(-1, 1), kappa


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
    """The k best of some rows of a chunk."""
    stored, kappa = chunk.vectors[rows], chunk.kappa[rows]
    is_all = among is None and not least_kappa and not chunk.n_removed
    allowed = None if is_all else chunk.allowed(rows, least_kappa, among)
    n_allowed = len(kappa) if allowed is None else int(allowed.sum())
    k, n_hidden = min(k, n_allowed), len(kappa) - n_allowed
    if k == 0:
        return no_hits(len(vectors))
    if allowed is None:
        found = faiss_calls.nearest(stored, vectors, k)[1]
    elif among is not None:
        found = _nearest_of(np.flatnonzero(allowed), stored, vectors, k)
    else:
        found = faiss_calls.nearest(stored, vectors, k + min(k, n_hidden))[1]
        found = np.where(allowed[found], found, -1)
        if ((found >= 0).sum(axis=1) < k).any():  # too many hidden rows among the candidates
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


def no_hits(queries: int) -> Found:
    """Empty hits for a number of queries."""
    return np.empty((queries, 0), np.int64), np.empty((queries, 0), np.float32), np.empty((queries, 0))


def score(
    vectors_of: Callable[[np.ndarray], np.ndarray], vectors: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(Q, K) candidate rows, sorted, and their cosines with Q vectors. A row of −1 means no candidate and scores −∞.

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
