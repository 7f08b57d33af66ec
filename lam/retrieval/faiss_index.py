"""The calls to FAISS, and what they need to be safe: known types, slots as labels, its errors as ValueError.

FAISS checks dimensions with `assert`, accepts NaN and pads with −1: `lam.retrieval.Index` validates before it comes
here.
"""

import re
from typing import Any

import torch
from torch import Tensor


def create(dimension: int, factory: str, parameters: str | None, device: str) -> Any:
    """Make an empty FAISS index that takes slots as labels.

    An IDMap around a type that keeps labels itself mixes them up once items are removed (FAISS 1.15), so it is put
    around the others alone, and a factory that brings its own is refused.

    Raises:
        ValueError: for a factory or parameters that FAISS does not know, or a device that it cannot use.
    """
    import faiss

    if "IDMap" in factory:
        raise ValueError(f"factory must not contain IDMap, got {factory!r}: the index keeps ids itself")
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ValueError(
            f"factory must be a FAISS factory string such as 'Flat', 'HNSW32' or 'IVF256,Flat', got {factory!r} "
            f"for dimension {dimension}: {_reason(error)}"
        ) from None
    keeps_labels = faiss.try_extract_index_ivf(index) is not None and not isinstance(index, faiss.IndexRefine)
    return prepare(index if keeps_labels else faiss.IndexIDMap2(index), parameters, device)


def prepare(index: Any, parameters: str | None, device: str) -> Any:
    """Set search parameters and move the index to its device.

    Raises:
        ValueError: for parameters that the type does not have, or a device that FAISS cannot use.
    """
    import faiss

    if parameters is not None:
        try:
            faiss.ParameterSpace().set_index_parameters(index, parameters)
        except RuntimeError as error:
            raise ValueError(
                f"parameters must be FAISS search parameters such as 'nprobe=16', got {parameters!r}: {_reason(error)}"
            ) from None
    if device == "cpu":
        return index
    number = re.fullmatch(r"cuda(?::(\d+))?", device)
    if number is None:
        raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    if not hasattr(faiss, "StandardGpuResources"):
        raise ValueError(
            f"device {device!r} needs a FAISS built for GPUs: install lam[gpu] in place of lam[cpu], or use 'cpu'"
        )
    return faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), int(number[1] or 0), index)


def train(index: Any, vectors: Tensor) -> None:
    """Train on (N, D) unit vectors.

    Raises:
        ValueError: where FAISS refuses, as it does for too few.
    """
    try:
        index.train(vectors.numpy())
    except RuntimeError as error:
        raise ValueError(f"FAISS cannot train on {len(vectors)} embeddings: {_reason(error)}") from None


def add(index: Any, vectors: Tensor, slots: Tensor) -> None:
    """Add (N, D) unit vectors under their slots.

    Raises:
        ValueError: where FAISS refuses, as types that are built at once do for a second call.
    """
    try:
        index.add_with_ids(vectors.numpy(), slots.numpy())
    except RuntimeError as error:
        raise ValueError(f"FAISS cannot add {len(vectors)} embeddings: {_reason(error)}") from None


def remove(index: Any, slots: Tensor) -> None:
    """Remove slots from a type that can; one that cannot keeps them as tombstones."""
    try:
        index.remove_ids(slots.numpy())
    except RuntimeError:
        return


def search(index: Any, vectors: Tensor, k: int) -> Tensor:
    """Give (Q, k) candidate slots, −1 where the type found none."""
    return torch.from_numpy(index.search(vectors.numpy(), k)[1])


def emptied(index: Any, device: str) -> Any:
    """Give an index of the same type, training and parameters that holds nothing."""
    import faiss

    fresh = faiss.clone_index(to_cpu(index))
    fresh.reset()
    return prepare(fresh, None, device)


def to_cpu(index: Any) -> Any:
    """Give the index in the form that can be written to a file."""
    import faiss

    return faiss.index_gpu_to_cpu(index) if hasattr(faiss, "index_gpu_to_cpu") else index


def _reason(error: RuntimeError) -> str:
    """What FAISS says, without the path of its own source."""
    return re.sub(r"^Error in .*? at \S+:\d+: (Error: )?", "", str(error), flags=re.DOTALL)
