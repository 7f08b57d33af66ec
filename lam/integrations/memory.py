"""Records with vectors in memory, by id, searched exactly by cosine."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from lam.utils.checks import unit_rows

Record = TypeVar("Record")


class VectorMemory(Generic[Record]):
    """Records by id. Threads may share it: a search sees the records before or after a change."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[Record, Tensor]] = {}
        self._stacked: tuple[object, Tensor] = None, torch.empty(0)
        self._changing = threading.Lock()

    def put(self, ids: Sequence[str], records: Sequence[Record], vectors: Float[Tensor, "N D"]) -> None:
        """Add N records; a record replaces an older one with its id. A zero vector raises a `ValueError`."""
        unit = unit_rows("embeddings", vectors).float()
        with self._changing:
            width = next((len(row) for _, row in self._rows.values()), unit.shape[1])
            if width != unit.shape[1]:
                raise ValueError(f"embeddings must have the dimension of the others, {width}, got {unit.shape[1]}")
            self._rows = self._rows | dict(zip(ids, zip(records, unit, strict=True), strict=True))

    def delete(self, ids: Iterable[str] | None) -> None:
        """Delete the records of these ids, or all records for None. An unknown id has no effect."""
        with self._changing:
            gone = set(self._rows if ids is None else map(str, ids))
            self._rows = {name: row for name, row in self._rows.items() if name not in gone}

    def get(self, ids: Iterable[str]) -> list[Record]:
        """The records of the ids that exist, in the order of the ids."""
        rows = self._rows
        return [rows[name][0] for name in map(str, ids) if name in rows]

    def ranked(
        self, query: Float[Tensor, " D"], keep: Callable[[Record], bool] | None = None
    ) -> tuple[list[Record], Float[Tensor, " N"], Float[Tensor, "N D"]]:
        """The records that `keep` accepts, by falling cosine, with cosines and unit vectors; by default all records."""
        if keep is not None and not callable(keep):
            example = "lambda document: document.metadata['label'] == 'a'"
            raise TypeError(f"a filter must be a function, such as {example}, got {keep!r}")
        rows, (of, vectors) = self._rows, self._stacked
        if of is not rows:
            vectors = torch.stack([row[1] for row in rows.values()]) if rows else torch.empty(0, len(query))
            self._stacked = rows, vectors
        records = [record for record, _ in rows.values()]
        kept = [place for place, record in enumerate(records) if keep is None or keep(record)]
        cosines = (vectors[kept] @ unit_rows("query", query[None])[0].float()).clamp(-1, 1)
        cosines, order = cosines.sort(descending=True, stable=True)
        places = [kept[place] for place in order.tolist()]
        return [records[place] for place in places], cosines, vectors[places]
