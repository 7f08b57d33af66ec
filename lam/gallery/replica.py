"""A read-only gallery beside a process that writes it, searched in that process's Milvus collection.

Items and facts are read from the store at each request, up to the last change that the writer has acknowledged.
SQLite's log needs memory that the processes share, so replicas must run on the machine of the writer. They cannot read
the store through a network file system.
"""

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
    """The items of a run, while another process has the gallery open and writes; `index` is that process's collection.

    Raises:
        CorruptFileError: for a lost file.
        ValueError: for a missing gallery, an index in this process, Milvus Lite in a file, or a collection that no
            writer has filled.
    """

    def __init__(self, folder: Path, dimension: int, *, index: str | None) -> None:
        if index is None or "://" not in index or Path(Address.parse(index).uri).is_absolute():
            raise ValueError(
                f"a replica searches the collection of a Milvus server, milvus://HOST[:PORT]/COLLECTION, "
                f"got {index!r}; an index in a process or a file cannot be shared"
            )
        self._begin(folder, dimension)
        with ExitStack() as resources:
            self.store = resources.enter_context(closing(ItemStore(folder / FILE, read_only=True)))
            self._index = RemoteIndex(index, self.store, dimension, follows=False)
            resources.callback(self._index.close)
            self._resources = resources.pop_all()

    def __len__(self) -> int:
        return len(self.store)

    def search(self, queries: Embeddings, k: int, among: Matching | None = None) -> tuple[Hits, dict[int, ItemInfo]]:
        """See `Gallery.search`. Items that the store has deleted and the collection still holds are left out."""
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
