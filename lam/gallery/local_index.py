"""The FAISS index in this process, which follows the store; `lam.gallery.remote_index` uses a Milvus collection.

At every start, a flat index is built from the store. Other types build slowly, so they are read from a cache folder,
and updated.
"""

import logging
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Int64

from lam.gallery.item import Item
from lam.gallery.store import ItemStore
from lam.retrieval.index.faiss_index import Index
from lam.retrieval.index.hits import Hits, Recall, percent
from lam.utils.extras import install_command
from lam.utils.files import CorruptFileError
from lam.vmf.embeddings import Embeddings

Kind = Literal["flat", "hnsw"]  # `flat` searches exactly; `hnsw` searches along a graph, and may miss neighbours
LEAST_RECALL = 0.95  # a lower recall at the start logs a warning
_BLOCK = 10_000
_LOG = logging.getLogger(__name__)


class LocalIndex:
    """The items of a store in a FAISS index; any thread may search while one thread applies changes.

    An index that is not flat is saved in the folder `cache`. Items of another dimension raise a `ValueError`.

    Attributes:
        recall: recall against an exact search, measured at the start; None for exact searches or below two items.
    """

    complaint: None = None  # always None: the index can always be searched

    def __init__(self, cache: Path, store: ItemStore, dimension: int, factory: str) -> None:
        self._cache, self._store, self._lock = cache, store, threading.Lock()
        self.index = build_index(cache, store.items_by_key(), dimension, factory, source=store.path)
        if not cache.is_dir():
            self._save()
        self.recall: Recall | None = None if self.index.factory == "Flat" else self.index.measure_recall()
        if self.recall is not None and self.recall.share < LEAST_RECALL:
            _LOG.warning(
                "%s; less than %s of the neighbours: serve with --index flat, or index the gallery again with a wider "
                "graph, such as `lam index --factory HNSW64`, or with fewer cells",
                self.recall,
                percent(LEAST_RECALL),
            )

    def __len__(self) -> int:
        return len(self.index)

    def search(self, queries: Embeddings, k: int, among: Int64[np.ndarray, " G"] | None = None) -> Hits:
        """The k nearest items of each query, as hits whose ids are keys of the store; `among`: the keys to search."""
        with self._lock:
            return self.index.search(queries, k, among=among)

    def apply(self, gone: set[int], new: Mapping[int, Item]) -> None:
        """Remove and add items by key; removing or adding twice has no effect.

        A FAISS type that cannot remove is rebuilt, while searches continue.
        """
        with self._lock:
            self.index.remove(sorted(key for key in gone if key in self.index), sweeps=False)
            added = {key: item for key, item in new.items() if key not in self.index}
            if added:
                self.index.add(embeddings_of(added.values()), list(added))
        self.index.sweep(self._lock)

    def close(self) -> None:
        """Write the cache, unless the index is flat, still holds removed vectors, or the folder was moved."""
        with self._lock:
            self._save()

    def _save(self) -> None:
        if self.index.factory == "Flat" or not self._store.is_in_place:  # the folder may be of another run now
            return
        if self.index.holds_removed:  # erased vectors must not come back from the cache
            shutil.rmtree(self._cache, ignore_errors=True)
            return
        with suppress(OSError):  # without room for the cache, the next start builds it again
            self.index.save(self._cache)


def factory_of(kind: str | None, indexed: str) -> str:
    """The FAISS type for a requested kind; None keeps the gallery's type `indexed`, "hnsw" keeps only an HNSW type.

    Example:
        >>> factory_of(None, "IVF4,Flat"), factory_of("flat", "HNSW8"), factory_of("hnsw", "HNSW8")
        ('IVF4,Flat', 'Flat', 'HNSW8')
        >>> factory_of("hnsw", "Flat")
        'HNSW32'
    """
    if kind is None:
        return indexed
    if kind not in get_args(Kind):
        raise ValueError(
            f"index must be {', '.join(get_args(Kind))} or the address of a Milvus collection, such as "
            f"milvus://HOST/COLLECTION, got {kind!r}"
        )
    if kind == "flat":
        return "Flat"
    return indexed if indexed.startswith("HNSW") else "HNSW32"


def build_index(
    cache: Path,
    items: Iterator[tuple[int, Item]],
    dimension: int,
    factory: str,
    *,
    source: Path,
    trained: Index | None = None,
) -> Index:
    """The index of these items: the saved one in the folder `cache`, updated, or a new one.

    Args:
        items: items by rising key.
        factory: the FAISS type; with too few items for this type, the index is Flat, with a warning.
        source: the file of the items, for error messages.
        trained: an empty trained index of this type to fill, instead of the cached one.
    """
    index = trained if trained is not None else _load_cached(cache, dimension, factory)
    if index is None:
        index = Index(dimension, factory)
    known = set(index.ids.tolist())
    missing: list[tuple[int, Item]] = []
    while block := list(islice(items, _BLOCK)):
        require_dimension([item for _, item in block], dimension, source)
        missing += [(key, item) for key, item in block if key not in known]
        known -= {key for key, _ in block}
        if index.is_trained and len(missing) >= _BLOCK:
            index, missing = _extend(index, missing), []
    index.remove(sorted(known))
    return _extend(index, missing)


def require_faiss() -> None:
    """Raise a ValueError that says how to install FAISS, if it is missing."""
    try:
        import faiss  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"FAISS cannot be imported ({error}): {install_command('cpu')}, or {install_command('gpu')}"
        ) from None


def _load_cached(cache: Path, dimension: int, factory: str) -> Index | None:
    if factory == "Flat" or not cache.is_dir():
        return None
    try:
        index = Index.load(cache)
    except (CorruptFileError, ValueError, OSError) as error:  # a service may delete it meanwhile
        _LOG.warning("the index is built anew from the stored embeddings: %s", error)
        return None
    return index if (index.dimension, index.factory) == (dimension, factory) else None


def embeddings_of(items: Collection[Item]) -> Embeddings:
    """Embeddings of at least one item."""
    return embeddings_of_vectors([item.vector for item in items], [item.kappa for item in items])


def embeddings_of_vectors(vectors: Sequence[bytes], kappas: Sequence[float]) -> Embeddings:
    """Embeddings of one or more stored vectors with their κ."""
    mean = torch.from_numpy(np.frombuffer(bytearray().join(vectors), np.float32).reshape(len(vectors), -1))
    kappa = torch.tensor(kappas, dtype=torch.float64)
    return Embeddings(mean, kappa, torch.ones_like(kappa), torch.zeros_like(kappa))


def require_dimension(items: Iterable[Item], dimension: int, path: Path) -> None:
    """Raise a ValueError for an item of another dimension, because its embedding comes from another encoder."""
    for item in items:
        if len(item.vector) != 4 * dimension:
            raise ValueError(
                f"{path} holds item {item.id} of dimension {len(item.vector) // 4}, the run has {dimension}: "
                f"it belongs to another encoder; to begin anew, move {path.parent} away"
            )


def _extend(index: Index, items: list[tuple[int, Item]]) -> Index:
    if not items:
        return index if index.is_trained else Index(index.dimension)
    embeddings = embeddings_of([item for _, item in items])
    if not index.is_trained:
        try:
            index.train(embeddings)
        except ValueError as error:
            _LOG.warning("%s; the index is Flat until the next start", error)
            index = Index(index.dimension)
    index.add(embeddings, [key for key, _ in items])
    return index
