"""A Milvus collection that follows the store; with a circuit breaker, changes do not wait for a failed server.

While the circuit is closed, searches and changes go to the server. An error or time-out opens the circuit: searches are
then refused at once, and changes go to the store only. A thread tries the server at intervals. When the server answers,
the thread compares keys, updates the collection, and closes the circuit. An outage may last longer than the process.
"""

import logging
import math
import threading
from collections.abc import Collection, Mapping
from contextlib import closing

import numpy as np
from jaxtyping import Int64

from lam.gallery.item import Item
from lam.gallery.local_index import embeddings_of, require_dimension
from lam.gallery.refusal import Refusal, busy
from lam.gallery.store import ItemStore
from lam.retrieval.index.hits import Hits
from lam.retrieval.index.milvus_index import MOST_HITS, Address, MilvusIndex
from lam.vmf.embeddings import Embeddings

TIMEOUT = 5.0  # longest wait for an answer of the server, in seconds
PAUSE = 2.0  # time between two attempts to reach a failed server, in seconds
_BLOCK = 1000
_LOG = logging.getLogger(__name__)


class RemoteIndex:
    """The items of a store in a collection; any thread may search while one thread applies changes.

    The collection belongs to this store: other entities in it are deleted. At first use it must be empty or missing.

    Args:
        follows: whether this process keeps the collection equal to the store; False if another process does.

    Raises:
        ValueError: for a collection with other entities at its first use, or as `MilvusIndex`; with `follows=False`,
            for a collection that was never used for this store.
        ConnectionError: if the server does not answer at the first use; later, the circuit opens instead.
    """

    recall: None = None  # always None: recall is not measured

    def __init__(self, address: str, store: ItemStore, dimension: int, *, follows: bool = True) -> None:
        self._address, self._store, self._dimension, self._follows = address, store, dimension, follows
        self._index: MilvusIndex | None = None  # while the circuit is closed
        self._changing = threading.Lock()
        self._gone: set[int] = set()  # changes while the collection is updated
        self._new: set[int] = set()
        self._reason = ""
        self._count = len(store)
        self._claim()
        try:
            self._close_circuit()
        except ConnectionError as error:
            self._log_reason(error)
        self._is_closing = threading.Event()
        self._retrying = threading.Thread(target=self._retry_until_closed, name="lam circuit", daemon=True)
        self._retrying.start()

    def __len__(self) -> int:
        return self._count

    @property
    def factory(self) -> str:
        """The address of the collection, which is reported in place of a FAISS type."""
        return self._address

    @property
    def complaint(self) -> str | None:
        """Why the index cannot be searched now, or None; the server's error is in the log."""
        if self._index is not None:
            return None
        return "the index does not answer, or is not up to date yet; changes are stored, and follow later"

    def search(self, queries: Embeddings, k: int, among: Int64[np.ndarray, " G"] | None = None) -> Hits:
        """As `LocalIndex.search`; refused as `busy` while the circuit is open."""
        index = self._index
        if index is None:
            raise self._refusal()
        try:
            return index.search(queries, min(k, MOST_HITS), among=among)
        except ConnectionError as error:
            self._open_circuit(index, error)
            raise self._refusal() from None

    def apply(self, gone: set[int], new: Mapping[int, Item]) -> None:
        """Remove and add items by key; while the server fails, the changes wait."""
        self._count = len(self._store)
        with self._changing:
            self._gone |= gone
            self._new |= new.keys()
            index = self._index
            if index is None:
                return
            try:
                self._follow(index)
            except Exception as error:  # after any error the collection differs from the store
                self._open_circuit(index, error)

    def probe(self) -> bool:
        """Try the server, update the collection from the store, and close the circuit; False after an error."""
        try:
            self._close_circuit()
        except Exception as error:  # the thread that tries again must survive all errors
            self._log_reason(error)
            return False
        _LOG.warning("the index %s is back and up to date", self._address)
        return True

    def close(self) -> None:
        """Stop the attempts, and close the connection; the next start updates the collection."""
        self._is_closing.set()
        self._retrying.join(TIMEOUT)
        if self._index is not None:
            self._index.close()

    @property
    def retry_after(self) -> int:
        """Upper bound on the seconds until the next attempt to reach the server."""
        return max(1, math.ceil(PAUSE))

    def _refusal(self) -> Refusal:
        return busy("the index cannot be searched now", after=self.retry_after)

    def _connected(self) -> MilvusIndex:
        index = MilvusIndex(self._address, self._dimension if self._follows else None, timeout=TIMEOUT)
        if index.dimension != self._dimension:
            index.close()
            raise ValueError(f"the collection has dimension {index.dimension}, the run has {self._dimension}")
        return index

    def _claim(self) -> None:
        """Claim the collection for this file of items; a collection with other entities raises a `ValueError`.

        A copy of the file has another inode. So it cannot take the collection from the original, which may be served.
        """
        place = Address.parse(self._address)
        fact, inode = f"collection {place.uri}/{place.collection}", str(self._store.path.stat().st_ino)
        if self._store.fact(fact) == inode:
            return
        if not self._follows:
            raise ValueError(
                f"no service has filled the {fact} from this run: start `lam serve` without --replica first"
            )
        with closing(self._connected()) as index:
            if count := len(index):
                raise ValueError(
                    f"the collection {place.collection!r} in {place.server} holds {count} items of another gallery, or "
                    "of the original of this copy: name a collection that is empty, or that does not exist"
                )
        self._store.write([], facts={fact: inode})

    def _retry_until_closed(self) -> None:
        while not self._is_closing.wait(PAUSE):
            if self._index is None:
                self.probe()

    def _open_circuit(self, index: MilvusIndex, error: Exception) -> None:
        if self._index is index:  # an error from before the circuit last closed is outdated
            self._index = None
            self._log_reason(error)

    def _log_reason(self, error: Exception) -> None:
        if str(error) != self._reason:
            self._reason = str(error)
            _LOG.warning("the index %s is not searched: %s", self._address, error)

    def _close_circuit(self) -> None:
        with self._changing:
            self._gone, self._new = set(), set()
        index = self._connected()
        stored, indexed = set(self._store.keys()), set(index.ids.tolist())
        if self._follows:
            index.discard(sorted(indexed - stored))
            self._put(index, stored - indexed)
        elif missing := len(stored - indexed):
            raise ConnectionError(f"the collection lacks {missing} items, which the service that writes adds")
        with self._changing:
            self._follow(index)
            self._index, self._reason = index, ""

    def _follow(self, index: MilvusIndex) -> None:
        """Apply waiting changes. A removed key never returns, so additions come first."""
        self._put(index, self._new)
        index.discard(sorted(self._gone))
        self._gone, self._new = set(), set()

    def _put(self, index: MilvusIndex, keys: Collection[int]) -> None:
        """Put items into the collection, except items that the store has deleted meanwhile."""
        rising = sorted(keys)
        for start in range(0, len(rising), _BLOCK):
            if items := self._store.items_of(rising[start : start + _BLOCK]):
                require_dimension(items.values(), self._dimension, self._store.path)
                index.put(embeddings_of(items.values()), list(items))
