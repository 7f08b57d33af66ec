"""The items at one moment, read and searched while another process may write to the gallery."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch

from lam.gallery.item import KAPPA, VECTOR, Item
from lam.gallery.local_index import build_index, embeddings_of_vectors, require_dimension
from lam.gallery.store import CACHE, FACTORY, FILE, MEAN_SAMPLES, ItemStore
from lam.retrieval.index.faiss_index import Index, search_flat
from lam.retrieval.index.hits import Hits
from lam.vmf.embeddings import Embeddings, check_same_means


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
        queries = replace(queries, samples=None, mean_samples=None)
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
        return [Item.of_row(row) for row in rows] if isinstance(place, slice) else Item.of_row(rows)
