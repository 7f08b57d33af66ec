"""`Hits`: the result of a search in any index."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class Hits:
    """K hits for each of Q queries, best first.

    Attributes:
        ids: (Q, K) ids of the hits.
        scores: (Q, K) cosines of the hits with the query; higher is better.
        kappa: (Q, K) stored concentrations of the hits; small means uncertain.
    """

    ids: Int64[Tensor, "Q K"]
    scores: Float[Tensor, "Q K"]
    kappa: Float[Tensor, "Q K"]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> "Hits":
        """Some of the queries or hits, indexed like a tensor: `hits[:, :k]` holds the best k of each query."""
        return Hits(self.ids[index], self.scores[index], self.kappa[index])


def label_numbers(labels: Iterable[Iterable[str]]) -> Int64[Tensor, "Q K"]:
    """(Q, K) labels of hits as numbers, equal for equal labels; −1 for the empty label.

    Example:
        >>> label_numbers([["cat", ""], ["dog", "cat"]])
        tensor([[ 0, -1],
                [ 1,  0]])
    """
    numbers = {"": -1}
    rows = [[numbers.setdefault(label, len(numbers) - 1) for label in row] for row in labels]
    return torch.tensor(rows, dtype=torch.int64)


def label_key(label: str) -> int:
    """An integer for a label: 63 bits of the label's SHA-256."""
    return int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "big") >> 1
