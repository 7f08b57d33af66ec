"""Checks of vectors, κ and ids before they enter an index.

FAISS accepts NaN and checks dimensions with `assert`; a Milvus server reports errors late.
"""

from collections.abc import Container, Sequence
from typing import Any, SupportsIndex

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from lam.utils.blocks import row_blocks
from lam.utils.checks import check_finite, check_length, integers
from lam.vmf.embeddings import Embeddings, check_embeddings

_BLOCK = 2048  # rows
_NORM_TOLERANCE = 1e-3  # rounding to half precision changes a unit vector's length by about this much

Ids = Shaped[Tensor, " N"] | Shaped[np.ndarray, " N"] | Sequence[SupportsIndex]
"""Integers ≥ 0, one for each item."""


def unit_vectors(embeddings: Embeddings, dimension: int) -> Float[Tensor, "N D"]:
    """Mean directions as float32 unit rows on the CPU; rejects a wrong dimension or length, κ < 0, NaN and infinity."""
    check_embeddings(embeddings)
    if embeddings.dimension != dimension:
        raise ValueError(f"embeddings must have dimension {dimension}, got {embeddings.dimension}")
    mean = embeddings.mean.detach().cpu()
    norm, unit = mean.new_empty(len(mean), 1, dtype=torch.float64), mean.new_empty(mean.shape, dtype=torch.float32)
    for rows in row_blocks(len(mean), 1, elements=_BLOCK):  # all rows at once take four times the memory and time
        wide = mean[rows].double()
        norm[rows] = wide.norm(dim=1, keepdim=True)
        unit[rows] = wide / norm[rows]
    check_unit_lengths(norm[:, 0])
    if not ((embeddings.kappa >= 0) & (embeddings.kappa < torch.inf)).all():
        check_finite("kappa", embeddings.kappa)
        row = int((embeddings.kappa < 0).nonzero()[0])
        raise ValueError(f"kappa must not be negative, got {float(embeddings.kappa[row])} at index {row}")
    return unit


def check_unit_lengths(norm: Float[Tensor, " N"], exempt: Bool[Tensor, " N"] | None = None) -> None:
    """Reject lengths that are not near 1, except in the rows `exempt`."""
    is_right = (norm - 1).abs() <= _NORM_TOLERANCE
    is_right = is_right if exempt is None else is_right | exempt
    if not is_right.all():
        check_finite("embeddings", norm)
        row = int((~is_right).nonzero()[0])
        raise ValueError(f"embeddings must be unit vectors, got length {float(norm[row]):.6g} at index {row}")


def ids_tensor(values: Any) -> Int64[Tensor, " N"]:
    """Ids as a tensor; they must be distinct integers ≥ 0."""
    ids = integers("ids", values)
    check_length("ids", ids, "the items", ids.numel())
    if (ids < 0).any():
        raise ValueError(f"ids must not be negative, got {int(ids[ids < 0][0])}")
    if (ids[1:] > ids[:-1]).all():  # rising ids differ: no need to sort them
        return ids
    distinct, counts = ids.unique(return_counts=True)
    if len(distinct) < len(ids):
        raise ValueError(f"ids must differ, got {int(distinct[counts > 1][0])} twice")
    return ids


def check_stored(ids: Sequence[int], stored: Container[int]) -> None:
    """Reject ids that are not in the index."""
    unknown = [item for item in ids if item not in stored]
    if unknown:
        raise ValueError(f"ids must be in the index, got {unknown[0]}, which is not")
