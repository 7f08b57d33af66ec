"""Exact search of the rows of an index where they are, chunk by chunk, by as many threads as FAISS may use.

FAISS compares, and needs no second copy of the vectors, as its Flat type would hold.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import chain, pairwise

import numpy as np
from jaxtyping import Float32, Float64, Int64

from lam.retrieval.index import faiss_calls
from lam.retrieval.index.rows import Chunk

_SCORED_ELEMENTS = 2**24  # candidates' coordinates held at once while they are scored
_ALONE = 2**22  # coordinates that one thread goes through sooner than another is woken

Part = tuple[Chunk, slice]
Found = tuple[Int64[np.ndarray, "Q K"], Float32[np.ndarray, "Q K"], Float64[np.ndarray, "Q K"]]
"""Ids, cosines and κ, best first; hits of equal cosine in the order of adding."""


def search(chunks: Sequence[Chunk], vectors: Float32[np.ndarray, "Q D"], k: int, least_kappa: float) -> Found:
    """The k rows of highest cosine for each query among those whose κ is at least this.

    Args:
        chunks: of the rows.
        vectors: unit vectors.
        k: at least 1, and no more than there are.
        least_kappa: not negative.
    """
    with faiss_calls.matrix_product(len(vectors)):
        found = chain.from_iterable(_in_threads(chunks, vectors, k, least_kappa))
        ids, scores, kappa = (np.concatenate(columns, axis=1) for columns in zip(*found, strict=True))
    scores, ids, kappa = best(k, scores, ids, kappa)
    return ids, scores.clip(-1, 1), kappa


def _in_threads(chunks: Sequence[Chunk], vectors: np.ndarray, k: int, least_kappa: float) -> Iterator[Sequence[Found]]:
    """What is best in each part of the rows, which the threads share out evenly."""
    sizes = [(chunk, chunk.size) for chunk in chunks]
    total, threads = sum(size for _, size in sizes), faiss_calls.threads()
    if total * vectors.shape[1] < _ALONE:
        threads = 1
    ends = [total * number // threads for number in range(threads + 1)]
    shares = [[*_between(sizes, start, end)] for start, end in pairwise(ends)]
    search = partial(_searched, vectors=vectors, k=k, least_kappa=least_kappa)
    return map(search, shares) if threads == 1 else _pool(threads).map(search, shares)


def _between(sizes: Sequence[tuple[Chunk, int]], start: int, end: int) -> Iterator[Part]:
    """The parts of chunks that hold the rows from one to another."""
    before = 0
    for chunk, size in sizes:
        first, last = max(start - before, 0), min(end - before, size)
        if first < last:
            yield chunk, slice(first, last)
        before += size


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "lam flat", faiss_calls.use_threads, (1,))


def _searched(parts: Sequence[Part], *, vectors: np.ndarray, k: int, least_kappa: float) -> list[Found]:
    return [_near(*part, vectors, k, least_kappa) for part in parts]


def _near(chunk: Chunk, rows: slice, vectors: np.ndarray, k: int, least_kappa: float) -> Found:
    """The k best of some rows of a chunk. A removed one is a zero vector, which is above those opposite to the query:
    where these are needed, rows are copied without it."""
    stored, kappa = chunk.vectors[rows], chunk.kappa[rows]
    allowed = kappa >= least_kappa if least_kappa or chunk.n_removed else None
    n_allowed = len(kappa) if allowed is None else int(allowed.sum())
    k, n_hidden = min(k, n_allowed), len(kappa) - n_allowed
    if k == 0:
        return none(len(vectors))
    found = faiss_calls.nearest(stored, vectors, k + min(k, n_hidden))
    if allowed is not None:
        found = np.where(allowed[found], found, -1)
        if ((found >= 0).sum(axis=1) < k).any():
            kept = np.flatnonzero(allowed)
            found = kept[faiss_calls.nearest(stored[kept], vectors, k)]
    found, cosines = scored(stored.__getitem__, vectors, found)
    return chunk.ids[rows][found], cosines, kappa[found]


def none(queries: int) -> Found:
    """What so many queries find where there is nothing."""
    return np.empty((queries, 0), np.int64), np.empty((queries, 0), np.float32), np.empty((queries, 0))


def scored(
    vectors_of: Callable[[np.ndarray], np.ndarray], vectors: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Candidate rows, rising, and their cosines: −∞ where there is no row, which is one below 0.

    One product a row, as a matrix product would round equal vectors to unequal scores.

    Args:
        vectors_of: gives the vectors of rows.
        vectors: (Q, D) of the queries.
        rows: (Q, K) of the candidates of each.
    """
    rows = np.sort(rows, axis=1)
    block = max(1, _SCORED_ELEMENTS // max(1, rows.shape[1] * vectors.shape[1]))
    scores = np.empty(rows.shape, dtype=np.float32)
    for part in (slice(start, start + block) for start in range(0, len(rows), block)):
        scores[part] = np.vecdot(vectors_of(rows[part].clip(min=0)), vectors[part, None])
    scores[rows < 0] = -np.inf
    return rows, scores


def best(k: int, scores: np.ndarray, *columns: np.ndarray) -> list[np.ndarray]:
    """The k highest scores of each row, best first, equal ones as they stood, and what belongs to them."""
    row, order = np.arange(len(scores))[:, None], (-scores).argsort(axis=1, kind="stable")[:, :k]
    return [column[row, order] for column in (scores, *columns)]
