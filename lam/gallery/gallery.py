"""A store and its index: a change is written to disk, then applied to the index, then acknowledged.

Between the first two steps, the index may hold an item that the store has deleted. A search that finds a deleted item
waits until the index is up to date, and searches again; other searches do not wait for the disk. The index is a cache,
in this process (`lam.gallery.local_index`) or on a Milvus server (`lam.gallery.remote_index`).
"""

import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from lam.gallery.enrolment import Enrolment
from lam.gallery.filters import Filter
from lam.gallery.item import ItemInfo
from lam.gallery.local_index import LocalIndex, build_index, factory_of
from lam.gallery.operations import Change, DeleteWhere, Operation
from lam.gallery.refusal import Refusal, busy
from lam.gallery.remote_index import RemoteIndex
from lam.gallery.store import CACHE, FACTORY, FILE, MEAN_SAMPLES, MISSING, ItemStore
from lam.retrieval.index.faiss_index import Index
from lam.retrieval.index.hits import Hits, Recall, label_key
from lam.retrieval.metrics.scores import N_HITS
from lam.utils.files import locked
from lam.vmf.embeddings import Embeddings

_LOG = logging.getLogger(__name__)
_KEPT = 16  # number of filters whose items stay in memory
_DEEPEST = 2**12  # hits of one search


@dataclass(frozen=True, eq=False)
class Matching:
    """The items that pass a filter.

    Attributes:
        keys: (G,) the items' keys in the store, rising.
        labels: (G,) the items' `label_key`s; −1 without a label.
        unknown: fields of the filter that no item has; empty if an item passes.
    """

    keys: Int64[np.ndarray, " G"]
    labels: Int64[np.ndarray, " G"]
    unknown: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.keys)


@contextmanager
def open_store(folder: str | Path, *, make: bool = True) -> Iterator[ItemStore]:
    """Open the items of a gallery, and lock them against other processes; `make` creates a missing gallery.

    Raises:
        CorruptFileError: for a lost or unreadable file.
        ValueError: for a missing gallery, or a gallery that another process has open.
        OSError: for a gallery that cannot be written.
    """
    folder = Path(folder)
    if make:
        folder.mkdir(exist_ok=True)
    elif not folder.is_dir():
        raise ValueError(MISSING.format(folder / FILE))
    with locked(folder), closing(ItemStore(folder / FILE, make=make)) as store:
        yield store


def replace_items(store: ItemStore, enrolled: Enrolment, *, factory: str = "Flat") -> None:
    """Replace the items that a run or `lam index` wrote, and set the FAISS type; items that a service added stay.

    If the process is killed, either the old items or the new ones remain.

    Raises:
        ValueError: for an unknown FAISS type, or a type that needs more items; nothing is changed.
        OSError: if the items cannot be stored.
    """
    embeddings, cache = enrolled.embeddings, store.path.with_name(CACHE)
    index = Index(embeddings.dimension, factory)
    if not index.is_trained:
        index.train(replace(embeddings, mean_samples=None))
    shutil.rmtree(cache, ignore_errors=True)
    try:
        store.replace(enrolled.items, facts={FACTORY: factory, MEAN_SAMPLES: str(embeddings.mean_samples or "")})
    except Refusal as refusal:
        raise OSError(f"{store.path}: {refusal}") from None
    store.erase_log()
    if factory != "Flat":
        index = build_index(cache, store.items_by_key(), index.dimension, factory, source=store.path, trained=index)
        index.save(cache)


class Gallery:
    """The items of a run. Any thread may search while one thread writes; only one process may open a gallery.

    Args:
        folder: folder of the gallery, written by a run or by `lam index`.
        drop_corrupt: whether altered rows are deleted, instead of an error.
        index: "flat", "hnsw" or the address of a Milvus collection. By default the FAISS type from
            `lam index --factory`, else flat. The items on disk are the same for every index.

    Attributes:
        store: the items on disk, for lookups; change them only with `Gallery.write`.

    Raises:
        CorruptFileError: for altered rows or a lost file.
        ValueError: for a missing gallery, a gallery that another process has open, another kind of index, or a
            collection that cannot be used.
        ConnectionError: if Milvus does not answer when a collection is first used.
        OSError: if the folder cannot be written.
    """

    store: ItemStore

    def __init__(self, folder: Path, dimension: int, *, drop_corrupt: bool = False, index: str | None = None) -> None:
        self._begin(folder, dimension)
        with ExitStack() as resources:
            self.store = resources.enter_context(open_store(folder, make=False))
            for item_id in self.store.check(drop_corrupt=drop_corrupt):
                _LOG.warning("the row of item %s was altered and is deleted", item_id)
            self.store.erase_log()  # a killed process may have left deleted items in it
            self._index = self._open_index(index)
            resources.callback(self._index.close)
            self._resources = resources.pop_all()

    def _begin(self, folder: Path, dimension: int) -> None:
        self.dimension = dimension
        self._cache = folder / CACHE
        self._writing = threading.Lock()  # held while the index may lag behind the store
        self._version, self._matching = 0, lru_cache(_KEPT)(_find_matching)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def index(self) -> "Index | RemoteIndex":
        """The index, for measurements; its ids are keys of the store."""
        return self._index.index if isinstance(self._index, LocalIndex) else self._index

    @property
    def recall(self) -> Recall | None:
        """Recall against an exact search, measured at the start; None for exact searches and Milvus."""
        return self._index.recall

    @property
    def complaint(self) -> str | None:
        """Why the index cannot be searched now, or None."""
        return self._index.complaint

    def search(self, queries: Embeddings, k: int, among: Matching | None = None) -> tuple[Hits, dict[int, ItemInfo]]:
        """Hits of the k nearest items of each query, and information on these items by key.

        `among` limits the search to items that pass a filter. A search sees the items before or after a concurrent
        write. If Milvus does not answer, the search is refused as `busy`.
        """
        keys = None if among is None else among.keys
        hits, infos, gone = self._search_once(queries, k, keys)
        if gone:
            with self._writing:
                hits, infos, gone = self._search_once(queries, k, keys)
                while gone:  # from a write that failed between store and index
                    self._index.apply(gone, {})
                    hits, infos, gone = self._search_once(queries, k, keys)
        return hits, infos

    def nearest(self, queries: Embeddings, k: int, among: Int64[np.ndarray, " G"] | None) -> Hits:
        """Hits of the k nearest items among these keys (None: all keys); a hit may have been deleted meanwhile."""
        return self._index.search(queries, k, among)

    def matching(self, where: Filter) -> Matching:
        """The items that pass a filter; a slow filter is refused as `busy`. Recent results are kept until a change."""
        # the version is read first: a change during the scan makes the result outdated, never too new
        return self._matching(self.store, where, self._version)

    def write(self, operations: Sequence[Operation]) -> list[Change | Refusal]:
        """Apply operations; on return, the changes are on disk and searches see them.

        Deleted items are erased from the store, its log, and the index with its cache. While Milvus does not answer,
        changes are on disk only; the collection follows once Milvus answers again.

        Returns:
            The effect or refusal of each operation; `busy` for a deletion whose traces cannot be erased yet.

        Raises:
            Refusal: `full` or `busy`, if the changes could not be stored; nothing was changed.
        """
        deleted = [operation for operation in operations if isinstance(operation, str | DeleteWhere)]
        if deleted:
            shutil.rmtree(self._cache, ignore_errors=True)
        with self._writing:
            try:
                changes = self.store.write(operations)
                self._apply(changes)
            finally:
                self._version += 1
        if not deleted or (unerased := self._unerased()) is None:
            return changes
        pairs = zip(operations, changes, strict=True)
        return [unerased if isinstance(operation, str | DeleteWhere) else change for operation, change in pairs]

    def close(self) -> None:
        """Write the index's cache, if its type needs one, and unlock the folder."""
        self._resources.close()

    def _open_index(self, index: str | None) -> "LocalIndex | RemoteIndex":
        if index is None or "://" not in index:
            factory = factory_of(index, self.store.fact(FACTORY) or "Flat")
            return LocalIndex(self._cache, self.store, self.dimension, factory)
        return RemoteIndex(index, self.store, self.dimension)

    def _unerased(self) -> Refusal | None:
        """The refusal if traces of a deleted item are left, or None."""
        after = 1
        if kept := self.store.erase_log():
            where = f"{kept}, which still holds the item"
        elif self._cache.exists():
            where = "the cache of the index may still hold the item, and cannot be deleted now"
        elif self._index.complaint is not None:
            where, after = "the index holds its vector, and does not answer now", self._index.retry_after
        else:
            return None
        return busy(f"the item is deleted and no longer found, but {where}", after=after)

    def _search_once(
        self, queries: Embeddings, k: int, among: np.ndarray | None
    ) -> tuple[Hits, dict[int, ItemInfo], set[int]]:
        """Hits, information on stored ones by key, and the keys of hits that the store no longer holds."""
        hits = self._index.search(queries, k, among)
        keys = set(hits.ids.flatten().tolist())
        infos = self.store.infos_of(keys)
        return hits, infos, keys - infos.keys()

    def _apply(self, changes: Sequence[Change | Refusal]) -> None:
        """Apply changes to the index; a key that one batch adds and removes again is not added."""
        parts = (part for change in changes if isinstance(change, Change) for part in (change, *change.parts))
        done = [part for part in parts if isinstance(part, Change)]
        gone = {key for change in done for key in change.removed}
        new = {
            change.key: change.item
            for change in done
            if change.item is not None and change.key is not None and change.key not in gone
        }
        self._index.apply(gone, new)


def _find_matching(store: ItemStore, where: Filter, version: int) -> Matching:
    rows, unknown = store.where(where)
    numbers = {label: label_key(label) if label else -1 for label in {label for _, label in rows}}
    keys, labels = [key for key, _ in rows], [numbers[label] for _, label in rows]
    return Matching(np.array(keys, dtype=np.int64), np.array(labels, dtype=np.int64), unknown)


class Place(NamedTuple):
    """A hit: its key, cosine and κ, and its rank in the first search, from 0 (None if a deeper search found it)."""

    key: int
    score: float
    kappa: float
    rank: int | None


def places_of(hits: Hits) -> list[list[Place]]:
    """The hits of each query as places."""
    columns = (hits.ids.tolist(), hits.scores.tolist(), hits.kappa.tolist())
    return [
        [Place(*hit, rank) for rank, hit in enumerate(zip(*row, strict=True))] for row in zip(*columns, strict=True)
    ]


def nearest_by_label(
    search: Callable[[int, Int64[np.ndarray, " G"] | None], Hits], items: Matching, *, n_groups: int, size: int
) -> list[list[Place]]:
    """The nearest `size` items of each of the `n_groups` nearest labels, best first; unlabelled items are left out.

    `search(k, among)` returns the k nearest hits of the query among the keys `among`, or among all keys for None. Each
    deeper search leaves out labels that already have `size` items. A search for `n_groups * size` hits completes a
    label or finds `n_groups` labels, so the loop ends.
    """
    groups: dict[int, list[Place]] = {}
    ranks: dict[int, int] = {}
    depth, among = max(N_HITS, 4 * n_groups * size), None
    while True:
        hits = search(depth, among)
        (places,) = places_of(hits)
        ranks = ranks or {place.key: rank for rank, place in enumerate(places)}
        groups = {label: group if len(group) == size else [] for label, group in groups.items()}
        for place, label in zip(places, _labels_of(hits.ids[0].numpy(), items), strict=True):
            if label >= 0 and (label in groups or len(groups) < n_groups):
                group = groups.setdefault(label, [])
                if len(group) < size:
                    group.append(place._replace(rank=ranks.get(place.key)))
        full = [label for label, group in groups.items() if len(group) == size]
        if len(places) < depth or len(full) == n_groups:
            return list(groups.values())
        open_items = (items.labels >= 0) & ~np.isin(items.labels, full)
        if len(groups) == n_groups:
            open_items &= np.isin(items.labels, list(groups))
        among, depth = items.keys[open_items], max(depth, min(4 * depth, _DEEPEST))


def _labels_of(keys: np.ndarray, items: Matching) -> list[int]:
    """Label numbers of keys; −1 for an item that was added after the items were listed."""
    if len(items) == 0:
        return [-1] * len(keys)
    places = items.keys.searchsorted(keys).clip(max=len(items) - 1)
    return np.where(items.keys[places] == keys, items.labels[places], -1).tolist()
