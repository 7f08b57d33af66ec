"""Folders and lists of images, embedded and indexed by a run's encoder, and searched.

Beside the index stands `items/`: what each id is. How images become its entries is said in `lam.gallery.enrolment`.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.utils.data import DataLoader

from lam import datasets
from lam.datasets import FolderImages, ImageDataset
from lam.encoders.base import Encoder
from lam.encoders.load import load
from lam.gallery.enrolment import Enrolled, Entry, Item, content_id, enrol, name_of, named_id
from lam.gallery.image_list import read_list
from lam.gallery.shards import Shard, merge_embeddings
from lam.inputs.preprocessing import Preprocessing
from lam.retrieval.decisions.calibration import Calibration
from lam.retrieval.decisions.decisions import Decisions
from lam.retrieval.decisions.files import FOLDER as CALIBRATION
from lam.retrieval.decisions.files import fingerprint, load_calibration
from lam.retrieval.index.faiss_index import Index
from lam.retrieval.index.hits import Hits
from lam.runs.folder import require_finished
from lam.utils.files import (
    CorruptFileError,
    locked,
    read_generation,
    read_json,
    write_generation,
    write_json,
)
from lam.vmf.embeddings import Embeddings

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


@dataclass(frozen=True)
class EmbeddedFolder:
    """The images of a folder, embedded.

    Attributes:
        images: all of the folder.
        embeddings: of N of them: all, or those of a shard.
        flagged: (N,) which of these a calibration flags as unlike what it knows; None without one.
    """

    images: FolderImages
    embeddings: Embeddings
    flagged: Bool[Tensor, " N"] | None


def embed_folder(
    encoder: Encoder,
    folder: str | Path,
    *,
    shard: Shard | None = None,
    calibration: Calibration | None = None,
    progress: bool = True,
) -> EmbeddedFolder:
    """Embed the images of a folder, with class sub-folders or without: all, or those of a shard.

    Args:
        encoder: of a run.
        folder: the images.
        shard: which of them; by default all.
        calibration: of the run, by whose flag images are told that cannot be judged.
        progress: show a progress bar on standard error.

    Raises:
        ValueError: for an encoder that does not know how an image becomes an input, a shard without an image, or naming
            a file that is no image.
    """
    images = datasets.folder.read(root=folder, preprocessing=preprocessing_of(encoder))
    wanted = images if shard is None else images.subset(shard.positions(len(images)))
    parts: list[Embeddings] = []
    flagged: list[Tensor] = []
    for seen in encoder.observed(_loader(wanted), progress=progress):
        parts.append(seen.embeddings)
        if calibration is not None:
            surprise = calibration.surprise(seen.embeddings, seen.features)
            flagged.append((surprise > calibration.flag_above).cpu())
    return EmbeddedFolder(images, Embeddings.concatenate(parts), torch.cat(flagged) if flagged else None)


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
    """Replace a run's index by one of the images of a folder, and give how many; for more, see `index_images`."""
    return len(index_images(run, folder=folder, factory=factory, progress=progress))


def index_images(
    run: str | Path,
    *,
    folder: str | Path | None = None,
    listed: str | Path | None = None,
    embedded: Sequence[str | Path] | None = None,
    factory: str = "Flat",
    fuse: bool = False,
    skip_poor: bool = False,
    progress: bool = True,
) -> Enrolled:
    """Replace a run's index by one of images, given as one of a folder, a list, or embeddings.

    Where the run is calibrated, images are poor whose κ is below its flag for κ.

    Args:
        run: the run's folder.
        folder: images, with class sub-folders or without.
        listed: a CSV file; see `lam.gallery.image_list`.
        embedded: files of a folder's shards; see `lam.gallery.shards`.
        factory: the FAISS type.
        fuse: make one entry of the images of one identity; see `lam.gallery.enrolment.enrol`.
        skip_poor: leave poor images out.
        progress: show a progress bar on standard error.

    Returns:
        What the index now holds, and which images are poor.

    Raises:
        ValueError: for none or several of the three, a folder that is no finished run or that another process writes
            to, a type that FAISS does not know or that needs more images, mistakes in a list or in files of embeddings,
            a wish to skip where the run is not calibrated, or naming a file that is no image. The old index then stays.
    """
    if sum(source is not None for source in (folder, listed, embedded)) != 1:
        raise ValueError("give the images to index as one of a folder, a CSV file, or files of embeddings")
    run = Path(run)
    encoder = open_run(run)
    require_faiss()
    Index(encoder.dimension, factory)  # refuses a type before the images are read
    with locked(run):
        flag_below = _flag_below(run, skip_poor)
        if listed is not None:
            entries, embeddings = _of_list(encoder, listed, fuse, progress)
        elif embedded is not None:
            entries, embeddings = merge_embeddings(embedded, encoder=fingerprint(run))
        else:
            found_images = embed_folder(encoder, str(folder), progress=progress)
            images, embeddings = found_images.images, found_images.embeddings
            labels = (images.classes[label] for label in images.labels.tolist())
            found = zip(images.paths, labels, strict=True)
            entries = [Entry(str(path), label, content_id(path)) for path, label in found]
        made = enrol(entries, embeddings, flag_below=flag_below, skip_poor=skip_poor, fuse=fuse)
        _write(run, made.embeddings, made.ids, dict(zip(made.ids.tolist(), made.items, strict=True)), factory)
    return made


def _of_list(encoder: Encoder, listed: str | Path, fuse: bool, progress: bool) -> tuple[list[Entry], Embeddings]:
    found = read_list(listed, repeated_ids=fuse)
    names = {label: number for number, label in enumerate(sorted({image.label for image in found}))}
    images = FolderImages(
        [image.path for image in found],
        torch.tensor([names[image.label] for image in found]),
        name="list",
        classes=list(names),
        preprocessing=preprocessing_of(encoder),
    )
    entries = [
        Entry(str(image.path), image.label, content_id(image.path), image.name, image.metadata) for image in found
    ]
    return entries, encoder.embed(_loader(images), progress=progress)


def _flag_below(run: Path, required: bool) -> float | None:
    """The κ below which an image is poor; None where the run has no calibration of its own that says."""
    found = load_calibration(run) if required else calibration_of(run)
    return None if found is None else found.kappa_below


def calibration_of(run: str | Path) -> Calibration | None:
    """Read the calibration of a run; None where it has none, or, with a warning, where it is not of its encoder."""
    if not (Path(run) / CALIBRATION).is_dir():
        return None
    try:
        return load_calibration(run)
    except ValueError as error:
        warnings.warn(f"{error}; nothing is flagged", stacklevel=3)
        return None


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
    """The answers to Q images.

    Attributes:
        images: the files.
        queries: their embeddings.
        hits: the nearest items of each.
        items: what each hit is: its `label`, `path` and more.
        decisions: what is answered, where the run is calibrated.
    """

    images: tuple[Path, ...]
    queries: Embeddings
    hits: Hits
    items: tuple[tuple[Item, ...], ...]
    decisions: Decisions | None


def search(run: str | Path, *images: str | Path, k: int = 5, progress: bool = False) -> Found:
    """Search a run's index for images.

    Args:
        run: the run's folder.
        images: files, and folders, whose images are all searched for.
        k: how many hits each gets, at least 1.
        progress: show a progress bar on standard error.

    Raises:
        ValueError: for k below 1, no image at all, or naming a file that is no image.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    files = tuple(file for image in images for file in _image_files(Path(image)))
    if not files:
        raise ValueError("there is no image to search for: give files, or folders that hold some")
    run = Path(run)
    encoder = open_run(run)
    require_faiss()
    index, preprocessing = Index.load(run / "index"), preprocessing_of(encoder)
    size = BATCH if preprocessing.shape is not None else 1
    inputs = [files[start : start + size] for start in range(0, len(files), size)]
    batches = (torch.stack([preprocessing(file) for file in part]) for part in inputs)
    seen = encoder.observe(batches, n_samples=index.mean_samples, progress=progress and len(inputs) > 1)
    queries, decisions = seen.embeddings, None
    if (run / CALIBRATION).is_dir():
        first = index.search(queries, 2)  # the margin to the second is part of the evidence, whatever k
        decisions = load_calibration(run).decide(first, queries, features=seen.features, gallery_size=len(index))
    hits = index.search(queries, k)
    known = iter(read_items(run, hits.ids.flatten().tolist()))
    items = tuple(tuple(islice(known, hits.ids.shape[1])) for _ in files)
    return Found(files, queries, hits, items, decisions)


def _image_files(image: Path) -> list[Path]:
    return datasets.folder.image_files(image) if image.is_dir() else [image]


def read_items(run: Path, ids: list[int]) -> list[Item]:
    """Say what ids of a run's index are.

    Raises:
        CorruptFileError: where an id is unknown, or naming the file that is missing, truncated or altered.
    """
    path = read_generation(run / "items", [_ITEMS]) / _ITEMS
    items = read_json(path)
    missing = [identity for identity in ids if str(identity) not in items]
    if missing:
        raise CorruptFileError(f"{path} does not know id {missing[0]}: run `lam index` again")
    return [items[str(identity)] for identity in ids]


def held_items(run: Path, names: Iterable[str], *, by_number: bool = False) -> set[str]:
    """Tell which items a run's index holds.

    Args:
        run: the run's folder.
        names: their stable ids.
        by_number: take a name that is a number for the number of the index, whatever the list called the item.

    Returns:
        Those of the names.

    Raises:
        CorruptFileError: naming a file that is missing, truncated or altered.
    """
    return set(_named(_read_all(run), names, by_number).values())


def remove_items(run: Path, names: Iterable[str], *, by_number: bool = False) -> None:
    """Erase items from a run's index, those of them that it holds; again, where that was begun and not ended.

    Args:
        run: the run's folder.
        names: their stable ids.
        by_number: as `held_items`.

    Raises:
        CorruptFileError: naming a file that is missing, truncated or altered.
        ValueError: where another process is writing to the run.
        OSError: where the index cannot be written.
    """
    with locked(run):
        index, items = Index.load(run / "index"), _read_all(run)
        gone = _named(items, names, by_number).keys()
        index.remove(sorted(gone & set(index.ids.tolist())))
        index.save(run / "index")
        _write_items(run, {key: item for key, item in items.items() if int(key) not in gone})


def _named(items: Mapping[str, Item], names: Iterable[str], by_number: bool) -> dict[int, str]:
    wanted = {named_id(name): name for name in names}
    known = {number: items[str(number)] for number in wanted if str(number) in items}
    return {
        number: wanted[number] for number, item in known.items() if by_number or name_of(number, item) == wanted[number]
    }


def _write(run: Path, embeddings: Embeddings, ids: Tensor, items: dict[int, Item], factory: str) -> None:
    index = Index(embeddings.dimension, factory)
    if not index.is_trained:
        index.train(embeddings)
    index.add(embeddings, ids)
    new = {str(identity): item for identity, item in items.items()}
    _write_items(run, _known_items(run) | new)  # a superset first: whichever index a crash leaves finds its items
    index.save(run / "index")
    _write_items(run, new)


def _write_items(run: Path, items: dict[str, Item]) -> None:
    write_generation(run / "items", lambda generation: write_json(generation / _ITEMS, items))


def _known_items(run: Path) -> dict[str, Item]:
    """What the ids of the present index are; nothing where that is lost, as `lam index` is what repairs it."""
    try:
        return _read_all(run)
    except CorruptFileError:
        return {}


def _read_all(run: Path) -> dict[str, Item]:
    return read_json(read_generation(run / "items", [_ITEMS]) / _ITEMS)


def _loader(images: FolderImages) -> DataLoader[Any]:
    return DataLoader(images, batch_size=BATCH, generator=torch.Generator())  # torch's global one stays as it is


def preprocessing_of(encoder: Encoder) -> Preprocessing:
    """Give how an image becomes an input of an encoder.

    Raises:
        ValueError: where the encoder does not know it.
    """
    if encoder.preprocessing is None:
        raise ValueError("the encoder does not know how an image becomes an input: fit it with preprocessing=...")
    return encoder.preprocessing
