"""An index as a folder, in generations (`lam.files.write_generation`): a reader sees the old index or the new one.

index.json                format, type, and the SHA-256 of the cache
embeddings.safetensors    vectors (N, D), κ (N,), ids (N,), slots (N,)
search.faiss              the FAISS structure: a cache outside the manifest, which can be built from the embeddings
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lam.files import (
    read_generation,
    read_json,
    read_tensors,
    sha256_of,
    write_atomically,
    write_generation,
    write_json,
    write_tensors,
)
from lam.retrieval import faiss_index
from lam.retrieval.store import Store

FORMAT = 1
_METADATA, _EMBEDDINGS, _CACHE = "index.json", "embeddings.safetensors", "search.faiss"


@dataclass(frozen=True)
class SavedIndex:
    """What a folder holds; `faiss` is None where the cache must be built anew."""

    dimension: int
    factory: str
    parameters: str | None
    store: Store
    faiss: Any


def save(folder: str | Path, store: Store, index: Any, factory: str, parameters: str | None) -> None:
    """Replace what the folder holds by this index.

    Args:
        folder: made where it does not exist.
        store: the rows.
        index: the FAISS structure over them.
        factory: its type.
        parameters: its search parameters.
    """
    import faiss

    def write(generation: Path) -> None:
        on_cpu = faiss_index.to_cpu(index)
        write_tensors(generation / _EMBEDDINGS, store.tensors())
        write_atomically(generation / _CACHE, lambda temporary: faiss.write_index(on_cpu, str(temporary)))
        metadata = {
            "format": FORMAT,
            "dimension": store.column("vectors").shape[1],
            "size": len(store),
            "factory": factory,
            "parameters": parameters,
            "cache_sha256": sha256_of(generation / _CACHE),
        }
        write_json(generation / _METADATA, metadata)

    write_generation(folder, write, unsealed=[_CACHE])


def load(folder: str | Path) -> SavedIndex:
    """Read the current generation, checked before anything is parsed.

    Args:
        folder: the folder of the index.

    Returns:
        What it holds.

    Raises:
        CorruptFileError: naming the file of embeddings or metadata that is missing, truncated or altered.
        ValueError: for a format that this version does not know.
    """
    generation = read_generation(folder, [_METADATA, _EMBEDDINGS])
    metadata = read_json(generation / _METADATA)
    if metadata["format"] != FORMAT:
        raise ValueError(
            f"{generation / _METADATA} has format {metadata['format']}, this version of lam reads {FORMAT}"
        )
    return SavedIndex(
        metadata["dimension"],
        metadata["factory"],
        metadata["parameters"],
        Store.from_tensors(read_tensors(generation / _EMBEDDINGS)),
        _read_cache(generation / _CACHE, metadata["cache_sha256"]),
    )


def _read_cache(path: Path, expected: str) -> Any:
    import faiss

    if path.is_file() and sha256_of(path) == expected:
        try:
            return faiss.read_index(str(path))
        except RuntimeError:
            state = "in a format that this FAISS cannot read"
    else:
        state = "truncated or altered" if path.is_file() else "missing"
    warnings.warn(f"{path} is {state}: it is built anew from the stored embeddings", RuntimeWarning, stacklevel=4)
    return None
