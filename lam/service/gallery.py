"""Store and index, one for the other: what is written goes to disk first, then into the index, then is acknowledged.

Between the first two steps the index may hold what the store no longer does. A search that meets such an item waits
until the index has followed and looks again; no other search waits for the disk. The index is a cache, of this process
(`lam.gallery.local_index`) or of a Milvus server (`lam.gallery.remote_index`).
"""

import logging
import shutil
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lam.gallery.item import Item
from lam.gallery.local_index import LocalIndex
from lam.gallery.refusal import Refusal, busy
from lam.gallery.store import FILE, Change, ItemStore, Operation
from lam.retrieval.index.faiss_index import Index
from lam.retrieval.index.hits import Hits
from lam.service.takeover import erase, take_over, to_erase
from lam.utils.files import locked
from lam.vmf.embeddings import Embeddings

if TYPE_CHECKING:
    from lam.gallery.remote_index import RemoteIndex

FOLDER, CACHE = "service", "index"
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
        ValueError: where another process has it open, or for a collection that cannot be used.
        ConnectionError: where Milvus does not answer when a collection is first used.
        OSError: where the run cannot be written.
    """

    def __init__(self, run: Path, dimension: int, *, drop_corrupt: bool = False, index: str | None = None) -> None:
        self.dimension = dimension
        self._run, self._folder = run, run / FOLDER
        self._folder.mkdir(exist_ok=True)
        self._writing = threading.Lock()  # held while the index may lag behind the store
        with ExitStack() as held:
            held.enter_context(locked(self._folder))
            self._store = ItemStore(self._folder / FILE)
            held.callback(self._store.close)
            for identity in self._store.check(drop_corrupt=drop_corrupt):
                _LOG.warning("the row of item %s was altered and is deleted", identity)
            try:
                factory = take_over(run, self._store)
            except Refusal as error:
                raise OSError(f"{self._store.path}: {error}") from None
            self._store.erase_log()  # which may hold what a process deleted that then was killed
            self._index = self._opened(index, factory)
            held.callback(self._index.close)
            self._held = held.pop_all()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def index(self) -> "Index | RemoteIndex":
        """What is searched, whose ids are keys of the store; for measurements."""
        return self._index.index if isinstance(self._index, LocalIndex) else self._index

    @property
    def complaint(self) -> str | None:
        """Why it cannot be searched now, or None."""
        return self._index.complaint

    def search(self, queries: Embeddings, k: int) -> tuple[Hits, dict[int, Described]]:
        """Find the k nearest items of each query, as they are before a write or after it, and say what the hits are.

        Returns:
            Hits whose ids are keys, and what is behind each key.

        Raises:
            Refusal: busy, where the index is elsewhere and does not answer.
        """
        hits, described, gone = self._found(queries, k)
        if gone:
            with self._writing:
                hits, described, gone = self._found(queries, k)
                while gone:  # since a write that failed before the index had followed
                    self._index.apply(gone, {})
                    hits, described, gone = self._found(queries, k)
        return hits, described

    def get(self, identity: str) -> Item | None:
        """Look an item up by id."""
        return self._store.get(identity)

    def page(self, *, after: str, limit: int) -> list[Item]:
        """Give items by rising id, from behind one on; fewer, where together they have much metadata."""
        return self._store.page(after=after, limit=limit)

    def write(self, operations: Sequence[Operation]) -> list[Change | Refusal]:
        """Put and delete items; they are on disk, and found or no longer found, when this returns.

        Deleted items are erased from the store, its log, the index with its cache, and the run's own index. While an
        index that is elsewhere does not answer, items are on disk, and found or erased once it does.

        Returns:
            What each operation did; for a deletion that is stored, but has yet to be followed somewhere, a 503.

        Raises:
            Refusal: full, where it could not be stored; nothing was changed.
        """
        deleted = [operation for operation in operations if isinstance(operation, str)]
        if deleted:
            shutil.rmtree(self._folder / CACHE, ignore_errors=True)
        facts = to_erase(self._run, deleted, self._store)
        with self._writing:
            changes = self._store.write(operations, facts=facts)
            self._apply(changes)
        refusals = self._unerased(deleted) if deleted else {}
        pairs = zip(operations, changes, strict=True)
        return [refusals.get(each, change) if isinstance(each, str) else change for each, change in pairs]

    def close(self) -> None:
        """Write the cache of the index, if its type needs one, and let go of the folder."""
        self._held.close()

    def _opened(self, address: str | None, factory: str) -> "LocalIndex | RemoteIndex":
        if address is None:
            return LocalIndex(self._folder / CACHE, self._store, self.dimension, factory)
        from lam.gallery.remote_index import RemoteIndex

        return RemoteIndex(address, self._store, self.dimension)

    def _unerased(self, deleted: Sequence[str]) -> dict[str, Refusal]:
        """Erase deleted items wherever else they are; what is answered for those that are left somewhere."""
        left = erase(self._run, self._store)
        said = "the item is deleted and is not found again, but"
        refusals = dict.fromkeys(left, busy(f"{said} the run's index may still hold it and cannot be written now"))
        if not isinstance(self._index, LocalIndex) and self._index.complaint is not None:
            refusals = dict.fromkeys(deleted, self._index.unerased())
        if not self._store.erase_log():
            held = busy(f"{said} a reader of the database keeps its log, which still holds it")
            refusals = dict.fromkeys(deleted, held)
        return refusals

    def _found(self, queries: Embeddings, k: int) -> tuple[Hits, dict[int, Described], set[int]]:
        """Hits, what they are, and those of them that the store no longer holds."""
        hits = self._index.search(queries, k)
        keys = set(hits.ids.flatten().tolist())
        described = {key: Described(*what) for key, what in self._store.described(keys).items()}
        return hits, described, keys - described.keys()

    def _apply(self, changes: Sequence[Change]) -> None:
        """Bring the index to what the store now holds: a key that came and went within one batch never enters."""
        gone = {key for change in changes for key in change.removed}
        new = {
            change.key: change.item
            for change in changes
            if change.item is not None and change.key is not None and change.key not in gone
        }
        self._index.apply(gone, new)
