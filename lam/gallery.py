"""Folders of images, embedded and indexed by a run's encoder, and searched.

Beside the index stands `items/`: what each id is. The id of an image from a folder is the first 63 bits of its
SHA-256, so that one image is one row however often it is there and whatever it is called.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lam import datasets
from lam.datasets import FolderImages, ImageDataset
from lam.embeddings import Embeddings
from lam.encoder_base import Encoder
from lam.files import (
    CorruptFileError,
    read_generation,
    read_json,
    sha256_of,
    write_atomically,
    write_generation,
    write_json,
)
from lam.loading import load
from lam.retrieval.calibration_files import FOLDER as CALIBRATION
from lam.retrieval.decisions import Decisions
from lam.retrieval.index import Hits, Index
from lam.retrieval.threshold import Calibration
from lam.run_folder import locked, require_finished

BATCH = 64
_ITEMS = "items.json"


def open_run(folder: str | Path) -> Encoder:
    """Read the encoder of a finished run, every file of which is checked first.

    Raises:
        ValueError: where the folder is no run or the run did not finish.
        CorruptFileError: naming the file that is missing, truncated or altered.
    """
    require_finished(Path(folder))
    return load(Path(folder) / "encoder")


def require_faiss() -> None:
    """Refuse to go on where FAISS is not installed.

    Raises:
        ValueError: saying how to install it.
    """
    try:
        import faiss  # noqa: F401
    except ImportError as error:
        raise ValueError(f"FAISS cannot be imported ({error}): pip install 'lam[cpu]', or 'lam[gpu]'") from None


def embed_folder(encoder: Encoder, folder: str | Path, *, progress: bool = True) -> tuple[FolderImages, Embeddings]:
    """Embed every image of a folder, with class sub-folders or without.

    Raises:
        ValueError: for an encoder that does not know how an image becomes an input, or naming a file that is no image.
    """
    images = datasets.folder.read(root=folder, preprocessing=_preprocessing(encoder))
    loader = DataLoader(images, batch_size=BATCH, generator=torch.Generator())  # torch's global one stays as it is
    return images, encoder.embed(loader, progress=progress)


def save_embeddings(path: str | Path, images: FolderImages, embeddings: Embeddings) -> None:
    """Write a NumPy archive with `paths`, `mean` (N, D), `kappa`, `variance` and `resultant` (N,).

    Raises:
        ValueError: where `path` cannot be a file.
    """
    import numpy as np

    check_output(path)
    arrays: dict[str, Any] = {
        "paths": np.array([str(found) for found in images.paths]),
        "mean": embeddings.mean.cpu().numpy(),
        "kappa": embeddings.kappa.cpu().numpy(),
        "variance": embeddings.variance.cpu().numpy(),
        "resultant": embeddings.resultant.cpu().numpy(),
    }

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)

    write_atomically(path, write)


def check_output(path: str | Path) -> None:
    """Refuse a path at which no file can be written.

    Raises:
        ValueError: for a folder, or a path in a folder that does not exist.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the path of the file to write")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} to: make it first")


def index_folder(run: str | Path, folder: str | Path, *, factory: str = "Flat", progress: bool = True) -> int:
    """Replace a run's index by one of the images of a folder.

    Args:
        run: the run's folder.
        folder: images, with class sub-folders or without.
        factory: the FAISS type.
        progress: show a progress bar on standard error.

    Returns:
        How many different images it holds.

    Raises:
        ValueError: for a folder that is no finished run or that another process writes to, a type that FAISS does not
            know or that needs more images, or naming a file that is no image. The old index then stays.
    """
    run = Path(run)
    encoder = open_run(run)
    require_faiss()
    Index(encoder.dimension, factory)  # refuses a type before the images are read
    with locked(run):
        return _index_folder(run, encoder, folder, factory, progress)


def _index_folder(run: Path, encoder: Encoder, folder: str | Path, factory: str, progress: bool) -> int:
    images, embeddings = embed_folder(encoder, folder, progress=progress)
    items: dict[int, dict[str, str]] = {}
    rows = []
    for row, path in enumerate(images.paths):
        identity = int(sha256_of(Path(path))[:16], 16) >> 1
        if identity not in items:
            items[identity] = {"label": images.classes[int(images.labels[row])], "path": str(path)}
            rows.append(row)
    kept = embeddings[torch.tensor(rows)]
    _write(run, kept, torch.tensor(list(items)), items, factory)
    return len(items)


def index_dataset(run: Path, embeddings: Embeddings, images: ImageDataset) -> None:
    """Index a data set's items under their positions."""
    ids = torch.arange(len(embeddings))
    paths = images.paths if isinstance(images, FolderImages) else [f"{images.name} test {row}" for row in ids.tolist()]
    labels = [images.classes[label] for label in images.labels.tolist()]
    found = enumerate(zip(labels, paths, strict=True))
    items = {position: {"label": label, "path": str(path)} for position, (label, path) in found}
    _write(run, embeddings, ids, items, "Flat")


@dataclass(frozen=True)
class Found:
    """The answer to one image.

    Attributes:
        query: the embedding of the image.
        hits: its nearest items.
        items: of each hit, its `label` and `path`.
        decisions: what is answered, where the run is calibrated.
    """

    query: Embeddings
    hits: Hits
    items: list[dict[str, str]]
    decisions: Decisions | None


def search(run: str | Path, image: str | Path, *, k: int = 5) -> Found:
    """Search a run's index for one image.

    Raises:
        ValueError: for k below 1, or a file that is no image.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    run = Path(run)
    encoder = open_run(run)
    require_faiss()
    seen = encoder.observe(_preprocessing(encoder)(image)[None])
    query, index = seen.embeddings, Index.load(run / "index")
    decisions = None
    if (run / CALIBRATION).is_dir():
        first = index.search(query, 2)  # the margin to the second is part of the evidence, whatever k
        decisions = Calibration.load(run).decide(first, query, features=seen.features, gallery_size=len(index))
    hits = index.search(query, k)
    return Found(query, hits, read_items(run, hits.ids[0].tolist()), decisions)


def read_items(run: Path, ids: list[int]) -> list[dict[str, str]]:
    """Say what ids of a run's index are: the `label` and `path` of each.

    Raises:
        CorruptFileError: where an id is unknown, or naming the file that is missing, truncated or altered.
    """
    path = read_generation(run / "items", [_ITEMS]) / _ITEMS
    items = read_json(path)
    missing = [identity for identity in ids if str(identity) not in items]
    if missing:
        raise CorruptFileError(f"{path} does not know id {missing[0]}: run `lam index` again")
    return [items[str(identity)] for identity in ids]


def remove_items(run: Path, ids: list[int]) -> int:
    """Erase items from a run's index, those of them that it holds.

    Returns:
        How many it held.

    Raises:
        CorruptFileError: naming a file that is missing, truncated or altered.
        ValueError: where another process is writing to the run.
    """
    with locked(run):
        index = Index.load(run / "index")
        gone = sorted(set(ids) & set(index.ids.tolist()))
        if gone:
            index.remove(gone)
            index.save(run / "index")
            forgotten = set(map(str, gone))
            _write_items(run, {name: item for name, item in _known_items(run).items() if name not in forgotten})
    return len(gone)


def _write(run: Path, embeddings: Embeddings, ids: Tensor, items: dict[int, dict[str, str]], factory: str) -> None:
    index = Index(embeddings.dimension, factory)
    if not index.is_trained:
        index.train(embeddings)
    index.add(embeddings, ids)
    new = {str(identity): item for identity, item in items.items()}
    _write_items(run, _known_items(run) | new)  # a superset first: whichever index a crash leaves finds its items
    index.save(run / "index")
    _write_items(run, new)


def _write_items(run: Path, items: dict[str, dict[str, str]]) -> None:
    write_generation(run / "items", lambda generation: write_json(generation / _ITEMS, items))


def _known_items(run: Path) -> dict[str, dict[str, str]]:
    """What the ids of the present index are; nothing where that is lost, as `lam index` is what repairs it."""
    try:
        return read_json(read_generation(run / "items", [_ITEMS]) / _ITEMS)
    except CorruptFileError:
        return {}


def _preprocessing(encoder: Encoder) -> Any:
    if encoder.preprocessing is None:
        raise ValueError("the encoder does not know how an image becomes an input: fit it with preprocessing=...")
    return encoder.preprocessing
