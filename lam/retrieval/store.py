"""The rows behind an index: vectors, κ and ids, which grow, shrink and look up without FAISS.

Every row has a slot: a number given once, never given again and rising with the row. The search structure knows slots
alone, so what it still holds of a removed row is recognised by a slot that is no longer here.
"""

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

_COLUMNS = ("vectors", "kappa", "ids", "slots")
_BLOCK = 512


class Store:
    """N unit vectors of dimension D with κ, id and slot; room grows by doubling, so that adding one by one stays cheap.

    Args:
        dimension: the number of embedding dimensions D.
    """

    def __init__(self, dimension: int) -> None:
        self._size = 0
        self._next_slot = 0
        self._slot_of: dict[int, int] = {}
        self._buffers = {
            "vectors": torch.empty(0, dimension),
            "kappa": torch.empty(0, dtype=torch.float64),
            "ids": torch.empty(0, dtype=torch.int64),
            "slots": torch.empty(0, dtype=torch.int64),
        }

    def __len__(self) -> int:
        return self._size

    def __contains__(self, item: int) -> bool:
        return item in self._slot_of

    def column(self, name: str) -> Tensor:
        """Give a column, as a view of its N rows: `vectors` float32, `kappa` float64, `ids` or `slots` int64."""
        return self._buffers[name][: self._size]

    def take_slots(self, count: int) -> Int64[Tensor, " N"]:
        """Give new slots; those of an addition that then fails are never used again."""
        first, self._next_slot = self._next_slot, self._next_slot + count
        return torch.arange(first, self._next_slot)

    def append(self, vectors: Tensor, kappa: Tensor, ids: Tensor, slots: Tensor) -> None:
        """Add rows whose slots lie above all that are here."""
        end = self._size + len(ids)
        for name, rows in zip(_COLUMNS, (vectors, kappa, ids, slots), strict=True):
            buffer = self._buffers[name]
            if end > len(buffer):
                grown = buffer.new_empty((max(end, 2 * len(buffer)), *buffer.shape[1:]))
                grown[: self._size] = buffer[: self._size]
                self._buffers[name] = buffer = grown
            buffer[self._size : end] = rows
        self._size = end
        self._slot_of.update(zip(ids.tolist(), slots.tolist(), strict=True))

    def slots_of(self, ids: Tensor) -> Int64[Tensor, " N"]:
        """Look up the slots of ids that are all here."""
        return torch.tensor([self._slot_of[item] for item in ids.tolist()], dtype=torch.int64)

    def remove(self, slots: Tensor) -> None:
        """Drop the rows of these slots; the others move up, and keep their order and slots.

        They move in place, block by block, and the room stays: to copy a large store takes several times as long.
        """
        gone = torch.isin(self.column("slots"), slots)
        for item in self.column("ids")[gone].tolist():
            del self._slot_of[item]
        first = int(gone.int().argmax())
        moved = (~gone[first:]).nonzero()[:, 0] + first
        for name in _COLUMNS:
            column = self.column(name)
            for at, rows in enumerate(moved.split(_BLOCK)):
                column[first + at * _BLOCK :][: len(rows)] = column[rows]
        self._size = first + len(moved)

    def rows_of(self, slots: Tensor) -> Int64[Tensor, "..."]:
        """Look up the row of each slot; −1 where it is no longer here, or never was."""
        here, wanted = self.column("slots").numpy(), slots.numpy()
        if len(here) == 0:
            return torch.full_like(slots, -1)
        row = np.minimum(here.searchsorted(wanted), len(here) - 1)
        return torch.from_numpy(np.where(here[row] == wanted, row, -1))

    def kappa_of(self, ids: Tensor) -> Float64[Tensor, " N"]:
        """Look up κ by id."""
        return self.column("kappa")[self.rows_of(self.slots_of(ids))]

    def tensors(self) -> dict[str, Tensor]:
        """Give what is saved; `from_tensors` takes it back."""
        return {name: self.column(name) for name in _COLUMNS}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "Store":
        """Make a store of what `tensors` gave."""
        store = cls(tensors["vectors"].shape[1])
        store.append(*(tensors[name] for name in _COLUMNS))
        store._next_slot = int(tensors["slots"][-1]) + 1 if len(store) else 0
        return store
