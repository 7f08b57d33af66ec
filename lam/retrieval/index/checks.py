"""Checks of vectors, κ and ids before any index takes them, whatever searches for it.

FAISS accepts NaN and checks dimensions with `assert`; a server says what is wrong too late, or in words of its own.
"""

import sys
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from lam.utils.checks import check_finite, check_length, integers
from lam.vmf.embeddings import Embeddings

_BLOCK = 2048  # rows
NORM_TOLERANCE = 1e-3  # half precision keeps a unit vector to about this

Ids = Shaped[Tensor, " N"] | Shaped[np.ndarray, " N"] | Sequence[SupportsIndex]
"""Integers ≥ 0, one an item."""


def unit_vectors(embeddings: Embeddings, dimension: int) -> Float[Tensor, "N D"]:
    """Mean directions as float32 rows of length one, on the CPU.

    Args:
        embeddings: N unit vectors, of half precision or better, with κ ≥ 0.
        dimension: D that they must have.

    Raises:
        ValueError: for another dimension, a mean that is no unit vector, or a κ that is negative or not finite.
    """
    if embeddings.dimension != dimension:
        raise ValueError(f"embeddings must have dimension {dimension}, got {embeddings.dimension}")
    mean = embeddings.mean.detach().cpu()
    norm, unit = mean.new_empty(len(mean), 1, dtype=torch.float64), mean.new_empty(mean.shape, dtype=torch.float32)
    for start in range(0, len(mean), _BLOCK):  # in float64 all at once would take four times the memory, and the time
        rows = slice(start, start + _BLOCK)
        wide = mean[rows].double()
        norm[rows] = wide.norm(dim=1, keepdim=True)
        unit[rows] = wide / norm[rows]
    near_one = _within(norm, 1 - NORM_TOLERANCE, 1 + NORM_TOLERANCE)
    if not (near_one and _within(embeddings.kappa, 0.0, sys.float_info.max)):
        _refuse_bad_rows(embeddings, norm[:, 0])
    return unit


def _within(values: Tensor, least: float, greatest: float) -> bool:
    """Whether all values are from least to greatest, which NaN is not."""
    if values.numel() == 0:
        return True
    low, high = values.aminmax()
    return least <= float(low) and float(high) <= greatest


def _refuse_bad_rows(embeddings: Embeddings, norm: Tensor) -> None:
    check_finite("embeddings", embeddings.mean)
    check_finite("kappa", embeddings.kappa)
    negative = (embeddings.kappa < 0).nonzero()
    if len(negative):
        row = int(negative[0])
        raise ValueError(f"kappa must not be negative, got {float(embeddings.kappa[row])} at index {row}")
    row = int(((norm - 1).abs() > NORM_TOLERANCE).nonzero()[0])
    raise ValueError(f"embeddings must be unit vectors, got length {float(norm[row]):.6g} at index {row}")


def checked_ids(values: Any) -> Int64[Tensor, " N"]:
    """Ids as a tensor.

    Raises:
        ValueError: for values that are no integers, or ids that are negative or repeated.
    """
    ids = integers("ids", values)
    check_length("ids", ids, "the items", ids.numel())
    if (ids < 0).any():
        raise ValueError(f"ids must not be negative, got {int(ids[ids < 0][0])}")
    distinct, counts = ids.unique(return_counts=True)
    if len(distinct) < len(ids):
        raise ValueError(f"ids must differ, got {int(distinct[counts > 1][0])} twice")
    return ids
