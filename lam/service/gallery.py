"""Store and index, one for the other: what is written goes to disk first, then into the index, then is acknowledged.

The index is a cache: it is made from the store at every start, or, for FAISS types that take long to build, read from
its own folder and caught up by key.
"""

import logging
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from lam.embeddings import Embeddings
from lam.files import CorruptFileError
from lam.retrieval.hits import Hits
from lam.retrieval.index import Index
from lam.run_folder import locked
from lam.service.errors import busy, full
from lam.service.items import Item
from lam.service.store import FILE, Change, ItemStore, Operation
from lam.service.takeover import erase, take_over

FOLDER, CACHE = "service", "index"
_BLOCK = 10_000
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Described:
    """What a hit is, beside its score and κ."""

    id: str
    label: str
    metadata: str
    images: int
    resultant: float
    least_kappa: float
    pictured: bool


class Gallery:
    """The items of a run, searched by any thread while one other writes. One process at a time may have it open.

    Args:
        run: the run's folder.
        dimension: of the embeddings.
        drop_corrupt: delete rows that were altered, and go on without them.
        index: the address of a Milvus collection that is searched, in place of an index of its own.

    Raises:
        CorruptFileError: naming the file, and the rows, that were altered.
        ValueError: where another process has it open, or for an index of another kind.
    """

    def __init__(self, run: Path, dimension: int, *, drop_corrupt: bool = False, index: str | None = None) -> None:
        if index is not None:
            raise ValueError(f"only an index of its own can be searched, got {index!r}")
        self._run, self._folder = run, run / FOLDER
        self._index_lock = threading.Lock()
        self._folder.mkdir(exist_ok=True)
        with ExitStack() as held:
            held.enter_context(locked(self._folder))
            self._store = ItemStore(self._folder / FILE)
            held.callback(self._store.close)
            for identity in self._store.check(drop_corrupt=drop_corrupt):
                _LOG.warning("the row of item %s was altered and is deleted", identity)
            factory = take_over(run, self._store)
            self._index = self._filled(dimension, factory)
            if not (self._folder / CACHE).is_dir():
                self._save_cache()
            self._held = held.pop_all()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def dimension(self) -> int:
        """Of the embeddings."""
        return self._index.dimension

    @property
    def index(self) -> Index:
        """The index, whose ids are keys of the store; for measurements."""
        return self._index

    @property
    def complaint(self) -> str | None:
        """Why it cannot be searched now, or None."""
        return None

    def search(self, queries: Embeddings, k: int) -> tuple[Hits, dict[int, Described]]:
        """Find the k nearest items of each query, and say what the hits are.

        Returns:
            Hits whose ids are keys, and what is behind each key; a key that was deleted meanwhile is not there.
        """
        with self._index_lock:
            hits = self._index.search(queries, k)
        described = self._store.described(hits.ids.unique().tolist())
        return hits, {key: Described(*what) for key, what in described.items()}

    def get(self, identity: str) -> Item | None:
        """Look an item up by id."""
        return self._store.get(identity)

    def page(self, *, after: str, limit: int) -> list[Item]:
        """Give items by rising id, from behind one on."""
        return self._store.page(after=after, limit=limit)

    def write(self, operations: Sequence[Operation]) -> list[Change]:
        """Put and delete items; they are on disk, and found or no longer found, when this returns.

        Deleted items are erased from the store, its log, the cache of the index and the run's own index.

        Returns:
            What each operation did.

        Raises:
            ServiceError: 507, where it could not be stored; or 503, where another process holds what would be erased.
                In the first case nothing was changed.
        """
        deleted = [operation for operation in operations if isinstance(operation, str)]
        try:
            facts = erase(self._run, deleted, self._store) if deleted else {}
            if deleted:
                shutil.rmtree(self._folder / CACHE, ignore_errors=True)
            changes = self._store.write(operations, facts=facts)
        except OSError as error:
            raise full(error.strerror or "it cannot be written") from error
        self._apply(operations, changes)
        if deleted and not self._store.erase_log():
            raise busy("the items are deleted, but a reader of the database keeps its log, which still holds them")
        return changes

    def close(self) -> None:
        """Write the cache of the index, if its type needs one, and let go of the folder."""
        with self._index_lock:
            self._save_cache()
            self._held.close()

    def _save_cache(self) -> None:
        """Keep what takes long to build; where there is no room for it, it is built again."""
        if self._index.factory != "Flat":
            with suppress(OSError):
                self._index.save(self._folder / CACHE)

    def _apply(self, operations: Sequence[Operation], changes: Sequence[Change]) -> None:
        """Bring the index to what the store now holds: a key that came and went within one batch never enters."""
        gone = {key for change in changes for key in change.removed}
        new = {
            change.key: operation
            for operation, change in zip(operations, changes, strict=True)
            if isinstance(operation, Item) and change.key is not None and change.key not in gone
        }
        with self._index_lock:
            known = set(self._known(gone | new.keys()))
            self._index.remove(sorted(gone & known))
            added = {key: item for key, item in new.items() if key not in known}
            if added:
                self._index.add(_embeddings(list(added.values())), list(added))

    def _known(self, keys: set[int]) -> list[int]:
        wanted = torch.tensor(sorted(keys), dtype=torch.int64)
        return wanted[torch.isin(wanted, self._index.ids)].tolist()

    def _filled(self, dimension: int, factory: str) -> Index:
        index = self._cached(dimension, factory)
        if index is None:
            index = Index(dimension, factory)
        known = set(index.ids.tolist())
        missing = []
        for block in _blocks(self._store.keyed()):
            _require_dimension(block, dimension, self._store.path)
            missing += [(key, item) for key, item in block if key not in known]
            known -= {key for key, _ in block}
            if index.is_trained and len(missing) >= _BLOCK:
                index, missing = _extended(index, missing), []
        index.remove(sorted(known))
        return _extended(index, missing)

    def _cached(self, dimension: int, factory: str) -> Index | None:
        folder = self._folder / CACHE
        if factory == "Flat" or not folder.is_dir():
            return None
        try:
            index = Index.load(folder)
        except (CorruptFileError, ValueError) as error:
            _LOG.warning("the index is built anew from the stored embeddings: %s", error)
            return None
        return index if (index.dimension, index.factory) == (dimension, factory) else None


def _extended(index: Index, items: list[tuple[int, Item]]) -> Index:
    if not items:
        return index if index.is_trained else Index(index.dimension)
    embeddings = _embeddings([item for _, item in items])
    if not index.is_trained:
        try:
            index.train(embeddings)
        except ValueError as error:
            _LOG.warning("%s; the index is Flat until the next start", error)
            index = Index(index.dimension)
    index.add(embeddings, [key for key, _ in items])
    return index


def _embeddings(items: Sequence[Item]) -> Embeddings:
    mean = torch.from_numpy(np.stack([item.embedding for item in items]))
    kappa = torch.tensor([item.kappa for item in items], dtype=torch.float64)
    return Embeddings(mean, kappa, torch.ones_like(kappa), torch.zeros_like(kappa))


def _blocks(items: Iterator[tuple[int, Item]]) -> Iterator[list[tuple[int, Item]]]:
    while block := list(islice(items, _BLOCK)):
        yield block


def _require_dimension(block: Sequence[tuple[int, Item]], dimension: int, path: Path) -> None:
    for _, item in block:
        if len(item.vector) != 4 * dimension:
            raise ValueError(
                f"{path} holds item {item.id} of dimension {len(item.vector) // 4}, the run has {dimension}: "
                "it belongs to another encoder; move it away to begin anew"
            )
