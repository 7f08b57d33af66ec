"""A read-only gallery: beside a process that writes it, or in a folder that nobody can write.

Beside a writer, a replica searches the writer's Milvus collection. At each request, it reads the store with all changes
that the writer has acknowledged. SQLite's log needs memory that the processes share, so replicas must run on the
machine of the writer. They cannot read the store through a network file system.

In a read-only folder, such as an image of a container, the items cannot change. The index is then in this process.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NoReturn

from lam.gallery.filters import Filter
from lam.gallery.gallery import Gallery, Matching
from lam.gallery.item import ItemInfo
from lam.gallery.operations import Operation
from lam.gallery.refusal import read_only
from lam.gallery.remote_index import RemoteIndex
from lam.gallery.store import FILE, ItemStore
from lam.retrieval.index.hits import Hits
from lam.retrieval.index.milvus_index import Address
from lam.vmf.embeddings import Embeddings


class Replica(Gallery):
    """The items of a run, for searches only; `index` is the collection of the process that writes the items.

    In a read-only folder, `index` may also be an index in this process, as in `Gallery`.

    Raises:
        CorruptFileError: for a lost file, or altered rows in a read-only folder.
        ValueError: for a missing gallery, an index in this process for a writable folder or beside a log of changes,
            Milvus Lite in a file, or a collection that no writer has filled.
    """

    def __init__(self, folder: Path, dimension: int, *, index: str | None) -> None:
        self._begin(folder, dimension)
        is_remote = "://" in (index or "") and not Path(Address.parse(str(index)).uri).is_absolute()
        log = folder / f"{FILE}-wal"
        if not is_remote and log.exists() and not os.access(folder, os.W_OK):
            raise ValueError(
                f"{log} holds changes of a service that runs or was killed, and {folder} is read-only: start and stop "
                "a service that may write there, or give --index milvus://HOST[:PORT]/COLLECTION beside one that runs"
            )
        with ExitStack() as resources:
            self.store = resources.enter_context(closing(ItemStore(folder / FILE, read_only=True)))
            if is_remote:
                self._index = RemoteIndex(str(index), self.store, dimension, follows=False)
            elif self.store.is_immutable:
                self.store.check()
                self._index = self._open_index(index)
            else:
                raise ValueError(
                    "a replica beside a process that writes searches its collection on a Milvus server: give --index "
                    f"milvus://HOST[:PORT]/COLLECTION, got {index!r}; without --index, the folder of the gallery must "
                    "be read-only"
                )
            resources.callback(self._index.close)
            self._resources = resources.pop_all()

    def __len__(self) -> int:
        return len(self.store)

    def search(self, queries: Embeddings, k: int, among: Matching | None = None) -> tuple[Hits, dict[int, ItemInfo]]:
        """See `Gallery.search`. Deeper searches replace hits that the store no longer holds."""
        keys = None if among is None else among.keys
        gone = set[int]()
        hits, infos, missing = self._search_once(queries, k, keys)
        while not missing <= gone:  # search deeper, to replace deleted hits; each turn finds at least one more of them
            gone |= missing
            hits, infos, missing = self._search_once(queries, k + len(gone), keys)
        if not gone:
            return hits, infos
        places = [[place for place, key in enumerate(row) if key in infos][:k] for row in hits.ids.tolist()]
        width = min(map(len, places), default=0)
        columns = hits.ids.new_tensor([row[:width] for row in places]).reshape(len(hits), width)
        return Hits(*(values.gather(1, columns) for values in (hits.ids, hits.scores, hits.kappa))), infos

    def matching(self, where: Filter) -> Matching:
        """See `Gallery.matching`."""
        self._version = self.store.version()
        return super().matching(where)

    def write(self, operations: Sequence[Operation]) -> NoReturn:
        """Refuse a change, as `read_only`."""
        raise read_only()
