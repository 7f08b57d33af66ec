"""A read-only gallery: beside a process that writes it, or in a folder that nobody can write.

A `Snapshot` holds the items of one moment; a `Replica` follows the writer.
Beside a writer, a replica searches the writer's Milvus collection. At each request, it reads the store with all changes
that the writer has acknowledged. SQLite's log needs memory that the processes share, so replicas must run on the
machine of the writer. They cannot read the store through a network file system.

In a read-only folder, such as an image of a container, the items cannot change. The index is then in this process.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import torch

from lam.gallery.filters import Filter
from lam.gallery.gallery import Gallery, Matching
from lam.gallery.item import KAPPA, VECTOR, Item, ItemInfo
from lam.gallery.local_index import build_index, embeddings_of_vectors, require_dimension
from lam.gallery.operations import Operation
from lam.gallery.refusal import read_only
from lam.gallery.remote_index import RemoteIndex
from lam.gallery.store import CACHE, FACTORY, FILE, MEAN_SAMPLES, ItemStore
from lam.retrieval.index.faiss_index import Index, search_flat
from lam.retrieval.index.hits import Hits
from lam.retrieval.index.milvus_index import Address
from lam.vmf.embeddings import Embeddings, check_same_means


class Replica(Gallery):
    """The items of a run, for searches only; `index` is the collection of the process that writes the items.

    In a read-only folder, `index` may also be an index in this process, as in `Gallery`.

    Raises:
        CorruptFileError: for a lost file, or altered rows in a read-only folder.
        ValueError: for a missing gallery, Milvus Lite in a file, or a collection that no writer has filled; without a
            collection, for a folder that is writable or holds a log of changes.
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
            elif self.store.is_immutable and "://" not in (index or ""):
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


@dataclass(frozen=True)
class Snapshot:
    """The items of a gallery at one moment.

    Attributes:
        keys: keys of the items, rising.
        items: items in the order of the keys, without thumbnails.
        mean_samples: see `Embeddings`; queries need the same number.
    """

    folder: Path
    dimension: int
    keys: Sequence[int]
    items: "Items"
    factory: str = "Flat"
    mean_samples: int | None = None

    def __len__(self) -> int:
        return len(self.items)

    @classmethod
    def read(cls, folder: str | Path, dimension: int) -> "Snapshot":
        """The checked items of a gallery, even if another process writes to the gallery.

        Reading takes about a second; meanwhile the other process may refuse a deletion as `busy`.

        Raises:
            CorruptFileError: for a lost file or altered rows.
            ValueError: for a missing gallery, or a file that another process has locked.
        """
        with closing(ItemStore(Path(folder) / FILE, read_only=True)) as store:
            rows, facts = store.read()
        items, samples = Items(list(rows.values())), facts.get(MEAN_SAMPLES)
        return cls(
            Path(folder), dimension, list(rows), items, facts.get(FACTORY, "Flat"), int(samples) if samples else None
        )

    def search(self, queries: Embeddings, k: SupportsIndex) -> Hits:
        """The k items with the highest cosines to each query, as positions in `items`; errors as in `Index.search`."""
        if self.items:
            check_same_means(queries, self.mean_samples)
        queries = replace(queries, mean_samples=None)
        if self.items and self.factory == "Flat":
            return search_flat(self.embeddings, queries, k)
        hits = self._index.search(queries, k)
        places = np.searchsorted(np.array(self.keys, np.int64), hits.ids.cpu().numpy())
        return replace(hits, ids=torch.from_numpy(places).to(hits.ids.device))

    @cached_property
    def embeddings(self) -> Embeddings:
        """Embeddings of the items, at least one; a `ValueError` for items of another dimension."""
        vectors = [row[VECTOR] for row in self.items.rows]
        if set(map(len, vectors)) != {4 * self.dimension}:
            require_dimension(self.items, self.dimension, self.folder / FILE)
        return embeddings_of_vectors(vectors, [row[KAPPA] for row in self.items.rows])

    @cached_property
    def _index(self) -> Index:
        keyed = zip(self.keys, self.items, strict=True)
        return build_index(self.folder / CACHE, keyed, self.dimension, self.factory, source=self.folder / FILE)


class Items(Sequence[Item]):
    """Items, each built from its row on access, because most are never accessed."""

    def __init__(self, rows: Sequence[Sequence[Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: Any) -> Any:
        rows = self.rows[place]
        return [Item(*row) for row in rows] if isinstance(place, slice) else Item(*rows)
