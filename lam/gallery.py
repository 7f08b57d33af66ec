"""Folders of images, embedded and indexed by a run's encoder, and searched.

Beside the index stands `items.json`: what each id is. The id of an image from a folder is the first 63 bits of its
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
from lam.encoder import BayesianEncoder, load
from lam.files import MANIFEST, CorruptFileError, read_json, sha256_of, verify, write_atomically, write_json
from lam.retrieval.index import Hits, Index

BATCH = 64


def open_run(folder: str | Path) -> BayesianEncoder:
    """Read the encoder of a finished run, every file of which is checked first.

    Raises:
        ValueError: where the folder is no run or the run did not finish.
        CorruptFileError: naming the file that is missing, truncated or altered.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"{folder} is no run of lam: `lam run CONFIG` or `lam demo` makes one")
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"the run in {folder} has not finished: start it again, and it continues")
    verify(folder)
    return load(folder / "encoder")


def embed_folder(
    encoder: BayesianEncoder, folder: str | Path, *, progress: bool = True
) -> tuple[FolderImages, Embeddings]:
    """Embed every image of a folder, with class sub-folders or without.

    Raises:
        ValueError: for an encoder that does not know how an image becomes an input, or naming a file that is no image.
    """
    images = datasets.folder.read(root=folder, preprocessing=_preprocessing(encoder))
    return images, encoder.embed(DataLoader(images, batch_size=BATCH), progress=progress)


def save_embeddings(path: str | Path, images: FolderImages, embeddings: Embeddings) -> None:
    """Write a NumPy archive with `paths`, `mean` (N, D), `kappa`, `variance` and `resultant` (N,)."""
    import numpy as np

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


def index_folder(run: str | Path, folder: str | Path, *, factory: str = "Flat", progress: bool = True) -> int:
    """Replace a run's index by one of the images of a folder.

    Args:
        run: the run's folder.
        folder: images, with class sub-folders or without.
        factory: the FAISS type.
        progress: show a progress bar on standard error.

    Returns:
        How many different images it holds.
    """
    encoder = open_run(run)
    images, embeddings = embed_folder(encoder, folder, progress=progress)
    items: dict[int, dict[str, str]] = {}
    rows = []
    for row, path in enumerate(images.paths):
        identity = int(sha256_of(Path(path))[:16], 16) >> 1
        if identity not in items:
            items[identity] = {"label": images.classes[int(images.labels[row])], "path": str(path)}
            rows.append(row)
    kept = embeddings[torch.tensor(rows)]
    _write(Path(run), kept, torch.tensor(list(items)), items, factory)
    return len(items)


def index_dataset(run: Path, embeddings: Embeddings, images: ImageDataset) -> None:
    """Index a data set's items under their positions."""
    ids = torch.arange(len(embeddings))
    items = {
        position: {"label": images.classes[label], "path": f"{images.name} test {position}"}
        for position, label in enumerate(images.labels.tolist())
    }
    _write(run, embeddings, ids, items, "Flat")


@dataclass(frozen=True)
class Found:
    """The answer to one image.

    Attributes:
        query: the embedding of the image.
        hits: its nearest items.
        items: of each hit, its `label` and `path`.
    """

    query: Embeddings
    hits: Hits
    items: list[dict[str, str]]


def search(run: str | Path, image: str | Path, *, k: int = 5) -> Found:
    """Search a run's index for one image.

    Raises:
        ValueError: for k below 1, or a file that is no image.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    encoder = open_run(run)
    query = encoder.embed(_preprocessing(encoder)(image)[None])
    index_path = Path(run) / "index"
    hits = Index.load(index_path).search(query, k)
    items = read_json(Path(run) / "items.json")
    missing = [hit for hit in hits.ids[0].tolist() if str(hit) not in items]
    if missing:
        raise CorruptFileError(f"{Path(run) / 'items.json'} does not know id {missing[0]}: run `lam index` again")
    return Found(query, hits, [items[str(hit)] for hit in hits.ids[0].tolist()])


def _write(run: Path, embeddings: Embeddings, ids: Tensor, items: dict[int, dict[str, str]], factory: str) -> None:
    index = Index(embeddings.dimension, factory)
    if not index.is_trained:
        index.train(embeddings)
    index.add(embeddings, ids)
    path = run / "items.json"
    known = read_json(path) if path.is_file() else {}
    new = {str(identity): item for identity, item in items.items()}
    write_json(path, known | new)  # a superset first: whichever index a crash leaves finds its items
    index.save(run / "index")
    write_json(path, new)


def _preprocessing(encoder: BayesianEncoder) -> Any:
    if encoder.preprocessing is None:
        raise ValueError("the encoder does not know how an image becomes an input: fit it with preprocessing=...")
    return encoder.preprocessing
