"""Calls to FAISS, with slots (`lam.retrieval.index.rows`) as FAISS's ids; most FAISS errors become a `ValueError`."""

import math
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np

from lam.utils.extras import install_command

_PRODUCT_FROM = 4  # queries
_HNSW = "efSearch=128"  # recall@10 of 0.996 among 100,000 clustered vectors; FAISS's default of 16 has 0.90
_CELLS = 2  # IVF searches 2 √n of n cells: recall@10 of 0.95 among a million vectors in 1024 cells; FAISS searches one
_SWITCH_LOCK = threading.Lock()


def _search_alone() -> None:
    """Let FAISS use one thread in a forked process: other threads do not survive a fork, and FAISS would wait."""
    _SWITCH_LOCK.release()
    if "faiss" in sys.modules:
        sys.modules["faiss"].omp_set_num_threads(1)


os.register_at_fork(before=_SWITCH_LOCK.acquire, after_in_parent=_SWITCH_LOCK.release, after_in_child=_search_alone)


def create(dimension: int, factory: str, parameters: str | None, device: str) -> Any:
    """An empty FAISS index. Its ids are slots, the numbers of rows in `lam.retrieval.index.rows`.

    IVF types store ids themselves; an IDMap around them mixes ids up after a removal (FAISS 1.15). Therefore only
    other types get an IDMap, and a factory string with an IDMap is rejected.
    """
    import faiss

    if "IDMap" in factory:
        raise ValueError(f"factory must not contain IDMap, got {factory!r}: the index keeps ids itself")
    rule = "factory must be a FAISS factory string such as 'Flat', 'HNSW32' or 'IVF256,Flat'"
    with _value_errors(f"{rule}, got {factory!r} for dimension {dimension}"):
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    cells = faiss.try_extract_index_ivf(index)
    if parameters is None and factory.startswith("HNSW"):
        parameters = _HNSW
    elif parameters is None and cells is not None:
        cells.nprobe = math.ceil(_CELLS * cells.nlist**0.5)
    keeps_labels = cells is not None and not isinstance(index, faiss.IndexRefine)
    return prepare(index if keeps_labels else faiss.IndexIDMap2(index), parameters, device)


@cache
def compares_codes(dimension: int, factory: str) -> bool:
    """Whether a type ranks candidates only roughly, by codes that are shorter than the vectors."""
    import faiss

    index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    try:
        return getattr(index, "storage", index).sa_code_size() < 4 * dimension  # a graph keeps its vectors in `storage`
    except RuntimeError:  # a type without codes
        return False


def prepare(index: Any, parameters: str | None, device: str) -> Any:
    """Set search parameters and move the index to its device."""
    import faiss

    if parameters is not None:
        with _value_errors(f"parameters must be FAISS search parameters such as 'nprobe=16', got {parameters!r}"):
            faiss.ParameterSpace().set_index_parameters(index, parameters)
    if device == "cpu":
        return index
    number = re.fullmatch(r"cuda(?::(\d+))?", device)
    if number is None:
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    if not hasattr(faiss, "StandardGpuResources"):
        raise ValueError(
            f"device {device!r} needs a FAISS built for GPUs: pip uninstall faiss-cpu && {install_command('gpu')}, "
            "or use 'cpu'"
        )
    advice = "use a type with a form for GPUs, such as 'Flat' or 'IVF256,Flat', or device 'cpu'"
    with _value_errors(f"FAISS cannot move this index to {device!r}; {advice}"):
        return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), int(number[1] or 0), index)


def train(index: Any, vectors: np.ndarray) -> None:
    """Train on (N, D) unit vectors; a `ValueError` if FAISS refuses, for example for too few vectors."""
    with _value_errors(f"FAISS cannot train on {len(vectors)} embeddings"):
        index.train(vectors)


def add(index: Any, vectors: np.ndarray, slots: np.ndarray) -> None:
    """Add (N, D) unit vectors under their slots; a `ValueError` if FAISS refuses (some types allow only one add)."""
    with _value_errors(f"FAISS cannot add {len(vectors)} embeddings"):
        index.add_with_ids(vectors, slots)


def remove(index: Any, slots: np.ndarray) -> None:
    """Remove slots; no effect in a type without removal."""
    with suppress(RuntimeError):
        index.remove_ids(slots)


def search(index: Any, vectors: np.ndarray, k: int) -> np.ndarray:
    """(Q, k) candidate slots, padded with −1; a GPU allows k up to a few thousand."""
    errors = _value_errors(f"FAISS cannot search for {k} candidates; take a smaller k or device 'cpu'")
    with errors, matrix_product(len(vectors)):
        return index.search(vectors, k)[1]


def search_among(index: Any, vectors: np.ndarray, k: int, slots: np.ndarray) -> np.ndarray | None:
    """(Q, k) candidates among `slots`, padded with −1; None for a type without a selector."""
    import faiss

    options: Any = faiss  # FAISS's type stubs lack these records
    selector = faiss.IDSelectorBatch(slots)
    inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexIDMap2) else index
    if isinstance(inner, faiss.IndexHNSW):
        parameters = options.SearchParametersHNSW(sel=selector, efSearch=max(inner.hnsw.efSearch, 2 * k))
    elif isinstance(inner, faiss.IndexIVF):
        parameters = options.SearchParametersIVF(sel=selector, nprobe=inner.nprobe)
    else:
        return None
    # pytorch-metric-learning may import `faiss.contrib.torch_utils`; `search` then takes no parameters
    search = getattr(index, "search_numpy", index.search)
    with matrix_product(len(vectors)):
        return search(vectors, k, params=parameters)[1]


def nearest(stored: np.ndarray, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(Q, k) highest cosines among stored vectors, and their rows. FAISS reads the vectors in place."""
    import faiss

    return faiss.knn(vectors, stored, min(k, len(stored)), metric=faiss.METRIC_INNER_PRODUCT)


def empty_copy(index: Any, device: str) -> Any:
    """An empty index of the same type, training and parameters."""
    import faiss

    copy = faiss.clone_index(to_cpu(index))
    copy.reset()
    return prepare(copy, None, device)


def to_cpu(index: Any) -> Any:
    """The index on the CPU, as needed for writing it to a file."""
    import faiss

    return faiss.index_gpu_to_cpu(index) if hasattr(faiss, "index_gpu_to_cpu") else index


@contextmanager
def matrix_product(queries: int) -> Iterator[None]:
    """For four or more queries, make FAISS compare all queries with all items by one matrix product.

    By default, FAISS 1.15 reads the items once per query if queries × dimensions are at most 128,000. This is 6 times
    slower for 32 queries in 512 dimensions, and faster only for 1 or 2 queries. A lock guards FAISS's global setting.
    """
    import faiss

    if queries < _PRODUCT_FROM:
        yield
        return
    with _SWITCH_LOCK:
        threshold = faiss.cvar.distance_compute_blas_threshold
        faiss.cvar.distance_compute_blas_threshold = 1
        try:
            yield
        finally:
            faiss.cvar.distance_compute_blas_threshold = threshold


@contextmanager
def _value_errors(sentence: str) -> Iterator[None]:
    """Turn an error of FAISS into a `ValueError` with this sentence and FAISS's reason."""
    try:
        yield
    except RuntimeError as error:
        if "out of memory" in str(error):  # not the caller's mistake
            raise
        reason = re.sub(r"^Error in .*? at \S+:\d+: (Error: )?", "", str(error), flags=re.DOTALL)
        raise ValueError(f"{sentence}: {reason}") from None
