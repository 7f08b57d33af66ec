"""What going over the pairs of a whole data set will cost, measured on a small part of it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """What a pass over pairs will cost.

    Attributes:
        pairs: how many unordered pairs there are.
        seconds: time, extrapolated from what was measured just now.
        bytes: memory beside the features.
    """

    pairs: int
    seconds: float
    bytes: int

    def __str__(self) -> str:
        return f"{self.pairs:,} pairs: about {self.seconds:.0f} s, {self.bytes / 2**20:.0f} MiB"


def estimate_all_pairs(n: Float[Tensor, "N D"], *, block_size: int = 1024) -> Estimate:
    """Estimate a pass over the similarities of all pairs, by measuring one block.

    Args:
        n: (N, D) unit outputs.
        block_size: items on a side of a block.
    """
    N, D = n.shape
    size = min(block_size, N)
    extended = torch.cat([n[:size], n.new_ones(size, 1)], 1)
    total = n.new_zeros(size, D + 1, dtype=torch.float64)

    def block() -> None:
        T = near(extended[:, :-1], extended[:, :-1], 0.5)
        total.add_(T @ extended)
        total.add_(T.T @ extended)

    pairs = N * (N - 1) // 2
    memory = n.element_size() * (N * (D + 1) + 2 * size**2) + 8 * N * (D + 1)
    return Estimate(pairs, _seconds(block) * pairs / size**2, memory)


def estimate_positive_pairs(sizes: Sequence[int], D: int, F: int, device: torch.device) -> Estimate:
    """Estimate the cross terms of all positive pairs, by measuring a matmul in float64.

    Args:
        sizes: how many items each class has.
        D: outputs.
        F: inputs, the bias included.
        device: where it will run.
    """
    side = 256
    factor = torch.ones(side, side, dtype=torch.float64, device=device)
    rate = side**3 / _seconds(lambda: factor @ factor)
    work = sum(min(size * (size - 1) / 2, size * D / 2) * D * F for size in sizes)
    memory = 8 * F * (2 * max(sizes) + 4 * D)
    return Estimate(sum(size * (size - 1) // 2 for size in sizes), work / rate, memory)


def near(left: Float[Tensor, "I D"], right: Float[Tensor, "J D"], cosine: float) -> Float[Tensor, "I J"]:
    """Give 1 where two unit vectors have a larger cosine, else 0."""
    return (left @ right.T).gt_(cosine)


def _seconds(call: Callable[[], object]) -> float:
    measured = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        measured.append(time.perf_counter() - start)
    return min(measured)
