"""An index as a folder.

    MANIFEST.json                             names the current generation and holds the SHA-256 of its two files below
    generation-…/index.json                   format, type, and the SHA-256 of the cache
    generation-…/embeddings.safetensors       vectors (N, D), κ (N,), ids (N,), slots (N,)
    generation-…/search.faiss                 the FAISS structure: a cache, which can be built from the embeddings

Saving writes a new generation beside the old one and then replaces the manifest, in one rename: a reader sees the old
generation or the new one. Only then is the old one deleted.
"""

import hashlib
import shutil
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lam.files import (
    MANIFEST,
    CorruptFileError,
    read_json,
    read_tensors,
    seal,
    sync_folder,
    verify,
    write_atomically,
    write_json,
    write_tensors,
)
from lam.retrieval import faiss_index
from lam.retrieval.store import Store

FORMAT = 1
_GENERATION = "generation-"
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
    """Write a new generation, make it the current one, and delete the others.

    Args:
        folder: made where it does not exist.
        store: the rows.
        index: the FAISS structure over them.
        factory: its type.
        parameters: its search parameters.
    """
    import faiss

    folder = Path(folder)
    generation = folder / f"{_GENERATION}{uuid.uuid4().hex}"
    generation.mkdir(parents=True)
    try:
        write_tensors(generation / _EMBEDDINGS, store.tensors())
        on_cpu = faiss_index.to_cpu(index)
        write_atomically(generation / _CACHE, lambda temporary: faiss.write_index(on_cpu, str(temporary)))
        write_json(
            generation / _METADATA,
            {
                "format": FORMAT,
                "dimension": store.column("vectors").shape[1],
                "size": len(store),
                "factory": factory,
                "parameters": parameters,
                "cache_sha256": _sha256(generation / _CACHE),
            },
        )
        sync_folder(folder)
        seal(folder, [f"{generation.name}/{name}" for name in (_METADATA, _EMBEDDINGS)])
    except BaseException:
        if not _is_current(folder, generation):
            shutil.rmtree(generation, ignore_errors=True)
        raise
    _sweep(folder, generation)


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
    folder = Path(folder)
    verify(folder)
    generation = _current(folder)
    if generation is None:
        raise CorruptFileError(f"{folder / MANIFEST} lists no index: the folder holds something else")
    verify(folder, [f"{generation.name}/{name}" for name in (_METADATA, _EMBEDDINGS)])
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

    if path.is_file() and _sha256(path) == expected:
        try:
            return faiss.read_index(str(path))
        except RuntimeError:
            state = "cannot be read by this version of FAISS"
    else:
        state = "truncated or altered" if path.is_file() else "missing"
    warnings.warn(f"{path} is {state}: it is built anew from the stored embeddings", RuntimeWarning, stacklevel=4)
    return None


def _current(folder: Path) -> Path | None:
    """The generation that the manifest names."""
    for name in read_json(folder / MANIFEST)["sha256"]:
        if name.startswith(_GENERATION) and name.endswith(f"/{_METADATA}"):
            return folder / Path(name).parent
    return None


def _sweep(folder: Path, generation: Path) -> None:
    """Delete the former generation, and what saves that were killed left behind."""
    for other in folder.glob(f"{_GENERATION}*"):
        if other != generation:
            shutil.rmtree(other, ignore_errors=True)
    for temporary in folder.glob(f".{MANIFEST}.*.tmp"):
        temporary.unlink(missing_ok=True)


def _is_current(folder: Path, generation: Path) -> bool:
    return (folder / MANIFEST).is_file() and _current(folder) == generation


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
