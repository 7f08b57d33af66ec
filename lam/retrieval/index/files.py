"""An index in a folder, with atomic replacement (`lam.utils.files`): a reader sees the old index or the new one.

index.json                format, type, parameters, `mean_samples`, and the SHA-256 of the cache
embeddings.safetensors    vectors (N, D), κ (N,), ids (N,), slots (N,) and next slot of `lam.retrieval.index.rows`
search.faiss              the FAISS structure, except for Flat: a cache, not in the manifest, rebuilt if it is lost
"""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lam.retrieval.index import faiss_calls
from lam.retrieval.index.rows import Store
from lam.utils.files import FolderFormat, sha256_of, write_atomically, write_generation

FORMAT = FolderFormat(3, "index.json", ("embeddings.safetensors",))
_CACHE = "search.faiss"
SETTINGS = ("factory", "parameters", "mean_samples")


def save(folder: str | Path, settings: Mapping[str, Any], store: Store, index: Any) -> None:
    """Replace the contents of a folder; if writing fails, the old contents stay.

    Args:
        folder: folder of the index.
        settings: values of `SETTINGS` by name.
        store: the rows.
        index: the FAISS structure, or None.
    """

    def write(generation: Path) -> None:
        metadata = {**settings, "cache_sha256": None}
        if index is not None:
            write_atomically(generation / _CACHE, lambda temporary: _write_cache(index, temporary))
            metadata["cache_sha256"] = sha256_of(generation / _CACHE)
        FORMAT.write_files(generation, metadata, store.tensors())

    write_generation(folder, write, unsealed=[_CACHE])


def load(folder: str | Path) -> tuple[dict[str, Any], Store, Any, str | None]:
    """Settings, rows, the FAISS structure (None for Flat or if it must be rebuilt), and the reason to rebuild it.

    The index is read again if another process replaces it meanwhile.
    """
    return FORMAT.read(folder, _read)


def _write_cache(index: Any, path: Path) -> None:
    import faiss

    try:
        faiss.write_index(faiss_calls.to_cpu(index), str(path))
    except RuntimeError as error:
        raise OSError(errno.EIO, "FAISS cannot write its index", str(path)) from error


def _read(generation: Path) -> tuple[dict[str, Any], Store, Any, str | None]:
    metadata, tensors = FORMAT.read_files(generation)
    settings, store = {name: metadata[name] for name in SETTINGS}, Store.from_tensors(tensors)
    return settings, store, *_read_cache(generation / _CACHE, metadata["cache_sha256"])


def _read_cache(path: Path, expected: str | None) -> tuple[Any, str | None]:
    """The FAISS structure, or None and the problem with its file; (None, None) for an index without a structure."""
    import faiss

    if expected is None:
        return None, None
    if not path.is_file():
        return None, f"{path} is missing"
    if sha256_of(path) != expected:
        return None, f"{path} is truncated or altered"
    try:
        return faiss.read_index(str(path)), None
    except RuntimeError:
        return None, f"{path} is in a format that this FAISS cannot read"
